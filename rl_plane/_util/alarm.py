"""A wait on a loop. It ends when an event rings, or at a given time."""

from __future__ import annotations

import asyncio


class Alarm:
    """Wakes one waiter. `wait` and `ring` are called on the same loop.

    A ring is not remembered: look for the event before each wait."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self, until: float | None = None) -> None:
        """Waits for `ring`. `until`: the time of the loop at which the wait ends anyway. None: only `ring` ends it."""
        loop = asyncio.get_running_loop()
        timer = None if until is None else loop.call_at(until, self.ring)
        try:
            await self.wait_for(loop.create_future())
        finally:
            if timer is not None:
                timer.cancel()

    async def wait_for(self, waiter: asyncio.Future[None]) -> None:
        """Waits for `ring`, or until something else has ended `waiter`."""
        self._waiter = waiter
        try:
            await waiter
        finally:
            self._waiter = None

    def ring(self) -> None:
        """Ends the wait. It does nothing while there is no waiter."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
