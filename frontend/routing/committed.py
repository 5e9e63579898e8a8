"""The committed states that this frontend has known: tokens of any other are not delivered."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl_plane.commit.history import read_history
from rl_plane.errors import PlaneError, StaleWeights, Unlabelled
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.generation import GenerateDelta, VersionSpan, unwitnessed
from rl_plane.protocol.record import LEASE_MARGIN_S, SERVING_LEASE_S, DecisionRecord, Held
from rl_plane.protocol.versions import WeightVersion

log = logging.getLogger("frontend.routing.committed")

MAX_HISTORY = 1024
"""States back that a reply may name: a stream that is older than a thousand updates is a mistake."""
STALE_AFTER_S = SERVING_LEASE_S + LEASE_MARGIN_S
"""So long after an update has ended no worker that follows the record still makes tokens by the weights before."""

MAX_LABELS = 4096
"""Labels of the present run that are remembered, the latest ones: a request may demand one."""
LABELS_INTERVAL_S = 1.0
"""The history is not read more often for labels that nobody knows."""

Key = tuple[str | None, int | None, str | None, tuple[str, int, str] | None]
"""What a token was made by: run, sequence and digest of the base; name, sequence and digest of the adapter."""


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
    """The places at which a key was committed."""

    first: int
    last: int
    replaced_at: float | None = None
    """When an update that ended without it became known; loop seconds."""

    def is_stale(self, now: float) -> bool:
        return self.replaced_at is not None and now - self.replaced_at > STALE_AFTER_S


class History:
    """What was committed, in the order in which it became known. Each record that changes that is a place. Time is
    passed in: loop seconds."""

    def __init__(self) -> None:
        self._intervals: OrderedDict[Key, Interval] = OrderedDict()
        self._now: set[Key] = set()
        self._lapsed: set[Key] = set()
        """Not committed any more, but the update that replaced it goes on."""
        self.count = 0
        """Of all places ever: the newest one."""

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
        """All that can be known of them."""
        return all(span.sequence is None or key_of_span(span) in self._intervals for span in spans)

    def check(self, spans: Sequence[VersionSpan], tokens: int, since: int) -> None:
        """Unlabelled unless the spans cover exactly these tokens, by states that were committed from place
        `since` on (where the request began), in their order."""
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
            # The earliest place that it can have been leaves most room for what follows.
            end, place = span.end, max(place, interval.first)
        if end != tokens:
            raise Unlabelled(f"the worker labelled {end} of {tokens} tokens", retry_after_s=1.0)


class Labels:
    """What made the tokens of one stream, as far as it has come."""

    def __init__(
        self,
        history: History,
        adapter: str | None,
        since: int,
        may_make: Callable[[VersionSpan], bool] = lambda span: True,
        witnesses: bool = True,
    ) -> None:
        """`adapter`: that the request names; `since`: the history's place at which it was sent; `may_make`: whether
        the worker may still make tokens by these weights, as far as it has told; `witnesses`: whether its engine can
        tell which weights make them."""
        self._history = history
        self._adapter = adapter
        self._since = since
        self._may_make = may_make
        self._witnesses = witnesses
        self._tokens = 0
        self._spans: Sequence[VersionSpan] = ()
        self._last: Interval | None = None
        """Of the last span."""

    def take(self, delta: GenerateDelta, arrived: float) -> None:
        """Unlabelled or StaleWeights where the delta may not be delivered. `arrived`: when it came, not when its reader
        took it. What came late was still made in time where the worker has gone on to other weights: it was kept there
        for a slow reader."""
        delivered = self._tokens
        self._tokens += len(delta.token_ids)
        if not self._witnesses:
            self._check_unknown(delta)
            return
        if delta.spans or delta.finish_reason is not None:
            self._check(delta.spans, delivered)
        if not delta.token_ids:
            return
        if self._last is None:
            raise Unlabelled("the worker does not say which weights made its tokens", retry_after_s=1.0)
        span = self._spans[-1]
        if self._last.is_stale(arrived) and self._may_make(span):
            raise StaleWeights(
                f"the worker still generates under {span.version!r} ({span.sequence}), which was replaced more than "
                f"{STALE_AFTER_S:g} s ago",
                sequence=span.sequence,
                digest=span.digest,
                retry_after_s=1.0,
            )

    def _check_unknown(self, delta: GenerateDelta) -> None:
        """Nothing is delivered in silence: the worker itself says that it can't tell."""
        due = delta.spans or delta.finish_reason is not None or self._tokens == len(delta.token_ids)
        if due and delta.spans != unwitnessed(self._tokens):
            raise Unlabelled("the worker's engine can't witness, and its tokens don't say so", retry_after_s=1.0)

    def _check(self, spans: Sequence[VersionSpan], delivered: int) -> None:
        self._history.check(spans, self._tokens, self._since)
        if any((span.adapter.name if span.adapter else None) != self._adapter for span in spans):
            raise Unlabelled(
                f"the tokens were not made with {f'the adapter {self._adapter!r}' if self._adapter else 'the base'}",
                retry_after_s=1.0,
            )
        before = len(self._spans)
        told = [(span.start, key_of_span(span)) for span in spans[:before]]
        same = told == [(span.start, key_of_span(span)) for span in self._spans]
        if not same or (before and spans[before - 1].end < delivered):
            raise Unlabelled("the worker has changed its word on tokens that were delivered", retry_after_s=1.0)
        self._spans = spans
        if spans:
            self._last = self._history.interval(key_of_span(spans[-1]))


