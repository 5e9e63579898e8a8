"""Chooses the times at which a request with `gather_s` hands its tokens on. Its client reads the reply at its end, so
the worker holds the tokens after the first one back for a moment, and sends many at once."""

from __future__ import annotations

import asyncio


def next_turn(now: float, gather_s: float) -> float:
    """Returns the first multiple of `gather_s` after `now`. Requests with the same `gather_s` have the same times: the
    loop wakes up once for all of them, and sends their tokens to a frontend in one message."""
    return (now // gather_s + 1) * gather_s


class Turns:
    """The turns of all requests on one event loop. One timer wakes all that wait for the same turn."""

    def __init__(self) -> None:
        self._waiters: dict[float, list[asyncio.Future[None]]] = {}

    def next(self, gather_s: float) -> asyncio.Future[None]:
        """A future that the next turn ends. The caller may end it sooner."""
        loop = asyncio.get_running_loop()
        turn = next_turn(loop.time(), gather_s)
        waiters = self._waiters.get(turn)
        if waiters is None:
            waiters = self._waiters[turn] = []
            loop.call_at(turn, self._end, turn)
        waiter = loop.create_future()
        waiters.append(waiter)
        return waiter

    def _end(self, turn: float) -> None:
        for waiter in self._waiters.pop(turn):
            if not waiter.done():
                waiter.set_result(None)
