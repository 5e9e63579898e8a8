"""Tests the times at which held-back tokens are handed on."""

from __future__ import annotations

import asyncio

import pytest

from worker.runtime.gathering import Turns, next_turn


@pytest.mark.parametrize(("now", "turn"), [(0.0, 0.5), (0.1, 0.5), (0.5, 1.0), (1234.6, 1235.0)])
def test_all_requests_hand_their_tokens_on_at_the_same_times(now: float, turn: float) -> None:
    assert next_turn(now, 0.5) == turn


async def test_one_turn_ends_every_wait_that_still_runs() -> None:
    turns = Turns()
    waiters = [turns.next(0.01) for _ in range(3)]
    waiters[1].set_result(None)
    waiters[2].cancel()
    async with asyncio.timeout(10.0):
        await waiters[0]
        await turns.next(0.01)  # the turn after it, which has a timer of its own
