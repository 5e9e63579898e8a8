"""Commits one update: the pure state machine of its coordinator. Events in, instructions out; no clock, no I/O.

    survey ─→ prepare ─→ decide ─→ gate ─→ commit ─→ (leases) ─→ open ─→ answer        strict
                 │          └────→ gate ─→ roll … roll ─→ open ─→ (leases) ─→ answer   rolling
                 └─ any failure before the decision ─→ abort: nothing has changed anywhere. With `staging: none`, a
                    worker whose weights were overwritten stays closed until it has healed

The steps are generators: each yields an instruction (`steps.py`) and receives its event, so it reads like a call.
`coordinator.py` carries the instructions out under the component's lock. README.md leads through the package.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from rl_plane.commit.canary_steps import (
    awaits_scores,
    check_canary,
    goes_back,
    lacks_verdict,
    limits_of,
    missed_error,
    record_back,
    settled,
)
from rl_plane.commit.command_state import CommandState, Steps
from rl_plane.commit.opening import (
    LEASES_END_S,
    answer,
    keep_paused,
    open_record,
    opened_record,
    wait_for_leases,
    with_canary,
)
from rl_plane.commit.preparation import abort, decide, end_other_session, prepare, record_for
from rl_plane.commit.rolling import end_roll, roll
from rl_plane.commit.rules import check_against, commit_body, enough, outcome_of, still_there
from rl_plane.commit.steps import (
    Announce,
    Answered,
    End,
    Event,
    Failed,
    Instruction,
    Members,
    Outcome,
    Phase,
    Prepared,
    RecordAcks,
    SendOp,
    Survey,
    Watch,
    Write,
    Written,
)
from rl_plane.errors import (
    BusUnreachable,
    InvalidRequest,
    NoWorkers,
    OutcomeUnknown,
    PlaneError,
    StaleFence,
)
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.record import DecisionRecord, UpdateSession
from rl_plane.protocol.update_requests import UpdatePolicy

SCORE_RETRY_S = 1.0
SCORE_TRIES = 60
"""While the verdict lacks a worker's scores, the update asks that worker again every SCORE_RETRY_S seconds, at most
SCORE_TRIES times. The commit's own time-out may end these questions earlier."""


class UpdateMachine:
    """Runs the steps of one command. Call `step` with the event of the last instruction (None at first). It returns the
    next instruction, until End."""

    def __init__(self, state: CommandState, steps: Steps) -> None:
        self.phase: Phase = "survey"
        self._state = state
        self._steps = steps

    def step(self, event: Event | None, now: float, elapsed_s: float = 0.0) -> Instruction:
        """`now`: Unix seconds. `elapsed_s`: monotonic seconds since the command began."""
        self._state.now, self._state.elapsed_s = now, elapsed_s
        try:
            steps = self._steps
            instruction = steps.throw(event.error) if isinstance(event, Failed) else steps.send(event)
        except StopIteration as end:
            instruction = End(end.value)
        except PlaneError as error:
            instruction = End(error)
        self.phase = instruction.phase
        return instruction


def update(state: CommandState) -> Steps:
    """Commits a whole update in one call."""
    body, update_id = state.body, state.command.update_id
    if body.in_parts:
        raise InvalidRequest(
            "an update whose tensors come part by part takes several calls",
            field="transport.in_parts",
            fix="prepare_weights_update, receive_weights_part for each part, complete_weights_update",
        )
    _, base = yield from survey(state)
    if base.update_id == update_id:
        return (yield from answer(state, base, body.policy))
    check_against(base, body, state.changed_source(base, body))
    check_canary(body, limits_of(state.seen.reports))
    try:
        prepared = yield from prepare(state, base, body)
        decided = yield from decide(record_for(state, base, body, update_id, prepared))
    except OutcomeUnknown:
        raise
    except PlaneError:
        yield from abort(state, update_id)
        raise
    return (yield from carry_out(state, decided, prepared, body.policy))


def survey(
    state: CommandState, continues: Callable[[UpdateSession], bool] | None = None, own: str = ""
) -> Generator[Instruction, Any, tuple[UpdateSession | None, DecisionRecord]]:
    """Returns the session that waits, if this command `continues` it, and the committed record. First finishes an
    update that a coordinator had decided before it died. `own`: the id of the update that this command completes, which
    its caller need not name."""
    state.seen = seen = yield Survey()
    session = yield from end_other_session(state, continues)
    base = seen.record
    if base is None:
        raise NoWorkers("no worker has fixed the fleet's first version yet", retry_after_s=1.0)
    if not base.final:
        policy = UpdatePolicy(commit_timeout_s=base.commit_timeout_s)
        yield from keep_paused(state, base)
        if not goes_back(base, state.settlement):
            yield from swap_all(state, Written(base, seen.written), seen.members, policy)
        if goes_back(base, state.settlement):
            base, _ = yield from go_back(state, base, policy)
        base = opened_record(state, base)
        # The answer has the canary's result only for this command's own update.
        if base.update_id not in (state.command.update_id, own):
            state.settlement = None
        state.seen = yield Survey("recheck")  # a worker that only this update had closed is open now
    return session, base


