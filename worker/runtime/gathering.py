"""Holds the tokens of a reply that is sent at its end back for a while, to handle many of them at once."""

from __future__ import annotations

import asyncio

FIRST_PART = 0.1
"""The first wait is this part of the longest one."""


def gather_time(ran_s: float, most_s: float) -> float:
    """The seconds for which a request that has run for `ran_s` holds its next tokens back: as many, within bounds.

    So a worker that dies loses at most half of a request's work or a tenth of `most_s`, whichever is more, and never
    more than `most_s`."""
    return min(most_s, max(ran_s, FIRST_PART * most_s))


class Alarm:
    """Wakes one waiter, on the waiter's loop."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self, most_s: float | None = None) -> None:
        """Waits for `ring`, at most for `most_s` seconds. None: without a bound."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if most_s is None else loop.call_later(most_s, self.ring)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def ring(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
