"""The state that trainers and operators have asked for, by their answers: pauses, disabled workers, memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rl_plane.protocol.worker_ops import DEFAULT_PAUSE_LEASE_S
from tests.sim.checks import CallRecord

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.world import World

MAX_SKEW_S = 60.0
"""The difference of two wall clocks, by which a pause may end late for a worker that reads it when it joins."""
UNSURE_S = 5.0
"""A lease's end, give or take what a call takes."""


class Desired:
    """Calls are ordered by their fences. One without an answer, or with an error, may have been done or not."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.tidied = False
        """Has an operator undone everything?"""

    def _calls(self, *ops: str) -> list[CallRecord]:
        """The calls of these ops that held the lock, in order."""
        found = [call for call in self._world.calls if call.op in ops and call.fences]
        return sorted(found, key=lambda call: call.fences[-1])

    @property
    def _unknown(self) -> bool:
        """The store has lost this write."""
        return self._world.subjects.state.name in self._world.checks.lost_at

    def paused(self) -> bool | None:
        """None: either will do."""
        paused: bool | None = False
        until = 0.0
        for call in self._calls("pause", "resume", "update_weights", "complete_weights_update"):
            if call.op in ("update_weights", "complete_weights_update"):
                if not call.body.get("keeps_pause") and not call.body.get("policy", {}).get("keep_pause"):
                    continue
                if call.outcome in ("invalid_request", "invalid_weights", "update_aborted", "locked"):
                    continue
            if call.outcome != "ok" or call.ended_at is None:
                paused, until = None, max(until, self._world.loop.now)
                continue
            lease_s = call.body.get("lease_s", DEFAULT_PAUSE_LEASE_S)
            extended = until if paused and call.op not in ("pause", "resume") else 0.0
            until = max(extended, call.ended_at + lease_s)
            paused = call.op != "resume"
        unsure_s = UNSURE_S + 20.0 + (2 * MAX_SKEW_S if self._world.clock_drift else 0.0)
        if self._unknown or paused is None or (paused and abs(until - self._world.loop.now) < unsure_s):
            return None
        return paused and self._world.loop.now < until

    def is_disabled(self, instance_id: str) -> bool:
        return self._disabled(instance_id) is True and not self._unknown

    def may_be(self, instance_id: str, process: Process) -> set[str]:
        """The reasons for which it may be closed."""
        reasons = set()
        if self._disabled(instance_id) is not False or (
            self._unknown and any(self._of(instance_id, self._calls("disable")))
        ):
            reasons.add("disabled")
        if self._calls("release_memory") and not self.tidied:
            reasons.add("memory")  # who was away when it was resumed has not heard of it
        canary = self._world.checks.canary_here(process)
        if canary == "fails" or (canary == "wrong" and not self.tidied):
            reasons |= {"numerics", "behind"}
        return reasons

    def _disabled(self, instance_id: str) -> bool | None:
        disabled: bool | None = False
        for call in self._of(instance_id, self._calls("enable", "disable")):
            disabled = call.op == "disable" if call.outcome == "ok" else None
        return disabled

    @staticmethod
    def _of(instance_id: str, calls: Iterable[CallRecord]) -> list[CallRecord]:
        return [call for call in calls if instance_id in call.body["workers"]]