def carry_out(
    state: CommandState, decided: Written, prepared: Prepared, policy: UpdatePolicy
) -> Generator[Instruction, Any, Outcome]:
    """Brings the committed version to the workers, and answers. If NATS or the lock is lost on the way, the workers
    continue by the record, and this call watches them."""
    record = decided.record
    replies, meant = list(prepared.failed), [*prepared.ready, *prepared.excluded]
    try:
        yield from keep_paused(state, record)
        swap = roll if record.rolling_from is not None else swap_all
        replies += yield from swap(state, decided, prepared.ready, policy)
        if goes_back(record, state.settlement):
            back, states = yield from go_back(state, record, policy)
            raise missed_error(back, replies, states)
        return (yield from answer(state, record, policy, replies, meant))
    except StaleFence:
        pass  # the shell has logged it
    except BusUnreachable:
        # A worker may wait for the others' scores as long as this call holds the lock, until the record is open.
        shut = record.canary is not None and record.rolling_from is None
        if shut or lacks_verdict(record, state.settlement):
            base = yield from finish_again(state, record)
            if base is not None:
                return (yield from answer(state, base, policy, replies, meant))
    may_open = not lacks_verdict(record, state.settlement)
    if may_open and record.rolling_from is not None:
        may_open = yield from end_roll(state, record)
    watched: Answered = yield Watch(record, max(policy.commit_timeout_s, LEASES_END_S))
    if may_open:
        try:
            yield from keep_paused(state, record)
            yield Write("open", opened_record(state, record))
        except (BusUnreachable, StaleFence):
            pass  # the next holder of the lock opens it
    return enough(with_canary(state, outcome_of(record, watched.replies, replies, meant)), policy)


def finish_again(
    state: CommandState, record: DecisionRecord
) -> Generator[Instruction, Any, DecisionRecord | None]:
    """Finishes this call's own update after NATS was lost, as another coordinator would. Returns the
    committed record. None: NATS or the lock is lost again, and the next holder of the lock finishes the update."""
    try:
        yield Watch(record, 0.0)  # until NATS is back
        _, base = yield from survey(state, own=record.update_id)
    except PlaneError:
        return None
    return base if base.update_id == record.update_id else None


def swap_all(
    state: CommandState, decided: Written, ready: Members, policy: UpdatePolicy
) -> Generator[Instruction, Any, Sequence[WorkerReply]]:
    """Commits a version under the strict barrier. First every member closes. Then each of the `ready` workers swaps, or
    is excluded. Only then does the coordinator open the version, unless the fleet goes back (`go_back`). A worker that
    has swapped, and waits for no other worker's scores, opens by itself 6 s after it learnt of the decision."""
    record = decided.record
    acks: RecordAcks = yield Announce("gate", record, decided.sequence, policy.gate_timeout_s)
    shut = {reply.instance_id for reply in acks.replies if reply.ok}
    swapping = [key for key in still_there(ready, acks.members) if key in shut]
    commit = commit_body(record, decided.sequence, state.seen.pause.left_s(state.now))
    committed: Answered = yield SendOp("commit", "commit_update", commit, swapping, policy.commit_timeout_s)
    reported = [*(reply for reply in acks.replies if not reply.ok), *committed.replies]
    state.settlement, replies = settled(record, reported)
    until = state.elapsed_s + policy.commit_timeout_s
    for _ in range(SCORE_TRIES):
        late = awaits_scores(record, reported, state.settlement)
        if not late or state.elapsed_s > until:
            break
        yield Watch(record, SCORE_RETRY_S)
        again: Answered = yield SendOp("commit", "commit_update", commit, late, policy.commit_timeout_s)
        reported = [*(reply for reply in reported if reply.instance_id not in late), *again.replies]
        state.settlement, replies = settled(record, reported)
    if not goes_back(record, state.settlement):
        yield from wait_for_leases(acks)
        opened = yield from open_record(state, record)
        yield Announce("open", opened.record, opened.sequence, policy.gate_timeout_s)
    return replies


def go_back(
    state: CommandState, record: DecisionRecord, policy: UpdatePolicy
) -> Generator[Instruction, Any, tuple[DecisionRecord, Sequence[WorkerReply]]]:
    """Returns the fleet to the version before `record`, because every worker that has scored the canary has failed it.
    This is a second decision. No worker has that version staged, so `swap_all` asks no worker to swap: it closes every
    member, and opens the version. Each worker that lacks the weights fetches them by itself."""
    assert state.settlement is not None
    back = record_back(record, state.settlement, state.now)
    decided = yield from decide(back)
    state.settlement = None
    try:
        yield from swap_all(state, decided, {}, policy)
        watched: Answered = yield Watch(back, max(policy.commit_timeout_s, LEASES_END_S))
    except (BusUnreachable, StaleFence):
        return decided.record, ()  # the next holder of the lock opens it
    return decided.record, watched.replies
