"""Clients that read streams of tokens, or whole replies, with little work: the cores are for the servers."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

STREAM_S = 300.0
"""For the slowest stream of a round, on a machine that is busy with other things."""
DONE = b"data: [DONE]"
LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Heard:
    """One stream, in seconds from its request."""

    first_s: float
    """Until its first token."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Round:
    """So many streams that began together."""

    streams: Sequence[Heard]
    elapsed_s: float
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    """The CPU seconds that processes took meanwhile, by their names."""

    @property
    def per_thousand_s(self) -> float:
        """Seconds for 1,000 tokens of all streams together."""
        return self._per_thousand(self.elapsed_s)

    def cpu_per_thousand_s(self, *names: str) -> float:
        """CPU seconds of these processes together, likewise."""
        return self._per_thousand(sum(self.cpu_s[name] for name in names))

    def _per_thousand(self, seconds: float) -> float:
        return 1000 * seconds / sum(stream.tokens for stream in self.streams)


class Connection(asyncio.Protocol):
    """For one request."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[float] | None = None
        """The time of the first token, once the reply has ended."""
        self._rest = b""
        self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError(f"the stream broke: {exc}"))

    def data_received(self, data: bytes) -> None:
        assert self._ended is not None
        seen = self._rest + data
        if not self._first:
            head, _, body = seen.partition(b"\r\n\r\n")
            if (length := LENGTH.search(head)) is not None:  # a whole reply, or an error
                self._rest = seen
                if len(body) < int(length[1]):
                    return
                if head.startswith(b"HTTP/1.1 200 "):
                    self._ended.set_result(time.perf_counter())
                else:
                    self._ended.set_exception(ConnectionError(seen.decode(errors="replace")[:1000]))
                return
            if b"data: " not in body:
                if not head.startswith(b"HTTP/1.1 200 ") and body:
                    self._ended.set_exception(ConnectionError(seen.decode(errors="replace")[:1000]))
                self._rest = seen
                return
            self._first = time.perf_counter()
        if seen.endswith(b"\r\n0\r\n\r\n"):
            if DONE in seen:
                self._ended.set_result(self._first)
            else:
                self._ended.set_exception(ConnectionError(f"the stream ended early: {seen[-1000:]!r}"))
        # The end may come in pieces.
        self._rest = seen[-len(DONE) - 32 :]

    async def ask(self, request: bytes, tokens: int) -> Heard:
        self._ended, self._rest, self._first = asyncio.get_running_loop().create_future(), b"", 0.0
        assert self._transport is not None
        start = time.perf_counter()
        self._transport.write(request)
        async with asyncio.timeout(STREAM_S):
            return Heard(await self._ended - start, tokens)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def request_of(body: dict[str, Any]) -> bytes:
    """A request for a completion."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(data)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + data


class Streams:
    """The URL of one server, or of several in turn."""

    def __init__(self, urls: Sequence[str], processes: Mapping[str, int] | None = None) -> None:
        """`processes`: names and pids of the processes whose CPU time is reported."""
        self._urls = urls
        self._processes = processes or {}

    async def run(self, count: int, body: dict[str, Any], tokens: int) -> Round:
        """Runs `count` streams at once, each of so many tokens. It opens their connections before the clock starts.
        Each round has new connections, because a server closes a connection that is unused for some seconds."""
        requests = [request_of({**body, "prompt": [*body["prompt"], 3 + number]}) for number in range(count)]
        async with _connections(self._urls, count) as connections:
            before = self._cpu_s()
            start = time.perf_counter()
            heard = await asyncio.gather(
                *(one.ask(request, tokens) for one, request in zip(connections, requests, strict=True))
            )
            elapsed_s = time.perf_counter() - start
            return Round(heard, elapsed_s, {name: now - before[name] for name, now in self._cpu_s().items()})

    def _cpu_s(self) -> dict[str, float]:
        return {name: time.clock_gettime(clock_of(pid)) for name, pid in self._processes.items()}


def clock_of(pid: int) -> int:
    """The clock of what a process takes of the cores: clock_getcpuclockid(3) as Linux has it."""
    return (~pid << 3) | 2


@asynccontextmanager
async def _connections(urls: Sequence[str], count: int) -> AsyncIterator[list[Connection]]:
    loop = asyncio.get_running_loop()
    made: list[Connection] = []
    try:
        for number in range(count):
            where = urlsplit(urls[number % len(urls)])
            assert where.hostname is not None
            assert where.port is not None
            _, connection = await loop.create_connection(Connection, where.hostname, where.port)
            made.append(connection)
        yield made
    finally:
        for connection in made:
            connection.close()
