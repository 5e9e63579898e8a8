"""The receiving half of `nixl`: weights that are pulled, one-sided, out of the trainer's memory.

A request is `{backend: nixl, host: H, port: P, secret: K}`, as the sender's `open` returns it, or has one such object
for each share of a version (see `merged_delivery`). The buckets go into two
registered buffers: one is filled while the other is used. The connection to the source reports its death; a time bound
finds a source that hangs.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_plane._util.framing import read_frame, send_frame
from rl_plane.errors import DeadlineExceeded, EngineFailed, InvalidRequest, PlaneError
from rl_plane.protocol.relay import RelayPlan
from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.base import Delivery, RelayingTransport, TransportContext, check_fields
from rl_plane.transports.merged_delivery import SHARES, MergedDelivery, open_shares
from rl_plane.transports.nixl.channel import Channel, ReadSource
from rl_plane.transports.nixl.peer_source import PeerSource, address_towards
from rl_plane.transports.nixl.reads import (
    PUBLISH,
    READ_LIMITS,
    READ_S,
    Piece,
    ReadLimits,
    checked_places,
    gone,
    refuse,
    split_reads,
)
from rl_plane.transports.nixl.relayed_pull import END_S, RelayedPull, Trainer
from rl_plane.transports.nixl.wire import BACKEND, PROTOCOL, RegisteredMemory, have_nixl, make_agent
from rl_plane.transports.packed_delivery import PackedDelivery, check_kind
from rl_plane.transports.relay.plan import LEAST_BYTES
from rl_plane.weights.checkpoint import Kind
from rl_plane.weights.manifest import Manifest

if not have_nixl():
    raise ModuleNotFoundError("nixl is not installed", name="nixl")

log = logging.getLogger("rl_plane.transports.nixl.receiver")

CONNECT_S = 10.0
"""The time for an answer in seconds. The trainer answers on a thread of its own, unless its process hangs."""


POLL_S = 0.0005
"""Seconds between two looks at a read. Within one machine it is done at once; on a network it takes milliseconds."""

BUFFERS = 2
"""One buffer is filled while the other is used."""

LANES = 4
"""The number of shares that are pulled at once. Each has its own buffers, and four fill most networks."""

MAX_PORT = 65535
MAX_TEXT_CHARS = 255

_FIELDS = ("host", "port", "secret")


class NixlTransport(RelayingTransport):
    """The `nixl` transport of one process. Its agent and buffers stay from one update to the next."""

    backend = BACKEND

    def __init__(self, context: TransportContext, limits: ReadLimits = READ_LIMITS) -> None:
        self.limits = limits
        self._nats_url = context.nats_url
        self._idle: list[Puller] = []
        self._peer_source: PeerSource | None = None

    def init(self, config: Mapping[str, Any]) -> None:
        check_fields(BACKEND, config)
        self._idle = self._idle or [Puller(address_towards(self._nats_url))]

    def destroy(self) -> None:
        self._idle.clear()
        source, self._peer_source = self._peer_source, None
        if source is not None:
            source.close()

    def open(self, request: Mapping[str, Any], kind: Kind) -> PackedDelivery | MergedDelivery:
        if SHARES in request:
            return open_shares(BACKEND, request, LANES, lambda share: self._pull(share, kind))
        return self._pull(request, kind)

    def _pull(self, request: Mapping[str, Any], kind: Kind) -> Pull:
        check_fields(BACKEND, request, *_FIELDS)
        connection = _connected(request)
        try:
            return Pull(self, *_asked(connection, request["secret"], kind), connection)
        except BaseException:
            connection.close()
            raise

    def open_relayed(self, request: Mapping[str, Any], kind: Kind, plan: RelayPlan) -> Delivery:
        check_fields(BACKEND, request, *_FIELDS)
        connection = _connected(request)
        try:
            manifest, places, source, refetchable = _asked(connection, request["secret"], kind)
            small = sum(bucket.nbytes for bucket in manifest.buckets) < LEAST_BYTES
            if small or manifest.tensor_digests is None:  # without them, what a peer gives could not be checked
                return Pull(self, manifest, places, source, refetchable, connection)
            return RelayedPull(self, manifest, Trainer(connection, source, places), plan, refetchable)
        except BaseException:
            connection.close()
            raise

    def offer(self, tensors: Mapping[str, HostTensor]) -> Mapping[str, Any]:
        return self.peer_source().offer(tensors)

    def withdraw(self) -> None:
        if self._peer_source is not None:
            self._peer_source.withdraw()

    def peer_source(self) -> PeerSource:
        """From it other workers read what this process has. It listens from now on."""
        if self._peer_source is None:
            self._peer_source = PeerSource(address_towards(self._nats_url))
        return self._peer_source

    def relay_address(self) -> tuple[str, int]:
        return self.peer_source().address

    def end_relay(self) -> None:
        if self._peer_source is not None:
            self._peer_source.end_relay()

    def take(self, host: str) -> Puller:
        """An idle Puller at this machine's address `host`, or a new one."""
        idle = self._idle.pop() if self._idle else None
        return idle if idle is not None and idle.host == host else Puller(host)

    def give_back(self, puller: Puller) -> None:
        """Returns a Puller after an update without an error."""
        self._idle = [*self._idle[-LANES + 1 :], puller]


class Puller:
    """An agent with its registered buffers."""

    def __init__(self, host: str) -> None:
        """`host`: this machine's address on the network of the source."""
        self.host = host
        self.agent = make_agent(f"rl-plane-{secrets.token_hex(8)}", host)
        self._buffers: list[RegisteredMemory] = []

    def buffers(self, count: int, nbytes: int) -> Sequence[RegisteredMemory]:
        if len(self._buffers) < count or self._buffers[0].nbytes < nbytes:
            for memory in self._buffers:
                self.agent.deregister_memory(memory.registered)
            self._buffers.clear()  # first, to make room in memory
            self._buffers = [RegisteredMemory(self.agent, nbytes) for _ in range(count)]
        return self._buffers


