"""The coordinator of an update: the pure half. Events in, instructions out; no clock, no I/O.

    survey ─→ prepare ─→ decide ─→ gate ─→ commit ─→ (leases) ─→ open ─→ answer        strict
                 │          └────→ gate ─→ roll … roll ─→ open ─→ (leases) ─→ answer   rolling
                 └─ any failure before the decision ─→ abort: nothing has changed anywhere

The protocol is written as generators that yield an instruction and get its event: each reads as the steps of a call.
`coordinator.py` carries the instructions out, under the component's lock. `update_sessions.py` has the calls of an
update that spans several. See docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rl_plane.commit.canary_rules import Settlement
from rl_plane.commit.canary_steps import (
    canary_of,
    check_canary,
    goes_back,
    limits_of,
    missed_error,
    record_back,
    settled,
)
from rl_plane.commit.rules import (
    check_against,
    commit_body,
    enough,
    evaluate_prepare,
    is_enough,
    is_lost,
    label_of,
    left_reply,
    next_record,
    one_model,
    outcome_of,
    still_there,
)
from rl_plane.commit.steps import (
    Announce,
    Answered,
    End,
    Event,
    Failed,
    Instruction,
    Members,
    Note,
    Outcome,
    Phase,
    Prepared,
    RecordAcks,
    Result,
    SendOp,
    Survey,
    Surveyed,
    UpdateCommand,
    WaitSilent,
    Watch,
    Write,
    Written,
)
from rl_plane.errors import (
    BusUnreachable,
    InvalidRequest,
    Locked,
    MembershipChanged,
    NoWorkers,
    OutcomeUnknown,
    PlaneError,
    StaleFence,
)
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.canary import CanaryHistory, CanaryRecord
from rl_plane.protocol.record import (
    LEASE_MARGIN_S,
    SERVING_LEASE_S,
    DecisionRecord,
    DesiredPause,
    Source,
    UpdateSession,
    first_record,
)
from rl_plane.protocol.update_requests import UpdatePolicy, UpdateWeights
from rl_plane.protocol.worker_ops import DEFAULT_PAUSE_LEASE_S

LEASES_END_S = SERVING_LEASE_S + LEASE_MARGIN_S
"""So long after a decision no worker serves the version before, whether it could be told or not."""
OPEN_BY_THEMSELVES_S = 30.0
"""How long a new run waits for the workers to serve their own models: they have nothing to load."""
END_ROLL_TRIES = 3
"""Each waits until NATS is back; it may go away again at once."""

Steps = Generator[Instruction, Any, Result]


@contextmanager
def naming_workers(replies: Sequence[WorkerReply]) -> Iterator[None]:
    """Adds each worker's row to an error's facts."""
    try:
        yield
    except PlaneError as error:
        error.facts.setdefault("workers", [reply.to_wire() for reply in replies])
        raise


class UpdateMachine:
    """One call. `step` with the event of the last instruction (None at first) gives the next one, until End."""

    def __init__(self, call: UpdateCommand) -> None:
        self.call = call
        self.phase: Phase = "survey"
        self._now = 0.0
        self._elapsed_s = 0.0
        self._members: Members = {}
        self._fingerprint = ""
        self._counted: set[str] = set()
        """Whose failure matters: a worker that says that it is closed can't fail an update."""
        self._reports: Sequence[WorkerReply] = ()
        self._pause, self._pause_written = DesiredPause(False), 0
        self._history = CanaryHistory()
        self._settlement: Settlement | None = None
        """What the canary of the record that is carried out has shown."""
        self._steps = self._kinds()[call.kind]()

    def _kinds(self) -> Mapping[str, Callable[[], Steps]]:
        return {"update": self._update, "finish": self._finish, "new_run": self._new_run}

    def step(self, event: Event | None, now: float, elapsed_s: float = 0.0) -> Instruction:
        """`now`: Unix seconds, for the entries that people read. `elapsed_s`: monotonic, since the call began."""
        self._now, self._elapsed_s = now, elapsed_s
        try:
            steps = self._steps
            instruction = steps.throw(event.error) if isinstance(event, Failed) else steps.send(event)
        except StopIteration as end:
            instruction = End(end.value)
        except PlaneError as error:
            instruction = End(error)
        self.phase = instruction.phase
        return instruction

    # ---- the calls ----

    def _update(self) -> Steps:
        """A whole update in one call."""
        body = self._body()
        if body.in_parts:
            raise InvalidRequest(
                "what comes part by part takes several calls",
                field="transport.in_parts",
                fix="prepare_weights_update, receive_weights_part for each part, complete_weights_update",
            )
        _, base = yield from self._survey()
        if base.update_id == self.call.update_id:
            return (yield from self._answer(base, body.policy))
        before = self._before(base, body)
        check_against(base, body, before)
        check_canary(body, limits_of(self._reports))
        try:
            prepared = yield from self._prepare(base, body)
            canary = self._canary(base, body, prepared)
            record = next_record(base, body, self.call.update_id, prepared, self._now, before, canary)
            decided = yield from self._decide(record)
        except OutcomeUnknown:
            raise
        except PlaneError:
            yield from self._abort(self.call.update_id)
            raise
        return (yield from self._carry_out(decided, prepared, body.policy))

    def _finish(self) -> Steps:
        """Only what a dead coordinator has left."""
        _, base = yield from self._survey()
        return Outcome(base.made)

    def _new_run(self) -> Steps:
        """Sequence 0 of a new run, by the model that every worker was started with."""
        _, base = yield from self._survey()
        if base.update_id == self.call.update_id:
            return (yield from self._answer(base, UpdatePolicy()))
        record = replace(
            first_record(one_model(self._reports), base.run_number + 1),
            update_id=self.call.update_id,
            open=False,
        )
        yield Note("begin", base=base)
        decided = yield from self._decide(record)
        yield from self._swap_all(decided, {}, UpdatePolicy())
        watched: Answered = yield Watch(record.opened(), OPEN_BY_THEMSELVES_S)
        return enough(outcome_of(record, watched.replies), UpdatePolicy())

    def _body(self) -> UpdateWeights:
        assert self.call.body is not None
        return self.call.body

    def _before(self, base: DecisionRecord, body: UpdateWeights) -> Source | None:
        """For a delta: the source of the version that it changes."""
        return (self.call.before or base.source) if body.encoding == "delta" else None

    def _canary(self, base: DecisionRecord, body: UpdateWeights, prepared: Prepared) -> CanaryRecord | None:
        return canary_of(base, body, prepared.digest, prepared.replies, limits_of(self._reports), self._history)

    # ---- the steps ----

    def _survey(self) -> Generator[Instruction, Any, tuple[UpdateSession | None, DecisionRecord]]:
        """The session that this call continues, and the committed record. An update that a dead coordinator had decided
        is finished here."""
        seen: Surveyed = yield Survey()
        self._see(seen)
        base, session = seen.record, seen.session
        if session is not None and base is not None and session.update_id == base.update_id:
            yield Note("clear")  # it was decided, and its coordinator died before it could note that
        elif session is not None and not self._continues(session):
            policy = UpdateWeights.model_validate(session.body).policy
            if not is_lost(session, policy, seen):
                raise Locked(
                    f"the update {session.update_id!r} is prepared and waits for complete or abort",
                    holder=session.update_id,
                    retry_after_s=1.0,
                    fix="complete it, abort it, or wait until its idle limit ends it",
                )
            yield from self._abort(session.update_id, "clear")
            yield Note("clear")
            session = None
        if base is None:
            raise NoWorkers("no worker has fixed the fleet's first version yet", retry_after_s=1.0)
        if not base.final:
            yield from self._keep_paused(base)
            decided = Written(base, seen.written)
            yield from self._swap_all(decided, seen.members, UpdatePolicy())
            if goes_back(base, self._settlement):
                base, _ = yield from self._go_back(base, UpdatePolicy())
            base, self._settlement = self._opened(base), None
            self._see((yield Survey("recheck")))  # a worker that only this update had closed is open now
        return session, base

    def _see(self, seen: Surveyed) -> None:
        self._members, self._fingerprint, self._reports = seen.members, seen.fingerprint, seen.reports
        self._pause, self._pause_written, self._history = seen.pause, seen.pause_written, seen.history
        closed = {reply.instance_id for reply in seen.reports if reply.ok and not reply.body["admitted"]}
        self._counted = seen.members.keys() - closed

    def _continues(self, session: UpdateSession) -> bool:
        """Is this a call of the update that waits?"""
        return False

    def _prepare(self, base: DecisionRecord, body: UpdateWeights) -> Generator[Instruction, Any, Prepared]:
        """Stages on every member; on failure the error names each worker."""
        yield Note("begin", base=base)
        update_id, label = self.call.update_id, label_of(base, body)
        replies = yield from self._ask_to_prepare(
            "prepare_update", update_id, label, body, self._members, self._before(base, body)
        )
        with naming_workers(replies):
            all_or_none = body.pushed and body.policy.on_prepare_failure == "abort"
            pinned = self.call.fingerprint or (self._fingerprint if all_or_none else None)
            if pinned is not None:
                again: Surveyed = yield Survey("recheck")
                if again.fingerprint != pinned:
                    raise MembershipChanged(after_epoch=again.epoch)
            return evaluate_prepare(replies, self._counted, body.policy, body.digest)

    def _ask_to_prepare(
        self,
        op: str,
        update_id: str,
        label: str,
        body: UpdateWeights,
        workers: Members,
        before: Source | None,
    ) -> Generator[Instruction, Any, list[WorkerReply]]:
        """A row for each of these workers."""
        request = {
            "update_id": update_id,
            "target": body.target.model_dump(),
            "transport": body.transport.model_dump() if body.transport is not None else None,
            "encoding": body.encoding,
            "base": body.base,
            "before": before.to_wire() if before is not None else None,
            "label": label,
            "digest": body.digest,
            "cast": body.cast,
            "staging": body.policy.staging,
            "keep_staged": body.policy.keep_staged or body.encoding == "delta",
            "pause_mode": body.policy.pause_mode,
        }
        answered: Answered = yield SendOp("prepare", op, request, list(workers), body.policy.prepare_timeout_s)
        replies = list(answered.replies)
        asked = {reply.instance_id for reply in replies}
        return replies + [left_reply(key, incarnation) for key, incarnation in workers.items() if key not in asked]

    def _abort(self, update_id: str, phase: Phase = "abort") -> Generator[Instruction, Any, None]:
        """Drops what is staged, wherever it is. A worker that doesn't hear it asks the record by itself."""
        try:
            yield SendOp(phase, "abort_update", {"update_id": update_id}, list(self._members))
        except PlaneError:
            pass  # said in the shell's log

    def _decide(self, record: DecisionRecord) -> Generator[Instruction, Any, Written]:
        """After this the version is committed. An answer that was lost is settled under a new fence: no record that was
        written under the old one counts any more, unless it is found now."""
        try:
            written: Written = yield Write("decide", record)
            return written
        except BusUnreachable as lost:
            try:
                seen: Surveyed = yield Survey("settle")
            except PlaneError as error:
                raise OutcomeUnknown(
                    f"whether {record.made.label} was committed is not known: {error.message}",
                    update_id=record.update_id,
                    retry_after_s=1.0,
                    fix="repeat the call with the same Idempotency-Key, or read the state",
                ) from error
            # An update that fails the canary makes two records under one id.
            there = seen.record
            if there is None or (there.update_id, there.made) != (record.update_id, record.made):
                raise lost
            return Written(there, seen.written)

    def _carry_out(
        self, decided: Written, prepared: Prepared, policy: UpdatePolicy
    ) -> Generator[Instruction, Any, Outcome]:
        """The version stands already: if NATS, the lock or the answers are lost on the way, the workers continue by the
        record, and this call only watches them."""
        record = decided.record
        told, meant = list(prepared.failed), [*prepared.ready, *prepared.excluded]
        try:
            yield from self._keep_paused(record)
            carried = self._roll if record.rolling_from is not None else self._swap_all
            told += yield from carried(decided, prepared.ready, policy)
            if goes_back(record, self._settlement):
                back, replies = yield from self._go_back(record, policy)
                raise missed_error(back, replies)
            return (yield from self._answer(record, policy, told, meant))
        except (BusUnreachable, StaleFence):
            pass  # said in the shell's log
        if record.rolling_from is not None:
            yield from self._end_roll(record)
        watched: Answered = yield Watch(record, max(policy.commit_timeout_s, LEASES_END_S))
        judged = record.canary is None or self._settlement is not None
        if judged and not goes_back(record, self._settlement):
            try:
                yield Write("open", self._opened(record))
            except (BusUnreachable, StaleFence):
                pass  # the next holder of the lock does it
        return enough(self._outcome(record, watched.replies, told, meant), policy)

    def _answer(
        self,
        record: DecisionRecord,
        policy: UpdatePolicy,
        told: Sequence[WorkerReply] = (),
        meant: Sequence[str] = (),
    ) -> Generator[Instruction, Any, Outcome]:
        """What the workers serve at this moment, or once enough of them serve the version."""
        if record.missed is not None:
            raise missed_error(record)
        late_s = max(policy.commit_timeout_s, LEASES_END_S)
        none_passed = self._settlement is not None and self._settlement.action != "open"
        for timeout_s in (0.0,) if none_passed else (0.0, late_s):
            watched: Answered = yield Watch(record, timeout_s)
            outcome = self._outcome(record, watched.replies, told, meant)
            if is_enough(outcome, policy):
                break
        return enough(outcome, policy)

    def _outcome(
        self,
        record: DecisionRecord,
        states: Sequence[WorkerReply],
        told: Sequence[WorkerReply],
        meant: Sequence[str],
    ) -> Outcome:
        summary = self._settlement.summary() if self._settlement is not None else None
        return replace(outcome_of(record, states, told, meant), canary=summary)

    def _keep_paused(self, record: DecisionRecord) -> Generator[Instruction, Any, None]:
        """Pauses the fleet as the update's policy says, unless another call has paused or resumed it since."""
        if record.keep_pause and self._pause_written < record.fence:
            until = self._now + max(self._pause.left_s(self._now), DEFAULT_PAUSE_LEASE_S)
            self._pause = DesiredPause(True, record.pause_mode, until)
            yield Note("pause", pause=self._pause)

    def _swap_all(
        self, decided: Written, ready: Members, policy: UpdatePolicy
    ) -> Generator[Instruction, Any, Sequence[WorkerReply]]:
        """Strict: no worker opens before every member is gated, and swapped or excluded."""
        record = decided.record
        told: RecordAcks = yield Announce("gate", record, decided.sequence, policy.gate_timeout_s)
        shut = {reply.instance_id for reply in told.replies if reply.ok}
        swapping = [key for key in still_there(ready, told.members) if key in shut]
        commit = commit_body(record, decided.sequence, self._pause.left_s(self._now))
        committed: Answered = yield SendOp("commit", "commit_update", commit, swapping, policy.commit_timeout_s)
        replies = [*(reply for reply in told.replies if not reply.ok), *committed.replies]
        self._settlement, replies = settled(record, replies)
        if not goes_back(record, self._settlement):
            yield from self._leases(told)
            opened = yield from self._open(record)
            yield Announce("open", opened.record, opened.sequence, policy.gate_timeout_s)
        return replies

    def _roll(
        self, decided: Written, ready: Members, policy: UpdatePolicy
    ) -> Generator[Instruction, Any, Sequence[WorkerReply]]:
        """Rolling: one worker after another, while the others serve the version before."""
        record = decided.record
        told: RecordAcks = yield Announce("gate", record, decided.sequence, policy.gate_timeout_s)
        replies = [reply for reply in told.replies if not reply.ok]
        for key in sorted(still_there(ready, told.members)):
            commit = commit_body(record, decided.sequence, self._pause.left_s(self._now))
            one: Answered = yield SendOp("roll", "commit_update", commit, [key], policy.commit_timeout_s)
            replies += one.replies
            self._settlement, judged = settled(record, replies)
            if goes_back(record, self._settlement):
                return judged  # the others serve the version before still
            if self._settlement is not None and self._settlement.record != record.canary:
                # The next worker serves at once, so it needs what the first ones have scored to judge itself by.
                decided = yield Write("open", replace(record, canary=self._settlement.record))
                record = decided.record
        self._settlement, replies = settled(record, replies)
        opened = yield from self._open(record)
        after: RecordAcks = yield Announce("open", opened.record, opened.sequence, policy.gate_timeout_s)
        yield from self._leases(after)
        return replies

    def _opened(self, record: DecisionRecord) -> DecisionRecord:
        """With what the workers have scored, which a worker that comes later has to give too."""
        opened = record.opened()
        return opened if self._settlement is None else replace(opened, canary=self._settlement.record)

    def _open(self, record: DecisionRecord) -> Generator[Instruction, Any, Written]:
        opened: Written = yield Write("open", self._opened(record))
        canary, settlement = opened.record.canary, self._settlement
        # Values that are served in spite of a failure (`warn`) are no measure for the time when this version returns.
        passed = settlement is not None and settlement.action == "open" and not settlement.warning
        if canary is not None and passed:
            digest = record.version.digest
            yield Note("open", canary=self._history.with_values(digest, canary.sequences, canary.references))
        return opened

    def _go_back(
        self, record: DecisionRecord, policy: UpdatePolicy
    ) -> Generator[Instruction, Any, tuple[DecisionRecord, Sequence[WorkerReply]]]:
        """Brings the version before `record` back: a decision like any other. Each worker fetches it by itself."""
        assert self._settlement is not None
        back = record_back(record, self._settlement, self._now)
        decided = yield from self._decide(back)
        self._settlement = None
        try:
            yield from self._swap_all(decided, {}, policy)
            watched: Answered = yield Watch(back, max(policy.commit_timeout_s, LEASES_END_S))
        except (BusUnreachable, StaleFence):
            return decided.record, ()  # the next holder of the lock opens it
        return decided.record, watched.replies

    def _end_roll(self, record: DecisionRecord) -> Generator[Instruction, Any, None]:
        """A worker whose turn has not come waits as long as the lock is held, and so for this call: without a roll
        it swaps by itself."""
        for _ in range(END_ROLL_TRIES):
            try:
                yield Write("open", record.opened())
                return
            except StaleFence:
                return  # no worker waits for this call any more
            except BusUnreachable:
                pass
            try:
                yield Watch(record, 0.0)  # until NATS is back
            except PlaneError:
                pass

    def _leases(self, told: RecordAcks) -> Generator[Instruction, Any, None]:
        """A worker or frontend that has not acknowledged may serve what it knows until it leaves or its lease has run
        out."""
        silent = {
            reply.instance_id: told.members[reply.instance_id]
            for reply in told.replies
            if not reply.ok and not reply.lost
        }
        if silent or told.silent_frontends:
            yield WaitSilent(silent, told.silent_frontends)
