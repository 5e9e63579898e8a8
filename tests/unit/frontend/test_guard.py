"""The end of a listener, as the callers see it whose calls are under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from frontend.frontend_limits import FrontendLimits
from frontend.server.api import Api, Operation
from frontend.server.listeners import Server, bind, url_of
from rl_plane.errors import Unavailable
from rl_plane.fleet.http_client import call_json
from tests.support.plain_client import plain_client

CALL_S = 60.0


async def _never() -> None:
    await asyncio.Event().wait()


async def _cut(
    endpoint: Callable[[Request], Awaitable[Response]], call: Callable[[str], Awaitable[object]]
) -> None:
    """Lets `call` call the endpoint, whose answer never ends, and ends the listener without a grace."""
    begun = asyncio.Event()

    async def answer(request: Request) -> Response:
        begun.set()
        return await endpoint(request)

    api = Api("a frontend that ends")
    api.add(
        Operation(method="POST", path="/op", endpoint=answer, name="op", summary="It never ends.", tags=("test",))
    )
    with bind("rl_port", "127.0.0.1", 0, None, False) as listener:
        server = Server(api.app(), None, FrontendLimits(grace_s=0))
        serving = asyncio.create_task(server.serve([listener]))
        await server.accepting.wait()
        calling = asyncio.ensure_future(call(url_of(listener) + "/op"))
        await begun.wait()
        server.should_exit = True
        await asyncio.gather(serving, calling)


async def _silent(request: Request) -> Response:
    await _never()
    return Response()


async def test_a_call_that_the_end_cuts_gets_a_503_that_does_not_say_that_nothing_was_done() -> None:
    async def call(url: str) -> None:
        async with plain_client(timeout=CALL_S) as http:
            reply = await http.post(url, json={})
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        error = reply.json()["error"]
        assert (error["code"], "may still be carried out" in error["message"]) == ("unavailable", True)

    await _cut(_silent, call)


async def test_the_sdk_raises_the_same_error_for_a_call_that_the_end_cuts_as_for_a_lost_connection() -> None:
    async def call(url: str) -> None:
        with pytest.raises(Unavailable) as cut:
            await asyncio.to_thread(call_json, url, {}, None, CALL_S)
        assert type(cut.value) is Unavailable

    await _cut(_silent, call)


async def test_half_a_reply_that_the_end_cuts_ends_with_its_connection() -> None:
    async def halves(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"{"
            await _never()

        return StreamingResponse(parts(), media_type="application/json")

    async def call(url: str) -> None:
        async with plain_client(timeout=CALL_S) as http:
            with pytest.raises(httpx.RemoteProtocolError):
                await http.post(url, json={})

    await _cut(halves, call)
