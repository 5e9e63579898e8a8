"""The commands of an update that spans several calls: prepare, receive_part, label, complete, abort. Pure.

Between two calls the update is a *session*: a key in the state bucket, which the server removes when its trainer has
been silent for too long. Any coordinator can continue it. The workers hold verified bytes, or they listen for what the
trainer pushes. `complete` asks them to prepare in both cases: that is idempotent, and it waits for what is still to
come.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from rl_plane.commit.canary_steps import check_canary, limits_of, missed_error
from rl_plane.commit.command_state import CommandState, Steps, naming_workers
from rl_plane.commit.machine import carry_out, survey
from rl_plane.commit.opening import answer
from rl_plane.commit.preparation import abort, ask_to_prepare, decide, prepare, record_for, with_left
from rl_plane.commit.rules import (
    SHOWN,
    check_against,
    committed_already,
    evaluate_listening,
    evaluate_prepare,
    label_of,
    left_early,
    needs_of,
    still_there,
    too_few,
)
from rl_plane.commit.steps import (
    Answered,
    BeginJournal,
    Instruction,
    Members,
    Needs,
    PartReceived,
    Prepared,
    Put,
    SendOp,
    Survey,
)
from rl_plane.errors import (
    BusUnreachable,
    InvalidRequest,
    MembershipChanged,
    OutcomeUnknown,
    PlaneError,
    StaleFence,
    UpdateAborted,
)
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.broadcast_plan import pieces
from rl_plane.protocol.record import DecisionRecord, UpdateSession
from rl_plane.protocol.subjects import SESSION
from rl_plane.protocol.update_requests import Part, UpdatePolicy, UpdateWeights

LEAST_PART_S = 1.0
"""The time-out of a piece whose part has no time left: its worker then reports that it did not come."""
PART_MARGIN_S = 5.0
"""The coordinator waits this much longer than the part's own time-out, for the error of a worker that gives up."""
NOTHING_MORE = Part(names=[], dtypes=[], shapes=[])


# ---- the commands ----


def prepare_only(state: CommandState) -> Steps:
    """Stages an update, which any coordinator can complete later. A second call under the same id changes nothing."""
    body, update_id = state.body, state.command.update_id
    session, base = yield from survey(state, lambda waiting: waiting.update_id == update_id)
    if _is_decided(state, session, base):
        raise _too_late(base, "prepare the next one under a new id")
    if session is not None:
        return Prepared(session.digest, session.prepared, [], session.refetchable, session=session)
    check_against(base, body, state.changed_source(base, body))
    check_canary(body, limits_of(state.seen.reports))
    if body.pushed and body.policy.staging == "none":
        raise InvalidRequest(
            "an unstaged update closes every worker from its first byte on, so it can't wait for another call",
            field="policy.staging",
            fix="use staging host, or push during one update_weights",
        )
    try:
        prepared = yield from (_listen if body.pushed else prepare)(state, base, body)
    except PlaneError:
        yield from abort(state, update_id)
        raise
    session = UpdateSession(
        update_id,
        label_of(base, body),
        body.model_dump(),
        prepared.digest,
        prepared.refetchable,
        prepared.ready,
        state.command.session_idle_s + (int(body.policy.prepare_timeout_s) if body.pushed else 0),
    )
    try:
        yield _save(session)
    except PlaneError:
        yield from _give_up(state, update_id)
        raise
    return replace(prepared, session=session)


def _save(session: UpdateSession) -> Put:
    return Put("session", SESSION, session, session.idle_s)


