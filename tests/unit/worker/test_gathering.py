"""Tests how long tokens are held back."""

from __future__ import annotations

import asyncio

import pytest

from worker.runtime.gathering import Alarm, gather_time


@pytest.mark.parametrize(("ran_s", "held_s"), [(0.0, 0.1), (0.05, 0.1), (0.4, 0.4), (1.0, 1.0), (60.0, 1.0)])
def test_a_request_holds_its_tokens_back_as_long_as_it_has_run_within_bounds(ran_s: float, held_s: float) -> None:
    assert gather_time(ran_s, 1.0) == held_s


async def test_an_alarm_ends_a_wait_and_so_does_the_time() -> None:
    alarm = Alarm()
    alarm.ring()  # nothing waits, so it has no effect
    waiting = asyncio.create_task(alarm.wait(3600.0))
    await asyncio.sleep(0)
    alarm.ring()
    alarm.ring()
    async with asyncio.timeout(10.0):
        await waiting
        await alarm.wait(0.001)
