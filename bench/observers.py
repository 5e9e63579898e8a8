"""Streams of tokens of a fleet with all observers, beside those of a fleet without any.

The observers: a scraper reads the metrics of the worker and of the frontend each second, a reader follows the events,
and the frontend records every rollout in files.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx

from bench.generation import BODY, WARM_UP, Fleet, StreamTimes, fleet, keep
from bench.streams import Streams
from rl_plane._util.tasks import end_tasks

SCRAPE_S = 1.0
"""Seconds between two scrapes: Prometheus usually takes 15."""


async def measure_observed(
    model: Path, scratch: Path, sizes: Sequence[int], rounds: int, tokens: int
) -> list[StreamTimes]:
    """Ways: `without observers` and `with observers`, as fast as they can. Both fleets are up all the time, and are
    asked in turn."""
    found = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with (
        fleet(model, "fake", {}, 1) as plain,
        fleet(model, "fake", {}, 1, record=scratch / "records", metrics_port=port) as seen,
        _watching(seen, f"http://127.0.0.1:{port}"),
    ):
        body = {**BODY, "max_tokens": tokens}
        ways = {
            "without observers": Streams(plain.urls, plain.processes),
            "with observers": Streams(seen.urls, seen.processes),
        }
        for size in sizes:
            times = StreamTimes(size, {name: [] for name in ways})
            for number in range(-WARM_UP, rounds):
                names = list(ways) if number % 2 else list(reversed(ways))
                measured = {name: await ways[name].run(size, body, tokens) for name in names}
                keep(times, measured, number)
            found.append(times)
    return found


@asynccontextmanager
async def _watching(seen: Fleet, worker_url: str) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))

        async def scrape() -> None:
            while True:
                for url in (worker_url, seen.rl_url):
                    (await client.get(f"{url}/metrics")).raise_for_status()
                await asyncio.sleep(SCRAPE_S)

        async def follow() -> None:
            async with client.stream("GET", f"{seen.rl_url}/v1/rl/events") as events:
                async for _ in events.aiter_bytes():
                    pass

        tasks = [asyncio.create_task(scrape()), asyncio.create_task(follow())]
        try:
            yield
            for task in tasks:
                if task.done():
                    await task  # raises why it could not watch
        finally:
            await end_tasks(tasks)
