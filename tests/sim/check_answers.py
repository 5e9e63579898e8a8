"""I2, I4, I8: what calls and streams are answered is true."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_plane.protocol.versions import WeightVersion
from tests.sim import product
from tests.sim.product import Decision

if TYPE_CHECKING:
    from tests.sim.checks import CallRecord, Checks
    from tests.sim.process import Process

AFTERMATH_S = 2.0

TOUCHING = frozenset({"commit_update", "set_admission", "follow_record", "a pause of the engine", "an overwrite"})
"""The ops that an update may not have sent to any worker if it is refused as invalid."""
DECIDING = ("update_weights", "complete_weights_update")


class AnswerChecks:
    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._world = checks.world

    def answered(self, call: CallRecord, outcome: str, facts: Mapping[str, Any]) -> None:
        checks = self._checks
        call.outcome, call.ended_at = outcome, checks.now
        if call.op not in (*DECIDING, "prepare_weights_update"):
            return
        if outcome == "ok" and call.wrong:
            checks.fail("I4", f"the update {call.name} was accepted, and {call.wrong}")
        decided = [one for one in checks.decided[call.decided_before :] if one.key not in checks.forgotten]
        mine = [one for one in decided if one.made.label == call.name and not one.missed]
        if outcome == "ok" and call.op in DECIDING:
            self._check_committed(call, facts)
        elif outcome == "numerics" and "failed_version" in facts:
            self._check_taken_back(call, mine, facts)
        elif mine and outcome not in self._excuses(call) and not self._is_told_as_committed(mine[-1], facts):
            checks.fail("I2", f"the update {call.name} was told as {outcome}, and is committed")
        if outcome in ("invalid_request", "invalid_weights"):
            touched = [
                f"{what} in {where}"
                for fence, what, where, about in checks.done[call.done_before :]
                if fence in call.fences and what in TOUCHING and about in (None, call.name)
            ]
            if touched:
                checks.fail("I4", f"the update {call.name} is refused as {outcome}, after {', '.join(touched)}")

    @staticmethod
    def _excuses(call: CallRecord) -> tuple[str, ...]:
        """Answers that don't say that nothing was committed."""
        by_another = ("locked", "stale_fence", "bus_unreachable", "no_workers") if call.shared else ()
        return ("ok", "outcome_unknown", "unknown", *by_another)

    def _is_told_as_committed(self, mine: Decision, facts: Mapping[str, Any]) -> bool:
        """An error that says that the version is committed, and that hardly any worker serves it. It needs a reason: a
        worker that was well all the time would serve it."""
        version = facts.get("version")
        if not version or WeightVersion.from_wire(version) != mine.made:
            return False
        record, excluded = self._checks.record, set(facts.get("excluded") or ())
        if record is None or record.key != mine.key:
            return True  # the workers serve what was decided since
        for process, worker in self._world.live_workers():
            if self._checks.canary_here(process):
                continue
            well = not process.faulty and process.started_at < self._checks.decided_at[mine.key] - AFTERMATH_S
            if well and product.instance_id(worker) in excluded and not self._world.anything_wrong():
                self._checks.fail("I2", f"{mine} is committed, and {process.name}, which was well, is excluded")
        return True

    def _check_taken_back(self, call: CallRecord, mine: list[Decision], facts: Mapping[str, Any]) -> None:
        """The version before was brought back, under the update's own id."""
        ids = {one.update_id for one in mine}
        back = [one for one in self._checks.decided if one.update_id in ids and one.missed]
        if mine and not back:
            self._checks.fail("I2", f"the update {call.name} was told as a failed canary, and stays committed")

    def _check_committed(self, call: CallRecord, facts: Mapping[str, Any]) -> None:
        checks = self._checks
        version = WeightVersion.from_wire(facts["version"])
        found = next((one for one in reversed(checks.decided) if version == one.made), None)
        if found is None:
            checks.fail("I2", f"the update {call.name} was told as committed, and is not")
            return
        if not checks.recovering():
            checks.told.append((checks.now, found))
            self._check_served(call, found, set(facts.get("excluded") or ()))
        pin = call.body.get("fingerprint")
        if pin is not None and checks.decided_at[found.key] >= call.began_at and not self._was(pin, call.began_at):
            checks.fail("I1", f"the update {call.name} is pinned to {pin}, which the fleet was not any more")

    def _check_served(self, call: CallRecord, told: Decision, excluded: set[str]) -> None:
        """Every member that is not named as excluded serves the version now. What excuses: another decision since, a
        repeated call (its answer is of the past), and whatever was done to this worker since the call began."""
        checks, world = self._checks, self._world
        if checks.record is None or checks.record.key != told.key or call.shared:
            return
        members = set(world.members())
        for process, worker in world.live_workers():
            instance_id = product.instance_id(worker)
            disturbed = process.frozen or process.disturbed_at >= call.began_at - AFTERMATH_S
            if instance_id in excluded or instance_id not in members or disturbed:
                continue
            joined_at = checks.joined_at.get(instance_id, 0.0)  # a process may take seconds from its start to that
            if joined_at >= call.began_at - AFTERMATH_S or world.reset_at >= call.began_at:
                continue  # it has joined since; its weights were overwritten by an operator
            if product.holds(worker) != told.held:
                closed = product.closed(worker)
                checks.fail("I2", f"{told} was told as served by all, and {process.name} does not: {closed}")

    def _was(self, fingerprint: str, since: float) -> bool:
        """Did the fleet have it at `since`, or later?"""
        until = self._checks.now
        for at, told in reversed(self._checks.fingerprints):
            if told == fingerprint and until >= since:
                return True
            until = at
            if at < since:
                break
        return False

    def failed_stream(self, frontend: Process, worker: Process | None, error: str, start: float) -> None:
        """I8: a stream that has begun ends with an error only if something was done to one of its ends."""
        world, checks = self._world, self._checks
        if worker is None or not worker.alive or world.server.stalled or world.has_double(worker):
            return
        if max(frontend.disturbed_at, worker.disturbed_at) >= start - AFTERMATH_S or world.outage_s > 4.0:
            return
        if checks.lost_at.get(world.subjects.members.name, 0.0) >= start - AFTERMATH_S:
            return  # the fleet had no member for a moment
        checks.fail("I8", f"a stream from {worker.name} to {frontend.name} ended with {error}, and both were well")
