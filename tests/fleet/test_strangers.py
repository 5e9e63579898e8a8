"""Attacks of strangers on the HTTP listeners: web pages, foreign hosts, huge bodies, unfinished heads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest

from frontend.frontend_limits import FrontendLimits
from frontend.server.bodies import MAX_BODY_BYTES, MAX_BRACKETS, MAX_NAMES_BYTES
from frontend.server.options import FrontendOptions
from tests.conftest import Plane
from tests.support.frontend_here import started
from tests.support.plain_client import plain_client

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

EVIL = {"Referer": "https://evil.example/", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
BOUND_S = 60.0


@asynccontextmanager
async def facade(plane: Plane, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=None, **more)
    async with started(options) as urls, plain_client(base_url=urls["rl_url"], timeout=BOUND_S) as http:
        yield http


@contextlib.contextmanager
def frontend_process(plane: Plane, open_files: str = "") -> Iterator[tuple[str, psutil.Process]]:
    """`rl-plane frontend` as a process of its own, and the URL of its facade. `open_files`: its soft limit of open
    files."""
    command = ["sh", "-c", f'ulimit -Sn {open_files}; exec "$@"', "sh"] if open_files else []
    command += [sys.executable, "-m", "rl_plane.cli.main", "frontend", "--json", "--rl-port=0", "--http-port=off"]
    where = [f"--nats-url={plane.url}", f"--namespace={plane.namespace}"]
    with subprocess.Popen([*command, *where], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["rl_url"], psutil.Process(process.pid)
        finally:
            process.kill()


async def test_a_web_page_changes_nothing_by_get(plane: Plane) -> None:
    plane.spawn()
    async with facade(plane) as http:
        assert (await http.get("/v1/rl/ready", params={"wait_s": 30})).status_code == 200
        for path in ("/flush_cache", "/v1/rl/state", "/get_world_size"):
            assert (await http.get(path, headers=EVIL)).status_code == 401, path
        for path in ("/release_memory_occupation", "/resume_memory_occupation", "/weights_checker"):
            assert (await http.get(path, headers=EVIL)).status_code == 401, path
            assert (await http.get(path)).status_code == 405, path
        # Where a browser sends none of these headers, its name remains.
        for header in ({"User-Agent": "Mozilla/5.0 (X11; Linux)"}, {"Referer": "https://evil.example/"}):
            assert (await http.get("/flush_cache", headers=header)).status_code == 401
        assert (await http.get("/flush_cache")).status_code == 200


async def test_a_foreign_host_reads_nothing(plane: Plane) -> None:
    plane.spawn()
    async with facade(plane, allowed_hosts=("plane.example",)) as http:
        port = http.base_url.port
        for host in (
            "evil.example",
            f"evil.example:{port}",
            f"127.0.0.1.evil.example:{port}",
            "localhost.evil.example.",
        ):
            for method, path in (("GET", "/v1/rl/state"), ("GET", "/flush_cache"), ("POST", "/v1/rl/pause")):
                answer = await http.request(method, path, headers={"Host": host})
                assert (answer.status_code, answer.json()["error"]["field"]) == (401, "Host"), (host, path)
        for host in (
            f"localhost:{port}",
            f"[::1]:{port}",
            "127.0.0.1",
            "frontend:8002",
            "Plane.Example:1",
            "10.0.0.1",
        ):
            assert (await http.get("/v1/rl/state", headers={"Host": host})).status_code == 200, host


async def test_a_page_cannot_frame_the_docs(plane: Plane) -> None:
    async with facade(plane) as http:
        assert "frame-ancestors 'none'" in (await http.get("/docs")).headers["content-security-policy"]


@pytest.mark.parametrize("size", [18_000_000, MAX_NAMES_BYTES - 100])
async def test_a_huge_body_neither_stops_the_frontend_nor_keeps_its_memory(plane: Plane, size: int) -> None:
    plane.spawn()
    with frontend_process(plane) as (url, process):
        async with plain_client(base_url=url, timeout=BOUND_S) as http:
            assert (await http.get("/v1/rl/ready", params={"wait_s": 30})).status_code == 200
            before = process.memory_info().rss
            evil = b'{"update_info":{"names":[' + b"[]," * (size // 3) + b"[]]}}"
            attack = asyncio.create_task(http.post("/update_weights", content=evil))
            answered = 0
            while not attack.done():
                assert (await http.get("/v1/rl/health")).status_code == 200
                answered += 1
            reply = await attack
            assert (reply.status_code, reply.json()["error"]["field"]) == (400, "body")
            assert answered >= 10, "the frontend stood still while it read the body"
            assert process.memory_info().rss - before < 4 * size + 200_000_000


async def test_the_memory_of_refused_tensors_is_given_back(plane: Plane) -> None:
    plane.spawn()
    with frontend_process(plane) as (url, process):
        async with plain_client(base_url=url, timeout=BOUND_S) as http:
            assert (await http.get("/v1/rl/ready", params={"wait_s": 30})).status_code == 200
            before = process.memory_info().rss
            body = {"serialized_named_tensors": ["gASV" * 40_000_000], "load_format": "safetensors"}
            assert (await http.post("/update_weights_from_tensor", json=body)).status_code == 501
            async with asyncio.timeout(BOUND_S):
                while process.memory_info().rss - before > 60_000_000:
                    await http.get("/v1/rl/health")


async def test_many_brackets_are_refused_unless_they_are_text(plane: Plane) -> None:
    async with facade(plane) as http:
        evil = b'{"a":[' + b"[]," * MAX_BRACKETS + b"[]]}"
        reply = await http.post("/v1/rl/pause", content=evil)
        assert (reply.status_code, reply.json()["error"]["field"]) == (400, "body")
        text = json.dumps({"min_workers": 0, "lease_s": 60, "none": "[{" * MAX_BRACKETS + '\\"'})
        reply = await http.post("/v1/rl/pause", content=text)
        assert reply.json()["error"]["field"] == "none", "the body was read"


async def _closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(BOUND_S):
            assert await reader.read() == b""


async def test_an_unfinished_head_ends(plane: Plane) -> None:
    """The first head, and the head of a further request on the same connection."""
    async with facade(plane, limits=FrontendLimits(head_timeout_s=1.0)) as http:
        where = ("127.0.0.1", http.base_url.port)
        silent, silent_writer = await asyncio.open_connection(*where)
        begun, writer = await asyncio.open_connection(*where)
        writer.write(b"GET /v1/rl/health HTTP/1.1\r\nHost: localhost\r\nX: ")
        later, later_writer = await asyncio.open_connection(*where)
        later_writer.write(b"GET /v1/rl/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await later.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200")
        later_writer.write(b"GET /v1")
        for reader in (silent, begun, later):
            await _closed(reader)
        for each in (silent_writer, writer, later_writer):
            each.close()


async def test_connections_without_a_request_make_room(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    async with facade(plane, limits=FrontendLimits(connections=4)) as http, contextlib.AsyncExitStack() as stack:
        idle = []
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
            stack.callback(writer.close)
            idle.append(reader)
        await _closed(idle[0])
        (warning,) = (one for one in caplog.messages if "was closed" in one)
        assert "listener has 4 already" in warning
        assert (await http.get("/v1/rl/health")).status_code == 200


async def test_the_connection_that_is_idle_for_longest_makes_room(plane: Plane) -> None:
    async with facade(plane, limits=FrontendLimits(connections=2)) as http, contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
            stack.callback(writer.close)
            writer.write(b"GET /v1/rl/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(BOUND_S):
                assert (await reader.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200")
            readers.append(reader)
        await _closed(readers[0])


async def test_a_frontend_takes_more_connections_than_the_usual_soft_limit_allows(plane: Plane) -> None:
    with frontend_process(plane, open_files="1024") as (url, _):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(1024 * 3 // 8 + 10):
                reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
                stack.callback(writer.close)
                writer.write(b"GET /v1/rl/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await reader.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200")


async def test_two_lengths_are_refused(plane: Plane) -> None:
    async with facade(plane) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
        lengths = b"Content-Length: 6\r\nTransfer-Encoding: chunked"
        writer.write(b"POST /v1/rl/pause HTTP/1.1\r\nHost: localhost\r\n" + lengths + b"\r\n\r\n0\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()


async def test_many_nested_bodies_are_refused_while_others_are_answered(plane: Plane) -> None:
    """Each is refused by its brackets, before it is parsed. Others are answered meanwhile."""
    body = b'{"workers": ' + b"[" * (MAX_BODY_BYTES // 2 - 10) + b"]" * (MAX_BODY_BYTES // 2 - 10) + b"}"
    await asyncio.to_thread(plane.spawn)
    with frontend_process(plane) as (url, process):
        async with plain_client(base_url=url, timeout=BOUND_S, limits=httpx.Limits(max_connections=40)) as http:
            assert (await http.get("/v1/rl/ready", params={"wait_s": 30})).status_code == 200
            before = process.memory_info().rss
            posts = [asyncio.create_task(http.post("/v1/rl/pause", content=body)) for _ in range(30)]
            answered = 0
            while not all(post.done() for post in posts):
                assert (await http.get("/health")).status_code == 200
                answered += any(not post.done() for post in posts)
            assert answered > 0, "no other request was answered meanwhile"
            for post in posts:
                reply = post.result()
                assert reply.status_code == 400
                assert f"more than {MAX_BRACKETS} arrays" in reply.text
            assert process.memory_info().rss - before < 10 * 30 * MAX_BODY_BYTES
