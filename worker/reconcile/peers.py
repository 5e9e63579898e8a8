"""Offers this worker's copy of the weights to other workers, and takes theirs when the recorded source is gone.

A bucket of its own has the offers. The members' records do not, because each change of those changes the fleet's epoch.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from pydantic import BaseModel

from rl_plane.bus.connection import Bus
from rl_plane.bus.entries import decoded
from rl_plane.errors import PlaneError
from rl_plane.protocol.subjects import Subjects
from rl_plane.protocol.update_requests import Transport
from worker.engines.base import EngineAdapter

log = logging.getLogger("worker.reconcile.peers")

OFFERS = 1024
"""So many offers stay in the bucket. Dead workers have the oldest."""
TRIED = 3
"""A worker asks so many peers, one after another. A peer that can't be reached costs ten seconds."""


class _Place(BaseModel):
    """An offer: the weights with this digest, and the transport that fetches them (`EngineAdapter.offer`)."""

    digest: str
    transport: Transport
    host: str = ""
    """The machine of the worker that offers them."""


class Peers:
    """One worker's offer, and its access to the offers of others."""

    def __init__(
        self, bus: Bus, subjects: Subjects, adapter: EngineAdapter, transports: Collection[str], host: str
    ) -> None:
        """`host`: the name of this machine."""
        self._bus = bus
        self._host = host
        self._offers = subjects.offers
        self._key = bus.name
        self._adapter = adapter
        self._transports = transports
        self._offered: dict[str, Any] | None = None
        self._task: asyncio.Task[None] | None = None

    def offer(self) -> None:
        """Writes in the background where other workers can fetch the engine's copy, if that has changed."""
        self._task = asyncio.create_task(self._offer())

    async def _offer(self) -> None:
        try:
            place = await asyncio.to_thread(self._adapter.offer)
            if place is not None and place != self._offered:
                self._offered = place
                await self._bus.ensure_bucket(self._offers)
                await self._bus.put(self._offers, self._key, json.dumps({**place, "host": self._host}).encode())
                await self._bus.keep_newest(self._offers, ">", OFFERS)
                log.info("%s offers its weights to other workers", self._bus.name)
        except PlaneError as error:
            log.warning("%s can't offer its weights to other workers: %s", self._bus.name, error)
        except Exception:
            log.exception("%s can't offer its weights to other workers", self._bus.name)

    async def bring(self, digest: str, take: Callable[[Mapping[str, Any]], Awaitable[object]]) -> bool:
        """Calls `take(transport)` for peers that offer this digest, the nearest first. Returns whether one call
        succeeded."""
        if not await self._bus.bucket_exists(self._offers):
            return False
        entries = await self._bus.list_keys(self._offers, ">")
        found = {
            entry.key: place
            for entry in entries
            if entry.key != self._key and (place := decoded(entry, _Place.model_validate_json)) is not None
            if place.digest == digest and place.transport.backend in self._transports
        }
        for key in nearest(self._key, self._host, {key: place.host for key, place in found.items()})[:TRIED]:
            try:
                await take(found[key].transport.model_dump(exclude_unset=True))
            except PlaneError as error:
                log.info("%s: a peer did not give its weights: %s", self._bus.name, error)
            else:
                return True
        return False


def nearest(own: str, host: str, offers: Mapping[str, str]) -> list[str]:
    """The workers that offer weights, in the order in which the worker `own` on the machine `host` asks them.

    Those on the same machine come first. The others are asked in a ring that begins behind the worker itself, so that
    workers that heal at the same time ask different ones. `offers`: worker → its machine."""
    ring = sorted(offers, key=lambda key: (key <= own, key))
    return sorted(ring, key=lambda key: offers[key] != host)
