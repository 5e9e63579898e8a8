"""The delivery of a version that comes from the trainer and from other workers at once.

One thread does all reads. `Chooser` chooses them, and `PeerLink` reports what the peers have. The thread reads a bucket
into memory of this module, a *slot*. It checks the bucket against the digests of its tensors, and only then gives it to
the engine and to the peers. It does not use a slot again whose read has failed, because bytes may still arrive in it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import DeadlineExceeded, InvalidWeights, PlaneError, Unavailable
from rl_plane.protocol.relay import TRAINER, RelayPlan
from rl_plane.protocol.versions import HostTensor, algorithm_of, tensor_digest
from rl_plane.transports.nixl.channel import END_S, Channel, ChannelRead, ReadSource
from rl_plane.transports.nixl.metadata_server import RelayOffer
from rl_plane.transports.nixl.peer_link import Lost, News, Offered, PeerLink, Verified
from rl_plane.transports.nixl.pull import SourcePull
from rl_plane.transports.nixl.pull_context import PullContext
from rl_plane.transports.nixl.puller import Puller
from rl_plane.transports.nixl.reads import (
    PUBLISH,
    READ_S,
    Piece,
    ReadLimits,
    checked_places,
    gone,
    split_reads,
)
from rl_plane.transports.nixl.relay_chooser import BucketRead, Chooser
from rl_plane.transports.nixl.wire import RegisteredMemory
from rl_plane.weights.hashed_copy import copy_hashed
from rl_plane.weights.manifest import CHANGED_FIX, Manifest, PackedBucket, pack

log = logging.getLogger("rl_plane.transports.nixl.receiver")

POLL_S = (0.0002, 0.01)
"""Seconds between two looks at the reads: from the first, doubled as long as nothing happens, up to the last."""

DRAIN_S = 2.0
"""The time for reads by UCX that are under way when all buckets have come. A transfer takes less on a link of 20
Mbit/s."""

TRANSFER_BYTES = 4 << 20
"""The most bytes of one transfer by UCX, so that a slow source shows its progress. Over TCP a transfer shows it itself,
and the source sends the whole bucket without a pause."""

UNIT_BYTES = (1 << 20, 32 << 20)
"""The least and the most bytes of a bucket in a relay, unless a tensor is larger. A host passes a bucket on when it has
all of it, so with many small ones the hosts work at the same time."""
UNITS_OF_A_SHARE = 8
"""The number of buckets of a share, within UNIT_BYTES."""

SLOT_BYTES = 128 << 20
"""The most memory of all slots, unless two buckets need more."""

CHECKERS = min(4, os.cpu_count() or 1)
"""Threads that copy and hash what has come."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """The trainer, as it has answered."""

    connection: socket.socket
    source: ReadSource
    places: Sequence[Sequence[Piece]]


@dataclass(slots=True)
class _SourceChannel:
    channel: Channel
    places: Sequence[Sequence[Piece]]


@dataclass(slots=True)
class _StartedBucket:
    """A read of one bucket, as a run of transfers."""

    read: BucketRead
    slot: RegisteredMemory
    rest: Iterator[list[Piece]]
    transfer: ChannelRead | None = None
    arrived: int = 0
    """Bytes of this transfer so far."""
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class _Wake:
    """Something that the reading thread has asked for is done."""


@dataclass(frozen=True, slots=True)
class _Free:
    """The engine has taken what was in this slot."""

    slot: RegisteredMemory


@dataclass(slots=True)
class _Arrived:
    number: int
    tensors: Sequence[tuple[str, HostTensor]] = ()
    slot: RegisteredMemory | None = None
    """The memory of the tensors, if they have no place of their own."""


@dataclass(slots=True)
class _Reading:
    """The state of the reading thread."""

    chooser: Chooser
    puller: Puller
    sources: dict[str, _SourceChannel]
    offer: RelayOffer | None
    places: Mapping[str, memoryview]
    largest: int
    slots: int
    """The number of slots that may still be made."""
    made: list[RegisteredMemory] = field(default_factory=list)
    free: list[RegisteredMemory] = field(default_factory=list)
    lost: list[RegisteredMemory] = field(default_factory=list)
    """Slots of reads by UCX that have failed. Bytes may arrive in them at any later time."""
    left: list[Channel] = field(default_factory=list)
    """The channels to lost peers."""
    flights: list[_StartedBucket] = field(default_factory=list)
    checks: dict[Future[Sequence[tuple[str, HostTensor]] | None], tuple[BucketRead, RegisteredMemory]] = field(
        default_factory=dict
    )


class RelayedPull(SourcePull):
    """The delivery of one version that is pulled from several sources."""

    def __init__(
        self,
        context: PullContext,
        manifest: Manifest,
        trainer: Trainer,
        plan: RelayPlan,
        refetchable: bool,
    ) -> None:
        total = sum(bucket.nbytes for bucket in manifest.buckets)
        least, most = UNIT_BYTES
        nbytes = min(max(total // (plan.shares * UNITS_OF_A_SHARE), least), most)
        manifest, trainer = _cut(manifest, trainer, nbytes)
        super().__init__(manifest, iter(()), refetchable=refetchable, close=self._end)
        self._context = context
        self._connection = trainer.connection
        self._trainer = trainer
        self._secret = trainer.source.secret
        self._plan = plan
        self._limits = ReadLimits(min(context.limits.nbytes, TRANSFER_BYTES), context.limits.pieces)
        self._threads = ThreadPoolExecutor(1 + CHECKERS, thread_name_prefix="nixl relay")
        self._news: queue.SimpleQueue[News | _Free | _Wake] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[_Arrived | BaseException] = queue.SimpleQueue()
        self._links: list[PeerLink] = []
        self._complete = False

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        """Yields the tensors bucket by bucket, in the order in which the buckets come."""
        self.cancelled = cancelled
        self._threads.submit(self._read_all)
        for _ in self._manifest.buckets:
            one = self._out.get()  # bounded, since each read is
            if isinstance(one, BaseException):
                raise one
            yield from one.tensors
            if one.slot is not None:
                self._news.put(_Free(one.slot))
        self._complete = True

    def _end(self) -> None:
        self._ended = True
        for link in self._links:
            link.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        if not self._complete:
            self._context.end_relay()
        self._connection.close()

    # ---- the reading thread ----

    def _read_all(self) -> None:
        try:
            reading = self._begin()
            try:
                self._run(reading)
            finally:
                clean = self._leave(reading)
            if clean:
                self._context.give_back(reading.puller)
        except PlaneError as error:
            self._out.put(error)
        except Exception as error:  # nixl's errors have no common base
            self._out.put(gone(error).with_traceback(None))  # the frames of the traceback would keep the agent

    def _begin(self) -> _Reading:
        buckets = self._manifest.buckets
        puller = self._context.take(self._connection.getsockname()[0])
        channel = self._open_channel(partial(self._channel, puller, self._trainer.source))
        self._links = [PeerLink(peer, self._secret, self._news.put) for peer in self._plan.peers]
        largest = max(bucket.nbytes for bucket in buckets)
        sources = 1 + len(self._plan.peers)
        places = self._places()
        return _Reading(
            Chooser(self._plan, [bucket.nbytes for bucket in buckets], time.monotonic()),
            puller,
            {TRAINER: _SourceChannel(channel, self._trainer.places)},
            self._serve(places),
            places,
            largest,
            max(2, min(sources + CHECKERS, SLOT_BYTES // max(largest, 1))),
        )

    def _channel(self, puller: Puller, source: ReadSource) -> Channel:
        return Channel(puller.agent, source, lambda: self._news.put(_Wake()))

    def _places(self) -> Mapping[str, memoryview]:
        """The place of each tensor. Empty: some tensor has none."""
        if self.places is None:
            return {}
        found = {name: self.places(name, spec) for name, spec in self.specs.items()}
        placed = {name: place for name, place in found.items() if place is not None}
        return placed if len(placed) == len(found) else {}

    def _serve(self, places: Mapping[str, memoryview]) -> RelayOffer | None:
        """Serves the places to the peers. None: the tensors have no place in which they stay."""
        if not places:
            return None
        buckets = [[places[placed.name] for placed in bucket.tensors] for bucket in self._manifest.buckets]
        try:
            return self._context.peer_source().relay(self._secret, buckets)
        except Exception as error:  # nixl's errors have no common base
            log.warning("this worker gives nothing to its peers: %s", error)
            return None

    def _run(self, reading: _Reading) -> None:
        wait_s = POLL_S[0]
        while not reading.chooser.done:
            self._look()
            happened = self._hear(reading, wait_s)
            happened |= self._look_at_flights(reading)
            happened |= self._look_at_checks(reading)
            for peer in reading.chooser.hanging(time.monotonic()):
                self._lose(reading, peer, "it hangs")
            happened |= self._start(reading)
            wait_s = POLL_S[0] if happened else min(2 * wait_s, POLL_S[1])
        self.sources = reading.chooser.uses()

    def _hear(self, reading: _Reading, wait_s: float) -> bool:
        """Takes in what the peers and the engine have said. Waits for the first news."""
        heard = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._take_in(reading, self._news.get(timeout=wait_s))
                heard, wait_s = True, 0.0
        return heard

    def _take_in(self, reading: _Reading, news: News | _Free | _Wake) -> None:
        match news:
            case _Free(slot):
                reading.free.append(slot)
            case _Wake():
                pass
            case Lost(peer, why):
                self._lose(reading, peer, why)
            case Offered(peer, source, places):
                try:
                    checked = checked_places(places, self._manifest.buckets)
                    reading.sources[peer] = _SourceChannel(self._channel(reading.puller, source), checked)
                except Exception as error:  # nixl's errors have no common base
                    self._lose(reading, peer, str(error))
            case Verified(peer, buckets):
                if peer in reading.sources:  # not lost
                    reading.chooser.announced(peer, buckets)

    def _lose(self, reading: _Reading, peer: str, why: str) -> None:
        """Stops to read from a peer."""
        log.info("%s takes nothing more from %s: %s", self._plan.worker, peer, why)
        source = reading.sources.pop(peer, None)
        for flight in [one for one in reading.flights if one.read.source == peer]:
            assert source is not None, "it is read from"
            reading.flights.remove(flight)
            reading.slots += 1
            _release(flight)
            if not source.channel.by_tcp:
                reading.lost.append(flight.slot)
        reading.chooser.failed(peer)
        if source is not None:
            reading.left.append(source.channel)
            source.channel.leave()
        for link, plan in zip(self._links, self._plan.peers, strict=True):
            if plan.worker == peer:
                link.close()

    def _start(self, reading: _Reading) -> bool:
        """Begins the reads that there is a slot for."""
        started = False
        while reading.free or reading.slots:
            read = reading.chooser.next(time.monotonic())
            if read is None:
                break
            if not reading.free:
                reading.made.append(RegisteredMemory(reading.puller.agent, reading.largest))
                reading.free.append(reading.made[-1])
                reading.slots -= 1
            source = reading.sources[read.source]
            limits = self._context.limits if source.channel.by_tcp else self._limits
            flight = _StartedBucket(read, reading.free.pop(), split_reads(source.places[read.bucket], limits))
            reading.flights.append(flight)
            self._advance(reading, flight)
            started = True
        return started

    def _advance(self, reading: _Reading, flight: _StartedBucket) -> None:
        """Begins the next transfer of a bucket. After the last transfer it has the bucket checked."""
        _release(flight)
        pieces = next(flight.rest, None)
        if pieces is None:
            self._arrived(reading, flight)
            return
        flight.arrived, flight.until = 0, time.monotonic() + READ_S
        try:
            moves = [(flight.slot.address + at, there) for at, there in pieces]
            flight.transfer = reading.sources[flight.read.source].channel.begin(moves, flight.slot)
        except Exception as error:  # nixl's errors have no common base
            self._failed(reading, flight, str(error))

    def _look_at_flights(self, reading: _Reading) -> bool:
        happened = False
        for flight in list(reading.flights):
            if flight not in reading.flights:  # its peer is lost since
                continue
            transfer, now = flight.transfer, time.monotonic()
            assert transfer is not None, "each flight has one, or has failed"
            state = transfer.look()
            if transfer.arrived > flight.arrived:
                flight.arrived, flight.until = transfer.arrived, now + READ_S
                reading.chooser.progressed(flight.read, now)
            if state == "PROC" and now < flight.until:
                continue
            happened = True
            if state == "PROC":
                self._failed(reading, flight, f"nothing came in {READ_S:g} s", DeadlineExceeded)
            elif state != "DONE":
                self._failed(reading, flight, f"a read ended as {state}")
            else:
                self._advance(reading, flight)
        return happened

    def _failed(
        self, reading: _Reading, flight: _StartedBucket, why: str, kind: type[PlaneError] = Unavailable
    ) -> None:
        if flight.read.source == TRAINER:
            self._look()
            raise kind(f"the trainer: {why}", fix=PUBLISH)
        self._lose(reading, flight.read.source, why)

    # ---- what has come ----

    def _arrived(self, reading: _Reading, flight: _StartedBucket) -> None:
        reading.flights.remove(flight)
        read = flight.read
        reading.chooser.arrived(read, time.monotonic())
        if not reading.chooser.is_missing(read.bucket) or read.bucket in {
            other.bucket for other, _ in reading.checks.values()
        }:
            reading.chooser.superseded(read)
            reading.free.append(flight.slot)
            return
        bucket = self._manifest.buckets[read.bucket]
        check = self._threads.submit(self._checked, bucket, flight.slot, reading.places)
        check.add_done_callback(lambda _: self._news.put(_Wake()))
        reading.checks[check] = (read, flight.slot)

    def _checked(
        self, bucket: PackedBucket, slot: RegisteredMemory, places: Mapping[str, memoryview]
    ) -> Sequence[tuple[str, HostTensor]] | None:
        """The tensors of a bucket, in their places. None: one has not the stated digest."""
        assert self.tensor_digests is not None
        found = []
        for placed in bucket.tensors:
            data = slot.view(placed.offset, placed.spec.nbytes).toreadonly()
            stated = self.tensor_digests[placed.name]
            algorithm = algorithm_of(stated)
            if (place := places.get(placed.name)) is None:
                computed = tensor_digest(data, algorithm)
            else:
                computed = copy_hashed(place, data, algorithm)
                data = place
            if computed != stated:
                return None
            digest = stated if algorithm == self.algorithm else None
            found.append((placed.name, HostTensor(placed.spec, data, place is not None, digest)))
        return found

    def _look_at_checks(self, reading: _Reading) -> bool:
        done = [one for one in reading.checks if one.done()]
        for check in done:
            read, slot = reading.checks.pop(check)
            tensors = check.result()
            if tensors is None:
                reading.free.append(slot)
                self._wrong(reading, read)
                continue
            reading.chooser.verified(read)
            if reading.offer is not None:
                reading.offer.announce(read.bucket)
            if reading.places:
                reading.free.append(slot)
            self._out.put(_Arrived(read.bucket, tensors, None if reading.places else slot))
        return bool(done)

    def _wrong(self, reading: _Reading, read: BucketRead) -> None:
        if read.source == TRAINER:
            raise InvalidWeights(
                f"the trainer's bucket {read.bucket} has not the digests that it stated",
                field="transport",
                fix=CHANGED_FIX,
            )
        log.warning("%s got wrong bytes from %s", self._plan.worker, read.source)
        self._lose(reading, read.source, "its bytes are wrong")

    def _drain(self, reading: _Reading) -> None:
        """Waits for the reads by UCX that are under way, and whose buckets came from elsewhere, so that the agent and
        its memory can be used again."""
        until = time.monotonic() + DRAIN_S
        while time.monotonic() < until:
            flying = [one for one in reading.flights if not reading.sources[one.read.source].channel.by_tcp]
            for flight in flying:
                assert flight.transfer is not None, "each flight has one, or has failed"
                state = flight.transfer.look()
                if state != "PROC":
                    reading.flights.remove(flight)
                    _release(flight)
                    (reading.free if state == "DONE" else reading.lost).append(flight.slot)
            if not flying:
                return
            time.sleep(POLL_S[0])

    def _leave(self, reading: _Reading) -> bool:
        """Ends all reads. Returns whether the agent and its buffers can be used again."""
        self._drain(reading)
        flying = [one for one in reading.flights if not reading.sources[one.read.source].channel.by_tcp]
        for flight in reading.flights:
            _release(flight)
        for link in self._links:
            link.close()
        channels = [*reading.left, *(source.channel for source in reading.sources.values())]
        for channel in channels:
            channel.leave()
        ended = [channel.has_ended(END_S) for channel in channels]
        if flying or reading.lost or not all(ended):
            return False
        for slot in reading.made:
            reading.puller.agent.deregister_memory(slot.registered)
        return True


def _cut(manifest: Manifest, trainer: Trainer, nbytes: int) -> tuple[Manifest, Trainer]:
    """Cuts the trainer's buckets into those of the relay. Every receiver of an update cuts them alike."""
    buckets: list[PackedBucket] = []
    places: list[Sequence[Piece]] = []
    for bucket, pieces in zip(manifest.buckets, trainer.places, strict=True):
        offsets = {placed.name: placed.offset for placed in bucket.tensors}
        whole = len(pieces) == 1 and pieces[0][1][1] == bucket.nbytes
        each = {} if whole else dict(zip(offsets, pieces, strict=True))
        for unit in pack(((placed.name, placed.spec) for placed in bucket.tensors), nbytes):
            buckets.append(unit)
            begin = offsets[unit.tensors[0].name]
            if whole:
                address, _, device = pieces[0][1]
                places.append([(0, (address + begin, unit.nbytes, device))])
            else:
                places.append([(placed.offset, each[placed.name][1]) for placed in unit.tensors])
    return replace(manifest, buckets=tuple(buckets)), replace(trainer, places=places)


def _release(flight: _StartedBucket) -> None:
    transfer, flight.transfer = flight.transfer, None
    if transfer is not None:
        transfer.release()
