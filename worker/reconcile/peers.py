"""Offers this worker's copies to other workers, and takes theirs when the recorded source of a version is gone.

A bucket of its own has the offers. The members' records do not, because each change of those changes the fleet's epoch.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from rl_plane.bus.connection import Bus
from rl_plane.bus.entries import decoded
from rl_plane.errors import Conflict, PlaneError
from rl_plane.membership.core import Member
from rl_plane.protocol.subjects import MEMBER_PREFIX, Subjects
from rl_plane.protocol.update_requests import Transport
from worker.engines.base import EngineAdapter

log = logging.getLogger("worker.reconcile.peers")

OFFERS = 1024
"""So many offers stay in the bucket. Dead workers have the oldest."""
AGAIN_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""The pauses between attempts to write an offer. After the last one, the next reconnect or offer tries again."""
TRIED = 3
"""A worker asks so many peers, one after another. A peer that can't be reached costs ten seconds."""


class _OfferedWeights(BaseModel):
    """The weights with this digest, and the transport that fetches them (`ReceivesWeights.offer`)."""

    digest: str
    transport: Transport


class _WorkerOffer(BaseModel):
    """All that one worker offers."""

    places: list[_OfferedWeights]
    host: str = ""
    """The machine of the worker."""
    incarnation: str = ""
    """The worker's incarnation. A later one has none of these copies."""


@dataclass(eq=False)
class Peers:
    """One worker's offer, and its access to the offers of others."""

    _bus: Bus
    _subjects: Subjects
    _adapter: EngineAdapter
    _transports: Collection[str]
    _host: str
    """The name of this machine."""
    _incarnation: str
    """This worker's incarnation."""
    _loaded: Callable[[], Collection[str]]
    """Returns the digests of the adapters that the engine has loaded."""
    _offered: list[dict[str, Any]] | None = field(default_factory=list, init=False)
    """The offer that NATS has. None: unknown."""
    _offering: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def reconnected(self) -> None:
        """Writes the offer again after an outage of NATS, which may have lost it."""
        self._offered = self._offered and None  # an offer that was empty needs none
        self.offer()

    def offer(self) -> None:
        """Writes in the background where other workers can fetch the engine's copies, if that has changed."""
        task = asyncio.create_task(self._offer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _offer(self) -> None:
        async with self._offering:
            for again_s in AGAIN_S:
                if await self._write_offer():
                    return
                await asyncio.sleep(again_s)

    async def _write_offer(self) -> bool:
        """Returns whether NATS has the offer."""
        try:
            places = await asyncio.to_thread(self._adapter.receiver.offer, list(self._loaded()))
            if places != self._offered:
                offer = {"places": places, "host": self._host, "incarnation": self._incarnation}
                await self._bus.ensure_bucket(self._subjects.offers)
                await self._bus.put(self._subjects.offers, self._bus.name, json.dumps(offer).encode())
                self._offered = places
                await self._bus.keep_newest(self._subjects.offers, ">", OFFERS)
                log.info("%s offers its weights to other workers", self._bus.name)
            return True
        except PlaneError as error:
            log.warning("%s can't offer its weights to other workers: %s", self._bus.name, error)
        except Exception:
            log.exception("%s can't offer its weights to other workers", self._bus.name)
        return False

    async def bring(self, digest: str, take: Callable[[Mapping[str, Any]], Awaitable[object]]) -> bool:
        """Calls `take(transport)` for peers that offer this digest, the nearest first. Returns whether one call
        succeeded. Raises Conflict if an update of the fleet is in the way."""
        if not await self._bus.bucket_exists(self._subjects.offers):
            return False
        entries = await self._bus.list_keys(self._subjects.offers, ">")
        found: dict[str, Transport] = {}
        offers: dict[str, _WorkerOffer] = {}
        for entry in entries:
            offer = decoded(entry, _WorkerOffer.model_validate_json) if entry.key != self._bus.name else None
            for place in offer.places if offer is not None else ():
                if offer is not None and place.digest == digest and place.transport.backend in self._transports:
                    found[entry.key], offers[entry.key] = place.transport, offer
        tried = 0
        for key in nearest(self._bus.name, self._host, {key: offer.host for key, offer in offers.items()}):
            if tried == TRIED:
                break
            if not await self._lives(key, offers[key].incarnation):
                continue  # an offer outlives its worker
            tried += 1
            try:
                await take(found[key].model_dump(exclude_unset=True))
            except Conflict:
                raise  # an update has the staging: no other peer would help
            except PlaneError as error:
                log.info("%s: a peer did not give its weights: %s", self._bus.name, error)
            else:
                return True
        return False

    async def _lives(self, key: str, incarnation: str) -> bool:
        """True if this incarnation of the worker `key` is a member."""
        entry = await self._bus.get(self._subjects.members, MEMBER_PREFIX + key)
        member = Member.from_entry(entry) if entry is not None else None
        return member is not None and member.incarnation == incarnation


def nearest(own: str, host: str, offers: Mapping[str, str]) -> list[str]:
    """The workers that offer weights, in the order in which the worker `own` on the machine `host` asks them.

    Those on the same machine come first. The others are asked in a ring that begins behind the worker itself, so that
    workers that heal at the same time ask different ones. `offers`: worker → its machine."""
    ring = sorted(offers, key=lambda key: (key <= own, key))
    return sorted(ring, key=lambda key: offers[key] != host)
