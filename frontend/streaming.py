"""Replies that end when their reader goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

SEND_TIMEOUT_S = 30.0
"""A reader that takes nothing for so long is gone, as far as we care: its socket's buffers are full."""

_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies of the nginx kind would hold tokens back
}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The work's result; when the client goes first, the work is cancelled and ClientDisconnect raised.

    The request's body must have been read."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. What fails before the first event is raised, so that it gets a status of its own."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, framed: bool = False) -> None:
        """`framed`: the events come as they are sent, with their own fields, not as the data alone; who reads
        them too slowly is cut off, as nobody's work is lost by it."""
        super().__init__(None, 200, _HEADERS)
        self._framed = framed
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        started = False
        async with aclosing(self._events) as events:
            async for data in events:
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    started = True
                if not self._framed:
                    body = b"data: " + data + b"\n\n"
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    continue
                try:
                    async with asyncio.timeout(SEND_TIMEOUT_S):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                except TimeoutError as error:
                    raise ClientDisconnect from error
        await send({"type": "http.response.body", "body": b"", "more_body": False})
