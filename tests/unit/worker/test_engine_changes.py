"""Tests which coordinator may change a worker's engine, without an engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl_plane.errors import StaleFence
from worker.reconcile.engine_changes import EngineChanges
from worker.reconcile.worker_core import WorkerCore
from worker.reconcile.worker_state import WorkerState

NOTHING: Any = None


def changes_of(state: WorkerState) -> EngineChanges:
    core = WorkerCore(state, "model")
    return EngineChanges(core, NOTHING, NOTHING, NOTHING, NOTHING, lambda: None)


async def test_a_coordinator_that_was_replaced_while_it_waited_is_refused() -> None:
    """The dispatcher accepted the op, because its fence was live then."""
    state = WorkerState("0" * 16, "me", fence=5)
    one = changes_of(state)
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
