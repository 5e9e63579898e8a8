"""Tests that a wait ends by a ring, and by its time."""

from __future__ import annotations

import asyncio

from rl_plane._util.alarm import Alarm


async def test_an_alarm_ends_a_wait_and_so_does_the_time() -> None:
    alarm, loop = Alarm(), asyncio.get_running_loop()
    alarm.ring()  # nothing waits, so it has no effect
    waiting = asyncio.create_task(alarm.wait(loop.time() + 3600.0))
    await asyncio.sleep(0)
    alarm.ring()
    alarm.ring()
    async with asyncio.timeout(10.0):
        await waiting
        await alarm.wait(loop.time() + 0.001)
