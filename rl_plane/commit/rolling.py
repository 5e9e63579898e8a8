"""The steps of a rolling update after its decision: workers swap one after another. Pure."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from rl_plane.commit.canary_steps import goes_back, settled
from rl_plane.commit.command_state import CommandState
from rl_plane.commit.opening import keep_paused, open_record, opened_record, wait_for_leases
from rl_plane.commit.rules import commit_body, still_there
from rl_plane.commit.steps import (
    Announce,
    Answered,
    Instruction,
    Members,
    RecordAcks,
    SendOp,
    Survey,
    Surveyed,
    Watch,
    Write,
    Written,
)
from rl_plane.errors import BusUnreachable, PlaneError, StaleFence
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.record import DecisionRecord
from rl_plane.protocol.update_requests import UpdatePolicy

END_ROLL_TRIES = 3
"""Each try waits until NATS is back, and NATS may fail again at once."""


def roll(
    state: CommandState, decided: Written, ready: Members, policy: UpdatePolicy
) -> Generator[Instruction, Any, Sequence[WorkerReply]]:
    """Swaps worker after worker. The others serve the version before meanwhile."""
    record = decided.record
    acks: RecordAcks = yield Announce("gate", record, decided.sequence, policy.gate_timeout_s)
    replies = [reply for reply in acks.replies if not reply.ok]
    for key in sorted(still_there(ready, acks.members)):
        commit = commit_body(record, decided.sequence, state.seen.pause.left_s(state.now))
        one: Answered = yield SendOp("roll", "commit_update", commit, [key], policy.commit_timeout_s)
        replies += one.replies
        state.settlement, evaluated = settled(record, replies)
        if goes_back(record, state.settlement):
            return evaluated  # the other workers still serve the version before
        verdict = state.settlement
        # If every worker so far has failed, that is no verdict for the next one: it may compute correctly.
        if verdict is not None and verdict.passed and verdict.record != record.canary:
            # The next worker serves at once, so it compares its scores with those of the first workers.
            decided = yield Write("open", replace(record, canary=verdict.record))
            record = decided.record
    state.settlement, replies = settled(record, replies)
    opened = yield from open_record(state, record)
    after: RecordAcks = yield Announce("open", opened.record, opened.sequence, policy.gate_timeout_s)
    yield from wait_for_leases(after)
    return replies


def end_roll(state: CommandState, record: DecisionRecord) -> Generator[Instruction, Any, bool]:
    """Ends the roll in the record, after NATS was lost. A worker waits for its turn as long as this call holds the
    lock. When the roll has ended the worker swaps by itself. Returns False if another record stands: this call must not
    write over it."""
    for _ in range(END_ROLL_TRIES):
        try:
            # This call's last write may stand although its answer was lost. The survey takes that record up.
            seen: Surveyed = yield Survey()
            there = seen.record
            if there is None or there.made != record.made or there.final:
                return there is not None and there.made == record.made
            yield from keep_paused(state, record)  # no coordinator saves the pause of a final record
            yield Write("open", opened_record(state, there))
            return True
        except StaleFence:
            return False  # another coordinator has taken over, so no worker waits for this call
        except BusUnreachable:
            pass
        try:
            yield Watch(record, 0.0)  # until NATS is back
        except PlaneError:
            pass
    return True
