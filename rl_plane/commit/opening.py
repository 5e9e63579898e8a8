"""The steps around the swap: keep the fleet paused, wait for leases, open the version, report who serves it. Pure."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from rl_plane.commit.canary_steps import missed_error, unserved_error
from rl_plane.commit.command_state import CommandState
from rl_plane.commit.rules import enough, is_enough, outcome_of
from rl_plane.commit.steps import (
    Answered,
    Instruction,
    Outcome,
    Put,
    RecordAcks,
    WaitSilent,
    Watch,
    Write,
    Written,
)
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.record import LEASE_MARGIN_S, SERVING_LEASE_S, DecisionRecord, DesiredPause
from rl_plane.protocol.subjects import CANARY_HISTORY, PAUSE
from rl_plane.protocol.update_requests import UpdatePolicy
from rl_plane.protocol.worker_ops import DEFAULT_PAUSE_LEASE_S

LEASES_END_S = SERVING_LEASE_S + LEASE_MARGIN_S
"""This long after a decision no worker serves the version before, even a worker that did not receive the decision."""


def keep_paused(state: CommandState, record: DecisionRecord) -> Generator[Instruction, Any, None]:
    """Pauses the fleet where the update's policy says so, unless another call has paused or resumed it since."""
    if record.keep_pause and state.seen.pause_written < record.fence:
        until = state.now + max(state.seen.pause.left_s(state.now), DEFAULT_PAUSE_LEASE_S)
        state.seen = replace(state.seen, pause=DesiredPause(True, record.pause_mode, until))
        yield Put("pause", PAUSE, state.seen.pause)
        state.seen = replace(state.seen, pause_written=record.fence)


def wait_for_leases(acks: RecordAcks) -> Generator[Instruction, Any, None]:
    """Waits until each process that has not acknowledged the record has left, or its serving lease has ended. Until
    then it may serve the version before."""
    silent = {
        reply.instance_id: acks.members[reply.instance_id]
        for reply in acks.replies
        if not reply.ok and not reply.lost
    }
    if silent or acks.silent_frontends:
        yield WaitSilent(silent, acks.silent_frontends)


def opened_record(state: CommandState, record: DecisionRecord) -> DecisionRecord:
    """The record as it may be served. It has the workers' scores, which a worker that joins later must reach too."""
    opened = record.opened()
    return opened if state.settlement is None else replace(opened, canary=state.settlement.record)


def open_record(state: CommandState, record: DecisionRecord) -> Generator[Instruction, Any, Written]:
    """Writes that the version may be served. Saves the scores of a version that has passed the canary."""
    opened: Written = yield Write("open", opened_record(state, record))
    canary, settlement = opened.record.canary, state.settlement
    # Scores that are served in spite of a failure (`warn`) are no measure for the time when this version returns.
    if canary is not None and settlement is not None and settlement.passed:
        digest = record.version.digest
        history = state.seen.history.with_values(digest, canary.sequences, canary.references)
        yield Put("open", CANARY_HISTORY, history)
    return opened


def answer(
    state: CommandState,
    record: DecisionRecord,
    policy: UpdatePolicy,
    replies: Sequence[WorkerReply] = (),
    prepared: Sequence[str] = (),
) -> Generator[Instruction, Any, Outcome]:
    """The answer to a committed update: at once if enough workers serve it, else when they do."""
    if record.missed is not None:
        raise missed_error(record)
    late_s = max(policy.commit_timeout_s, LEASES_END_S)
    for timeout_s in (0.0, late_s):
        watched: Answered = yield Watch(record, timeout_s)
        outcome = with_canary(state, outcome_of(record, watched.replies, replies, prepared))
        if state.settlement is not None and state.settlement.action != "open":
            raise unserved_error(record, outcome, state.settlement)  # more time changes nothing
        if is_enough(outcome, policy):
            break
    return enough(outcome, policy)


def with_canary(state: CommandState, outcome: Outcome) -> Outcome:
    """The outcome with what the canary has shown."""
    return replace(outcome, canary=state.settlement.summary() if state.settlement is not None else None)
