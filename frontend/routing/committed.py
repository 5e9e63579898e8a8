"""The committed states that this frontend knows. It delivers tokens of no other state."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rl_plane.commit.history import read_history
from rl_plane.errors import PlaneError, Unlabelled
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.generation import VersionSpan
from rl_plane.protocol.record import DecisionRecord, Held
from rl_plane.protocol.versions import WeightVersion

log = logging.getLogger("frontend.routing.committed")

MAX_HISTORY = 1024
"""The number of states that a reply may name. A stream that is older than a thousand updates is a mistake."""
MAX_LABELS = 4096
"""The number of labels of the present run that are remembered, the latest ones. A request may demand a label."""
LABELS_INTERVAL_S = 1.0
"""The shortest time between two reads of the history for unknown labels."""

Key = tuple[str | None, int | None, str | None, tuple[str, int, str] | None]
"""The weights of a token: run, sequence and digest of the base; name, sequence and digest of the adapter."""


def key_of(version: WeightVersion, adapter: str | None = None, of_adapter: WeightVersion | None = None) -> Key:
    with_adapter = None
    if adapter is not None and of_adapter is not None:
        with_adapter = (adapter, of_adapter.sequence, of_adapter.digest)
    return version.run, version.sequence, version.digest, with_adapter


def key_of_span(span: VersionSpan) -> Key:
    adapter = span.adapter
    with_adapter = (adapter.name, adapter.sequence, adapter.digest) if adapter is not None else None
    return span.run, span.sequence, span.digest, with_adapter


def _keys(held: Held) -> set[Key]:
    return {
        key_of(held.version),
        *(key_of(held.version, name, version) for name, version in held.adapters.items()),
    }


@dataclass(slots=True)
class Interval:
    """The places at which a key was committed: the first and the last."""

    first: int
    last: int
    replaced_at: float | None = None
    """The time at which this frontend learned of the end of the update that replaced the key; loop seconds."""


class History:
    """The committed states, in the order in which this frontend learned of them. Each record that changes it is a
    place. The caller passes the time: loop seconds."""

    def __init__(self) -> None:
        self._intervals: OrderedDict[Key, Interval] = OrderedDict()
        self._now: set[Key] = set()
        self._lapsed: set[Key] = set()
        """Keys that are no longer committed, while the update that replaced them is not yet final."""
        self.count = 0
        """The number of the newest place."""

    def add(self, record: DecisionRecord, now: float) -> None:
        keys = _keys(record.held)
        if record.rolling_from is not None:
            keys |= _keys(record.rolling_from)
        if keys != self._now:
            self.count += 1
            self._lapsed = (self._lapsed | self._now) - keys
            self._now = keys
        for key in keys:
            interval = self._intervals.setdefault(key, Interval(self.count, self.count))
            interval.last, interval.replaced_at = self.count, None
            self._intervals.move_to_end(key)
        if record.final:
            for key in self._lapsed & self._intervals.keys():
                self._intervals[key].replaced_at = now
            self._lapsed.clear()
        while len(self._intervals) > max(MAX_HISTORY, len(keys)):
            self._intervals.popitem(last=False)

    def interval(self, key: Key) -> Interval | None:
        return self._intervals.get(key)

    def knows(self, spans: Sequence[VersionSpan]) -> bool:
        """Whether all spans with a known version are in the history."""
        return all(span.sequence is None or key_of_span(span) in self._intervals for span in spans)

    def check(self, spans: Sequence[VersionSpan], tokens: int, since: int) -> None:
        """Raises Unlabelled unless the spans cover exactly these tokens, by states that were committed from place
        `since` on (where the request began), in the order of their commits."""
        end, place = 0, since
        for span in spans:
            if span.start != end or span.end <= span.start:
                raise Unlabelled(f"the worker's version spans leave a hole at token {end}", retry_after_s=1.0)
            interval = self._intervals.get(key_of_span(span))
            if interval is None or interval.last < place:
                raise Unlabelled(
                    f"tokens {span.start} to {span.end} were made under {span.version!r} ({span.sequence}"
                    + (f", with {span.adapter.name} {span.adapter.version!r}" if span.adapter else "")
                    + "), which was not the committed version then",
                    sequence=span.sequence,
                    digest=span.digest,
                    retry_after_s=1.0,
                )
            # The earliest possible place leaves most room for the spans that follow.
            end, place = span.end, max(place, interval.first)
        if end != tokens:
            raise Unlabelled(f"the worker labelled {end} of {tokens} tokens", retry_after_s=1.0)


class LabelsOfRun:
    """The sequence of each label of one run, for the base (None) and for each adapter. A label that came twice has the
    later sequence."""

    def __init__(self) -> None:
        self._run: str | None = None
        self._sequences: OrderedDict[tuple[str | None, str], int] = OrderedDict()

    def add(self, version: WeightVersion, run: str, adapter: str | None = None) -> None:
        """`run`: the present run."""
        if run != self._run:
            self._run = run
            self._sequences.clear()
        key = adapter, version.label
        if version.run == run and version.sequence >= self._sequences.get(key, 0):
            self._sequences[key] = version.sequence
            self._sequences.move_to_end(key)
            if len(self._sequences) > MAX_LABELS:
                self._sequences.popitem(last=False)

    def get(self, label: str, adapter: str | None = None) -> int | None:
        """The sequence that a label means to a request for this adapter: the later of the adapter's and the base's."""
        found = (self._sequences.get((name, label)) for name in {None, adapter})
        return max((sequence for sequence in found if sequence is not None), default=None)


class Committed:
    """The record as this frontend's view follows it, and the states that it had before."""

    def __init__(self, view: MembershipView) -> None:
        self.history = History()
        self.labels_unread = False
        """The last read of the history, for an unknown label, failed."""
        self._labels = LabelsOfRun()
        self._labels_read_at = -math.inf
        self._reading_labels: asyncio.Task[None] | None = None
        self._view = view
        self._reading: asyncio.Task[None] | None = None

    @property
    def record(self) -> DecisionRecord | None:
        return self._view.record

    @property
    def sequence(self) -> int | None:
        """The sequence of the one state that may be served now. None: there is no state yet, or there are two."""
        record = self.record
        return record.sequence if record is not None and record.rolling_from is None else None

    def start(self) -> None:
        if self.record is not None:
            self._on_record(self.record)
        self._view.listen_record(self._on_record)

    def _on_record(self, record: DecisionRecord) -> None:
        self.history.add(record, asyncio.get_running_loop().time())
        run = record.version.run
        self._labels.add(record.version, run)
        for name, adapter in record.adapters.items():
            self._labels.add(adapter.version, run, name)

    def sequence_of(self, label: str, adapter: str | None) -> int | None:
        """The sequence of a label in the present run, as a request for this adapter means it. None: it is unknown."""
        return self._labels.get(label, adapter)

    async def learn_label(self, label: str, adapter: str | None) -> None:
        """Looks for an unknown label in the history."""
        if self.sequence_of(label, adapter) is not None:
            return
        if self._reading_labels is None or self._reading_labels.done():
            now = asyncio.get_running_loop().time()
            if now < self._labels_read_at + LABELS_INTERVAL_S:
                return
            self._labels_read_at = now
            self._reading_labels = asyncio.create_task(self._read_labels())
        await asyncio.shield(self._reading_labels)

    async def _read_labels(self) -> None:
        try:
            entries = await read_history(self._view.bus, self._view.subjects.state)
        except PlaneError as error:
            log.warning("the history could not be read: %s", error)
            self.labels_unread = True
            return
        self.labels_unread = False
        for entry in reversed(entries):
            target = entry.target or {}
            if entry.version is not None and self.record is not None and target.get("op") != "unload":
                self._labels.add(entry.version, self.record.version.run, target.get("name"))

    async def is_known(self, version: WeightVersion) -> bool:
        """Whether this version of the base was ever committed. Asks the leader if it is unknown."""
        if self.history.interval(key_of(version)) is None:
            await self.try_read()
        return self.history.interval(key_of(version)) is not None

    async def learn(self, spans: Sequence[VersionSpan]) -> None:
        """Asks the leader about states that are unknown here."""
        if not self.history.knows(spans):
            await self.try_read()

    async def try_read(self) -> None:
        """Reads the record from the leader, if it answers. Concurrent callers share one read."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        try:
            await self._view.read_record()
        except PlaneError as error:
            log.warning("the record could not be read: %s", error)
