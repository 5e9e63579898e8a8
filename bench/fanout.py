"""Fan-outs of a reading op, beside a raw nats-py scatter-gather to as many plain subscribers.

Every round times each way once, so that noise hits all alike; the ways take turns in going first.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg

from bench.peers import peers, start_peer
from rl_plane.bus.scatter import YIELD_EVERY
from rl_plane.client import RlClient
from rl_plane.protocol.envelope import Request, encode

OP = "state"
"""The reading op that people and dashboards poll; its reply is the largest but `describe`."""
PATH = "/v1/rl/state"

WARM_UP = 10
"""Rounds that do not count: connections, route tables and caches of all ways are warm after them."""
WORKERS_PER_PROCESS = 512
"""Two processes for 1,024, of the workers as of the plain subscribers: one Python process is one core at most."""
JOIN_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 10.0
"""Far longer than the op's own: on a busy machine a slow answer is a measurement, a missing one is not."""


Ways = Mapping[str, Callable[[], Coroutine[Any, Any, int]]]
"""Name → what is timed; it gives the number of workers that it has no answer of."""


@dataclass(frozen=True, slots=True)
class FanOutTimes:
    """Seconds of every round, in the order of the rounds."""

    workers: int
    reply_bytes: int
    seconds: dict[str, list[float]]
    missing: dict[str, int]
    """Answers that did not come in time, of all rounds."""

    def ratio(self, way: str, *beside: str) -> float:
        """The median over the rounds of `way` beside the sum of others, all taken from the same round."""
        ratios: list[float] = list(map(truediv, self.seconds[way], self.sums(*beside)))
        return statistics.median(ratios)

    def sums(self, *ways: str) -> list[float]:
        return [sum(parts) for parts in zip(*(self.seconds[way] for way in ways), strict=True)]


class RawGather:
    """A scatter-gather as a careful user of nats-py writes: a publish for each target, one wildcard inbox, a slot per
    answer."""

    def __init__(self, connection: Client, subjects: list[str], payload: bytes) -> None:
        self._connection = connection
        self._subjects = subjects
        self._payload = payload
        self._inbox = connection.new_inbox()
        self._answers: dict[int, bytes] = {}
        self._all = asyncio.Event()

    async def start(self) -> None:
        await self._connection.subscribe(f"{self._inbox}.*", cb=self._reply)
        await self._connection.flush()
        await self._connection.flush()

    async def _reply(self, message: Msg) -> None:
        self._answers[int(message.subject.rsplit(".", 1)[1])] = message.data
        if len(self._answers) == len(self._subjects):
            self._all.set()

    async def ask_all(self) -> int:
        self._answers.clear()
        self._all.clear()
        for index, subject in enumerate(self._subjects):
            await self._connection.publish(subject, self._payload, reply=f"{self._inbox}.{index}")
            if index % YIELD_EVERY == YIELD_EVERY - 1:
                await asyncio.sleep(0)
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await self._all.wait()
        return len(self._subjects) - len(self._answers)


class HttpConnection:
    """A kept-alive HTTP connection that does the least: a client library's own time is not the facade's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, url: str) -> HttpConnection:
        where = urlsplit(url)
        return cls(*await asyncio.open_connection(where.hostname, where.port, limit=1 << 24))

    async def get(self, path: str) -> bytes:
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"GET {path}: {head.decode(errors='replace').splitlines()[0]}")
        length = next(
            int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length:")
        )
        return await self._reader.readexactly(length)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


def per_process(workers: int) -> list[int]:
    """The number of workers in each process."""
    return [min(WORKERS_PER_PROCESS, workers - done) for done in range(0, workers, WORKERS_PER_PROCESS)]


async def measure_fan_out(nats_url: str, model: Path, workers: int, rounds: int) -> FanOutTimes:
    """Starts a fleet and its plain twin, and measures every way in each round."""
    namespace = f"bench{workers}"
    copies = per_process(workers)
    with ExitStack() as stack:
        fleet = [
            start_peer("workers", nats_url=nats_url, namespace=namespace, model=str(model), copies=count)
            for count in copies
        ]
        stack.enter_context(peers(fleet))
        async with await RlClient.connect(nats_url, namespace) as client:
            snapshot = await client.wait_for(workers, JOIN_TIMEOUT_S)
            request = encode(Request(OP).to_wire())
            direct = client.subjects().rl_direct(snapshot.members[0].instance_id)
            reply_bytes = len((await client.bus.nc.request(direct, request)).data)
            plain = [
                start_peer(
                    "subscribers",
                    nats_url=nats_url,
                    prefix=f"{namespace}.plain0.rl",  # as long as a worker's own subject
                    copies=count,
                    reply_bytes=reply_bytes,
                )
                for count in copies
            ]
            web = [start_peer("empty_route"), start_peer("frontend", nats_url=nats_url, namespace=namespace)]
            ready = stack.enter_context(peers([*web, *plain]))
            urls = [peer.said["rl_url"] for peer in ready[:2]]
            subjects = [subject for peer in ready[2:] for subject in peer.said["subjects"]]
            seconds, missing = await _measure(client, subjects, request, urls, rounds)
            return FanOutTimes(workers, reply_bytes, seconds, missing)


async def _measure(
    client: RlClient, subjects: list[str], request: bytes, urls: list[str], rounds: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    connection = Client()
    await connection.connect(client.bus.url)
    raw = RawGather(connection, subjects, request)
    await raw.start()
    empty, facade = [await HttpConnection.open(url) for url in urls]
    instance_id = (await client.list_workers()).members[0].instance_id

    async def ask_client() -> int:
        out = await client.call_all(OP, timeout_s=CALL_TIMEOUT_S)
        return len(subjects) - len(out.rows) + len(out.failed)

    async def ask_facade() -> int:
        # One for the reply itself, one for each worker's row.
        return len(subjects) + 1 - (await facade.get(PATH)).count(b'"status":"ok"')

    async def ask_empty_route() -> int:
        return len(await empty.get("/"))

    async def ask_raw_request() -> int:
        return 0 if (await connection.request(subjects[0], request, timeout=CALL_TIMEOUT_S)).data else 1

    async def ask_one() -> int:
        return 0 if (await client.call(instance_id, OP, timeout_s=CALL_TIMEOUT_S)).status == "ok" else 1

    ways = {
        "raw": raw.ask_all,
        "client": ask_client,
        "facade": ask_facade,
        "empty_route": ask_empty_route,
        "raw_request": ask_raw_request,
        "call": ask_one,
    }
    try:
        return await time_rounds(ways, rounds)
    finally:
        await facade.close()
        await empty.close()
        await connection.close()


async def time_rounds(
    ways: Ways, rounds: int, warm_up: int = WARM_UP
) -> tuple[dict[str, list[float]], dict[str, int]]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    missing = dict.fromkeys(ways, 0)
    names = list(ways)
    for number in range(-warm_up, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            lacking = await ways[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
                missing[name] += lacking
    return seconds, missing
