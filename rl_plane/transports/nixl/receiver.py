"""The receiving half of `nixl`: weights that are pulled, one-sided, out of the trainer's memory.

A request is `{backend: nixl, host: H, port: P, secret: K}`, as the sender's `open` returns it, or has one such object
for each share of a version (see `merged_delivery`). The tensors are read straight into their places, in slices that
are hashed while they are in the cache. Without places the buckets go into two registered buffers: one is filled while
the other is used. The connection to the source reports its death; a time bound finds a source that hangs.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rl_plane._util.framing import read_frame, send_frame
from rl_plane.errors import DeadlineExceeded, InvalidRequest
from rl_plane.protocol.relay import RelayPlan
from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.base import Delivery, RelayingTransport, TransportContext, check_fields
from rl_plane.transports.merged_delivery import SHARES, MergedDelivery, open_shares
from rl_plane.transports.nixl.channel import ReadSource
from rl_plane.transports.nixl.peer_source import PeerSource, address_towards
from rl_plane.transports.nixl.pull import Pull
from rl_plane.transports.nixl.puller import Puller
from rl_plane.transports.nixl.reads import (
    PUBLISH,
    READ_LIMITS,
    Piece,
    ReadLimits,
    checked_places,
    gone,
    refuse,
)
from rl_plane.transports.nixl.relayed_pull import RelayedPull, Trainer
from rl_plane.transports.nixl.wire import BACKEND, PROTOCOL, have_nixl
from rl_plane.transports.packed_delivery import PackedDelivery, check_kind
from rl_plane.weights.checkpoint import Kind
from rl_plane.weights.manifest import Manifest

if not have_nixl():
    raise ModuleNotFoundError("nixl is not installed", name="nixl")

log = logging.getLogger("rl_plane.transports.nixl.receiver")

LEAST_BYTES = 1 << 20
"""A receiver takes a smaller update from the trainer alone, in a few milliseconds."""

CONNECT_S = 10.0
"""The time for an answer in seconds. The trainer answers on a thread of its own, unless its process hangs."""


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
        self._idle: deque[Puller] = deque(maxlen=LANES)
        """Several lanes take and give back at the same time."""
        self._peer_source: PeerSource | None = None

    def init(self, config: Mapping[str, Any]) -> None:
        check_fields(BACKEND, config)
        if not self._idle:
            self._idle.append(Puller(address_towards(self._nats_url)))

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

    def offer(self, tensors: Mapping[str, HostTensor], adapter_config: bytes | None = None) -> Mapping[str, Any]:
        return self.peer_source().offer(tensors, adapter_config)

    def withdraw(self, transport: Mapping[str, Any]) -> None:
        if self._peer_source is not None:
            self._peer_source.withdraw(transport["secret"])

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
        with contextlib.suppress(IndexError):  # there is none
            if (idle := self._idle.pop()).host == host:
                return idle
        return Puller(host)

    def give_back(self, puller: Puller) -> None:
        """Returns a Puller after an update without an error."""
        self._idle.append(puller)


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
            fix="start the trainer at an address that this worker reaches, then send an update",
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
