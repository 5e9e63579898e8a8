"""The calls of an update that spans several: prepare, feed, name, complete, abort. Pure, as `update.py`.

Between two calls the update is a *session*: a key in the state bucket that the server removes when its trainer has
been silent for too long. Any coordinator can continue it. The workers hold verified bytes, or they listen for what the
trainer pushes; `complete` asks them to prepare in both cases, which is idempotent and waits for what is still to come.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any

from rl_plane.commit.canary_steps import check_canary, limits_of
from rl_plane.commit.machine import Steps, UpdateMachine, naming_workers
from rl_plane.commit.rules import (
    SHOWN,
    check_against,
    evaluate_listening,
    evaluate_prepare,
    label_of,
    left_early,
    left_reply,
    next_record,
    still_there,
    too_few,
)
from rl_plane.commit.steps import (
    Answered,
    Instruction,
    Members,
    Note,
    PartReceived,
    Prepared,
    SendOp,
    Survey,
    UpdateCommand,
)
from rl_plane.errors import (
    BusUnreachable,
    Conflict,
    InvalidRequest,
    MembershipChanged,
    OutcomeUnknown,
    PlaneError,
    StaleFence,
    UpdateAborted,
)
from rl_plane.protocol.record import DecisionRecord, UpdateSession
from rl_plane.protocol.update_requests import Part, UpdatePolicy, UpdateWeights
from rl_plane.transports.group.broadcast_plan import pieces

SESSION_IDLE_S = 120
"""A prepared update whose trainer is silent this long is aborted: its staging is a model's worth of memory. A call that
waits for the lock is no silence (`keeping.py`)."""
LEAST_PART_S = 1.0
"""For a piece whose part has no time left: its worker says that it did not come."""
PART_MARGIN_S = 5.0
"""Beyond a part's own time: a worker that gives up says so."""
NOTHING_MORE = Part(names=[], dtypes=[], shapes=[])


def machine_for(call: UpdateCommand) -> UpdateMachine:
    """The machine of a call of any kind."""
    alone = call.kind in ("update", "finish", "new_run")
    return UpdateMachine(call) if alone else SessionMachine(call)


