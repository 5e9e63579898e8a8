"""The listener of a worker's metrics: its address, its bounds, and what it needs."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rl_plane.errors import InvalidRequest, PlaneError
from worker.metrics.metrics_listener import MAX_CONNECTIONS, REQUEST_S, MetricsListener, open_metrics_port
from worker.nodes.node_settings import NodeSettings
from worker.process import check_options
from worker.worker_options import WorkerOptions

BOUND_S = 10.0
HERE = "127.0.0.1"


@asynccontextmanager
async def listening(text: bytes = b"a 1\n", request_s: float = REQUEST_S) -> AsyncIterator[int]:
    with open_metrics_port(HERE, 0, None) as listener:

        async def page() -> bytes:
            return text

        server = MetricsListener(listener, page, None, request_s=request_s)
        await server.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.close()


async def answer(port: int, request: bytes) -> bytes:
    """The bytes that come until the listener closes the connection."""
    reader, writer = await asyncio.open_connection(HERE, port)
    try:
        writer.write(request)
        async with asyncio.timeout(BOUND_S):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.transport.abort()


async def test_a_scrape_gets_the_page_and_the_connection_ends() -> None:
    async with listening() as port:
        head, _, body = (await answer(port, b"GET /metrics?x=1 HTTP/1.1\r\nHost: [::1]:5\r\n\r\n")).partition(
            b"\r\n\r\n"
        )
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4")
    assert (b"Content-Length: 4" in head, body) == (True, b"a 1\n")


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("", True),
        ("LOCALHOST:80", True),
        ("gpu7", True),
        ("10.0.0.7:8000", True),
        ("[::ffff:10.0.0.7]:8000", True),
        ("evil.example", False),
        ("evil.example.:80", False),
        ("10.0.0.7.evil.example", False),
        ("[evil.example]", False),
    ],
)
async def test_only_a_name_that_surely_means_this_machine_gets_the_page_without_a_key(
    host: str, is_own: bool
) -> None:
    async with listening() as port:
        found = await answer(port, f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert (b"200 OK" in found) is is_own
    assert (b"401 Unauthorized" in found) is not is_own


@pytest.mark.parametrize("request_", [b"", b"GET /metrics HTTP/1.1\r\nHost: x", b"\x00" * 100])
async def test_a_request_that_does_not_end_is_cut(request_: bytes) -> None:
    async with listening(request_s=0.05) as port:
        assert await answer(port, request_) == b""


async def test_a_huge_head_is_cut_at_once() -> None:
    async with listening() as port:
        assert await answer(port, b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 100_000) == b""


@pytest.mark.parametrize(
    "head", [b"\r\n\r\n", b"GET\r\n\r\n", b"\xff\xfe /metrics\r\n\r\n", b"GET  \r\n: :\r\n\r\n"]
)
async def test_a_broken_head_gets_no_page(head: bytes) -> None:
    async with listening() as port:
        assert b"200 OK" not in await answer(port, head)
        assert b"200 OK" in await answer(port, b"GET /metrics HTTP/1.1\r\n\r\n")


async def test_connections_beyond_the_bound_are_closed() -> None:
    async with listening(request_s=10 * BOUND_S) as port:
        waiting = [(await asyncio.open_connection(HERE, port))[1] for _ in range(MAX_CONNECTIONS)]
        assert await answer(port, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
        waiting[0].transport.abort()
        async with asyncio.timeout(BOUND_S):
            while b"200 OK" not in await answer(port, b"GET /metrics HTTP/1.1\r\n\r\n"):
                continue
        for each in waiting:
            each.transport.abort()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        open_metrics_port(host, 0, None)
    assert raised.value.facts["field"] == "metrics_host"
    assert "RL_PLANE_METRICS_KEY" in raised.value.facts["fix"]
    open_metrics_port(host, 0, "key").close()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server((HERE, 0)) as taken, pytest.raises(InvalidRequest) as raised:
        open_metrics_port(HERE, taken.getsockname()[1], None)
    assert raised.value.facts["field"] == "metrics_port"
    with pytest.raises(InvalidRequest) as raised:
        open_metrics_port("192.0.2.1", 0, "key")
    assert raised.value.facts["field"] == "metrics_host"


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # as if it weren't installed
    with pytest.raises(PlaneError) as raised:
        open_metrics_port(HERE, 0, None)
    assert raised.value.facts["fix"] == "pip install 'rl-plane[metrics]'"


@pytest.mark.parametrize("more", [{"copies": 2}, {"nodes": NodeSettings(2, 1, "127.0.0.1:1")}])
def test_metrics_are_of_one_worker(tmp_path: Path, more: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_options(WorkerOptions("fake", tmp_path, metrics_port=0, **more))  # type: ignore[arg-type]
    assert raised.value.facts["field"] == "metrics_port"
