"""Every fleet call of this frontend, from HTTP or NATS: equal ones that are under way become one."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any

from rl_plane.errors import InvalidRequest, PlaneError, Unavailable
from rl_plane.fleet.fleet import Fleet
from rl_plane.protocol.fleet_ops import FLEET_OPS

log = logging.getLogger("frontend.facade.calls")

MAX_IN_FLIGHT = 64
"""Different updates that wait for the lock or hold it: more is a trainer gone wild."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    body: str
    task: asyncio.Task[dict[str, Any]]


class FleetCalls:
    """Runs ops of a Fleet. A coalesced one is a task of its own, which no caller's end cancels."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._in_flight: dict[tuple[str, str, str], _InFlight] = {}

    async def run(
        self, op: str, body: dict[str, Any], request_id: str = "", digest: str | None = None
    ) -> dict[str, Any]:
        """The merged reply. Equal calls (by request id, or, without one, by body) share an answer. `digest`: of the
        body's lists, where they may be long; writing them out to compare them would hold up every other call."""
        if op not in FLEET_OPS or not FLEET_OPS[op].coalesce:
            return await self.fleet.run(op, body, request_id)
        told = body if digest is None else {name: one for name, one in body.items() if not isinstance(one, list)}
        text = json.dumps([told, digest], sort_keys=True, default=str)
        key = (op, "id", request_id) if request_id else (op, "body", text)
        current = self._in_flight.get(key)
        if current is None:
            current = self._start(key, text, op, body, request_id)
        elif current.body != text:
            raise InvalidRequest(
                f"the request id {request_id!r} belongs to another {op}, which is under way",
                field="Idempotency-Key",
                fix="use a new id for each different request",
            )
        return await asyncio.shield(current.task)

    def _start(
        self, key: tuple[str, str, str], text: str, op: str, body: dict[str, Any], request_id: str
    ) -> _InFlight:
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise Unavailable(f"{MAX_IN_FLIGHT} updates are under way or waiting here", retry_after_s=1.0)
        task = asyncio.create_task(self.fleet.run(op, body, request_id), name=f"{op} {request_id}")
        current = self._in_flight[key] = _InFlight(text, task)

        def ended(task: asyncio.Task[dict[str, Any]]) -> None:
            del self._in_flight[key]
            # Looking at the error here also serves the case that nobody waits for it any more.
            if not task.cancelled() and (error := task.exception()) is not None:
                log.log(logging.INFO if isinstance(error, PlaneError) else logging.ERROR, "%s: %s", op, error)

        task.add_done_callback(ended)
        return current

    async def close(self, grace_s: float) -> None:
        """Lets what is under way end within the time, then cuts it off: the next coordinator takes it up."""
        tasks = [current.task for current in self._in_flight.values()]
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