def receive_part(state: CommandState) -> Steps:
    """Receives tensors of a prepared update, which its trainer broadcasts now. Any failure ends the update: the trainer
    can't take back what it has sent, and does not send it twice."""
    assert state.command.part is not None
    session, _ = yield from _session(state, "prepare the next one")
    body = UpdateWeights.model_validate(session.body)
    if not body.in_parts:
        raise InvalidRequest(
            f"the update {session.update_id!r} was not prepared to come part by part",
            field="update_id",
            fix="prepare it with transport {backend, group, in_parts: true}",
        )
    try:
        ready = still_there(session.prepared, state.seen.members)
        if len(ready) < len(session.prepared):
            raise left_early(session.prepared, ready)
        if body.policy.on_prepare_failure == "abort":
            _refuse_joiners(state, session)
        missing = yield from _receive_pieces(state, session, state.command.part)
        said = session.updated(
            version=state.command.version, pause_mode=state.command.pause_mode, kv=state.command.kv
        )
        session = replace(said, parts=session.parts + 1)
        yield _save(session)
    except PlaneError:
        yield from _give_up(state, session.update_id)
        raise
    return PartReceived(session, missing)


def label(state: CommandState) -> Steps:
    """Labels a prepared update. Any coordinator then commits it under this label."""
    session, _ = yield from _session(state, "it keeps that label")
    labelled = session.updated(version=state.command.version)
    yield _save(labelled)
    return labelled


def abort_only(state: CommandState) -> Steps:
    """Drops a prepared update."""
    session, _ = yield from _session(state, "roll back to the version before, if it is not wanted")
    yield Put("session", SESSION, None)
    yield from abort(state, session.update_id)
    return session


def complete(state: CommandState) -> Steps:
    """Decides and commits what was prepared. Waits for what is pushed first."""
    session, base = yield from survey(state, lambda waiting: True)
    if _is_decided(state, session, base):
        policy = UpdatePolicy(min_ready=state.command.min_ready)
        if session is not None and session.update_id == base.update_id:
            policy = UpdateWeights.model_validate(session.body).policy
        return (yield from answer(state, base, policy))
    session = _expected(state, session).updated(version=state.command.version, kv=state.command.kv)
    body = UpdateWeights.model_validate(session.body)
    before = state.changed_source(base, body)
    all_or_none = session.listening and body.policy.on_prepare_failure == "abort"
    try:
        ready = _still_ready(state, session, body.policy)
        if all_or_none:
            _refuse_joiners(state, session)
        if body.in_parts:
            yield from _receive_piece(session, NOTHING_MORE, last=True)
        needs = needs_of(session.update_id, ready, body.policy)
        replies = yield from ask_to_prepare("prepare_update", needs, session.label, body, ready, before)
        with naming_workers(replies):
            stated = state.command.digest or body.digest or session.digest or None
            prepared = evaluate_prepare(replies, set(ready), body.policy, stated)
        if all_or_none:
            state.seen = yield Survey("recheck")
            _refuse_joiners(state, session)
        gone = sorted(session.prepared.keys() - ready.keys())
        prepared = replace(prepared, excluded=[*gone, *prepared.excluded])
        if before is not None:
            check_against(base, body, before)
        decided = yield from decide(record_for(state, base, body, session.update_id, prepared))
    except OutcomeUnknown:
        raise
    except PlaneError:
        yield from _give_up(state, session.update_id)
        raise
    try:
        yield Put("session", SESSION, None)
    except (BusUnreachable, StaleFence):
        pass  # the next coordinator sees by the record that the session is over
    return (yield from carry_out(state, decided, prepared, body.policy))


# ---- the session ----


def _session(
    state: CommandState, committed_fix: str
) -> Generator[Instruction, Any, tuple[UpdateSession, DecisionRecord]]:
    """Returns the prepared update that the command names. Raises Conflict, with `committed_fix`, if it is committed,
    and CanaryFailed if the canary has taken it back."""
    session, base = yield from survey(state, lambda waiting: True)
    if _is_decided(state, session, base):
        raise _too_late(base, committed_fix)
    return _expected(state, session), base


def _is_decided(state: CommandState, session: UpdateSession | None, base: DecisionRecord) -> bool:
    """Reports whether the update that the command names is the committed one: its coordinator died before it could
    answer."""
    meant = state.command.update_id or (session.update_id if session is not None else "")
    return meant != "" and base.update_id == meant


