"""The steps up to the decision: end a lost session, stage the update on the workers, decide it or drop it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from rl_plane.commit.canary_steps import canary_of, limits_of
from rl_plane.commit.command_state import CommandState, naming_workers
from rl_plane.commit.relay_plan import plan_relay
from rl_plane.commit.rules import (
    check_size,
    evaluate_prepare,
    is_lost,
    label_of,
    left_reply,
    needs_of,
    next_record,
)
from rl_plane.commit.steps import (
    Answered,
    BeginJournal,
    Instruction,
    Members,
    Needs,
    Phase,
    Prepared,
    Put,
    ResolveWrite,
    SendOp,
    Survey,
    Surveyed,
    Write,
    Written,
)
from rl_plane.errors import BusUnreachable, Locked, MembershipChanged, OutcomeUnknown, PlaneError
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.record import DecisionRecord, UpdateSession, VersionSource
from rl_plane.protocol.relay import RelayAddress, RelayPlan, name_of_host
from rl_plane.protocol.subjects import SESSION
from rl_plane.protocol.update_requests import ReceiveRequest, UpdateWeights
from rl_plane.protocol.worker_ops import OPEN_RELAY_S

Plans = Mapping[str, Sequence[RelayPlan]]
"""Worker → the relay plan of each host of its engine, by node rank."""

STOP_S = 3.0
"""The longest wait in seconds for workers that the coordinator tells to stop. A receive checks at least once a second
whether it is cancelled, and the membership reports a death sooner. The caller's answer does not wait for a slower
worker."""


def end_other_session(
    state: CommandState, continues: Callable[[UpdateSession], bool] | None
) -> Generator[Instruction, Any, UpdateSession | None]:
    """Ends the waiting session, unless this command `continues` it. Locked: another trainer may still complete it.

    Returns the session that the command continues. It also returns a session whose update is the committed one: its
    coordinator died after the decision, before it could end the session."""
    seen = state.seen
    session = seen.session
    if session is None:
        return None
    if seen.record is not None and session.update_id == seen.record.update_id:
        yield Put("clear", SESSION, None)
        return session
    if continues is not None and continues(session):
        return session
    policy = UpdateWeights.model_validate(session.body).policy
    if not is_lost(session, policy, seen):
        raise Locked(
            f"the update {session.update_id!r} is prepared and waits for complete or abort",
            holder=session.update_id,
            retry_after_s=1.0,
            fix="complete it, abort it, or wait until its idle limit ends it",
        )
    yield Put("clear", SESSION, None)  # first: what a session names should stay staged
    yield from abort(state, session.update_id, "clear")
    return None


def prepare(
    state: CommandState, base: DecisionRecord, body: UpdateWeights
) -> Generator[Instruction, Any, Prepared]:
    """Stages the update on every member. An error names each worker's reply."""
    yield BeginJournal(base)
    update_id, label = state.command.update_id, label_of(base, body)
    changed = state.changed_source(base, body)
    plans = yield from plan_sources(state, body)
    needs = needs_of(update_id, state.counted, body.policy)
    replies = yield from ask_to_prepare("prepare_update", needs, label, body, state.seen.members, changed, plans)
    with naming_workers(replies):
        all_or_none = body.pushed and body.policy.on_prepare_failure == "abort"
        pinned = state.command.fingerprint or (state.seen.fingerprint if all_or_none else None)
        if pinned is not None:
            again: Surveyed = yield Survey("recheck")
            if again.fingerprint != pinned:
                raise MembershipChanged(after_epoch=again.epoch)
        return evaluate_prepare(replies, state.counted, body.policy, body.digest)


def plan_sources(state: CommandState, body: UpdateWeights) -> Generator[Instruction, Any, Plans]:
    """Plans from which workers each worker fetches the update. Empty: each one fetches everything from the trainer.

    A worker that does not say in time where it serves its peers fetches from the trainer, and the others don't count on
    it."""
    if not body.relayed:
        return {}
    asked = {"workers": len(state.seen.members)}
    answered: Answered = yield SendOp("prepare", "open_relay", asked, list(state.seen.members), OPEN_RELAY_S)
    names: dict[str, list[str]] = {}
    addresses: dict[str, RelayAddress] = {}
    for reply in answered.replies:
        if reply.ok and reply.body["relay"]:
            names[reply.instance_id] = [
                name_of_host(reply.instance_id, at) for at, _ in enumerate(reply.body["relay"])
            ]
            addresses.update(zip(names[reply.instance_id], reply.body["relay"], strict=True))
    plans = plan_relay(addresses)
    return {key: [plans[name] for name in hosts] for key, hosts in names.items()} if plans else {}


def ask_to_prepare(
    op: str,
    needs: Needs,
    label: str,
    body: UpdateWeights,
    workers: Members,
    before: VersionSource | None,
    plans: Plans | None = None,
) -> Generator[Instruction, Any, Sequence[WorkerReply]]:
    """Sends `prepare_update` or `listen_update`. Returns a reply for each of the workers."""
    request = ReceiveRequest.of_update(body, needs.update_id, label, before).model_dump()
    each = {key: {"relay": [plan.model_dump() for plan in hosts]} for key, hosts in (plans or {}).items()}
    timeout_s = body.policy.prepare_timeout_s
    answered: Answered = yield SendOp("prepare", op, request, list(workers), timeout_s, each, needs)
    return with_left(answered.replies, workers)


def with_left(replies: Sequence[WorkerReply], workers: Members) -> list[WorkerReply]:
    """The replies, and an error for each of the workers that had left before it could be asked."""
    asked = {reply.instance_id for reply in replies}
    return [*replies, *(left_reply(key, one) for key, one in workers.items() if key not in asked)]


def record_for(
    state: CommandState, base: DecisionRecord, body: UpdateWeights, update_id: str, prepared: Prepared
) -> DecisionRecord:
    """The decision record of the update that was prepared. InvalidRequest: it is too large to be sent."""
    canary = canary_of(
        base, body, prepared.digest, prepared.replies, limits_of(state.seen.reports), state.seen.history
    )
    changed = state.changed_source(base, body)
    record = next_record(base, body, update_id, prepared, state.now, changed, canary)
    check_size(record)
    return record


def decide(record: DecisionRecord) -> Generator[Instruction, Any, Written]:
    """Writes the decision: from here on the version is committed.

    If the answer to the write is lost, this takes a new fence and reads again. The record that it finds then is the
    outcome, because a write under the old fence is refused from then on."""
    try:
        written: Written = yield Write("decide", record)
        return written
    except BusUnreachable as lost:
        try:
            seen: Surveyed = yield ResolveWrite()
        except PlaneError as error:
            raise OutcomeUnknown(
                f"whether {record.made.label} was committed is not known: {error.message}",
                update_id=record.update_id,
                retry_after_s=1.0,
                fix="repeat the call with the same Idempotency-Key, or read the state",
            ) from error
        there = seen.record
        # Not the update's id alone: an update that fails the canary makes two records under one id.
        if there is None or (there.update_id, there.made) != (record.update_id, record.made):
            raise lost
        return Written(there, seen.written)


def abort(state: CommandState, update_id: str, phase: Phase = "abort") -> Generator[Instruction, Any, None]:
    """Drops what the workers have staged or receive. A worker that is slower than the wait drops it later, and a worker
    that does not get this reads the record and drops it too."""
    try:
        yield SendOp(phase, "abort_update", {"update_id": update_id}, list(state.seen.members), STOP_S)
    except PlaneError:
        pass  # the shell has logged it
