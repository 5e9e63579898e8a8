"""The events of frontends in a bucket, so that a frontend that starts again still tells what happened before it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pydantic import BaseModel

from frontend.facade.kept_events import KEPT_S, FleetEvent
from frontend.server.replies import to_json
from rl_plane._util.limited_log import LimitedLog
from rl_plane._util.tasks import end_tasks
from rl_plane.bus.connection import Bus
from rl_plane.bus.entries import decoded
from rl_plane.errors import BusUnreachable, PlaneError
from rl_plane.protocol.subjects import KeyValueBucket

log = logging.getLogger("frontend.facade.stored_events")

GATHER_S = 0.25
"""Events of this time are written together. A frontend that is killed loses no more than these."""
RETRY_S = 2.0
"""The wait after a write that failed."""
CHUNK_EVENTS = 256
"""A chunk with so many events is full. A chunk that is not full is written anew with each event."""
CHUNK_BYTES = 64 << 10
"""A chunk whose events have so many bytes is full, too."""
EVENT_BYTES = 256 << 10
"""A longer event is not stored: NATS takes messages of up to 1 MB."""
CHUNKS = 64
"""The bucket keeps so many chunks, the newest of all frontends: at most 20 MB, and about 4 MB with usual events."""


class Chunk(BaseModel):
    """Some events of one frontend, in the order of their ids."""

    began_at: float
    """The start of the frontend, in Unix seconds by its own clock."""
    events: list[FleetEvent]


def earlier_events(chunks: Iterable[tuple[str, Chunk]], before: float) -> list[FleetEvent]:
    """Joins what earlier frontends have stored, oldest first.

    Frontends that run at the same time store the same events, each under ids of its own. So this takes the events of
    each moment from one frontend alone. Going backwards from `before`, it takes the frontend that has stored the latest
    event.

    Args:
        chunks: Each with the id of its frontend.
        before: Events from this time on are left out, in Unix seconds.
    """
    logs: dict[str, list[FleetEvent]] = {}
    began: dict[str, float] = {}
    for frontend_id, chunk in chunks:
        logs.setdefault(frontend_id, []).extend(chunk.events)
        began[frontend_id] = chunk.began_at
    joined: list[FleetEvent] = []
    while True:
        told = {key: [event for event in events if event.at < before] for key, events in logs.items()}
        logs = {key: events for key, events in told.items() if events}
        if not logs:
            return sorted(joined, key=lambda event: event.id)
        latest = max(logs, key=lambda key: max(event.at for event in logs[key]))
        joined += logs.pop(latest)
        before = began[latest]


@dataclass(slots=True)
class _Open:
    """A chunk that is not yet written for the last time."""

    number: int
    events: list[FleetEvent] = field(default_factory=list)
    nbytes: int = 0
    stored: bool = False
    """The bucket has some of its events."""


class StoredEvents:
    """Writes the events of one frontend, and reads those of earlier ones. Without the bucket nothing is stored."""

    def __init__(self, bus: Bus, bucket: KeyValueBucket, frontend_id: str) -> None:
        self._bus = bus
        self._bucket = bucket
        self._frontend_id = frontend_id
        self._began_at = time.time()
        self._chunks = deque([_Open(0)], maxlen=CHUNKS)
        """The last one takes the next events."""
        self._changed = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._checks_bucket = False
        """The last write failed, perhaps because NATS has lost the bucket."""
        self._warnings = LimitedLog(log)

    async def start(self) -> list[FleetEvent]:
        """Returns the events of earlier frontends, oldest first."""
        try:
            await self._bus.ensure_bucket(self._bucket)
            entries = await self._bus.list_keys(self._bucket, ">")
        except BusUnreachable as error:
            log.warning("events of earlier frontends can't be read: %s", error)
            entries, self._checks_bucket = [], True
        except PlaneError as error:  # another try would meet it again
            log.warning("this process can't store its events, so they are lost when it ends: %s", error)
            return []
        self._writer = asyncio.create_task(self._write_changes(), name="stored events")
        found = [(entry.key.partition(".")[0], decoded(entry, Chunk.model_validate_json)) for entry in entries]
        return earlier_events([(key, chunk) for key, chunk in found if chunk is not None], self._began_at)

    async def stop(self) -> None:
        """Writes what is not yet written, once."""
        if self._writer is None:
            return
        await end_tasks([self._writer])
        self._writer = None
        if self._changed.is_set():
            try:
                await self._write()
            except PlaneError as error:
                log.warning("the last events are not stored: %s", error)

    def add(self, event: FleetEvent) -> None:
        """Stores the event soon."""
        if self._writer is None:
            return
        nbytes = len(to_json(event.data))
        if nbytes > EVENT_BYTES:
            self._warnings.warning("an event of %d bytes is too long to be stored", nbytes)
            return
        chunk = self._chunks[-1]
        if len(chunk.events) >= CHUNK_EVENTS or chunk.nbytes >= CHUNK_BYTES:
            chunk = _Open(chunk.number + 1)
            self._chunks.append(chunk)
        chunk.events.append(event)
        chunk.nbytes += nbytes
        self._changed.set()

    async def _write_changes(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(GATHER_S)
            try:
                if self._checks_bucket:
                    await self._bus.ensure_bucket(self._bucket)
                await self._write()
                self._checks_bucket = False
            except PlaneError as error:
                self._checks_bucket = True
                self._changed.set()
                self._warnings.warning("events are not stored: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _write(self) -> None:
        """Writes every chunk that has changed."""
        self._changed.clear()
        grew = False
        while True:
            chunk, count = self._chunks[0], len(self._chunks[0].events)
            value = to_json({"began_at": self._began_at, "events": [event.to_wire() for event in chunk.events]})
            key = f"{self._frontend_id}.{chunk.number}"
            await self._bus.put(self._bucket, key, value, ttl_s=int(KEPT_S))
            grew, chunk.stored = grew or not chunk.stored, True
            if chunk is self._chunks[-1]:
                break
            if chunk is self._chunks[0] and count == len(chunk.events):
                self._chunks.popleft()
        if grew:
            await self._bus.keep_newest(self._bucket, ">", CHUNKS)
