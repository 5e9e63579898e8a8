"""Whose turn it is to change a worker's engine, without an engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl_plane.errors import StaleFence
from worker.reconcile.follower import RecordFollower
from worker.reconcile.worker_core import WorkerCore
from worker.reconcile.worker_state import WorkerState

NOTHING: Any = None


def follower(state: WorkerState) -> RecordFollower:
    core = WorkerCore(state, "model")
    others = NOTHING, NOTHING, NOTHING, NOTHING, NOTHING
    return RecordFollower(NOTHING, NOTHING, core, *others, "/model", lambda: None)


async def test_a_coordinator_that_was_replaced_while_it_waited_has_no_turn() -> None:
    """The dispatcher has let it in: its fence was live when it asked."""
    state = WorkerState("0" * 16, "me", fence=5)
    one = follower(state)
    turns: list[int] = []

    async def change(fence: int) -> None:
        async with one.turn(fence):
            turns.append(fence)

    async with one.changing:
        waiting = asyncio.create_task(change(5))
        await asyncio.sleep(0)
        state.fence = 7  # the news of the next holder of the lock
    with pytest.raises(StaleFence):
        await waiting
    await change(7)
    assert turns == [7]