def _too_late(base: DecisionRecord, committed_fix: str) -> PlaneError:
    """The error of a call that comes after its update was decided."""
    if base.missed is not None:
        return missed_error(base)
    return committed_already(base.update_id, base.made, committed_fix)


def _expected(state: CommandState, session: UpdateSession | None) -> UpdateSession:
    """Returns the prepared update, if the command names it or names none."""
    update_id = state.command.update_id
    if session is None or update_id not in ("", session.update_id):
        raise UpdateAborted(
            f"no such update is prepared: {update_id}" if update_id else "no update runs, and none is prepared",
            field="update_id",
            fix="prepare_weights_update first; a prepared update is dropped when its trainer is silent",
        )
    return session


def _give_up(state: CommandState, update_id: str) -> Generator[Instruction, Any, None]:
    """Ends an update that waits for another call. The session ends first: what a session names should stay staged. A
    worker whose failure has ended the update may have dropped it before."""
    try:
        yield Put("session", SESSION, None)
    except PlaneError:
        return  # the shell has logged it
    yield from abort(state, update_id)


def _still_ready(state: CommandState, session: UpdateSession, policy: UpdatePolicy) -> Members:
    ready = still_there(session.prepared, state.seen.members)
    if not ready or (len(ready) < len(session.prepared) and policy.on_prepare_failure == "abort"):
        raise left_early(session.prepared, ready)
    if len(ready) < policy.min_ready:
        raise too_few(len(ready), policy)
    return ready


def _refuse_joiners(state: CommandState, session: UpdateSession) -> None:
    joined = sorted(state.seen.members.keys() - session.prepared.keys())
    if joined:
        raise MembershipChanged(
            f"{', '.join(joined[:SHOWN])} joined since, and can't get what was pushed",
            fix="form the group again, and send the update again; or let them wait for the next one "
            "(policy.on_prepare_failure=exclude)",
        )


# ---- what the trainer pushes ----


def _listen(
    state: CommandState, base: DecisionRecord, body: UpdateWeights
) -> Generator[Instruction, Any, Prepared]:
    """Makes every member listen for what the trainer pushes."""
    yield BeginJournal(base)
    before = state.changed_source(base, body)
    needs = Needs(state.command.update_id, frozenset(state.seen.members))
    replies = yield from ask_to_prepare(
        "listen_update", needs, label_of(base, body), body, state.seen.members, before
    )
    with naming_workers(replies):
        return evaluate_listening(replies)


def _receive_pieces(state: CommandState, session: UpdateSession, part: Part) -> Generator[Instruction, Any, int]:
    """Receives the pieces of a part in the order in which the trainer broadcasts them, all within the part's time-out.
    Returns the number of tensors that are still missing."""
    began, missing, all_pieces = state.elapsed_s, 0, pieces(part)
    for number, piece in enumerate(all_pieces, 1):
        left_s = max(part.timeout_s - (state.elapsed_s - began), LEAST_PART_S)
        in_time = piece.model_copy(update={"timeout_s": min(left_s, part.timeout_s)})
        last = piece.check_only and number == len(all_pieces)
        missing = yield from _receive_piece(session, in_time, last=last)
    return missing


def _receive_piece(session: UpdateSession, part: Part, *, last: bool) -> Generator[Instruction, Any, int]:
    """Returns the number of tensors that are still missing."""
    request = {**part.model_dump(include=set(Part.model_fields)), "update_id": session.update_id, "last": last}
    answered: Answered = yield SendOp(
        "receive",
        "receive_part",
        request,
        list(session.prepared),
        part.timeout_s + PART_MARGIN_S,
        needs=Needs(session.update_id, frozenset(session.prepared)),
    )
    replies: Sequence[WorkerReply] = with_left(answered.replies, session.prepared)
    with naming_workers(replies):
        evaluate_listening(replies)
    return max(int(reply.body["missing"]) for reply in replies)
