"""The committed versions that this frontend has known: tokens of any other are not delivered."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence

from nats.aio.msg import Msg

from rl_plane.bus import Bus, is_marker
from rl_plane.errors import BusUnreachable, PlaneError, Unlabelled
from rl_plane.generation import VersionSpan
from rl_plane.record import DecisionRecord, record_of
from rl_plane.subjects import RECORD, Bucket
from rl_plane.versions import WeightVersion

log = logging.getLogger("frontend.committed")

MAX_HISTORY = 1024
"""Versions back that a reply may name: a stream that is older than a thousand updates is a mistake."""


class History:
    """Which versions were committed, in the order in which they became known."""

    def __init__(self) -> None:
        self._order: OrderedDict[tuple[str, int, str], int] = OrderedDict()
        self.count = 0
        """Of all versions ever; a version's place is the count when it was added."""

    def add(self, version: WeightVersion) -> None:
        key = (version.run, version.sequence, version.digest)
        if key not in self._order:
            self.count += 1
            self._order[key] = self.count
            if len(self._order) > MAX_HISTORY:
                self._order.popitem(last=False)

    def place(self, run: str, sequence: int, digest: str) -> int | None:
        return self._order.get((run, sequence, digest))

    def knows(self, spans: Sequence[VersionSpan]) -> bool:
        return all(self.place(span.run, span.sequence, span.digest) is not None for span in spans)

    def check(self, spans: Sequence[VersionSpan], tokens: int, since: int) -> None:
        """Unlabelled unless the spans cover exactly these tokens, by versions that were committed from place
        `since` on (where the request began), in their order."""
        end, last = 0, since
        for span in spans:
            if span.start != end or span.end <= span.start:
                raise Unlabelled(f"the worker's version spans leave a hole at token {end}", retry_after_s=1.0)
            place = self.place(span.run, span.sequence, span.digest)
            if place is None or place < last:
                raise Unlabelled(
                    f"tokens {span.start} to {span.end} were made under {span.version!r} ({span.sequence}), "
                    "which was not the committed version then",
                    sequence=span.sequence,
                    digest=span.digest,
                    retry_after_s=1.0,
                )
            end, last = span.end, place
        if end != tokens:
            raise Unlabelled(f"the worker labelled {end} of {tokens} tokens", retry_after_s=1.0)


class Committed:
    """The record as the leader has it: read at the start and after each reconnect, and followed between."""

    def __init__(self, bus: Bus, state: Bucket) -> None:
        self.record: DecisionRecord | None = None
        self.history = History()
        self._bus = bus
        self._state = state
        self._sequence = 0
        self._reading: asyncio.Task[None] | None = None

    @property
    def version(self) -> WeightVersion | None:
        return self.record.version if self.record else None

    async def start(self) -> None:
        await self._bus.subscribe(self._state.feed(RECORD), self._feed)
        await self._bus.flush()
        self._bus.on_reconnect(self.read_again)
        await self.read_again()

    async def _feed(self, message: Msg) -> None:
        headers = message.headers or {}
        if not is_marker(headers):
            self._take(DecisionRecord.decode(message.data), int(headers["Nats-Sequence"]))

    def _take(self, record: DecisionRecord | None, sequence: int) -> None:
        if record is None or sequence <= self._sequence:
            return  # the feed and a read may overtake each other
        self._sequence, self.record = sequence, record
        self.history.add(record.version)

    async def read_again(self) -> None:
        """From the leader; callers at one time share one read."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        known = self._sequence
        entry = await self._bus.get(self._state, RECORD)
        if entry is not None:
            if entry.sequence < known:
                self._sequence = 0  # the leader never goes back: its store is a new one, and what it says holds
            self._take(record_of(entry), entry.sequence)

    async def check_spans(self, spans: Sequence[VersionSpan], tokens: int, since: int) -> None:
        """See `History.check`; a version that is not known yet is looked up first."""
        if not self.history.knows(spans):
            await self.try_read()
        self.history.check(spans, tokens, since)

    async def place_of(self, version: WeightVersion) -> int | None:
        """When it became known as committed; None: never."""
        place = self.history.place(version.run, version.sequence, version.digest)
        if place is None:
            await self.try_read()
            place = self.history.place(version.run, version.sequence, version.digest)
        return place

    async def try_read(self) -> None:
        try:
            await self.read_again()
        except (BusUnreachable, PlaneError) as error:
            log.warning("the record could not be read: %s", error)
