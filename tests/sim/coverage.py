"""The transitions of the two machines that a run has taken, by name, and those before which a partition has cut
messages of their process. Has the list of all transitions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from rl_plane.commit.machine import UpdateMachine
from rl_plane.commit.steps import End, Failed
from rl_plane.errors import PlaneError
from tests.sim.virtual_loop import PROCESS
from worker.reconcile.instructions import Fetch, Swap, Wait
from worker.reconcile.worker_core import WorkerCore


@contextmanager
def recorded() -> Iterator[set[str]]:
    """The names of what is reached in this block."""
    reached: set[str] = set()
    with ExitStack() as stack:
        for target, name, stand_in in _watchers(reached):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        yield reached


def _watchers(reached: set[str]) -> list[tuple[Any, str, Any]]:
    return [
        (UpdateMachine, "step", _watched_step(UpdateMachine.step, reached)),
        *((WorkerCore, name, _watched(getattr(WorkerCore, name), name, reached)) for name in _NAMES),
    ]


def _note_cut(reached: set[str], what: str) -> None:
    """Has a partition cut messages of the process that runs now, since this was last asked in it?"""
    process = PROCESS.get()
    if process is not None and process.cut_messages > process.noted_cuts:
        process.noted_cuts = process.cut_messages
        reached.add(f"cut: {what}")


def _watched_step(step: Any, reached: set[str]) -> Any:
    def watched(self: UpdateMachine, event: Any, now: float, elapsed_s: float) -> Any:
        before = self.phase
        instruction = step(self, event, now, elapsed_s)
        if (process := PROCESS.get()) is not None:
            process.on_phase(instruction.phase)
        if event is not None:  # else it begins
            _note_cut(reached, f"coordinator, {before}")
            what = "fails" if isinstance(event, Failed) else "goes well"
            after: str = instruction.phase
            if isinstance(instruction, End):
                after = "error" if isinstance(instruction.result, PlaneError) else "done"
            reached.add(f"coordinator: {before} {what} → {after}")
        return instruction

    return watched


def _watched(method: Any, name: str, reached: set[str]) -> Any:
    def watched(self: WorkerCore, *args: Any, **more: Any) -> Any:
        result = method(self, *args, **more)
        what = f"worker: {_NAMES[name](self, args, result)}"
        reached.add(what)
        if what in CUT_AT:
            _note_cut(reached, CUT_AT[what])
        return result

    return watched


def _next(self: WorkerCore, args: Any, result: Any) -> str:
    return f"by itself → {_instruction(self, result, args[0])}"


def _instruction(self: WorkerCore, result: Any, now: float) -> str:
    match result:
        case None:
            return "all done"
        case Swap(name=name) | Fetch(name=name):
            return f"{type(result).__name__} {'an adapter' if name is not None else 'the base'}"
        case Wait(until=until):
            return _wait(self, until)
        case _:
            return type(result).__name__


def _wait(self: WorkerCore, until: float | None) -> str:
    if until is not None:
        staged = self.staged is not None and self.staged.fence is not None
        return "Wait for the commit" if staged and until != self._next_try else "Wait to try again"
    if self.record is not None and self.record.rolling_from is not None and self._may_serve_the_old():
        return "Wait for its turn"
    return "Wait for memory" if self.state.released and self._missing() is not None else "Wait"


def _leader_said(self: WorkerCore, args: Any, result: Any) -> str:
    if result is None:
        return "the leader said → lease"
    if args[0] is not None:
        return "the leader has lost a decision → written back"
    return "the leader has nothing → written back: " + ("the first" if result.sequence == 0 else "a decision")


_NAMES: dict[str, Any] = {
    "next": _next,
    "leader_said": _leader_said,
    "learnt": lambda self, args, result: f"learnt → {'news' if result else 'old'}",
    "commit_step": lambda self, args, result: f"commit → {_instruction(self, result, 0.0)}",
    "coordinator_holds": lambda self, args, result: (
        "asks after its coordinator → " + ("holds the lock" if result else "alone" if self._alone else "is gone")
    ),
    "given_up": lambda self, args, result: "what a coordinator has left → " + ("given up" if result else "stays"),
    "overwriting": lambda self, args, result: "overwriting",
    "overwrite_failed": lambda self, args, result: "overwrite failed",
    "fetch_failed": lambda self, args, result: "fetch failed",
    "swap_failed": lambda self, args, result: "swap failed",
    "enabled": lambda self, args, result: "enabled",
}

CUT_AT = {
    "worker: the leader said → lease": "worker, before it renews its lease",
    "worker: by itself → Fetch the base": "worker, before it heals",
    "worker: by itself → Swap the base": "worker, before it heals",
    "worker: commit → Swap the base": "worker, before it commits",
    "worker: asks after its coordinator → holds the lock": "worker, before it asks after its coordinator",
    "worker: asks after its coordinator → is gone": "worker, before it asks after its coordinator",
}
"""Transition of a worker → what a partition before it is called."""
CUT_PHASES = ("begin", "prepare", "receive", "session", "decide", "gate", "commit", "roll", "open")
"""The phases of a coordinator at whose beginning the simulation cuts it off from others."""

TRANSITIONS: dict[str, bool] = {
    "coordinator: abort fails → done": True,
    "coordinator: abort fails → error": True,
    "coordinator: abort goes well → done": False,
    "coordinator: abort goes well → error": False,
    "coordinator: begin fails → abort": True,
    "coordinator: begin fails → error": True,
    "coordinator: begin goes well → decide": True,
    "coordinator: begin goes well → prepare": False,
    "coordinator: clear fails → begin": True,
    "coordinator: clear fails → error": True,
    "coordinator: clear fails → watch": True,
    "coordinator: clear goes well → begin": True,
    "coordinator: clear goes well → clear": True,
    "coordinator: clear goes well → done": True,
    "coordinator: clear goes well → error": True,
    "coordinator: clear goes well → receive": True,
    "coordinator: clear goes well → gate": True,
    "coordinator: clear goes well → pause": True,
    "coordinator: clear goes well → prepare": True,
    "coordinator: clear goes well → session": True,
    "coordinator: clear goes well → watch": True,
    "coordinator: commit fails → error": True,
    "coordinator: commit fails → survey": True,
    "coordinator: commit fails → watch": True,
    "coordinator: commit goes well → decide": False,
    "coordinator: commit goes well → leases": True,
    "coordinator: commit goes well → open": False,
    "coordinator: commit goes well → watch": True,
    "coordinator: decide fails → abort": True,
    "coordinator: decide fails → error": True,
    "coordinator: decide fails → session": True,
    "coordinator: decide fails → resolve": True,
    "coordinator: decide goes well → gate": False,
    "coordinator: decide goes well → pause": True,
    "coordinator: decide goes well → session": True,
    "coordinator: receive fails → session": True,
    "coordinator: receive goes well → abort": True,
    "coordinator: receive goes well → receive": True,
    "coordinator: receive goes well → prepare": True,
    "coordinator: receive goes well → session": True,
    "coordinator: gate fails → error": True,
    "coordinator: gate fails → survey": True,
    "coordinator: gate fails → watch": True,
    "coordinator: gate goes well → commit": False,
    "coordinator: gate goes well → open": True,
    "coordinator: gate goes well → roll": False,
    "coordinator: leases fails → survey": True,
    "coordinator: leases fails → watch": True,
    "coordinator: leases goes well → done": True,
    "coordinator: leases goes well → open": True,
    "coordinator: leases goes well → watch": True,
    "coordinator: open fails → done": True,
    "coordinator: open fails → error": True,
    "coordinator: open fails → survey": True,
    "coordinator: open fails → watch": True,
    "coordinator: open goes well → done": True,
    "coordinator: open goes well → error": True,
    "coordinator: open goes well → leases": True,
    "coordinator: open goes well → open": False,
    "coordinator: open goes well → recheck": False,
    "coordinator: open goes well → roll": True,
    "coordinator: open goes well → watch": False,
    "coordinator: pause fails → error": True,
    "coordinator: pause fails → done": True,
    "coordinator: pause fails → survey": True,
    "coordinator: pause fails → watch": True,
    "coordinator: pause goes well → gate": True,
    "coordinator: pause goes well → open": True,
    "coordinator: prepare fails → abort": True,
    "coordinator: prepare fails → session": True,
    "coordinator: prepare goes well → abort": False,
    "coordinator: prepare goes well → decide": False,
    "coordinator: prepare goes well → recheck": False,
    "coordinator: prepare goes well → session": False,
    "coordinator: recheck fails → abort": True,
    "coordinator: recheck fails → error": True,
    "coordinator: recheck fails → session": True,
    "coordinator: recheck fails → watch": True,
    "coordinator: recheck goes well → abort": True,
    "coordinator: recheck goes well → begin": True,
    "coordinator: recheck goes well → decide": True,
    "coordinator: recheck goes well → done": True,
    "coordinator: recheck goes well → error": True,
    "coordinator: recheck goes well → receive": True,
    "coordinator: recheck goes well → prepare": True,
    "coordinator: recheck goes well → session": True,
    "coordinator: recheck goes well → watch": True,
    "coordinator: roll fails → survey": True,
    "coordinator: roll fails → watch": True,
    "coordinator: roll goes well → decide": True,
    "coordinator: roll goes well → open": False,
    "coordinator: roll goes well → roll": True,
    "coordinator: session fails → error": True,
    "coordinator: session fails → gate": True,
    "coordinator: session fails → session": True,
    "coordinator: session goes well → abort": False,
    "coordinator: session goes well → done": False,
    "coordinator: session goes well → gate": True,
    "coordinator: session goes well → pause": True,
    "coordinator: session goes well → watch": True,
    "coordinator: resolve fails → error": True,
    "coordinator: resolve fails → watch": True,
    "coordinator: resolve goes well → abort": True,
    "coordinator: resolve goes well → gate": True,
    "coordinator: resolve goes well → pause": True,
    "coordinator: resolve goes well → session": True,
    "coordinator: resolve goes well → watch": True,
    "coordinator: survey fails → error": False,
    "coordinator: survey fails → watch": True,
    "coordinator: survey goes well → begin": False,
    "coordinator: survey goes well → clear": True,
    "coordinator: survey goes well → decide": True,
    "coordinator: survey goes well → done": True,
    "coordinator: survey goes well → error": False,
    "coordinator: survey goes well → receive": True,
    "coordinator: survey goes well → gate": False,
    "coordinator: survey goes well → open": True,
    "coordinator: survey goes well → pause": True,
    "coordinator: survey goes well → prepare": True,
    "coordinator: survey goes well → recheck": True,
    "coordinator: survey goes well → session": False,
    "coordinator: survey goes well → watch": True,
    "coordinator: watch fails → error": True,
    "coordinator: watch fails → survey": True,
    "coordinator: watch fails → watch": True,
    "coordinator: watch goes well → commit": True,
    "coordinator: watch goes well → done": False,
    "coordinator: watch goes well → error": False,
    "coordinator: watch goes well → open": True,
    "coordinator: watch goes well → pause": True,
    "coordinator: watch goes well → recheck": True,
    "coordinator: watch goes well → survey": True,
    "coordinator: watch goes well → watch": True,
    **{f"cut: {what}": True for what in CUT_AT.values()},
    **{f"cut: coordinator, {phase}": True for phase in CUT_PHASES},
    **{f"cut: coordinator, {phase}": True for phase in ("survey", "clear", "abort", "resolve", "pause")},
    **{f"cut: coordinator, {phase}": True for phase in ("recheck", "leases", "watch")},
    "worker: asks after its coordinator → alone": True,
    "worker: asks after its coordinator → holds the lock": False,
    "worker: asks after its coordinator → is gone": False,
    "worker: by itself → Drop": False,
    "worker: by itself → Fetch an adapter": True,
    "worker: by itself → Fetch the base": False,
    "worker: by itself → Read": True,
    "worker: by itself → Relabel": False,
    "worker: by itself → ScoreCanary": False,
    "worker: by itself → Swap an adapter": True,
    "worker: by itself → Swap the base": False,
    "worker: by itself → Unload": True,
    "worker: by itself → Wait": False,
    "worker: by itself → Wait for its turn": False,
    "worker: by itself → Wait for memory": True,
    "worker: by itself → Wait for the commit": False,
    "worker: by itself → Wait to try again": False,
    "worker: commit → Relabel": True,
    "worker: commit → Swap an adapter": True,
    "worker: commit → Swap the base": False,
    "worker: commit → Unload": True,
    "worker: commit → all done": False,
    "worker: enabled": False,
    "worker: fetch failed": False,
    "worker: learnt → news": False,
    "worker: learnt → old": False,
    "worker: overwrite failed": True,
    "worker: overwriting": True,
    "worker: swap failed": True,
    "worker: the leader has lost a decision → written back": True,
    "worker: the leader has nothing → written back: a decision": False,
    "worker: the leader has nothing → written back: the first": False,
    "worker: the leader said → lease": False,
    "worker: what a coordinator has left → given up": False,
    "worker: what a coordinator has left → stays": False,
}
"""All that the seeds take, and whether one is rare: fewer than one seed in 12 takes it. What else a coordinator may
be led to do, `tests/unit/commit/test_update_*.py` feed it by hand."""
