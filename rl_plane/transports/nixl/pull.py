"""The delivery of a version that comes from one source.

One thread reads, while the receiver's thread hashes what has come.
"""

from __future__ import annotations

import logging
import queue
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from rl_plane.errors import DeadlineExceeded, EngineFailed, PlaneError
from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.nixl.channel import END_S, Channel, ChannelRead, ReadSource
from rl_plane.transports.nixl.pull_context import PullContext
from rl_plane.transports.nixl.puller import Puller
from rl_plane.transports.nixl.reads import (
    PUBLISH,
    READ_S,
    Piece,
    ReadLimits,
    gone,
    refuse,
    split_reads,
    tensor_pieces,
)
from rl_plane.transports.nixl.wire import RegisteredMemory
from rl_plane.transports.packed_delivery import Arrived, PackedDelivery
from rl_plane.weights.hashed_copy import address_of, read_hashed
from rl_plane.weights.manifest import Manifest, Placed

log = logging.getLogger("rl_plane.transports.nixl.receiver")

POLL_S = 0.0005
"""Seconds between two looks at a read. Within one machine it is done at once; on a network it takes milliseconds."""

BUFFERS = 2
"""One buffer is filled while the other is used."""

SLICE_BYTES = 8 << 20
"""The most bytes of a read into places. The shared cache of the cores still has such a slice when it is hashed. To
start a read takes a tenth of a millisecond, in which about 0.5 MB could be read."""


@dataclass(slots=True)
class _StartedRead:
    """A read that has begun."""

    read: ChannelRead
    nbytes: int
    until: float
    arrived: int = 0
    """Bytes so far."""


Places = Mapping[str, memoryview]
"""The place of each tensor of a bucket."""


class SourcePull(PackedDelivery):
    """A delivery that reads out of a trainer's memory."""

    _connection: socket.socket
    """The connection to the trainer. Its calls never block. It ends when the trainer dies, or withdraws the version."""
    _ended = False

    def _open_channel(self, make: Callable[[], Channel]) -> Channel:
        try:
            return make()
        except Exception as error:  # nixl's errors have no common base
            self._look()
            raise refuse(f"its metadata can't be used: {error}") from error

    def _look(self) -> None:
        """Raises if the update was cancelled, or the source has closed the connection."""
        if self._ended or self.cancelled():
            raise EngineFailed("staging was cancelled")
        try:
            self._connection.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            raise gone(error) from error
        raise gone("it has closed the connection")