class LabelsOfRun:
    """The sequence that each label of one run has, of the base (None) and of each adapter: the latest, where one came
    twice."""

    def __init__(self) -> None:
        self._run: str | None = None
        self._sequences: OrderedDict[tuple[str | None, str], int] = OrderedDict()

    def add(self, version: WeightVersion, run: str, adapter: str | None = None) -> None:
        """`run`: the present one."""
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
        """For a request that names this adapter: the later of its own and the base's."""
        found = (self._sequences.get((name, label)) for name in {None, adapter})
        return max((sequence for sequence in found if sequence is not None), default=None)


class Committed:
    """The record as this frontend's view follows it, and what it said before."""

    def __init__(self, view: MembershipView) -> None:
        self.history = History()
        self.labels_unread = False
        """The history could not be read when a label was last looked for there."""
        self._labels = LabelsOfRun()
        self._labels_read_at = -math.inf
        self._reading_labels: asyncio.Task[None] | None = None
        self._view = view
        self._reading: asyncio.Task[None] | None = None
        self._stop_listening: Callable[[], None] = lambda: None

    @property
    def record(self) -> DecisionRecord | None:
        return self._view.record

    @property
    def version(self) -> WeightVersion | None:
        return self.record.version if self.record else None

    @property
    def sequence(self) -> int | None:
        """Of the one state that may be served now; None: there is none yet, or two of them."""
        record = self.record
        return record.sequence if record is not None and record.rolling_from is None else None

    def start(self) -> None:
        if self.record is not None:
            self._learnt(self.record)
        self._stop_listening = self._view.listen_record(self._learnt)

    def stop(self) -> None:
        self._stop_listening()
        self._stop_listening = lambda: None

    def _learnt(self, record: DecisionRecord) -> None:
        self.history.add(record, asyncio.get_running_loop().time())
        run = record.version.run
        self._labels.add(record.version, run)
        for name, adapter in record.adapters.items():
            self._labels.add(adapter.version, run, name)

    def sequence_of(self, label: str, adapter: str | None) -> int | None:
        """Of the version of this label in the present run, as a request for this adapter means it; None: none is
        known."""
        return self._labels.get(label, adapter)

    async def learn_label(self, label: str, adapter: str | None) -> None:
        """Looks for one that is not known in the history."""
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

    def labels(self, adapter: str | None, may_make: Callable[[VersionSpan], bool], witnesses: bool) -> Labels:
        """For a request that is sent now; `may_make` and `witnesses` as in `Labels`."""
        return Labels(self.history, adapter, self.history.count, may_make, witnesses)

    async def is_known(self, version: WeightVersion) -> bool:
        """Was it ever committed, as a base?"""
        if self.history.interval(key_of(version)) is None:
            await self.try_read()
        return self.history.interval(key_of(version)) is not None

    async def learn(self, spans: Sequence[VersionSpan]) -> None:
        """Asks the leader about states that are not known here."""
        if not self.history.knows(spans):
            await self.try_read()

    async def try_read(self) -> None:
        """From the leader, if it answers; callers at one time share one read."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        try:
            await self._view.read_record()
        except PlaneError as error:
            log.warning("the record could not be read: %s", error)
