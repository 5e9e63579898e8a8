"""Streamed replies, which end when their reader disconnects or stops reading."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.frontend_limits import LIMITS, FrontendLimits

T = TypeVar("T")

LOOKS = 10
"""The number of times that a stream checks its reader in that time. A timer for each token would cost more than the
token."""

_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx and similar proxies would buffer the tokens
}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[None, None, T], *also: asyncio.Future[None]) -> T:
    """The result of `work`. Cancels `work` and raises ClientDisconnect if the client disconnects first, or if one of
    `also` ends. Read the request's body before."""
    loop, bound = asyncio.get_running_loop(), asyncio.timeout(None)
    gone = asyncio.create_task(_gone(receive))

    def end(_: asyncio.Future[None]) -> None:
        with contextlib.suppress(RuntimeError):  # the work ended in the same turn
            bound.reschedule(loop.time())

    others: tuple[asyncio.Future[None], ...] = gone, *also
    for other in others:
        other.add_done_callback(end)
    try:
        async with bound:
            return await work
    except Exception as error:
        if bound.expired():
            raise ClientDisconnect from error
        raise
    finally:
        for other in others:
            other.remove_done_callback(end)
        gone.cancel()


class EventStream(Response):
    """Server-sent events. An error before the first event is raised, so that it gets an HTTP status."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, framed: bool = False, limits: FrontendLimits = LIMITS
    ) -> None:
        """`framed`: `events` yields whole events with their fields, not their data alone. A slow reader of these is cut
        off sooner, because no work is lost by it."""
        self._stall_s = limits.event_stall_s if framed else limits.token_stall_s
        super().__init__(None, 200, _HEADERS)
        self._framed = framed
        del self.headers["content-length"]
        self._events = events
        self._sending: float | None = None
        """Since when the reader has not taken the present event. None: it has taken all."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stalled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._look_later(stalled)
        try:
            await unless_gone(receive, self._send(send), stalled)
        finally:
            self._timer.cancel()

    def _look_later(self, stalled: asyncio.Future[None]) -> None:
        """Ends `stalled` when the reader has taken nothing for too long."""
        bound_s, loop = self._stall_s, asyncio.get_running_loop()

        def look() -> None:
            if self._sending is not None and loop.time() - self._sending > bound_s:
                stalled.set_result(None)
            else:
                self._look_later(stalled)

        self._timer = loop.call_later(bound_s / LOOKS, look)

    async def _send(self, send: Send) -> None:
        started, loop = False, asyncio.get_running_loop()
        async with aclosing(self._events) as events:
            async for data in events:
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    started = True
                body = data if self._framed else b"data: " + data + b"\n\n"
                self._sending = loop.time()
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._sending = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})