class Pull(SourcePull):
    """The delivery of one version that is pulled from its source."""

    def __init__(
        self,
        context: PullContext,
        manifest: Manifest,
        pieces: Sequence[Sequence[Piece]],
        source: ReadSource,
        refetchable: bool,
        connection: socket.socket,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pieces`: where each bucket lies at the source. `clock`: seconds, for the bounds of its reads."""
        super().__init__(manifest, self._received(), refetchable=refetchable, close=self._end)
        self._context = context
        self._pieces = pieces
        self._source = source
        self._connection = connection
        self._clock = clock
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="nixl pull")
        self._puller: Puller | None = None
        self._channel: Channel | None = None
        self._came: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        """The bytes of each read that has ended, in order, or why there are no more."""
        self._ready = 0
        """The bytes that have come, and are not hashed yet."""

    def _received(self) -> Iterator[Arrived]:
        self._begin()
        buckets = self._manifest.buckets
        found = [self.find_places(bucket) for bucket in buckets]
        places = [one for one in found if one is not None]
        if len(places) == len(found) and self._registered(places):
            self._ahead.submit(self._read_all, places)
            for bucket, into in zip(buckets, places, strict=True):
                yield [self._hashed(placed, into[placed.name]) for placed in bucket.tensors]
        else:
            yield from self._through_buffers()

    def _through_buffers(self) -> Iterator[memoryview]:
        """Yields each bucket while a thread reads the next one."""
        assert self._puller is not None
        buckets = self._manifest.buckets
        buffers = self._puller.buffers(min(len(buckets), BUFFERS), max(bucket.nbytes for bucket in buckets))
        coming = self._ahead.submit(self._read, 0, buffers[0])
        for number, bucket in enumerate(buckets):
            coming.result()  # bounded, since each of its reads is
            if number + 1 < len(buckets):
                coming = self._ahead.submit(self._read, number + 1, buffers[(number + 1) % BUFFERS])
            yield buffers[number % BUFFERS].view(0, bucket.nbytes).toreadonly()

    def _hashed(self, placed: Placed, place: memoryview) -> tuple[str, HostTensor]:
        """Hashes a tensor in its place while it comes."""
        digest = read_hashed(place, self._await_bytes, self.algorithm)
        return placed.name, HostTensor(placed.spec, place, owned=True, digest=digest)

    def _await_bytes(self, _: int, piece: memoryview) -> None:
        """Waits until the next bytes have come, which are those of this piece."""
        while self._ready < piece.nbytes:
            came = self._came.get()  # bounded, since each read is
            if isinstance(came, BaseException):
                raise came
            self._ready += came
        self._ready -= piece.nbytes

    def _end(self) -> None:
        self._ended = True
        self._ahead.shutdown(wait=True, cancel_futures=True)
        self._came.put(EngineFailed("staging was cancelled"))  # if the reading had not begun
        self._leave(clean=True)
        self._connection.close()

    def _leave(self, *, clean: bool) -> None:
        """Leaves the source. After an error the agent and its memory are not used again, since bytes may still arrive,
        even after a read was released."""
        channel, self._channel = self._channel, None
        puller, self._puller = self._puller, None
        if channel is not None:
            channel.leave()
            clean &= channel.has_ended(END_S)
        if puller is not None and clean:
            puller.release()
            self._context.give_back(puller)

    def _begin(self) -> None:
        self._puller = self._context.take(self._connection.getsockname()[0])
        self._channel = self._open_channel(partial(self._source.channel, self._puller.agent))

    def _registered(self, places: Sequence[Places]) -> bool:
        """Registers the places. Returns False if they can't be registered."""
        assert self._puller is not None
        try:
            self._puller.register([place for bucket in places for place in bucket.values()])
        except Exception as error:  # nixl's errors have no common base
            log.warning("the weights are copied into their places, which can't be registered: %s", error)
            return False
        return True

    # ---- the reading thread ----

    def _read_all(self, places: Sequence[Places]) -> None:
        try:
            for number, into in enumerate(places):
                self._read(number, into)
        except BaseException as error:
            self._came.put(error)

    def _read(self, number: int, into: RegisteredMemory | Places) -> None:
        """Reads one bucket."""
        limits, pieces = self._context.limits, self._pieces[number]
        if isinstance(into, RegisteredMemory):
            moves = [(into.address + at, there) for at, there in pieces]
            ahead = 0
        else:
            bucket = self._manifest.buckets[number]
            each = zip(bucket.tensors, tensor_pieces(pieces, bucket), strict=True)
            moves = [(address_of(into[placed.name]), there) for placed, (_, there) in each]
            limits = ReadLimits(min(SLICE_BYTES, limits.nbytes), limits.pieces)
            ahead = self._context.limits.nbytes // limits.nbytes - 1
        try:
            self._transfer(split_reads(moves, limits), ahead)
        except PlaneError:
            self._leave(clean=False)
            raise
        except Exception as error:  # nixl's errors have no common base
            self._leave(clean=False)
            raise gone(error) from error.with_traceback(None)  # the frames of the traceback would keep the agent

    def _transfer(self, reads: Iterator[list[Piece]], ahead: int) -> None:
        """Carries out reads. While it waits for one read, up to `ahead` further reads are under way."""
        flights: deque[_StartedRead] = deque()
        try:
            for moves in reads:
                flights.append(self._started(moves))
                while flights and (len(flights) > ahead or flights[0].read.look() == "DONE"):
                    self._await(flights[0])
                    flights.popleft()
            while flights:
                self._await(flights[0])
                flights.popleft()
        finally:
            for flight in flights:
                flight.read.release()

    def _started(self, moves: list[Piece]) -> _StartedRead:
        """Starts a read from the source. `moves`: from where it reads, each with the address here."""
        assert self._channel is not None
        nbytes = sum(place[1] for _, place in moves)
        return _StartedRead(self._channel.begin(moves, self._puller), nbytes, self._clock() + READ_S)

    def _await(self, flight: _StartedRead) -> None:
        assert self._channel is not None
        if self._channel.by_tcp:  # its bytes come after those of the reads before
            flight.until = self._clock() + READ_S
        while (state := flight.read.look()) == "PROC":
            self._look()
            if flight.read.arrived > flight.arrived:
                flight.arrived, flight.until = flight.read.arrived, self._clock() + READ_S
            if self._clock() > flight.until:
                raise DeadlineExceeded(f"{flight.nbytes} bytes did not come in {READ_S:g} s", fix=PUBLISH)
            time.sleep(POLL_S)
        if state != "DONE":
            raise gone(state)
        flight.read.release()
        self._look()
        self._came.put(flight.nbytes)
