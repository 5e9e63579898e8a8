"""A wait that something else ends, or the time."""

from __future__ import annotations

import asyncio


class Alarm:
    """Wakes one waiter, on the waiter's loop."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self, until: float | None = None) -> None:
        """Waits for `ring`, at most until this time of the loop. None: without a bound."""
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
        """Ends the wait. It has no effect while nothing waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
