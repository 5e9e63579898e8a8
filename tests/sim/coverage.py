"""Which transitions of the two machines a run has taken, by name; and the list of all that there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from rl_plane.errors import PlaneError
from rl_plane.update import UpdateMachine
from rl_plane.update_steps import End, Failed
from worker import core
from worker.core import WorkerCore


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


def _watched_step(step: Any, reached: set[str]) -> Any:
    def watched(self: UpdateMachine, event: Any, now: float) -> Any:
        before = self.phase
        instruction = step(self, event, now)
        if event is not None:  # else it begins
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
        reached.add(f"worker: {_NAMES[name](self, args, result)}")
        return result

    return watched


def _next(self: WorkerCore, args: Any, result: Any) -> str:
    return f"by itself → {_instruction(self, result, args[0])}"


def _instruction(self: WorkerCore, result: Any, now: float) -> str:
    match result:
        case None:
            return "all done"
        case core.Swap(name=name) | core.Fetch(name=name):
            return f"{type(result).__name__} {'an adapter' if name is not None else 'the base'}"
        case core.Wait(until=until):
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
    if result.last:
        return "the leader has lost a decision → Restore"
    return "the leader has nothing → Restore " + ("the first" if result.record.sequence == 0 else "a decision")


_NAMES: dict[str, Any] = {
    "next": _next,
    "leader_said": _leader_said,
    "learnt": lambda self, args, result: f"learnt → {'news' if result else 'old'}",
    "commit_step": lambda self, args, result: f"commit → {_instruction(self, result, 0.0)}",
    "coordinator_is": lambda self, args, result: (
        "asks after its coordinator → " + ("given up" if result else "alone" if self._alone else "goes on")
    ),
    "overwriting": lambda self, args, result: "overwriting",
    "overwrite_failed": lambda self, args, result: "overwrite failed",
    "fetch_failed": lambda self, args, result: "fetch failed",
    "swap_failed": lambda self, args, result: "swap failed",
    "enabled": lambda self, args, result: "enabled",
}

TRANSITIONS: tuple[str, ...] = ()
"""All that there are, in their order."""
