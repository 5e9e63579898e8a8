"""RlClient: the fleet as a service or an asynchronous trainer uses it. `SyncRlClient` has the same
methods, and they block. Only RlClient has `watch` and the methods that a coordinator needs.

async with await RlClient.connect() as client:
    await client.wait_for(2)
    print(await client.state())
    await client.update_weights({"backend": "filesystem", "path": "/ckpt/step_17"}, "step_17")
"""

from __future__ import annotations

import asyncio
from typing import Any

from rl_plane.bus.connection import Bus
from rl_plane.bus.lock import LOCK_TIMINGS, LockTimings
from rl_plane.errors import DeadlineExceeded
from rl_plane.fleet.fleet import Fleet
from rl_plane.fleet.fleet_method import AsyncRun
from rl_plane.fleet.fleet_methods import FleetMethods
from rl_plane.membership.worker_calls import WorkerCalls


class RlClient(WorkerCalls, AsyncRun, FleetMethods):
    """One connection to the fleet: the typed ops of `FleetMethods`, and calls to single workers.

    `connect` makes it. Methods may be called concurrently; `close` ends calls under way with an error."""

    def __init__(
        self, bus: Bus, namespace: str, component: str, *, lock_timings: LockTimings = LOCK_TIMINGS
    ) -> None:
        super().__init__(bus, namespace, component, lock_timings=lock_timings)
        self.fleet = Fleet(self)

    async def run(
        self, op: str, body: dict[str, Any] | None = None, request_id: str = "", *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s) as bound:
                return await self.fleet.run(op, body, request_id)
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise DeadlineExceeded(f"{op} did not end within {timeout_s:g} s") from error
