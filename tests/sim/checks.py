"""The invariants, checked at each step: whatever the world sees happen is told here first.

A check is strict where the design promises something, and silent where a fault of this run excuses it: what excuses is
named at each check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_plane.generation import VersionSpan
from rl_plane.record import LEASE_MARGIN_S, SERVING_LEASE_S, DecisionRecord, Held
from rl_plane.subjects import MEMBER_PREFIX, RECORD, Bucket
from rl_plane.versions import WeightVersion
from rl_plane.wire import Request
from tests.sim import product
from tests.sim.product import Decision
from worker.engines.fake import FakeEngine, fake_token
from worker.worker import Worker

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.world import World

OPEN_AFTER_S = SERVING_LEASE_S + LEASE_MARGIN_S
"""A decided version is served from its opening on, or so long after the decision."""
SLACK_S = 0.01
WITNESS_S = 10.0
"""A worker that was undisturbed so long could be asked by every coordinator."""
AFTERMATH_S = 2.0
RECOVERY_S = 60.0
"""After a store lost writes, what was committed is open until somebody has written the newest decision back."""

TOUCHING = frozenset({"commit_update", "set_admission", "follow_record", "a pause of the engine", "an overwrite"})
"""What an update may not have done to anybody when it is refused as invalid."""


def _order(decision: Decision) -> tuple[int, int]:
    return decision.run_number, decision.sequence


class Violation(AssertionError):
    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(invariant, text)
        self.invariant, self.text = invariant, text

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"


@dataclass(eq=False)
class CallRecord:
    """One call of a trainer or an operator, and what it did."""

    by: Process
    op: str
    body: Mapping[str, Any]
    name: str
    began_at: float
    decided_before: int
    """Decisions that there were when it began."""
    fences: list[int] = field(default_factory=list)
    """Of the locks that were held for it."""
    shared: bool = False
    """Another call asks for the same update, under the same request id."""
    outcome: str = "unknown"
    """`ok`, or the code of its error; `unknown` while it runs, and if its process died."""
    ended_at: float | None = None


CALL: ContextVar[CallRecord | None] = ContextVar("call", default=None)


class Checks:
    def __init__(self, world: World) -> None:
        self.world = world
        self.violation: Violation | None = None
        self.decided: list[Decision] = []
        """In the order of their first writing."""
        self.decided_at: dict[tuple[str, int, str, str], float] = {}
        self.opened_at: dict[tuple[str, int, str, str], float] = {}
        self.record: Decision | None = None
        """As the store has it."""
        self.told: list[tuple[float, Decision]] = []
        """When an update was answered as committed, and what it decided."""
        self.delivered: dict[tuple[str, int], float] = {}
        """Run and sequence → when a client first had tokens of it."""
        self.final_at: dict[tuple[str, int, str, str], float] = {}
        self.rolled_from: dict[tuple[str, int, str, str], Held] = {}
        """Of each rolling decision: the state before."""
        self.forgotten: set[tuple[str, int, str, str]] = set()
        """Decisions that the store lost before anybody had heard of them: nobody will ever know."""
        self.lost_at: dict[str, float] = {}
        """Bucket → when the store last lost writes of it."""
        self.done: list[tuple[int, str, str, str | None]] = []
        """Under which fence, what, in which worker, and the label that it was about."""
        self.fingerprints: list[tuple[float, str]] = []
        """Since when the fleet has which fingerprint."""
        self._fence_of: dict[str, int] = {}
        """Incarnation → the newest fence under which it has done something."""

    def fail(self, invariant: str, text: str) -> None:
        """Ends the run at once."""
        if self.violation is None:
            self.violation = Violation(invariant, text)
            self.world.say(f"VIOLATION {self.violation}")
            self.world.loop.stop()

    @property
    def now(self) -> float:
        return self.world.loop.now

    def recovering(self, since: float | None = None) -> bool:
        """Is the committed state in doubt, because the store has lost writes of it (or had, at `since`)?"""
        lost = self.lost_at.get(self.world.subjects.state.name)
        return lost is not None and (since or self.now) < lost + RECOVERY_S

    # ---- the record: I6, and I2's other half ----

    def written(self, bucket: Bucket, key: str, value: bytes | None, sequence: int) -> None:
        subjects = self.world.subjects
        if bucket == subjects.members and key.startswith(MEMBER_PREFIX):
            self.fingerprints.append((self.now, self.world.fingerprint()))
            if not value:
                self.world.say(f"member {key[-2:]} is taken out")
        if bucket != subjects.state or key != RECORD or not value:
            return
        record = DecisionRecord.decode(value)
        decision = product.decision_of(record)
        before, self.record = self.record, decision
        self.world.say(f"record: {decision} {'final' if record.final else 'open' if record.open else 'decided'}")
        if decision.key not in self.decided_at:
            self._check_order(before, decision)
            self.decided.append(decision)
            self.decided_at[decision.key] = self.now
            if decision.before is not None:
                self.rolled_from[decision.key] = decision.before
        elif before is not None and before.key != decision.key and _order(decision) < _order(before):
            self.fail("I6", f"the record went back from {before} to {decision}")
        if record.open:
            self.opened_at.setdefault(decision.key, self.now)
        if record.final:
            self.final_at.setdefault(decision.key, self.now)

    def _check_order(self, before: Decision | None, decision: Decision) -> None:
        """A decision is the next one after the record, and after all that anybody knows who could be asked."""
        if before is None:
            if self.decided and not self.lost_at:
                self.fail("I6", f"a second first record: {decision}")
        elif decision.run_number > before.run_number:
            return  # somebody began a new run
        elif decision.sequence <= before.sequence or (
            decision.run != before.run and not self._began_twice(before)
        ):
            self.fail("I6", f"the record went from {before} to {decision}")
        elif decision.sequence > before.sequence + 1 and not self.lost_at:
            self.fail("I6", f"the record jumped from {before} to {decision}")
        if decision.sequence == 0:
            return  # a worker that found an empty store: the elder run is written back
        for process, worker in self.world.live_workers():
            known = product.known_to(worker)
            if known is None or not self.world.undisturbed(process, WITNESS_S):
                continue
            if _order(known) >= _order(decision) and known.key != decision.key:
                self.fail("I6", f"{decision} was decided though {process.name} knows {known}")

    def _began_twice(self, record: Decision) -> bool:
        """Two workers found a lost store empty, and each began a run: the one that comes further counts."""
        return record.sequence == 0 and self.world.subjects.state.name in self.lost_at

    def lost_writes(self, bucket: Bucket) -> None:
        """The store has just lost some."""
        self.lost_at[bucket.name] = self.now
        if bucket == self.world.subjects.state:
            entry = self.world.server.streams.get(bucket.name)
            found = entry.keys.get(RECORD) if entry is not None else None
            value = found.value if found is not None else None
            self.record = product.decision_of(DecisionRecord.decode(value)) if value else None
            stays = {one.key for one in [*self._known(), self.record] if one is not None}
            latest = self.decided[-1:]
            self.forgotten.update(one.key for one in latest if one.key not in stays)

    def _known(self) -> Iterator[Decision]:
        """The newest decision that each living process has learnt."""
        for _, worker in self.world.live_workers():
            if (known := product.known_to(worker)) is not None:
                yield known
        for one in self.world.alive():
            yield from product.known_to_client(one.client)

    # ---- ops on workers: I1 ----

    def doing(self, process: Process, worker: Worker, request: Request) -> None:
        """A worker begins to carry out a changing op."""
        incarnation = product.incarnation(worker)
        if request.incarnation != incarnation:
            self.fail("I1", f"{process.name} does {request.op}, which was meant for another process")
        fence = request.fence
        if fence is None or fence < self._fence_of.get(incarnation, 0):
            self.fail("I1", f"{process.name} does {request.op} under {fence}, after a newer coordinator's ops")
        self._fence_of[incarnation] = fence or 0
        self.done.append((fence or 0, request.op, process.name, product.label_in(request)))

    def touching(self, process: Process, what: str) -> None:
        """Something changes in a worker, perhaps because a coordinator said so."""
        request = product.REQUEST.get()
        if request is not None and request.fence is not None:
            self.done.append((request.fence, what, process.name, product.label_in(request)))

    # ---- weights: I2, I3 ----

    def swapping(self, process: Process, version: WeightVersion) -> None:
        if not any(version in (one.made, one.held.version) for one in self.decided):
            self.fail("I2", f"{process.name} swaps {version.label} in, which nobody has decided")

    def admitted(self, process: Process, engine: FakeEngine, adapter: str | None) -> None:
        """A worker lets a request into its engine."""
        held, wrong = product.in_engine(engine, adapter)
        if held is None:
            self.fail("I3", f"{process.name} admits a request to {wrong}")
            return
        if self.recovering() or self.record is None:
            return
        record, now = self.record, self.now
        decided_at = self.decided_at[record.key]
        if held == record.held:
            if record.key not in self.opened_at and now < decided_at + OPEN_AFTER_S - SLACK_S:
                self.fail("I3", f"{process.name} serves {record}, which is not open yet")
            return
        if held == self.rolled_from.get(record.key):
            replaced_at = self.final_at.get(record.key)
        else:
            earlier = next((one for one in reversed(self.decided) if one.held == held), None)
            if earlier is None:
                self.fail("I3", f"{process.name} serves {held}, which was never committed")
                return
            replaced_at = 0.0 if record.key in self.opened_at else decided_at
            if record.key in self.rolled_from:
                replaced_at = decided_at
        if replaced_at is not None and now > replaced_at + (SERVING_LEASE_S if replaced_at else 0.0) + SLACK_S:
            self.fail("I3", f"{process.name} admits a request to {held.version.label}, and {record} is served")

    def completed(
        self,
        frontend: str,
        prompt: list[int],
        tokens: list[int],
        spans: Sequence[VersionSpan],
        start: float,
        seams: Sequence[int] = (0,),
    ) -> None:
        """Whatever a frontend delivers was made by committed weights, and says which. `seams`: where each of its
        workers began, with all before it as a prompt."""
        if not spans or spans[0].start != 0 or spans[-1].end != len(tokens):
            self.fail("I3", f"{len(tokens)} tokens came with the spans {spans}")
            return
        for span in spans:
            base, name, adapter = product.made_by(span)
            if not any(
                one.held.version == base and (name is None or one.held.adapters.get(name) == adapter)
                for one in self.decided
            ):
                self.fail("I3", f"{frontend} delivers tokens of {base} and {adapter}, which were never committed")
            adapter_digest = adapter.digest if adapter is not None else None
            for position in range(span.start, span.end):
                seam = max(at for at in seams if at <= position)
                given = prompt + tokens[:seam]
                if tokens[position] != fake_token(base.digest, given, position - seam, 512, adapter_digest):
                    self.fail("I3", f"{frontend}: token {position} was not made by {span.version}")
            if not self.recovering(start):
                self._check_age(frontend, base, name, adapter, start)
            self.delivered.setdefault((base.run, base.sequence), self.now)

    def _check_age(
        self, frontend: str, base: WeightVersion, name: str | None, adapter: WeightVersion | None, start: float
    ) -> None:
        """Of a request that began at `start`: what was told as committed before, and what was served before."""
        for at, told in self.told:
            if at >= start or told.run != base.run:
                continue
            newest = told.held.version
            of_adapter = told.held.adapters.get(name or "", None if name is None else told.made)
            if newest.sequence > base.sequence or (
                adapter is not None
                and of_adapter is not None
                and of_adapter.sequence > adapter.sequence
                and told.made.sequence > adapter.sequence
            ):
                self.fail(
                    "I3",
                    f"{frontend} answers by {base.sequence}{f' and {adapter.sequence}' if adapter else ''}, asked "
                    f"{start - at:.3f} s after {told} was told",
                )
        rolling = {(key[0], key[1]) for key in self.rolled_from}
        for (run, newer), at in self.delivered.items():
            if run == base.run and newer > base.sequence and at < start and (run, newer) not in rolling:
                self.fail("I3", f"{frontend}: asked after {newer} was served, and answered by {base.sequence}")

    # ---- answers: I2, I4 ----

    def answered(self, call: CallRecord, outcome: str, facts: Mapping[str, Any]) -> None:
        call.outcome, call.ended_at = outcome, self.now
        if call.op not in ("update_weights", "complete_weights_update", "prepare_weights_update"):
            return
        decided = [one for one in self.decided[call.decided_before :] if one.key not in self.forgotten]
        mine = [one for one in decided if one.made.label == call.name]
        if outcome == "ok" and call.op != "prepare_weights_update":
            self._check_committed(call, facts)
        elif mine and outcome not in self._excuses(call) and not facts.get("version"):
            self.fail("I2", f"the update {call.name} was told as {outcome}, and is committed")
        if outcome in ("invalid_request", "invalid_weights"):
            touched = [
                f"{what} in {where}"
                for fence, what, where, about in self.done
                if fence in call.fences and what in TOUCHING and about in (None, call.name)
            ]
            if touched:
                self.fail("I4", f"the update {call.name} is refused as {outcome}, after {', '.join(touched)}")

    @staticmethod
    def _excuses(call: CallRecord) -> tuple[str, ...]:
        """Answers that don't say that nothing was committed."""
        by_another = ("locked", "stale_fence", "bus_unreachable", "no_workers") if call.shared else ()
        return ("ok", "outcome_unknown", "unknown", *by_another)

    def _check_committed(self, call: CallRecord, facts: Mapping[str, Any]) -> None:
        version = WeightVersion.from_wire(facts["version"])
        found = next((one for one in reversed(self.decided) if version == one.made), None)
        if found is None:
            self.fail("I2", f"the update {call.name} was told as committed, and is not")
            return
        if not self.recovering():
            self.told.append((self.now, found))
        pin = call.body.get("fingerprint")
        if pin is not None and self.decided_at[found.key] >= call.began_at and not self._was(pin, call.began_at):
            self.fail("I1", f"the update {call.name} is pinned to {pin}, which the fleet was not any more")

    def _was(self, fingerprint: str, since: float) -> bool:
        """Did the fleet have it at `since`, or later?"""
        until = self.now
        for at, told in reversed(self.fingerprints):
            if told == fingerprint and until >= since:
                return True
            until = at
            if at < since:
                break
        return False

    def failed_stream(self, frontend: Process, worker: Process | None, error: str, start: float) -> None:
        """I8: a stream that has begun ends with an error only if something was done to one of its ends."""
        world = self.world
        if worker is None or not worker.alive or world.server.stalled:
            return
        if max(frontend.disturbed_at, worker.disturbed_at) >= start - AFTERMATH_S or world.outage_s > 4.0:
            return
        if self.lost_at.get(world.subjects.members.name, 0.0) >= start - AFTERMATH_S:
            return  # nobody was a member for a moment
        self.fail("I8", f"a stream from {worker.name} to {frontend.name} ended with {error}, and both were well")

    # ---- at rest ----

    def problem(self) -> Violation | None:
        """I7, I2: when nothing fails any more, every worker serves the committed version, and nobody is stuck."""
        if self.record is None:
            return Violation("I7", "there is no record")
        last, world = self.record, self.world
        paused = world.desired.paused()
        living = set()
        for process, worker in world.live_workers():
            instance_id = product.instance_id(worker)
            living.add(instance_id)
            held = product.holds(worker)
            closed = product.closed(worker)
            may_be = world.desired.may_be(instance_id)
            if "memory" in closed and "memory" in may_be:
                continue  # nothing can be loaded into it now
            if held != last.held:
                label = held.version.label if held is not None else "nothing"
                return Violation("I7", f"{process.name} holds {label}, committed is {last}: {closed}")
            if closed.keys() - may_be:
                return Violation("I7", f"{process.name} is closed: {closed}")
            if "disabled" not in closed and world.desired.is_disabled(instance_id):
                return Violation("I7", f"{process.name} was disabled by an operator, and is open")
            if paused is not None and paused != product.is_paused(worker):
                return Violation("I7", f"{process.name} is {'running' if paused else 'paused'}, and should not be")
            if (busy := product.staged_in(worker)) is not None and not world.session_waits():
                return Violation("I2", f"{process.name} still holds staged weights of {busy}")
        if last.key not in self.final_at:
            return Violation("I2", f"the update {last} was left half done")
        members = set(world.members())
        if members != living:
            return Violation("I7", f"the members are {sorted(members)}, alive are {sorted(living)}")
        return None
