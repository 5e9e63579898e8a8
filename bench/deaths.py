"""Measures how long it takes until a killed worker is gone, and a new one listed, in the view of another process."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.peers import start_peer, stop_peers
from rl_plane.bus.connection import Bus
from rl_plane.bus.server import CONFIG, NatsServer
from rl_plane.client import RlClient
from rl_plane.membership.core import Changed
from worker.runtime.registration import Registration

NAMESPACE = "bench"
LISTED_TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 20.0
SETTLE_S = 0.5
"""Between a start and the kill: the worker has nothing left to do, as most of its life."""


class Watcher:
    """Hands on what a view hears, with the time at which it did."""

    def __init__(self) -> None:
        self._listed: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
        self._gone: asyncio.Queue[tuple[str, float]] = asyncio.Queue()

    def changed(self, change: Changed) -> None:
        now = time.perf_counter()
        if change.before is None and change.after is not None:
            self._listed.put_nowait((change.after.instance_id, now))
        elif change.before is not None and change.after is None:
            self._gone.put_nowait((change.before.instance_id, now))

    async def next_listed(self) -> tuple[str, float]:
        async with asyncio.timeout(LISTED_TIMEOUT_S):
            return await self._listed.get()

    async def gone(self, instance_id: str) -> float:
        async with asyncio.timeout(GONE_TIMEOUT_S):
            who, when = await self._gone.get()
        assert who == instance_id, "one worker lives at a time"
        return when


@asynccontextmanager
async def _watched(config: Path | None) -> AsyncIterator[tuple[RlClient, Watcher]]:
    server = NatsServer(config=config)
    server.start()
    try:
        async with await RlClient.connect(server.url, NAMESPACE) as client:
            watcher = Watcher()
            (await client.view()).listen(watcher.changed)
            yield client, watcher
    finally:
        server.stop()


async def measure_deaths(model: Path, kills: int, *, advisories: bool) -> list[float]:
    """Seconds from a worker's SIGKILL until it is gone. Without advisories the server has no configuration of ours."""
    deaths: list[float] = []
    async with _watched(CONFIG if advisories else None) as (client, watcher):
        for _ in range(kills):
            process = start_peer(
                "workers", nats_url=client.bus.url, namespace=NAMESPACE, model=str(model), copies=1
            )
            try:
                instance_id, _ = await watcher.next_listed()
                await asyncio.sleep(SETTLE_S)
                start = time.perf_counter()
                process.kill()
                deaths.append(await watcher.gone(instance_id) - start)
            finally:
                stop_peers([process])
    return deaths


async def _nothing() -> None:
    """These workers have no fleet to do as."""


async def measure_joins(joins: int) -> list[float]:
    """Seconds from the moment that a worker, ready in all else, begins to register until it is listed."""
    seconds = []
    async with _watched(CONFIG) as (client, watcher):
        for _ in range(joins):
            instance_id = secrets.token_hex(8)
            bus = await Bus.connect(client.bus.url, instance_id)
            members = client.subjects().members
            place = Registration(
                bus,
                members,
                instance_id,
                secrets.token_hex(8),
                {},
                on_registered=_nothing,
                on_superseded=lambda: None,
            )
            start = time.perf_counter()
            registering = asyncio.create_task(place.start())
            seconds.append((await watcher.next_listed())[1] - start)
            await registering
            await place.leave()
            await watcher.gone(instance_id)
            await bus.close()
    return seconds
