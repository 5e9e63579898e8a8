"""Which weights should be here: the worker's side of an update. Pure: events in, instructions out; time is passed in.

What the worker does by itself follows from its state, whatever happened before: `next` compares what the engine holds
with what the fleet has committed, and says the one thing to do now.

    holds it all ──→ Relabel, Drop what is left staged, open
    something differs ──→ it is staged:  Wait for the coordinator's commit, then Swap
                          an adapter too many:  Unload
                          else:  Fetch it from the recorded source; on failure Wait, longer each time
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rl_plane.errors import Conflict, NotPrepared, PlaneError
from rl_plane.protocol.canary import CanaryRecord
from rl_plane.protocol.record import (
    LEASE_MARGIN_S,
    SERVING_LEASE_S,
    TAKEOVER_S,
    DecisionRecord,
    Held,
    PauseMode,
    Source,
    first_record,
    newer,
)
from rl_plane.protocol.versions import WeightVersion
from worker.reconcile.numerics import Numerics
from worker.reconcile.worker_state import Scores, WorkerState

HEAL_RETRY_S = 1.0
MAX_HEAL_RETRY_S = 30.0
"""A source that is gone for a minute is found again within half of one."""
COMMIT_GRACE_S = 4.0
"""After the decision a worker that is prepared waits this long for its commit before it swaps by itself."""
GATE_S = SERVING_LEASE_S + LEASE_MARGIN_S
"""So long after a decision nobody can serve the version before: a gate that nobody lifted ends."""
SOURCE_GONE = "source_gone: the committed weights can't be fetched again; an update brings new ones"
OTHER_MODEL_FIX = "start it with the fleet's model, or begin a new run (`rl-plane new-run`)"

# ---- instructions ----


@dataclass(frozen=True, slots=True)
class Read:
    """The record, from the leader. → `leader_said`"""


@dataclass(frozen=True, slots=True)
class Restore:
    """Write this record over the leader's, if that is still the one that was read. → Read again"""

    record: DecisionRecord


@dataclass(frozen=True, slots=True)
class Relabel:
    """The bytes are here already: nothing moves but the labels. → `relabelled`"""

    record: DecisionRecord


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody will swap this in any more. → `is_staged`"""

    update_id: str


@dataclass(frozen=True, slots=True)
class Swap:
    """What is staged under `update_id` becomes the base weights, or the adapter `name`. → `swapped` or `swap_failed`"""

    update_id: str
    name: str | None
    version: WeightVersion
    pause_mode: PauseMode


@dataclass(frozen=True, slots=True)
class Unload:
    """→ `swapped` or `swap_failed`"""

    name: str
    pause_mode: PauseMode


@dataclass(frozen=True, slots=True)
class Fetch:
    """Brings a committed version into staging, from its recorded source or from a worker that keeps it.
    → `is_staged` or `fetch_failed`"""

    update_id: str
    name: str | None
    version: WeightVersion
    source: Source


@dataclass(frozen=True, slots=True)
class Score:
    """Score these sequences by the weights that are here. → `scored`, or `fetch_failed`"""

    canary: CanaryRecord


@dataclass(frozen=True, slots=True)
class Wait:
    """For the next event, or until then (monotonic seconds)."""

    until: float | None = None


Instruction = Read | Relabel | Drop | Swap | Unload | Fetch | Score | Wait


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """Complete and verified, beside the served weights (`in_place`: over them)."""

    update_id: str
    name: str | None
    """The adapter's; None: base weights."""
    digest: str
    fence: int | None
    """Its coordinator's; None: this worker fetched it, to heal."""
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatedUpdate:
    """On its way into staging, for a coordinator."""

    update_id: str
    fence: int


@dataclass(frozen=True, slots=True)
class _Change:
    """A difference between what is held and what is committed."""

    name: str | None
    version: WeightVersion | None
    """None: the adapter goes."""
    source: Source | None