class SessionMachine(UpdateMachine):
    """One call of an update that spans several."""

    def _kinds(self) -> Mapping[str, Callable[[], Steps]]:
        return {
            "prepare": self._prepare_only,
            "receive_part": self._receive_part,
            "label": self._label,
            "complete": self._complete,
            "abort": self._abort_only,
        }

    def _continues(self, session: UpdateSession) -> bool:
        return self.call.kind != "prepare" or session.update_id == self.call.update_id

    # ---- the calls ----

    def _prepare_only(self) -> Steps:
        """The first half, which any coordinator can complete later. Prepared twice under one id: the first stands."""
        body = self._body()
        session, base = yield from self._survey()
        if self._is_decided(session, base):
            raise self._committed(base, "prepare the next one under a new id")
        if session is not None:
            return Prepared(session.digest, session.prepared, [], session.refetchable, session=session)
        check_against(base, body, self._before(base, body))
        check_canary(body, limits_of(self._reports))
        if body.pushed and body.policy.staging == "none":
            raise InvalidRequest(
                "nobody generates from the first byte of an unstaged update on, so none waits for its trainer",
                field="policy.staging",
                fix="use staging host, or push during one update_weights",
            )
        try:
            prepared = yield from (self._listen if body.pushed else self._prepare)(base, body)
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
            SESSION_IDLE_S + (int(body.policy.prepare_timeout_s) if body.pushed else 0),
        )
        try:
            yield Note("session", session=session)
        except PlaneError:
            yield from self._give_up(self.call.update_id)
            raise
        return replace(prepared, session=session)

    def _receive_part(self) -> Steps:
        """Tensors of a prepared update, which its trainer broadcasts now. Whatever goes wrong ends the update: what is
        on its way can't be taken back, and it is not sent twice."""
        assert self.call.part is not None
        session, _ = yield from self._session("prepare the next one")
        body = UpdateWeights.model_validate(session.body)
        if not body.in_parts:
            raise InvalidRequest(
                f"the update {session.update_id!r} was not prepared to be fed",
                field="update_id",
                fix="prepare it with transport {backend, group, in_parts: true}",
            )
        try:
            ready = still_there(session.prepared, self._members)
            if len(ready) < len(session.prepared):
                raise left_early(session.prepared, ready)
            if body.policy.on_prepare_failure == "abort":
                self._refuse_joiners(session)
            missing = yield from self._receive_pieces(session, self.call.part)
            said = session.told(version=self.call.version, pause_mode=self.call.pause_mode)
            session = replace(said, parts=session.parts + 1)
            yield Note("session", session=session)
        except PlaneError:
            yield from self._give_up(session.update_id)
            raise
        return PartReceived(session, missing)

    def _label(self) -> Steps:
        """The label of a prepared update, which any coordinator then commits it under."""
        session, _ = yield from self._session("it keeps that label")
        named = session.told(version=self.call.version)
        yield Note("session", session=named)
        return named

    def _abort_only(self) -> Steps:
        session, _ = yield from self._session("roll back to the version before, if it is not wanted")
        yield Note("session")
        yield from self._abort(session.update_id)
        return session

    def _complete(self) -> Steps:
        """The second half: decides and commits what was prepared. What is pushed is waited for first."""
        session, base = yield from self._survey()
        if self._is_decided(session, base):
            policy = UpdatePolicy(min_ready=self.call.min_ready)
            if session is not None and session.update_id == base.update_id:
                policy = UpdateWeights.model_validate(session.body).policy
            return (yield from self._answer(base, policy))
        session = self._expected(session)
        body = UpdateWeights.model_validate(session.body)
        if self.call.version is not None:
            body = body.model_copy(update={"version": self.call.version})
        before = self._before(base, body)
        all_or_none = session.listening and body.policy.on_prepare_failure == "abort"
        try:
            ready = self._still_ready(session, body.policy)
            if all_or_none:
                self._refuse_joiners(session)
            if body.in_parts:
                yield from self._ask_to_take(session, NOTHING_MORE, last=True)
            replies = yield from self._ask_to_prepare(
                "prepare_update", session.update_id, session.label, body, ready, before
            )
            with naming_workers(replies):
                stated = self.call.digest or body.digest or session.digest or None
                prepared = evaluate_prepare(replies, set(ready), body.policy, stated)
            if all_or_none:
                self._see((yield Survey("recheck")))
                self._refuse_joiners(session)
            gone = sorted(session.prepared.keys() - ready.keys())
            prepared = replace(prepared, excluded=[*gone, *prepared.excluded])
            if before is not None:
                check_against(base, body, before)
            canary = self._canary(base, body, prepared)
            record = next_record(base, body, session.update_id, prepared, self._now, before, canary)
            decided = yield from self._decide(record)
        except OutcomeUnknown:
            raise
        except PlaneError:
            yield from self._give_up(session.update_id)
            raise
        try:
            yield Note("session")
        except (BusUnreachable, StaleFence):
            pass  # the record tells that it is over
        return (yield from self._carry_out(decided, prepared, body.policy))

    # ---- the session ----

    def _session(self, committed_fix: str) -> Generator[Instruction, Any, tuple[UpdateSession, DecisionRecord]]:
        """The prepared update that is meant. Conflict, with `committed_fix`: it is committed already."""
        session, base = yield from self._survey()
        if self._is_decided(session, base):
            raise self._committed(base, committed_fix)
        return self._expected(session), base

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

    def _give_up(self, update_id: str) -> Generator[Instruction, Any, None]:
        """Ends an update that waits for another call. The session goes first: what it names stays staged."""
        try:
            yield Note("session")
        except PlaneError:
            return  # said in the shell's log
        yield from self._abort(update_id)

    def _still_ready(self, session: UpdateSession, policy: UpdatePolicy) -> Members:
        ready = still_there(session.prepared, self._members)
        if not ready or (len(ready) < len(session.prepared) and policy.on_prepare_failure == "abort"):
            raise left_early(session.prepared, ready)
        if len(ready) < policy.min_ready:
            raise too_few(len(ready), policy)
        return ready

    def _refuse_joiners(self, session: UpdateSession) -> None:
        joined = sorted(self._members.keys() - session.prepared.keys())
        if joined:
            raise MembershipChanged(
                f"{', '.join(joined[:SHOWN])} joined since, and can't get what was pushed",
                fix="form the group again, and send the update again; or let them wait for the next one "
                "(policy.on_prepare_failure=exclude)",
            )

    # ---- what is pushed ----

    def _listen(self, base: DecisionRecord, body: UpdateWeights) -> Generator[Instruction, Any, Prepared]:
        """Makes every member listen for what is pushed."""
        yield Note("begin", base=base)
        update_id, label = self.call.update_id, label_of(base, body)
        replies = yield from self._ask_to_prepare(
            "listen_update", update_id, label, body, self._members, self._before(base, body)
        )
        with naming_workers(replies):
            return evaluate_listening(replies)

    def _receive_pieces(self, session: UpdateSession, part: Part) -> Generator[Instruction, Any, int]:
        """One after another, as the trainer broadcasts them; all within the part's own time."""
        began, missing, told = self._elapsed_s, 0, pieces(part)
        for number, piece in enumerate(told, 1):
            left_s = max(part.timeout_s - (self._elapsed_s - began), LEAST_PART_S)
            in_time = piece.model_copy(update={"timeout_s": min(left_s, part.timeout_s)})
            last = piece.check_only and number == len(told)
            missing = yield from self._ask_to_take(session, in_time, last=last)
        return missing

    def _ask_to_take(self, session: UpdateSession, part: Part, *, last: bool) -> Generator[Instruction, Any, int]:
        """How many tensors are missing yet."""
        request = {**part.model_dump(include=set(Part.model_fields)), "update_id": session.update_id, "last": last}
        answered: Answered = yield SendOp(
            "receive",
            "receive_part",
            request,
            list(session.prepared),
            part.timeout_s + PART_MARGIN_S,
            together=session.update_id,
        )
        asked = {reply.instance_id for reply in answered.replies}
        left = [left_reply(key, one) for key, one in session.prepared.items() if key not in asked]
        replies = [*answered.replies, *left]
        with naming_workers(replies):
            evaluate_listening(replies)
        return max(int(reply.body["missing"]) for reply in replies)