class Pull(PackedDelivery):
    """The delivery of one version that is pulled from its source."""

    def __init__(
        self,
        transport: NixlTransport,
        manifest: Manifest,
        places: Sequence[Sequence[Piece]],
        source: ReadSource,
        refetchable: bool,
        connection: socket.socket,
    ) -> None:
        super().__init__(manifest, self._received(), refetchable=refetchable, close=self._end)
        self._transport = transport
        self._places = places
        self._source = source
        self._connection = connection
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="nixl pull")
        self._puller: Puller | None = None
        self._channel: Channel | None = None
        self._ended = False

    def _received(self) -> Iterator[memoryview]:
        """Yields each bucket while a thread reads the next one."""
        buckets = self._manifest.buckets
        buffers = self._begin(min(len(buckets), BUFFERS), max(bucket.nbytes for bucket in buckets))
        coming = self._ahead.submit(self._read, 0, buffers[0])
        for number, bucket in enumerate(buckets):
            coming.result()  # bounded, since each of its reads is
            if number + 1 < len(buckets):
                coming = self._ahead.submit(self._read, number + 1, buffers[(number + 1) % BUFFERS])
            yield buffers[number % BUFFERS].view(0, bucket.nbytes).toreadonly()

    def _end(self) -> None:
        self._ended = True
        self._ahead.shutdown(wait=True, cancel_futures=True)
        self._leave(clean=True)
        self._connection.close()

    def _leave(self, *, clean: bool) -> None:
        """Leaves the source. After an error the agent and its buffers are not used again, since bytes may still arrive,
        even after a read was released."""
        channel, self._channel = self._channel, None
        puller, self._puller = self._puller, None
        if channel is not None:
            channel.leave()
            clean &= channel.has_ended(END_S)
        if puller is not None and clean:
            self._transport.give_back(puller)

    def _begin(self, count: int, nbytes: int) -> Sequence[RegisteredMemory]:
        self._puller = self._transport.take(self._connection.getsockname()[0])
        try:
            self._channel = Channel(self._puller.agent, self._source)
        except Exception as error:  # nixl's errors have no common base
            self._look()
            raise refuse(f"its metadata can't be used: {error}") from error
        return self._puller.buffers(count, nbytes)

    def _read(self, number: int, buffer: RegisteredMemory) -> None:
        """Reads one bucket."""
        try:
            for pieces in split_reads(self._places[number], self._transport.limits):
                self._read_pieces(buffer, pieces)
        except PlaneError:
            self._leave(clean=False)
            raise
        except Exception as error:  # nixl's errors have no common base
            self._leave(clean=False)
            raise gone(error) from error.with_traceback(None)  # the frames of the traceback would keep the agent

    def _read_pieces(self, buffer: RegisteredMemory, pieces: Sequence[Piece]) -> None:
        assert self._channel is not None
        read = self._channel.begin(buffer, pieces)
        try:
            arrived, until = 0, time.monotonic() + READ_S
            while (state := read.look()) == "PROC":
                self._look()
                if read.arrived > arrived:
                    arrived, until = read.arrived, time.monotonic() + READ_S
                if time.monotonic() > until:
                    nbytes = sum(place[1] for _, place in pieces)
                    raise DeadlineExceeded(f"{nbytes} bytes did not come in {READ_S:g} s", fix=PUBLISH)
                time.sleep(POLL_S)
            if state != "DONE":
                raise gone(state)
        finally:
            read.release()
        self._look()

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


def _connected(request: Mapping[str, Any]) -> socket.socket:
    for name, fits in (("host", _is_text), ("port", _is_port), ("secret", _is_text)):
        if not fits(request.get(name)):
            raise InvalidRequest(
                f"transport.{name} is missing, or is not what a sender gives",
                field=f"transport.{name}",
                fix="pass on the `transport` that the sender's `open` gave",
            )
    try:
        return socket.create_connection((request["host"], request["port"]), CONNECT_S)
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(
            f"source_gone: no trainer listens at {request['host']}:{request['port']} ({error})",
            field="transport",
            fix="is the trainer alive, and reachable from this worker by that address? an update brings new weights",
        ) from error


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT_CHARS and value.isprintable()


def _is_port(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_PORT


def _asked(
    connection: socket.socket, secret: str, kind: Kind
) -> tuple[Manifest, Sequence[Sequence[Piece]], ReadSource, bool]:
    try:
        send_frame(connection, {"protocol": PROTOCOL, "secret": secret})
        answer = read_frame(connection)
    except TimeoutError as error:
        raise DeadlineExceeded(f"the trainer did not answer in {CONNECT_S:g} s", fix=PUBLISH) from error
    except (OSError, EOFError) as error:
        raise gone(error) from error
    except Exception as error:  # msgpack's errors have no common base
        raise refuse(f"it sent {error}") from error
    if isinstance(answer.get("error"), str):
        raise InvalidRequest(answer["error"][:500], field="transport", fix=PUBLISH)
    manifest = Manifest.from_wire(answer.get("manifest"))
    check_kind(manifest, kind)
    if not isinstance(answer.get("metadata"), bytes):
        raise refuse("it gave no metadata")
    connection.setblocking(False)
    places = checked_places(answer.get("places"), manifest.buckets)
    source = ReadSource(connection.getpeername()[:2], secret, answer["metadata"], answer.get("reach"))
    return manifest, places, source, answer.get("refetchable") is not False