class WorkerCore:
    def __init__(self, state: WorkerState, model_digest: str, engine_kind: str | None = None) -> None:
        """`engine_kind`: None for an engine that can't score."""
        self.state = state
        self.numerics = Numerics(state, engine_kind)
        self.record: DecisionRecord | None = None
        self.staged: StagedVersion | None = None
        self.receiving: CoordinatedUpdate | None = None
        self.in_place = False
        """The model does not fit twice, as the last update that touched it said."""
        self.model_digest = model_digest
        self._written = 0
        """The record's sequence in the bucket."""
        self._learnt_at = 0.0
        """When this worker first heard of the record's version."""
        self._alone = False
        """The coordinator that rolls it out is gone."""
        self._unjudged = False
        """No coordinator is left to compare this worker's scores with those of others."""
        self._free_since: float | None = None
        """When the lock was first seen free. None: a coordinator holds it, or has sealed the record since."""
        self._is_late = False
        """The gate was not lifted in time."""
        self._next_try = 0.0
        self._retry_s = HEAL_RETRY_S
        self._unsure: set[str] = set()
        """Adapters of which nobody has heard how their last change ended."""

    # ---- events: the record ----

    def learnt(self, record: DecisionRecord, written: int, now: float) -> bool:
        """A decision is known: from now on only its weights are served. Whether it was news. What was read may be
        older than what was heard, and a store may have lost what it acknowledged."""
        mine = self.record
        if mine is not None and (newer(mine, record) or (not newer(record, mine) and written <= self._written)):
            return False
        if mine is None or (mine.version.run, mine.made) != (record.version.run, record.made):
            self._learnt_at, self._alone, self._is_late = now, False, False
            self._unjudged, self._free_since = False, None
            self._retry_now()
            self.numerics.new_decision(record)
        elif record.seal > mine.seal:
            self._unjudged, self._free_since = False, None  # another coordinator collects the scores now
        self.record, self._written = record, written
        self._judge(now)
        return True

    def leader_said(
        self,
        record: DecisionRecord | None,
        written: int,
        asked_at: float,
        connection: tuple[str, int],
        now: float,
    ) -> Restore | None:
        """The leader's record, and so the serving lease, unless the leader has lost what this worker knows: then it
        is written back. The first worker of all fixes sequence 0 by its own model."""
        if record is None:
            return Restore(self.record or first_record(self.model_digest))
        if self.record is not None and newer(self.record, record):
            return Restore(self.record)
        if self.record != record:
            self._written = min(self._written, written - 1)  # the leader's word counts, also after a lost store
        self.learnt(record, written, now)
        self._written = max(self._written, written)
        self.state.confirm_lease(asked_at, connection)
        return None

    def _judge(self, now: float) -> None:
        """Admission, by what is held and what is committed."""
        record, state = self.record, self.state
        assert record is not None
        final = self._is_final(now)
        if final:
            state.open("updating")
        else:
            state.close("updating")
        self.numerics.judge(record, final)
        if self._is_whole() or self._may_serve_the_old():
            state.open("behind")
        else:
            state.close("behind", state.closed.get("behind", ""))

    def _is_final(self, now: float) -> bool:
        """Is no verdict or gate of a coordinator awaited any more?"""
        record = self.record
        assert record is not None
        self._is_late = now >= self._learnt_at + GATE_S
        return record.open or (self._is_late and not self._awaits_verdict())

    def ticked(self, now: float, busy: bool = False) -> bool:
        """Returns whether there is something new to do: weights that failed the canary are dropped, and fetched again.

        `busy`: a coordinator changes the engine now. Its commit still has to tell what these weights scored."""
        record, state = self.record, self.state
        if record is None:
            return False
        self._judge(now)
        if (
            busy
            or not self._is_final(now)
            or state.digest != record.version.digest
            or not self.numerics.take_heal()
        ):
            return False
        state.lose_weights("the weights are fetched again: the engine computes something else with them")
        self._wait_longer(now)
        return True

    # ---- events: the coordinator ----

    def depends_on_coordinator(self) -> bool:
        """Is something here that only its coordinator would end?"""
        return self._coordinated() is not None or self._on_the_old() or (self._is_late and self._awaits_verdict())

    def _awaits_verdict(self) -> bool:
        """Only the other workers' scores can tell whether these weights compute what they should, and a coordinator
        still collects them."""
        record = self.record
        return record is not None and not record.open and not self._unjudged and self.numerics.needs_others(record)

    def coordinator_holds(self, fence: int, held: bool, now: float) -> bool:
        """By the leader's lock: does the coordinator of what is here hold it still?"""
        self._alone = self._on_the_old() and not held
        if held:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now
        self._unjudged = self._free_since is not None and now >= self._free_since + TAKEOVER_S
        here = self._coordinated()
        return held and (here is None or fence <= here.fence)

    def given_up(self, waiting_for: str | None) -> CoordinatedUpdate | None:
        """The update that a coordinator has left here and that is to be dropped, once the record bars the coordinator.

        `waiting_for`: the update of the session, which waits for another call."""
        here = self._coordinated()
        decided = here is not None and self.record is not None and self.record.update_id == here.update_id
        return None if here is None or decided or waiting_for == here.update_id else here

    def _coordinated(self) -> CoordinatedUpdate | None:
        """What a coordinator has begun here: staged, or still received."""
        staged = self.staged
        if staged is None or staged.fence is None:
            return self.receiving
        return CoordinatedUpdate(staged.update_id, staged.fence)

    def check_undecided(self, update_id: str | None) -> None:
        """What the record names is decided, whatever its coordinator has heard of it."""
        staged = self.staged
        if staged is None or self.record is None or staged.update_id != self.record.update_id:
            return
        if update_id in (None, staged.update_id):
            raise Conflict(f"the update {staged.update_id} is committed: it can't be aborted any more")

    # ---- events: staging and swapping ----

    def overwriting(self) -> None:
        """The first byte is about to be written over the served weights."""
        self.in_place = True
        self.state.lose_weights("an update is written over the served weights")

    def overwrite_failed(self) -> None:
        self.state.lose_weights("an update that was written over the served weights did not end")

    def is_staged(self, staged: StagedVersion | None) -> None:
        """None: nothing is any more."""
        self.staged = staged
        if staged is not None and staged.name is None:
            self.in_place = staged.in_place

    def does_not_fit(self, fetch: Fetch, why: str) -> str:
        """Why a committed version could not be fetched: this model has other tensors."""
        if fetch.name is not None:
            return why
        return f"{why}; this worker's model has the digest {self.model_digest}: {OTHER_MODEL_FIX}"

    def fetch_failed(self, why: str, now: float) -> None:
        """Bounded retries with growing pauses; a new decision or an operator's `enable` comes at once."""
        if self._missing() is not None:  # a commit may have been faster
            self.state.close("behind", why)
        self._wait_longer(now)

    def _wait_longer(self, now: float) -> None:
        self._next_try = now + self._retry_s
        self._retry_s = min(MAX_HEAL_RETRY_S, self._retry_s * 2)

    def enabled(self) -> None:
        self._retry_now()
        self.numerics.try_again()

    def _retry_now(self) -> None:
        self._next_try, self._retry_s = 0.0, HEAL_RETRY_S

    def swapping(self, swap: Swap | Unload) -> None:
        """From here until `swapped` the engine holds weights of no version."""
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
            self.numerics.swapped(self.record)
        else:
            state.adapters[swap.name] = swap.version
        if swap.name is not None:
            self._unsure.discard(swap.name)
        self._settle()
        if self.record is not None:
            self._judge(now)

    def swap_failed(
        self, swap: Swap | Unload, why: str, now: float, lost: bool = False, cut: bool = False
    ) -> None:
        """`lost`: the adapter that was there is gone. `cut`: it was called off, so that it may be either way."""
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
            self._judge(now)

    def took_back(self, tags: Iterable[str], now: float) -> None:
        """Memory is there again. What was swapped in meanwhile is still to be scored."""
        self.state.take_back(tags)
        if self.record is not None:
            self._judge(now)

    def _settle(self) -> None:
        """Opens a worker that holds exactly the committed state."""
        record, state = self.record, self.state
        if record is not None and self._missing() is None and self._held() == record.held:
            self.numerics.judge(record, record.open)
            state.sequence = record.sequence
            state.open("behind")
            state.open("starting")
            self._retry_now()

    # ---- what to do ----

    def next(self, now: float) -> Instruction:
        """The one thing that this worker should do by itself now."""
        record = self.record
        if record is None:
            return Read()
        change, staged = self._missing(), self.staged
        if change is None:
            if not self._is_whole():
                return Relabel(record)
            if (canary := self.numerics.wanted(record)) is not None:
                return Score(canary) if now >= self._next_try else Wait(self._next_try)
            return Drop(staged.update_id) if staged is not None and self._is_left(staged) else Wait()
        if self._may_serve_the_old():
            return Wait()
        if "weights" in self.state.released:
            self.state.close("behind", "memory is released: the weights come back with resume_memory")
            return Wait()
        if change.version is None:
            assert change.name is not None
            return Unload(change.name, record.pause_mode) if now >= self._next_try else Wait(self._next_try)
        if self._fits(staged, change, record):
            assert staged is not None
            # A coordinator is about to say so of what it has staged.
            begin = 0.0 if staged.fence is None else self._learnt_at + COMMIT_GRACE_S
            wait_until = max(begin, self._next_try)
            if now < wait_until:
                return Wait(wait_until)
            return Swap(staged.update_id, change.name, change.version, record.pause_mode)
        if staged is not None and self._is_left(staged):
            return Drop(staged.update_id)  # staging holds one at a time
        if self.state.released:
            return (
                Wait()
            )  # who brought the weights back alone is about to send new ones, and nobody is served before
        if now < self._next_try:
            return Wait(self._next_try)
        return self._fetch(change, now)

    def _fetch(self, change: _Change, now: float) -> Instruction:
        assert change.version is not None
        assert change.source is not None
        source = change.source
        if source.transport is None and change.version.digest != self.model_digest:
            why = (
                f"this worker's model has the digest {self.model_digest}, the fleet's first version is "
                f"{change.version.digest}: {OTHER_MODEL_FIX}"
            )
        elif not source.refetchable and (change.name is not None or not source.keep_staged):
            why = SOURCE_GONE
        elif self.staged is not None:
            self.state.close("behind", f"waiting for the update {self.staged.update_id}, which is being prepared")
            return Wait(now + HEAL_RETRY_S)  # no failure: nothing is tried less often for it
        else:
            return Fetch(f"heal-{change.version.sequence}", change.name, change.version, source)
        self.fetch_failed(why, now)
        return Wait(self._next_try)

    def commit_step(self, record: DecisionRecord) -> Swap | Unload | Relabel | None:
        """What a coordinator's commit has to do next; None: all is done. NotPrepared: it is not here. Conflict: there
        is no memory to swap it into."""
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
        return Swap(staged.update_id, change.name, change.version, record.pause_mode)

    def _is_left(self, staged: StagedVersion) -> bool:
        """Fetched to heal, or of the decided update: if it doesn't fit, no coordinator comes for it any more."""
        return staged.fence is None or (self.record is not None and staged.update_id == self.record.update_id)

    @staticmethod
    def _fits(staged: StagedVersion | None, change: _Change, record: DecisionRecord) -> bool:
        """Is this what was staged under the record's update, or fetched to heal?"""
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
        """Exactly the committed state is here, labels included."""
        record = self.record
        return record is not None and self._held() == record.held and self.state.sequence == record.sequence

    def _on_the_old(self) -> bool:
        """A rolling update goes on, and the state before it is here."""
        old = self.record.rolling_from if self.record is not None else None
        return old is not None and self.state.sequence is not None and self._held() == old

    def _may_serve_the_old(self) -> bool:
        """Its turn comes, as long as somebody rolls."""
        return self._on_the_old() and not self._alone

    def _missing(self) -> _Change | None:
        """The first difference between what is held and what is committed. Adapters that go, go first: they were never
        committed with a new base. Then comes what is staged, since anything else would need its place."""
        record = self.record
        assert record is not None
        changes = self._changes(record)
        first = (change for change in changes if change.version is None or self._fits(self.staged, change, record))
        return next(first, changes[0] if changes else None)

    def _changes(self, record: DecisionRecord) -> list[_Change]:
        held = self.state.adapters
        gone = [
            _Change(name, None, None) for name in sorted((held.keys() | self._unsure) - record.adapters.keys())
        ]
        base = [_Change(None, record.version, record.source)] if self.state.digest != record.version.digest else []
        new = [
            _Change(name, adapter.version, adapter.source)
            for name, adapter in sorted(record.adapters.items())
            if name not in held or held[name].digest != adapter.version.digest or name in self._unsure
        ]
        return [*gone, *base, *new]


def why(error: BaseException) -> str:
    return error.message if isinstance(error, PlaneError) else f"{type(error).__name__}: {error}"
