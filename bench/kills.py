"""How long until the fleet serves a new version when a worker is killed in the middle of its update."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.fanout import JOIN_TIMEOUT_S
from bench.peers import Peer, await_ready, start_peer, stop_peers
from bench.phases import phases_seen
from rl_plane.bus.server import CONFIG, NatsServer
from rl_plane.client import RlClient
from rl_plane.commit.steps import Announce, Instruction, Phase, SendOp

WORKERS = 4
"""Each in a process of its own; one of them dies."""
PHASES: tuple[Phase, ...] = ("prepare", "gate", "commit", "open")
SERVING_TIMEOUT_S = 60.0
SETTLE_S = 0.5
"""Between a worker's start and the update."""


@dataclass(slots=True)
class KillTimes:
    """Seconds, a number for each round. `answered`: from the call to its answer; `serving`: until every worker that
    is left serves the new version."""

    calm: list[float] = field(default_factory=list)
    """The same round's update that nobody disturbed, until all serve."""
    answered: list[float] = field(default_factory=list)
    serving: list[float] = field(default_factory=list)


class Fleet:
    """Worker processes of which one may be killed and replaced."""

    def __init__(self, client: RlClient, models: Sequence[Path]) -> None:
        self._client = client
        self._models = models
        self._count = 0
        self._peers: list[Peer] = []
        self._started: list[subprocess.Popen[str]] = []

    def stop(self) -> None:
        stop_peers(self._started)

    async def fill(self) -> None:
        """Starts what is missing, and updates all once: a process's first update is slower."""
        self._peers = [peer for peer in self._peers if peer.process.poll() is None]
        missing = [
            start_peer(
                "workers",
                nats_url=self._client.bus.url,
                namespace=self._client.namespace,
                model=str(self._models[0]),
                copies=1,
                weight_roots=[str(self._models[0].parent)],
            )
            for _ in range(WORKERS - len(self._peers))
        ]
        self._started += missing
        for process in missing:
            self._peers.append(await asyncio.to_thread(await_ready, process))
        await self._client.wait_for(WORKERS, JOIN_TIMEOUT_S)
        await asyncio.sleep(SETTLE_S)
        await self.update()

    async def update(self, lost: str | None = None) -> tuple[float, float]:
        """Seconds to the answer, and until all but `lost` serve it."""
        self._count += 1
        path = str(self._models[self._count % len(self._models)])
        label = f"update-{self._count}"
        start = time.perf_counter()
        await self._client.update_weights(
            {
                "transport": {"backend": "filesystem", "path": path},
                "version": label,
                "policy": {"on_prepare_failure": "exclude"},
            }
        )
        answered = time.perf_counter() - start
        left = [peer.said["instance_ids"][0] for peer in self._peers]
        async with asyncio.timeout(SERVING_TIMEOUT_S):
            while not await self._all_serve([each for each in left if each != lost], label):
                pass  # an answer takes a millisecond
        return answered, time.perf_counter() - start

    async def _all_serve(self, workers: Sequence[str], label: str) -> bool:
        rows: dict[str, Any] = {row.instance_id: row for row in (await self._client.call_all("state")).rows}
        return all(
            each in rows
            and rows[each].ok
            and rows[each].body["ready"]
            and rows[each].body["applied_weight_version"] == label
            for each in workers
        )

    async def update_with_a_death(self, phase: Phase) -> tuple[float, float]:
        """The worker dies as the phase's fan-out begins."""
        victim = self._peers[self._count % len(self._peers)]

        def kill(instruction: Instruction) -> None:
            # "open" is a write, then a fan-out: that one is meant.
            if instruction.phase == phase and isinstance(instruction, SendOp | Announce):
                victim.process.kill()

        with phases_seen(kill):
            return await self.update(victim.said["instance_ids"][0])


async def measure_kills(models: Sequence[Path], rounds: int) -> dict[Phase, KillTimes]:
    times = {phase: KillTimes() for phase in PHASES}
    with ExitStack() as stack:
        server = NatsServer(config=CONFIG)
        server.start()
        stack.callback(server.stop)
        async with await RlClient.connect(server.url, f"kills{secrets.token_hex(2)}") as client:
            fleet = Fleet(client, models)
            try:
                for _ in range(rounds):
                    for phase, found in times.items():
                        await fleet.fill()
                        found.calm.append((await fleet.update())[1])
                        answered, serving = await fleet.update_with_a_death(phase)
                        found.answered.append(answered)
                        found.serving.append(serving)
            finally:
                fleet.stop()
    return times
