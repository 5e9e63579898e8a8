"""The invariants, checked at each step: the world reports here first whatever happens.

A check is strict where the design promises something, and silent where a fault of this run excuses it: what excuses is
named at each check.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_plane.protocol.canary import CanaryRecord
from rl_plane.protocol.envelope import Request
from rl_plane.protocol.record import DecisionRecord, Held
from rl_plane.protocol.subjects import LOCK, MEMBER_PREFIX, RECORD, KeyValueBucket
from rl_plane.protocol.versions import WeightVersion
from tests.sim import product
from tests.sim.check_answers import AnswerChecks
from tests.sim.check_serving import OPEN_AFTER_S, ServingChecks
from tests.sim.product import Decision
from tests.sim.sim_store import Key
from worker.worker import Worker

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.world import World

SCORED_S = 4.0
"""A coordinator that opens a version so long after a worker has scored it could know the scores."""
WITNESS_S = 10.0
"""A worker that was undisturbed so long could be asked by every coordinator."""


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
    done_before: int
    """The number of `Checks.done` at the beginning: a store that has lost writes gives their fences a second time."""
    """Decisions that there were when it began."""
    fences: list[int] = field(default_factory=list)
    """The fences of the locks that were held for it."""
    wrong: str = ""
    """Why it can't be accepted. Empty: it may."""
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
        """The newest decision in the store."""
        self.told: list[tuple[float, Decision]] = []
        """The time at which an update was answered as committed, and its decision."""
        self.final_at: dict[tuple[str, int, str, str], float] = {}
        self.rolled_from: dict[tuple[str, int, str, str], Held] = {}
        """Rolling decision → the state before it."""
        self.forgotten: set[tuple[str, int, str, str]] = set()
        """Decisions that the store lost before any process had learnt them."""
        self.lost_at: dict[str, float] = {}
        """Bucket → when the store last lost writes of it."""
        self.canaries: dict[tuple[str, int], list[tuple[float, CanaryRecord | None]]] = {}
        """Run and sequence of the base → the canary that each record stores for it, and since when."""
        self.staged: dict[str, dict[Process, float]] = {}
        """Update → the processes in which it was staged, and when."""
        self.scored_at: dict[tuple[Process, WeightVersion], float] = {}
        """Process and version → the time of the process's first scores of the version's canary."""
        self.goes_back: set[tuple[str, int, str, str]] = set()
        """Decisions whose canary every worker fails. The version before has to return in place of each."""
        self.done: list[tuple[int, str, str, str | None]] = []
        """The changes that workers carried out: fence, change, worker, and label."""
        self.fingerprints: list[tuple[float, str]] = []
        """The fingerprints of the fleet, each with the time since when it holds."""
        self.joined_at: dict[str, float] = {}
        """Instance id → when it has joined the fleet last."""
        self.serving = ServingChecks(self)
        self.answers = AnswerChecks(self)
        self._fence_of: dict[str, int] = {}
        """Incarnation → the newest fence under which it has done something."""
        self._recovered_at = 0.0
        """The last time at which a decision that the store had lost was missing."""

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
        """Is the committed state in doubt (or was it, at `since`): has the store lost a decision that a process
        knows, or was it written back less than a lease ago?"""
        lost = self.lost_at.get(self.world.subjects.state.name)
        if lost is None:
            return False
        known = [*self._known()]
        if self.record is None or any(_order(one) > _order(self.record) for one in known):
            self._recovered_at = self.now
        elif any(one.key != self.record.key and _order(one) == _order(self.record) for one in known):
            self._recovered_at = self.now  # two were made of one sequence, and one of them was lost
        began = since if since is not None else self.now
        return began < max(self._recovered_at, lost) + OPEN_AFTER_S

    # ---- the record: I6, and I2's other half ----

    def written(self, bucket: KeyValueBucket, key: str, value: bytes | None, sequence: int) -> None:
        subjects = self.world.subjects
        if bucket == subjects.members and key.startswith(MEMBER_PREFIX):
            self.fingerprints.append((self.now, self.world.fingerprint()))
            if value:
                self.joined_at[key[len(MEMBER_PREFIX) :]] = self.now
            else:
                self.world.say(f"member {key[-2:]} is taken out")
        if bucket != subjects.state or key != RECORD or not value:
            return
        record = DecisionRecord.decode(value)
        decision = product.decision_of(record)
        before, self.record = self.record, decision
        version = record.version
        self.canaries.setdefault((version.run, version.sequence), []).append((self.now, record.canary))
        self.world.say(f"record: {decision} {'final' if record.final else 'open' if record.open else 'decided'}")
        if decision.key not in self.decided_at:
            self._check_order(before, decision)
            self._check_lock(before, decision)
            self._check_staged(decision)
            self.decided.append(decision)
            self.decided_at[decision.key] = self.now
            if self._must_go_back(record):
                self.goes_back.add(decision.key)
            if decision.before is not None:
                self.rolled_from[decision.key] = decision.before
        elif before is not None and before.key != decision.key and _order(decision) < _order(before):
            self.fail("I6", f"the record went back from {before} to {decision}")
        if record.open:
            self.opened_at.setdefault(decision.key, self.now)
        if record.final and decision.key not in self.final_at:
            self._check_judged(decision)
            self.final_at[decision.key] = self.now

    @staticmethod
    def _must_go_back(record: DecisionRecord) -> bool:
        """Does every worker fail it, by the trainer's values, and can the version before be restored?"""
        canary = record.canary
        if record.fallback is None or record.on_canary_failure != "rollback" or canary is None:
            return False
        truth = product.vectors_of(record.version.digest, canary.sequences)
        return canary.expected is not None and not product.near(canary.expected, truth)

    def scored(self, process: Process, version: WeightVersion) -> None:
        """A worker's engine has scored this version's canary."""
        self.scored_at.setdefault((process, version), self.now)

    def _check_judged(self, decision: Decision) -> None:
        """A version that every worker fails is not opened where a coordinator could know that: the version before
        is restored, whichever coordinator judges. What excuses: a lost store, released memory, and a worker that this
        update was not staged on or that something was done to."""
        world = self.world
        if decision.key not in self.goes_back or self.lost_at or world.memory_at:
            return
        for process, _ in world.live_workers():
            at = self.scored_at.get((process, decision.made))
            known = (
                at is not None and self.now > at + SCORED_S and process in self.staged.get(decision.update_id, {})
            )
            if known and world.undisturbed(process, WITNESS_S):
                self.fail("I2", f"{decision} stays, and {process.name} has failed its canary")

    def replaced(self, by: str, bucket: KeyValueBucket, key: str, before: Key, value: bytes | None) -> None:
        """A lock is renewed and given back by its holder alone; a taker puts its own name there."""
        if bucket != self.world.subjects.state or key != LOCK or self.lost_at:
            return
        holder, now = json.loads(before.value or b"{}"), json.loads(value) if value else None
        fence = holder.get("fence", before.sequence)
        if now is None and holder["owner"].partition("@")[0] != by:
            self.fail("I1", f"{by} gives the lock of {holder['owner']} back")
        if now is not None and now.get("fence", fence) != fence:
            self.fail("I1", f"{by} renews {now['fence']} over the lock {fence} of {holder['owner']}")

    def _check_order(self, before: Decision | None, decision: Decision) -> None:
        """A decision is the next one after the record, and after all decisions that a reachable process knows."""
        if before is None:
            if self.decided and not self.lost_at:
                self.fail("I6", f"a second first record: {decision}")
        elif decision.run_number > before.run_number:
            return  # a caller began a new run
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

    def _check_lock(self, before: Decision | None, decision: Decision) -> None:
        """A decision is written by the holder of the lock; or, if that has lost the lock meanwhile, before the next
        holder acts."""
        if decision.fence == 0 or self.lost_at:
            return  # the first of a run; a store that goes back lets an old holder find all as it was
        if before is not None and before.seal > decision.fence:
            self.fail("I1", f"{decision} is decided under {decision.fence}, over the seal of {before.seal}")
        if before is not None and before.barred >= decision.fence:
            self.fail("I1", f"{decision} is decided under {decision.fence}, and {before.barred} is barred")
        newer = max((fence for fence, *_ in self.done), default=0)
        if newer > decision.fence:
            self.fail("I1", f"{decision} is decided under {decision.fence}, after workers have obeyed {newer}")

    def _check_staged(self, decision: Decision) -> None:
        """Checks that each worker still has what it has staged: it drops only what can't be decided any more."""
        if decision.missed:
            return  # nothing is staged of it
        for process, at in self.staged.get(decision.update_id, {}).items():
            found = self.world.worker_of(process)
            lost = self.lost_at.get(self.world.subjects.state.name, -1.0) >= at
            if found is None or not process.alive or process.leaving or lost:
                continue
            if product.staged_in(found) != decision.update_id and product.holds(found) != decision.held:
                self.fail("I2", f"{decision} is decided, and {process.name} has dropped what it had staged of it")

    def holds_staged(self, process: Process, update_id: str) -> None:
        self.staged.setdefault(update_id, {})[process] = self.now

    def may_lack(self, process: Process, decision: Decision) -> bool:
        """Reports whether no source can bring this version to a worker that lacks it, and this worker has a reason to
        lack it: it was not there, could not take it, or something was done to it since."""
        if product.can_be_fetched(decision, self.world.sources.digest_at):
            return False
        well = self._has_staged_all(process, decision) and not process.faulty
        return not well or self.world.anything_wrong()

    def _has_staged_all(self, process: Process, decision: Decision) -> bool:
        """Reports whether the worker has staged each part of the committed state, the base and the adapters, by the
        update that made it. A worker starts with its own model, which is the base of sequence 0."""
        held = decision.held
        makers = {one.made: one.update_id for one in self.decided}
        return all(
            version.sequence == 0 or process in self.staged.get(makers.get(version, ""), {})
            for version in (held.version, *held.adapters.values())
        )

    def canary_here(self, process: Process) -> str:
        """`fails`: even an engine that computes as it should fails the canary of the record. `wrong`: this worker's
        engine computed something else. Empty: it has to pass."""
        canary = self.record.canary if self.record is not None else None
        if canary is not None and self.record is not None:
            truth = product.vectors_of(self.record.held.version.digest, canary.sequences)
            given = [*canary.references.values(), *([canary.expected] if canary.expected is not None else [])]
            if canary.undecided or not all(product.near(one, truth) for one in given):
                return "fails"
        return "wrong" if process.miscomputed else ""

    def _began_twice(self, record: Decision) -> bool:
        """Two workers found a lost store empty, and each began a run. The run with the higher sequence counts."""
        return record.sequence == 0 and self.world.subjects.state.name in self.lost_at

    def lost_writes(self, bucket: KeyValueBucket) -> None:
        """The store has just lost some."""
        self.lost_at[bucket.name] = self.now
        if bucket == self.world.subjects.state:
            entry = self.world.server.streams.get(bucket.name)
            found = entry.keys.get(RECORD) if entry is not None else None
            value = found.value if found is not None else None
            self.record = product.decision_of(DecisionRecord.decode(value)) if value else None
            stays = {one.key for one in [*self._known(), self.record] if one is not None}
            newest = max((_order(one) for one in self._known()), default=(-1, -1))
            if self.record is not None:
                newest = max(newest, _order(self.record))
            self.forgotten.update(
                one.key for one in self.decided if _order(one) >= newest and one.key not in stays
            )

    def _known(self) -> Iterator[Decision]:
        """The newest decision that each living process has learnt."""
        for worker in self.world.witnesses():
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
            self.fail("I2", f"{process.name} swaps {version.label} in, which no coordinator has decided")
