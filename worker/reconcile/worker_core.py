"""Decides which weights a worker should hold, and what it does next. Pure: the caller passes events and the time in.

A worker's own actions follow from its state alone, whatever happened before. `next` compares what the engine holds
with what the fleet has committed, and returns the one thing to do now:

    everything is here ──→ Relabel, ScoreCanary, Drop what is left in staging, open
    something differs ──→ the change is staged:  Wait for the coordinator's commit, then Swap
                          an adapter is too many:  Unload
                          otherwise:  Fetch it from the recorded source; after a failure Wait, longer each time
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rl_plane.errors import Conflict, NotPrepared, PlaneError
from rl_plane.protocol.record import (
    LEASE_MARGIN_S,
    SERVING_LEASE_S,
    TAKEOVER_S,
    DecisionRecord,
    Held,
    VersionSource,
    first_record,
    newer,
)
from rl_plane.protocol.versions import WeightVersion
from worker.reconcile.instructions import (
    CoordinatedUpdate,
    Drop,
    Fetch,
    Instruction,
    Read,
    Relabel,
    ScoreCanary,
    StagedVersion,
    Swap,
    Unload,
    Wait,
)
from worker.reconcile.numerics import Numerics
from worker.reconcile.worker_state import Scores, WorkerState

HEAL_RETRY_S = 1.0
MAX_HEAL_RETRY_S = 30.0
"""A worker finds a source that was away for a minute at most half a minute after it is back."""
COMMIT_GRACE_S = 4.0
"""A prepared worker waits this long for its commit after the decision, before it swaps by itself."""
GATE_S = SERVING_LEASE_S + LEASE_MARGIN_S
"""A gate that no coordinator lifts lasts this long. After that no worker can serve the version before."""
CHECK_S = 1800.0
"""A worker whose weights were reset after a snapshot waits this long for an update or the comparison, before it heals
by itself. A trainer builds its own model in this time, and then sends its first update."""
SOURCE_GONE = "source_gone: the committed weights can't be fetched again; an update brings new ones"
OTHER_MODEL_FIX = "start it with the fleet's model, or begin a new run (`rl-plane new-run`)"


@dataclass(frozen=True, slots=True)
class _Mismatch:
    """One difference between what the engine holds and what is committed."""

    name: str | None
    version: WeightVersion | None
    """It is None if the adapter is to be unloaded."""
    source: VersionSource | None


class WorkerCore:
    """Knows the committed record, what is staged, and what the engine holds. `engine_kind`: None if it can't score."""

    def __init__(self, state: WorkerState, model_digest: str, engine_kind: str | None = None) -> None:
        self.state = state
        self.numerics = Numerics(state, engine_kind)
        self.record: DecisionRecord | None = None
        self.staged: StagedVersion | None = None
        self.receiving: CoordinatedUpdate | None = None
        self.in_place = False
        """The last update of base weights said that the model does not fit in memory twice."""
        self.model_digest = model_digest
        self._written = 0
        """The record's sequence in the bucket."""
        self._learnt_at = 0.0
        """The time at which this worker first heard of the record's version."""
        self._alone = False
        """The coordinator of the rolling update is gone."""
        self._scores_stay_alone = False
        """No coordinator will compare this worker's scores with the other workers' scores."""
        self._free_since: float | None = None
        """The time at which the lock was seen free. None: a coordinator holds it, or has sealed the record since."""
        self._is_late = False
        """No coordinator lifted the gate in time."""
        self._next_try = 0.0
        self._retry_s = HEAL_RETRY_S
        self._has_snapshot = False
        """A snapshot was taken, and was not compared since."""
        self._check_until = 0.0
        """Until then a check waits for an update, and healing would hide that none came. 0: no check waits."""
        self._unsure: set[str] = set()
        """Adapters whose last change was cut off, so that the engine may or may not hold them."""

    # ---- events: the record ----

    def learnt(self, record: DecisionRecord, written: int, now: float) -> bool:
        """Takes a record: from now on the worker serves only its weights. Returns whether the record was news.

        A record that this worker reads may be older than a record that a coordinator sent. A store may have lost a
        write that it acknowledged."""
        mine = self.record
        if mine is not None and (newer(mine, record) or (not newer(record, mine) and written <= self._written)):
            return False
        if mine is not None and mine.version != record.version:
            self._check_until = 0.0  # an update has come, if not to this worker
        if mine is None or (mine.version.run, mine.made) != (record.version.run, record.made):
            self._learnt_at, self._alone, self._is_late = now, False, False
            self._scores_stay_alone, self._free_since = False, None
            self._retry_now()
            self.numerics.new_decision(record)
        elif record.seal > mine.seal:
            self._scores_stay_alone, self._free_since = False, None  # another coordinator collects the scores now
        self.record, self._written = record, written
        self._update_admission(now)
        return True

    def leader_said(
        self,
        record: DecisionRecord | None,
        written: int,
        asked_at: float,
        connection: tuple[str, int],
        now: float,
    ) -> DecisionRecord | None:
        """Takes the record of the store's leader, which confirms the serving lease.

        If the leader has lost the record that this worker knows, it returns that record, to be written over the
        leader's. On an empty store, the first worker fixes sequence 0 by its own model."""
        if record is None:
            return self.record or first_record(self.model_digest)
        if self.record is not None and newer(self.record, record):
            return self.record
        if self.record != record:
            self._written = min(self._written, written - 1)  # the leader decides, also after it has lost its store
        self.learnt(record, written, now)
        self._written = max(self._written, written)
        self.state.confirm_lease(asked_at, connection)
        return None

    def _update_admission(self, now: float) -> None:
        """Opens or closes the worker, by what the engine holds and what is committed."""
        record, state = self.record, self.state
        assert record is not None
        final = self._is_final(now)
        if final:
            state.open("updating")
        else:
            state.close("updating")
        self.numerics.update_admission(record, final)
        if self._is_whole() or self._may_serve_the_old():
            state.open("behind")
        else:
            state.close("behind", state.closed.get("behind", ""))

    def _is_final(self, now: float) -> bool:
        """Returns whether the worker waits neither for a verdict nor for the end of a gate."""
        record = self.record
        assert record is not None
        self._is_late = now >= self._learnt_at + GATE_S
        return record.open or (self._is_late and not self._awaits_verdict())

    def ticked(self, now: float, busy: bool = False) -> bool:
        """Notes that time has passed. Returns True if it drops weights that failed the canary, to fetch them again.

        `busy`: a coordinator changes the engine now, and its commit still has to report the scores of these weights."""
        record, state = self.record, self.state
        if record is None:
            return False
        self._update_admission(now)
        if (
            busy
            or not self._is_final(now)
            or self._may_be_overruled()
            or state.digest != record.version.digest
            or not self.numerics.take_heal()
        ):
            return False
        state.lose_weights("the weights are fetched again: the engine computes something else with them")
        self._wait_longer(now)
        return True

    # ---- events: the coordinator ----

    def depends_on_coordinator(self) -> bool:
        """Returns whether this worker waits for something that only a coordinator can end."""
        return (
            self._coordinated() is not None
            or self._on_the_old()
            or (self._is_late and self._awaits_verdict())
            or self._may_be_overruled()
        )

    def _awaits_verdict(self) -> bool:
        """Returns whether only the other workers' scores can judge these weights, and a coordinator still collects
        them."""
        record = self.record
        return (
            record is not None
            and not record.open
            and not self._scores_stay_alone
            and self.numerics.needs_others(record)
        )

    def _may_be_overruled(self) -> bool:
        """Returns whether these weights failed the canary in a rolling update that serves them all the same
        (`on_canary_failure: warn`) if every worker fails. A worker that dropped them might find no source for them."""
        record, verdict = self.record, self.numerics.verdict
        return (
            record is not None
            and record.rolling_from is not None
            and record.on_canary_failure == "warn"
            and verdict is not None
            and not verdict.passed
            and not self._scores_stay_alone
        )

    def coordinator_holds(self, fence: int, held: bool, now: float) -> bool:
        """Takes the state of the lock. Returns whether the coordinator of what is here still holds it."""
        self._alone = self._on_the_old() and not held
        if held:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now
        self._scores_stay_alone = self._free_since is not None and now >= self._free_since + TAKEOVER_S
        here = self._coordinated()
        return held and (here is None or fence <= here.fence)

    def given_up(self, waiting_for: str | None) -> CoordinatedUpdate | None:
        """Returns the update that a coordinator has left here. The worker drops it once the record bars that fence.

        `waiting_for`: the update of the session, which waits for another call."""
        here = self._coordinated()
        decided = here is not None and self.record is not None and self.record.update_id == here.update_id
        return None if here is None or decided or waiting_for == here.update_id else here

    def _coordinated(self) -> CoordinatedUpdate | None:
        """Returns the update that a coordinator has begun here: staged, or still being received."""
        staged = self.staged
        if staged is None or staged.fence is None:
            return self.receiving
        return CoordinatedUpdate(staged.update_id, staged.fence)

    def check_undecided(self, update_id: str | None) -> None:
        """Conflict if the record names this update: it is decided, even if its coordinator does not know."""
        staged = self.staged
        if staged is None or self.record is None or staged.update_id != self.record.update_id:
            return
        if update_id in (None, staged.update_id):
            raise Conflict(f"the update {staged.update_id} is committed: it can't be aborted any more")

    # ---- events: staging and swapping ----

    def overwriting(self) -> None:
        """Notes that the next byte goes over the served weights."""
        self.in_place = True
        self.state.lose_weights("an update is written over the served weights")

    def overwrite_failed(self) -> None:
        self.state.lose_weights("an update that was written over the served weights did not end")

    def is_staged(self, staged: StagedVersion | None) -> None:
        """Takes what is in staging now. None: nothing."""
        self.staged = staged
        if staged is not None and staged.name is None:
            self.in_place = staged.in_place

    def does_not_fit(self, fetch: Fetch, why: str) -> str:
        """Returns why a committed version could not be fetched: this worker's model has other tensors."""
        if fetch.name is not None:
            return why
        return f"{why}; this worker's model has the digest {self.model_digest}: {OTHER_MODEL_FIX}"

    def fetch_failed(self, why: str, now: float) -> None:
        """Delays the next try, longer each time. A new decision or an operator's `enable` ends the delay at once."""
        if self._missing() is not None:  # a commit may have been faster
            self.state.close("behind", why)
        self._wait_longer(now)

    def _wait_longer(self, now: float) -> None:
        self._next_try = now + self._retry_s
        self._retry_s = min(MAX_HEAL_RETRY_S, self._retry_s * 2)

    # ---- events: a check of the weights ----

    def snapshot_taken(self) -> None:
        self._has_snapshot = True

    def weights_reset(self, now: float) -> bool:
        """Notes that noise comes over the weights. Returns whether a snapshot waits for its comparison: then only an
        update brings weights, until the comparison, or for CHECK_S."""
        self._check_until = now + CHECK_S if self._has_snapshot else 0.0
        return self._has_snapshot

    def check_ended(self) -> None:
        """Notes a comparison, or a reset that failed: the worker may heal."""
        self._has_snapshot, self._check_until = False, 0.0

    def enabled(self) -> None:
        self._check_until = 0.0
        self._retry_now()
        self.numerics.try_again()

    def _retry_now(self) -> None:
        self._next_try, self._retry_s = 0.0, HEAL_RETRY_S

    def swapping(self, swap: Swap | Unload) -> None:
        """Notes that the engine holds weights of no version, until `swapped`."""
        if isinstance(swap, Swap):
            self.staged = None
        if swap.name is None:
            self.state.lose_weights("swapping")
        else:
            self.state.sequence = None
            self.state.close("behind", "swapping")

    def swapped(self, swap: Swap | Unload, now: float) -> None:
        state = self.state
        if isinstance(swap, Unload):
            state.adapters.pop(swap.name, None)
        elif swap.name is None:
            state.hold(swap.version)
            self._check_until = 0.0
            self.numerics.swapped(self.record)
        else:
            state.adapters[swap.name] = swap.version
        if swap.name is not None:
            self._unsure.discard(swap.name)
        self._settle()
        if self.record is not None:
            self._update_admission(now)

    def swap_failed(
        self, swap: Swap | Unload, why: str, now: float, lost: bool = False, cut: bool = False
    ) -> None:
        """`lost`: the adapter that was there is gone. `cut`: the call was cancelled, and the swap may have happened."""
        if swap.name is None:
            self.state.lose_weights(why)
        elif lost:
            self.state.adapters.pop(swap.name, None)
        elif cut:
            self._unsure.add(swap.name)
        self.fetch_failed(why, now)

    def relabelled(self, record: DecisionRecord) -> None:
        self.state.hold(record.version)
        self.state.adapters = dict(record.held.adapters)
        self._settle()

    def scored(self, scores: Scores, now: float) -> None:
        self.state.scores = scores
        if self.record is not None:
            self._update_admission(now)

    def took_back(self, tags: Iterable[str], now: float) -> None:
        """Notes that memory is back. Weights that were swapped in meanwhile still need their scores."""
        self.state.take_back(tags)
        if self.record is not None:
            self._update_admission(now)

    def _settle(self) -> None:
        """Opens a worker that holds exactly the committed state."""
        record, state = self.record, self.state
        if record is not None and self._missing() is None and self._held() == record.held:
            self.numerics.update_admission(record, record.open)
            state.sequence = record.sequence
            state.open("behind")
            state.open("starting")
            self._retry_now()

    # ---- what to do ----

    def next(self, now: float) -> Instruction:
        """Returns the one thing that this worker should do by itself now."""
        record = self.record
        if record is None:
            return Read()
        change, staged = self._missing(), self.staged
        if change is None:
            if not self._is_whole():
                return Relabel(record)
            if (canary := self.numerics.wanted(record)) is not None:
                return ScoreCanary(canary) if now >= self._next_try else Wait(self._next_try)
            return Drop(staged.update_id) if staged is not None and self._is_left(staged) else Wait()
        if self._may_serve_the_old():
            return Wait()
        if "weights" in self.state.released:
            self.state.close("behind", "memory is released: resume_memory restores the weights")
            return Wait()
        if self._waits_for_check(change, record, now):
            healed = staged is not None and staged.fence is None
            return Drop(staged.update_id) if staged is not None and healed else Wait(self._check_until)
        if change.version is None:
            assert change.name is not None
            return Unload(change.name, record.pause_mode) if now >= self._next_try else Wait(self._next_try)
        if self._fits(staged, change, record):
            assert staged is not None
            # For what a coordinator has staged, its commit should come first.
            begin = 0.0 if staged.fence is None else self._learnt_at + COMMIT_GRACE_S
            wait_until = max(begin, self._next_try)
            if now < wait_until:
                return Wait(wait_until)
            return self._swap(staged, change.name, change.version, record)
        if staged is not None and self._is_left(staged):
            return Drop(staged.update_id)  # staging has room for one
        if self.state.released:
            # A trainer that has resumed only the weights is about to send new ones. The worker is closed until then.
            return Wait()
        if now < self._next_try:
            return Wait(self._next_try)
        return self._fetch(change, now)

    def _waits_for_check(self, change: _Mismatch, record: DecisionRecord, now: float) -> bool:
        """Returns whether base weights may only come by an update: what a coordinator has staged and decided."""
        if change.name is not None or now >= self._check_until:
            return False
        staged = self.staged
        return staged is None or staged.fence is None or not self._fits(staged, change, record)

    def _fetch(self, change: _Mismatch, now: float) -> Instruction:
        assert change.version is not None
        assert change.source is not None
        source = change.source
        if source.transport is None and change.version.digest != self.model_digest:
            why = (
                f"this worker's model has the digest {self.model_digest}, the fleet's first version is "
                f"{change.version.digest}: {OTHER_MODEL_FIX}"
            )
        elif not (source.refetchable or source.keep_staged or change.name is not None):
            why = SOURCE_GONE
        elif self.staged is not None:
            self.state.close("behind", f"waiting for the update {self.staged.update_id}, which is being prepared")
            return Wait(now + HEAL_RETRY_S)  # not a failure: the wait does not grow
        else:
            return Fetch(f"heal-{change.version.sequence}", change.name, change.version, source)
        self.fetch_failed(why, now)
        return Wait(self._next_try)

    def commit_step(self, record: DecisionRecord) -> Swap | Unload | Relabel | None:
        """Returns the next step of a coordinator's commit. None: all is done.

        NotPrepared: the update is not staged here. Conflict: another update was committed, or memory is released."""
        mine = self.record
        if mine is None or mine.update_id != record.update_id:
            raise Conflict(f"another update was committed since: {mine and mine.made.label}")
        change, staged = self._missing(), self.staged
        if change is None:
            return None if self._is_whole() else Relabel(mine)
        self.state.check_weights_here()
        if change.version is None:
            assert change.name is not None
            return Unload(change.name, record.pause_mode)
        if not self._fits(staged, change, record):
            raise NotPrepared(
                f"the update {record.update_id} is not staged here", staged=staged and staged.update_id
            )
        assert staged is not None
        return self._swap(staged, change.name, change.version, record)

    def _swap(
        self, staged: StagedVersion, name: str | None, version: WeightVersion, record: DecisionRecord
    ) -> Swap:
        """A worker that fetched the version by itself may have missed an update whose policy forbids older KV."""
        keeps = record.kv == "keep" and name is None and staged.fence is not None
        return Swap(staged.update_id, name, version, record.pause_mode, keeps)

    def _is_left(self, staged: StagedVersion) -> bool:
        """Returns whether no coordinator will swap this in: the worker fetched it to heal, or its update is decided."""
        return staged.fence is None or (self.record is not None and staged.update_id == self.record.update_id)

    @staticmethod
    def _fits(staged: StagedVersion | None, change: _Mismatch, record: DecisionRecord) -> bool:
        """Returns whether what is staged is this change: of the record's update, or fetched to heal."""
        return (
            staged is not None
            and change.version is not None
            and (staged.name, staged.digest) == (change.name, change.version.digest)
            and (staged.fence is None or staged.update_id == record.update_id)
        )

    def _held(self) -> Held | None:
        version = self.state.version
        return Held(version, dict(self.state.adapters)) if version is not None else None

    def _is_whole(self) -> bool:
        """Returns whether the engine holds exactly the committed state, labels included."""
        record = self.record
        return record is not None and self._held() == record.held and self.state.sequence == record.sequence

    def _on_the_old(self) -> bool:
        """Returns whether a rolling update is under way, and the engine holds the state before it."""
        old = self.record.rolling_from if self.record is not None else None
        return old is not None and self.state.sequence is not None and self._held() == old

    def _may_serve_the_old(self) -> bool:
        """Returns whether a coordinator will still roll this worker, which serves the version before until then."""
        return self._on_the_old() and not self._alone

    def _missing(self) -> _Mismatch | None:
        """Returns the first difference between what the engine holds and what is committed.

        Adapters are unloaded first, because they were never committed with a new base. Next comes what is staged,
        because any other change needs its place in staging."""
        record = self.record
        assert record is not None
        changes = self._changes(record)
        first = (change for change in changes if change.version is None or self._fits(self.staged, change, record))
        return next(first, changes[0] if changes else None)

    def _changes(self, record: DecisionRecord) -> list[_Mismatch]:
        held = self.state.adapters
        gone = [
            _Mismatch(name, None, None) for name in sorted((held.keys() | self._unsure) - record.adapters.keys())
        ]
        base = (
            [_Mismatch(None, record.version, record.source)] if self.state.digest != record.version.digest else []
        )
        new = [
            _Mismatch(name, adapter.version, adapter.source)
            for name, adapter in sorted(record.adapters.items())
            if name not in held or held[name].digest != adapter.version.digest or name in self._unsure
        ]
        return [*gone, *base, *new]


def why(error: BaseException) -> str:
    return error.message if isinstance(error, PlaneError) else f"{type(error).__name__}: {error}"
