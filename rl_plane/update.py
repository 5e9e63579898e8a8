"""The coordinator of an update: the pure half. Events in, instructions out; no clock, no I/O.

    survey ─→ prepare ─→ decide ─→ gate ─→ commit ─→ (leases) ─→ open ─→ done          strict
                 │          └────→ gate ─→ roll … roll ─→ open ─→ (leases) ─→ done     rolling
                 └─ any failure before the decision ─→ abort: nothing has changed anywhere

The protocol is written as generators that yield an instruction and get its event: each reads as the steps of a call.
`coordinator.py` carries the instructions out, under the component's lock. See docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rl_plane.errors import (
    BusUnreachable,
    Conflict,
    InvalidRequest,
    Locked,
    MembershipChanged,
    NoWorkers,
    OutcomeUnknown,
    PlaneError,
    StaleFence,
    UpdateAborted,
)
from rl_plane.fed_parts import pieces
from rl_plane.judge import (
    SHOWN,
    check_against,
    commit_body,
    enough,
    is_enough,
    is_lost,
    judge_armed,
    judge_prepare,
    label_of,
    left_early,
    left_row,
    newest,
    next_record,
    one_model,
    outcome_now,
    outcome_of,
    still_there,
    too_few,
)
from rl_plane.ops import DEFAULT_PAUSE_LEASE_S
from rl_plane.record import (
    LEASE_MARGIN_S,
    SERVING_LEASE_S,
    DecisionRecord,
    DesiredPause,
    Source,
    UpdateSession,
    first_record,
)
from rl_plane.rows import WorkerRow
from rl_plane.update_bodies import Part, UpdatePolicy, UpdateWeights
from rl_plane.update_steps import (
    Answered,
    Ask,
    Call,
    End,
    Event,
    Failed,
    Fed,
    Instruction,
    Members,
    Note,
    Outcome,
    Phase,
    Prepared,
    Result,
    Settle,
    Settled,
    Survey,
    Surveyed,
    Tell,
    Told,
    WaitSilent,
    Watch,
    Write,
    Written,
)

SESSION_IDLE_S = 120.0
"""A prepared update whose trainer is silent this long is aborted: its staging is a model's worth of memory. A call that
waits for the lock is no silence (`keeping.py`)."""
LEASES_END_S = SERVING_LEASE_S + LEASE_MARGIN_S
"""So long after a decision nobody serves the version before, whoever could not be told."""
OPEN_BY_THEMSELVES_S = 30.0
"""How long a new run waits for the workers to serve their own models: nobody has to load anything."""

END_ROLL_TRIES = 3
"""Each waits until NATS is back; it may go away again at once."""

LEAST_FEED_S = 1.0
"""Of a piece whose part has no time left: its worker says that it did not come."""
FEED_MARGIN_S = 5.0
"""Beyond a part's own time: a worker that gives up says so."""
NOTHING_MORE = Part(names=[], dtypes=[], shapes=[])

NOBODY = Prepared("", {}, [], refetchable=True)

Steps = Generator[Instruction, Any, Result]


def _idle_s(body: UpdateWeights) -> float:
    """How long an update waits for its trainer's next call."""
    return SESSION_IDLE_S + (body.policy.prepare_timeout_s if body.pushed else 0.0)


def renew_in_s(session: UpdateSession, now: float) -> float:
    """When the update is to be renewed, while a call of its trainer's waits: with time left for several tries."""
    return max(0.0, session.expires_at - SESSION_IDLE_S / 2 - now)


def renewed(session: UpdateSession, now: float) -> UpdateSession:
    """Of an update whose trainer is not silent."""
    return replace(session, expires_at=max(session.expires_at, now + SESSION_IDLE_S))


@contextmanager
def _telling_of(rows: Sequence[WorkerRow]) -> Iterator[None]:
    """An error tells of each worker."""
    try:
        yield
    except PlaneError as error:
        error.facts.setdefault("workers", [row.to_wire() for row in rows])
        raise


