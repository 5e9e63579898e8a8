"""The addresses on which a frontend listens, the keys that they need, and how connections of strangers end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.frontend_limits import FrontendLimits
from frontend.server.listeners import Server, _Joined, bind, url_of
from rl_plane.errors import InvalidRequest

BOUND_S = 20.0
"""Less than uvicorn's timer of an idle connection."""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with bind("rl_port", host, 0, None, False) as listener:
        assert url_of(listener).startswith("http://")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_beyond_loopback_needs_a_key_or_insecure(host: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bind("rl_port", host, 0, None, False)
    assert caught.value.facts["field"] == "host"
    assert "admin_key" in caught.value.facts["fix"]
    for key, insecure in (("k", False), (None, True)):
        with bind("http_port", "0.0.0.0", 0, key, insecure) as listener:
            assert url_of(listener).startswith("http://127.0.0.1:")


@pytest.mark.parametrize("field", ["rl_port", "http_port"])
def test_a_taken_port_is_named(field: str) -> None:
    with bind(field, "127.0.0.1", 0, None, False) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest) as caught:
            bind(field, "127.0.0.1", port, None, False)
    assert caught.value.facts["field"] == field
    assert str(port) in caught.value.message


@pytest.mark.parametrize(
    ("host", "key", "field"),
    [
        ("no such host.", None, "host"),
        ("203.0.113.1", "k", "rl_port"),
    ],
)
def test_an_address_that_can_not_be_bound_is_refused_by_its_field(host: str, key: str | None, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bind("rl_port", host, 0, key, False)
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


async def _refuse(request: Request) -> Response:
    return Response(b"x" * 1000, status_code=401)


@asynccontextmanager
async def serving(limits: FrontendLimits) -> AsyncIterator[tuple[Server, int]]:
    """A listener that refuses each request before it has read the body, and its port."""
    listener = bind("rl_port", "127.0.0.1", 0, None, False)
    server = Server(Starlette(routes=[Route("/", _refuse, methods=["GET", "POST"])]), None, limits)
    task = asyncio.create_task(server.serve([listener]))
    await server.accepting.wait()
    try:
        yield server, listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not holds():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("rest", [b"x", b"x" * 1000])
async def test_a_connection_ends_whose_client_sends_body_after_the_answer_and_no_further_request(
    rest: bytes,
) -> None:
    async with serving(FrontendLimits(head_timeout_s=0.2)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        await reader.readuntil(b"x" * 1000)
        writer.write(rest)
        async with asyncio.timeout(BOUND_S):
            assert await reader.read() == b""
        writer.close()


async def test_a_connection_with_an_unfinished_body_makes_room() -> None:
    async with serving(FrontendLimits(connections=1)) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        await reader.readuntil(b"x" * 1000)
        writer.write(b"x")
        waiting: Any = server.config.heads  # type: ignore[attr-defined]
        await until(lambda: bool(waiting.waiting))
        _, other = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(BOUND_S):
            assert await reader.read() == b""
        writer.close()
        other.close()


async def test_a_client_that_never_reads_its_answers_loses_the_connection() -> None:
    async with serving(FrontendLimits(token_stall_s=0.2)) as (server, port):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))

        async def ask_for_ever() -> None:
            with contextlib.suppress(OSError):
                while True:
                    await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)

        asking = asyncio.create_task(ask_for_ever())
        await until(lambda: bool(server.server_state.connections))
        await until(lambda: not server.server_state.connections)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        client.close()


async def test_a_closed_connection_whose_client_does_not_read_the_rest_is_cut_off() -> None:
    cut = asyncio.Event()

    class Full:
        """A transport that can't send."""

        def write(self, data: bytes) -> None: ...

        def close(self) -> None: ...

        def get_write_buffer_size(self) -> int:
            return 1

        def abort(self) -> None:
            cut.set()

    transport: Any = Full()
    _Joined(transport, 0.01).close()
    async with asyncio.timeout(BOUND_S):
        await cut.wait()