class UpdateMachine:
    """One call. `step` with the event of the last instruction (None at first) gives the next one, until End."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.phase: Phase = "survey"
        self._now = 0.0
        self._members: Members = {}
        self._fingerprint = ""
        self._counted: set[str] = set()
        """Whose failure matters: one that says that it is closed can't fail an update."""
        self._attests: Sequence[WorkerRow] = ()
        self._pause, self._pause_written = DesiredPause(False), 0
        kinds: dict[str, Callable[[], Steps]] = {
            "update": self._update,
            "prepare": self._prepare_only,
            "feed": self._feed,
            "name": self._name,
            "complete": self._complete,
            "abort": self._abort_only,
            "finish": self._finish,
            "new_run": self._new_run,
        }
        self._steps = kinds[call.kind]()

    def step(self, event: Event | None, now: float) -> Instruction:
        """`now`: Unix seconds, for the entries that others read."""
        self._now = now
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
        if body.fed:
            raise InvalidRequest(
                "what comes part by part takes several calls",
                field="transport.fed",
                fix="prepare_weights_update, feed_weights_update for each part, complete_weights_update",
            )
        _, base, outcome = yield from self._survey()
        if base.update_id == self.call.update_id:
            return (yield from self._asked_again(base, outcome, body.policy))
        check_against(base, body, self._before(base, body))
        try:
            prepared = yield from self._prepare(base, body)
            before = self._before(base, body)
            record = next_record(base, body, self.call.update_id, prepared, self._now, before)
            written = yield from self._decide(record, base)
        except OutcomeUnknown:
            raise
        except PlaneError:
            yield from self._abort(self.call.update_id)
            raise
        return (yield from self._carry_out(record, written, prepared, body.policy))

    def _prepare_only(self) -> Steps:
        """The first half, which any coordinator can complete later. Prepared twice under one id: the first stands."""
        body = self._body()
        session, base, _ = yield from self._survey()
        if self._is_decided(session, base):
            raise self._committed(base, "prepare the next one under a new id")
        if session is not None and session.live(self._now):
            return Prepared(session.digest, session.prepared, [], session.refetchable, session=session)
        check_against(base, body, self._before(base, body))
        if body.pushed and body.policy.staging == "none":
            raise InvalidRequest(
                "nobody generates from the first byte of an unstaged update on, so none waits for its trainer",
                field="policy.staging",
                fix="use staging host, or push during one update_weights",
            )
        try:
            prepared = yield from (self._arm if body.pushed else self._prepare)(base, body)
        except PlaneError:
            yield from self._abort(self.call.update_id)
            raise
        session = UpdateSession(
            self.call.update_id,
            label_of(base, body),
            body.model_dump(),
            prepared.digest,
            prepared.refetchable,
            prepared.ready,
            self._now + _idle_s(body),
        )
        try:
            yield Note("session", session=session)
        except PlaneError:
            yield from self._give_up(self.call.update_id)
            raise
        return replace(prepared, session=session)

    def _feed(self) -> Steps:
        """Tensors of a prepared update, which its trainer broadcasts now. Whatever goes wrong ends the update: what is
        on its way can't be taken back, and nobody sends it twice."""
        assert self.call.part is not None
        session, base, _ = yield from self._survey()
        if self._is_decided(session, base):
            raise self._committed(base, "prepare the next one")
        session = self._expected(session)
        body = UpdateWeights.model_validate(session.body)
        if not body.fed:
            raise InvalidRequest(
                f"the update {session.update_id!r} was not prepared to be fed",
                field="update_id",
                fix="prepare it with transport {backend, group, fed: true}",
            )
        try:
            self._check_armed(session, body)
            missing = yield from self._feed_pieces(session, self.call.part)
            said = session.told(version=self.call.version, pause_mode=self.call.pause_mode)
            session = replace(said, expires_at=self._now + _idle_s(body))
            yield Note("session", session=session)
        except PlaneError:
            yield from self._give_up(session.update_id)
            raise
        return Fed(session, missing)

    def _name(self) -> Steps:
        """The label of a prepared update, which any coordinator then commits it under."""
        session, base, _ = yield from self._survey()
        if self._is_decided(session, base):
            raise self._committed(base, "it keeps that label")
        session = self._expected(session)
        if not session.live(self._now):
            raise UpdateAborted("the update was silent for too long", fix="prepare it again")
        named = renewed(session.told(version=self.call.version), self._now)
        yield Note("session", session=named)
        return named

    def _feed_pieces(self, session: UpdateSession, part: Part) -> Generator[Instruction, Any, int]:
        """One after another, as the trainer broadcasts them; all within the part's own time."""
        began, missing, told = self._now, 0, pieces(part)
        for number, piece in enumerate(told, 1):
            left_s = max(part.timeout_s - max(self._now - began, 0.0), LEAST_FEED_S)
            in_time = piece.model_copy(update={"timeout_s": min(left_s, part.timeout_s)})
            last = piece.check_only and number == len(told)
            missing = yield from self._ask_to_take(session, in_time, last=last)
        return missing

    def _check_armed(self, session: UpdateSession, body: UpdateWeights) -> None:
        """Are all there still that wait for the same broadcasts?"""
        if not session.live(self._now):
            raise UpdateAborted("the update was silent for too long", fix="prepare it again")
        ready = still_there(session.prepared, self._members)
        if len(ready) < len(session.prepared):
            raise left_early(session.prepared, ready)
        if body.policy.on_prepare_failure == "abort":
            self._refuse_joiners(session)

    def _ask_to_take(self, session: UpdateSession, part: Part, *, last: bool) -> Generator[Instruction, Any, int]:
        """How many tensors are missing yet."""
        request = {**part.model_dump(include=set(Part.model_fields)), "update_id": session.update_id, "last": last}
        answered: Answered = yield Ask(
            "feed",
            "feed_update",
            request,
            list(session.prepared),
            part.timeout_s + FEED_MARGIN_S,
            together=session.update_id,
        )
        asked = {row.instance_id for row in answered.rows}
        left = [left_row(key, one) for key, one in session.prepared.items() if key not in asked]
        rows = [*answered.rows, *left]
        with _telling_of(rows):
            judge_armed(rows)
        return max(int(row.body["missing"]) for row in rows)

    def _complete(self) -> Steps:
        """The second half: decides and commits what was prepared. What is pushed is waited for first."""
        session, base, outcome = yield from self._survey()
        if self._is_decided(session, base):
            if session is not None and session.update_id == base.update_id:
                policy = UpdateWeights.model_validate(session.body).policy
            else:
                policy = UpdatePolicy(min_ready=self.call.min_ready)
            return (yield from self._asked_again(base, outcome, policy))
        session = self._expected(session)
        body = UpdateWeights.model_validate(session.body)
        if self.call.version is not None:
            body = body.model_copy(update={"version": self.call.version})
        before = self._before(base, body)
        ready = still_there(session.prepared, self._members)
        try:
            if not session.live(self._now):
                raise UpdateAborted("the update was silent for too long", fix="prepare it again")
            if not ready or (len(ready) < len(session.prepared) and body.policy.on_prepare_failure == "abort"):
                raise left_early(session.prepared, ready)
            if len(ready) < body.policy.min_ready:
                raise too_few(len(ready), body.policy)
            gone = sorted(session.prepared.keys() - ready.keys())
            prepared = Prepared(session.digest, ready, gone, session.refetchable)
            stated = self.call.digest or body.digest
            if session.armed:
                all_or_none = body.policy.on_prepare_failure == "abort"
                if all_or_none:
                    self._refuse_joiners(session)
                if body.fed:
                    yield from self._ask_to_take(session, NOTHING_MORE, last=True)
                rows = yield from self._ask_to_prepare(
                    "prepare_update", session.update_id, session.label, body, ready, before
                )
                with _telling_of(rows):
                    received = judge_prepare(rows, set(ready), body.policy, stated)
                if all_or_none:
                    self._see((yield Survey("recheck")))
                    self._refuse_joiners(session)
                prepared = replace(received, excluded=[*gone, *received.excluded])
            elif stated not in (None, session.digest):
                raise UpdateAborted(
                    f"the workers hold {session.digest}, the caller stated {stated}", field="digest"
                )
            if before is not None:
                check_against(base, body, before)
            record = next_record(base, body, session.update_id, prepared, self._now, before)
            written = yield from self._decide(record, base)
        except OutcomeUnknown:
            raise
        except PlaneError:
            yield from self._give_up(session.update_id)
            raise
        try:
            yield Note("session")
        except (BusUnreachable, StaleFence):
            pass  # the record tells that it is over
        return (yield from self._carry_out(record, written, prepared, body.policy))

    def _refuse_joiners(self, session: UpdateSession) -> None:
        joined = sorted(self._members.keys() - session.prepared.keys())
        if joined:
            raise MembershipChanged(
                f"{', '.join(joined[:SHOWN])} joined since, and can't get what was pushed",
                fix="form the group again, and send the update again; or let them wait for the next one "
                "(policy.on_prepare_failure=exclude)",
            )

    def _abort_only(self) -> Steps:
        session, base, _ = yield from self._survey()
        if self._is_decided(session, base):
            raise self._committed(base, "roll back to the version before, if it is not wanted")
        session = self._expected(session)
        yield Note("session")
        yield from self._abort(session.update_id)
        return session

    def _finish(self) -> Steps:
        _, base, outcome = yield from self._survey()
        return outcome or Outcome(base.made)

    def _new_run(self) -> Steps:
        """Sequence 0 of a new run, by the model that every worker was started with."""
        _, base, outcome = yield from self._survey()
        if base.update_id == self.call.update_id:
            return (yield from self._asked_again(base, outcome, UpdatePolicy()))
        record = replace(
            first_record(one_model(self._attests), base.run_number + 1),
            update_id=self.call.update_id,
            open=False,
        )
        yield Note("begin", base=base)
        written = yield from self._decide(record, base)
        yield from self._swap_all(record, written, NOBODY, UpdatePolicy())
        watched: Answered = yield Watch(record.opened(), OPEN_BY_THEMSELVES_S)
        return enough(outcome_now(record, watched.rows), UpdatePolicy())

    def _body(self) -> UpdateWeights:
        assert self.call.body is not None
        return self.call.body

    def _before(self, base: DecisionRecord, body: UpdateWeights) -> Source | None:
        """Of a delta: where the version comes from that it changes."""
        return (self.call.before or base.source) if body.encoding == "delta" else None

    def _is_decided(self, session: UpdateSession | None, base: DecisionRecord) -> bool:
        """Is the update that is meant the committed one? Its coordinator died before it could answer."""
        meant = self.call.update_id or (session.update_id if session is not None else "")
        return meant != "" and base.update_id == meant

    def _committed(self, base: DecisionRecord, fix: str) -> Conflict:
        return Conflict(
            f"the update {base.update_id!r} is committed as {base.made.label}",
            version=base.made.to_wire(),
            fix=fix,
        )

    def _expected(self, session: UpdateSession | None) -> UpdateSession:
        """The prepared update that is meant."""
        if session is None or self.call.update_id not in ("", session.update_id):
            named = f": {self.call.update_id}" if self.call.update_id else ""
            raise UpdateAborted(
                f"no such update is prepared{named}",
                field="update_id",
                fix="prepare_weights_update first; a prepared update is dropped when its trainer is silent",
            )
        return session

    # ---- the steps ----

    def _survey(self) -> Generator[Instruction, Any, tuple[UpdateSession | None, DecisionRecord, Outcome | None]]:
        """The session that this call goes on with, the committed record, and the outcome of an update that a dead
        coordinator had decided: it is finished here. What one had not decided is dropped."""
        seen: Surveyed = yield Survey()
        self._see(seen)
        base, written, decided = newest(seen), seen.written, seen.decided
        if base is not None and base is not seen.record:
            restored: Written = yield Write("restore", base, seen.record)
            written = decided = restored.sequence
        session = seen.session
        if session is not None and base is not None and session.update_id == base.update_id:
            yield Note("clear")  # it was decided, and its coordinator died before it could note that
        elif session is not None and not self._goes_on_with(session):
            policy = UpdateWeights.model_validate(session.body).policy
            if session.live(self._now) and not is_lost(session, policy, seen):
                raise Locked(
                    f"the update {session.update_id!r} is prepared and waits for complete or abort",
                    holder=session.update_id,
                    retry_after_s=1.0,
                    fix="complete it, abort it, or wait until its idle limit ends it",
                )
            yield from self._abort(session.update_id, "clear")
            yield Note("clear")
            session = None
        elif session is None and seen.took_over:
            yield from self._abort(None, "clear")
        if base is None:
            raise NoWorkers("no worker has fixed the fleet's first version yet", retry_after_s=1.0)
        outcome = None
        if not base.final:
            yield from self._keep_paused(base, decided)
            whoever = Prepared(base.made.digest, seen.members, [], refetchable=True)
            outcome = yield from self._swap_all(base, written, whoever, UpdatePolicy())
            base = base.opened()
            self._see((yield Survey("recheck")))  # who was closed by that update alone is open now
        return session, base, outcome

    def _see(self, seen: Surveyed) -> None:
        self._members, self._fingerprint, self._attests = seen.members, seen.fingerprint, seen.attests
        self._pause, self._pause_written = seen.pause, seen.pause_written
        closed = {row.instance_id for row in seen.attests if row.ok and not row.body["admitted"]}
        self._counted = seen.members.keys() - closed

    def _goes_on_with(self, session: UpdateSession) -> bool:
        if self.call.kind == "prepare":
            return session.update_id == self.call.update_id
        return self.call.kind in ("feed", "name", "complete", "abort")

    def _prepare(self, base: DecisionRecord, body: UpdateWeights) -> Generator[Instruction, Any, Prepared]:
        """Stages on every member; on failure the error tells of each worker."""
        yield Note("begin", base=base)
        update_id, label = self.call.update_id, label_of(base, body)
        rows = yield from self._ask_to_prepare(
            "prepare_update", update_id, label, body, self._members, self._before(base, body)
        )
        with _telling_of(rows):
            all_or_none = body.pushed and body.policy.on_prepare_failure == "abort"
            pinned = self.call.fingerprint or (self._fingerprint if all_or_none else None)
            if pinned is not None:
                again: Surveyed = yield Survey("recheck")
                if again.fingerprint != pinned:
                    raise MembershipChanged(after_epoch=again.epoch)
            return judge_prepare(rows, self._counted, body.policy, body.digest)

    def _arm(self, base: DecisionRecord, body: UpdateWeights) -> Generator[Instruction, Any, Prepared]:
        """Makes every member listen for what is pushed."""
        yield Note("begin", base=base)
        update_id, label = self.call.update_id, label_of(base, body)
        rows = yield from self._ask_to_prepare(
            "arm_update", update_id, label, body, self._members, self._before(base, body)
        )
        with _telling_of(rows):
            return judge_armed(rows)

    def _ask_to_prepare(
        self,
        op: str,
        update_id: str,
        label: str,
        body: UpdateWeights,
        workers: Members,
        before: Source | None,
    ) -> Generator[Instruction, Any, list[WorkerRow]]:
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
        answered: Answered = yield Ask("prepare", op, request, list(workers), body.policy.prepare_timeout_s)
        rows = list(answered.rows)
        asked = {row.instance_id for row in rows}
        return rows + [left_row(key, incarnation) for key, incarnation in workers.items() if key not in asked]

    def _abort(self, update_id: str | None, phase: Phase = "abort") -> Generator[Instruction, Any, None]:
        """Drops what is staged, wherever it is. A worker that doesn't hear it asks the record by itself."""
        try:
            yield Ask(phase, "abort_update", {"update_id": update_id}, list(self._members))
        except PlaneError:
            pass  # said in the shell's log

    def _give_up(self, update_id: str) -> Generator[Instruction, Any, None]:
        """Of an update that waits for another call: what the session names stays staged, so it goes first."""
        try:
            yield Note("session")
        except PlaneError:
            return  # said in the shell's log
        yield from self._abort(update_id)

    def _decide(self, record: DecisionRecord, base: DecisionRecord) -> Generator[Instruction, Any, int]:
        """After this the version is committed. A lost answer is settled by the record itself."""
        try:
            written: Written = yield Write("decide", record, base)
            return written.sequence
        except BusUnreachable as lost:
            try:
                settled: Settled = yield Settle(record)
            except PlaneError as error:
                raise OutcomeUnknown(
                    f"whether {record.made.label} was committed is not known: {error.message}",
                    update_id=record.update_id,
                    retry_after_s=1.0,
                    fix="repeat the call with the same Idempotency-Key, or read the state",
                ) from error
            if settled.record is None or settled.record.update_id != record.update_id:
                raise lost
            return settled.sequence

    def _carry_out(
        self, record: DecisionRecord, written: int, prepared: Prepared, policy: UpdatePolicy
    ) -> Generator[Instruction, Any, Outcome]:
        """The version stands already: if NATS, the lock or the answers are lost on the way, the workers go on by the
        record, and this only watches them."""
        try:
            yield from self._keep_paused(record, written)
            carried = self._roll if record.rolling_from is not None else self._swap_all
            outcome = yield from carried(record, written, prepared, policy)
            if is_enough(outcome, policy):
                return outcome
        except (BusUnreachable, StaleFence):
            pass  # said in the shell's log
        if record.rolling_from is not None:
            yield from self._end_roll(record)
        watched: Answered = yield Watch(record, max(policy.commit_timeout_s, LEASES_END_S))
        try:
            yield Write("open", record.opened(), record)
        except (BusUnreachable, StaleFence):
            pass  # whoever holds the lock next does it
        return enough(outcome_now(record, watched.rows), policy)

    def _asked_again(
        self, record: DecisionRecord, outcome: Outcome | None, policy: UpdatePolicy
    ) -> Generator[Instruction, Any, Outcome]:
        """The answer of an update that was decided, whose coordinator could not give it. `outcome` None: nobody was
        asked yet, since it is open."""
        if outcome is None:
            told: Answered = yield Watch(record, 0.0)
            outcome = outcome_now(record, told.rows)
        if is_enough(outcome, policy):
            return outcome
        watched: Answered = yield Watch(record, max(policy.commit_timeout_s, LEASES_END_S))
        return enough(outcome_now(record, watched.rows), policy)

    def _keep_paused(self, record: DecisionRecord, written: int) -> Generator[Instruction, Any, None]:
        """As the update's policy says, unless somebody has paused or resumed the fleet since."""
        if record.keep_pause and self._pause_written < written:
            until = self._now + max(self._pause.left_s(self._now), DEFAULT_PAUSE_LEASE_S)
            self._pause = DesiredPause(True, record.pause_mode, until)
            yield Note("pause", pause=self._pause)

    def _swap_all(
        self, record: DecisionRecord, written: int, prepared: Prepared, policy: UpdatePolicy
    ) -> Generator[Instruction, Any, Outcome]:
        """Strict: nobody opens before every member is gated, and swapped or excluded."""
        told: Told = yield Tell("gate", record, written, policy.gate_timeout_s)
        shut = {row.instance_id for row in told.rows if row.ok}
        swapping = [key for key in still_there(prepared.ready, told.members) if key in shut]
        commit = commit_body(record, written, self._pause.left_s(self._now))
        committed: Answered = yield Ask("commit", "commit_update", commit, swapping, policy.commit_timeout_s)
        yield from self._leases(told)
        opened: Written = yield Write("open", record.opened(), record)
        after: Told = yield Tell("open", record.opened(), opened.sequence, policy.gate_timeout_s)
        return outcome_of(record, prepared, committed.rows, told, after)

    def _roll(
        self, record: DecisionRecord, written: int, prepared: Prepared, policy: UpdatePolicy
    ) -> Generator[Instruction, Any, Outcome]:
        """Rolling: one worker after another, while the others serve the version before."""
        told: Told = yield Tell("gate", record, written, policy.gate_timeout_s)
        rows: list[WorkerRow] = []
        for key in sorted(still_there(prepared.ready, told.members)):
            commit = commit_body(record, written, self._pause.left_s(self._now))
            one: Answered = yield Ask("roll", "commit_update", commit, [key], policy.commit_timeout_s)
            rows += one.rows
        opened: Written = yield Write("open", record.opened(), record)
        after: Told = yield Tell("open", record.opened(), opened.sequence, policy.gate_timeout_s)
        yield from self._leases(after)
        return outcome_of(record, prepared, rows, told, after)

    def _end_roll(self, record: DecisionRecord) -> Generator[Instruction, Any, None]:
        """A worker whose turn has not come waits as long as the lock is held, and so for this call: without a roll
        it swaps by itself."""
        for _ in range(END_ROLL_TRIES):
            try:
                yield Write("open", record.opened(), record)
                return
            except StaleFence:
                return  # nobody waits for this call any more
            except BusUnreachable:
                pass
            try:
                yield Watch(record, 0.0)  # until NATS is back
            except PlaneError:
                pass

    def _leases(self, told: Told) -> Generator[Instruction, Any, None]:
        """Who has not acknowledged may serve what it knows until it leaves or its lease has run out."""
        silent = {
            row.instance_id: told.members[row.instance_id] for row in told.rows if not row.ok and not row.lost
        }
        if silent or told.silent_frontends:
            yield WaitSilent(silent, told.silent_frontends)
