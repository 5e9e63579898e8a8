"""Tells receivers that know a version's secret where in memory to pull it from (see `nixl.wire`).

A receiver serves its peers in a relay from here too, while its own buckets still come: see `RelayOffer`. A reader that
UCX does not bring to this memory reads it from here over TCP: see `nixl.tcp_reads`.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from rl_plane._util.accepting import Acceptor, hang_up
from rl_plane._util.forks import not_for_children
from rl_plane._util.framing import frame_of, read_frame, send_frame
from rl_plane._util.listening import listen_at
from rl_plane.errors import InvalidRequest
from rl_plane.transports.nixl.tcp_reads import ReadableMemory, Region, serve_reads
from rl_plane.transports.nixl.wire import BACKEND, NOT_YET, PROTOCOL, reach
from rl_plane.weights.manifest import Manifest

REQUEST_S = 10.0
"""The time for a receiver's whole request in seconds. It sends the request as soon as it has connected."""

ANSWER_S = 60.0
"""The time for a receiver to take the answer in seconds: a manifest of megabytes, over a slow network."""

LEAVE_S = 1.0
"""The time in seconds for receivers to leave a version that is withdrawn. While they read they look for it every half
millisecond. A receiver that hangs longer finds later that the version was withdrawn, and uses nothing of what it
read."""

RELAY_LOOK_S = 0.5
"""The interval in seconds at which the server looks whether a peer has left, while it has nothing to tell it."""

MAX_REQUEST_BYTES = 1024

OTHER_PROTOCOL = frame_of({"error": f"this trainer speaks version {PROTOCOL}: update both sides"})
NOT_KEPT = frame_of({"error": "source_gone: these weights are no longer kept"})
NOT_HERE_YET = frame_of({"error": NOT_YET})


class Offer:
    """Memory that can be read, and who reads it."""

    def __init__(self, frame: bytes, memory: ReadableMemory) -> None:
        self.frame = frame
        """The answer to a receiver: what it needs to read this memory."""
        self.memory = memory
        self.receivers: set[socket.socket] = set()
        """The connections of the receivers or peers that asked where the memory is."""
        self.reads: set[socket.socket] = set()
        """The connections over which the memory is read by TCP."""


class RelayOffer(Offer):
    """The buckets of one update that this process has verified, and serves to its peers."""

    def __init__(self, frame: bytes, memory: ReadableMemory, changed: threading.Condition) -> None:
        super().__init__(frame, memory)
        self.verified: list[int] = []
        """The numbers of the buckets, in the order in which they were verified."""
        self.ended = False
        self._changed = changed

    def has_news(self, told: int) -> bool:
        """Whether there is something to tell a peer that knows of the first `told` buckets."""
        return self.ended or len(self.verified) > told

    def announce(self, bucket: int) -> None:
        """Tells the peers that they may read this bucket. Its bytes do not change until the offer ends."""
        with self._changed:
            self.verified.append(bucket)
            self._changed.notify_all()


AnyOffer = TypeVar("AnyOffer", bound=Offer)


class MetadataServer:
    """Answers receivers over TCP, with a thread for each: as many as ranks, and a bounded number of strangers.

    Only a receiver that knows a version's secret gets an answer about it. A receiver keeps its connection open while it
    pulls, so the server knows when it has left.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        request_s: float = REQUEST_S,
        leave_s: float = LEAVE_S,
        relay_look_s: float = RELAY_LOOK_S,
    ) -> None:
        self._request_s = request_s
        self._leave_s = leave_s
        self._relay_look_s = relay_look_s
        self.host = host
        listener = listen_at(host, port)
        not_for_children.add(listener)
        self.port: int = listener.getsockname()[1]
        self._offers: dict[str, Offer] = {}
        """The offer of each secret."""
        self._relays: dict[str, RelayOffer] = {}
        """The relay of each secret."""
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._acceptor = Acceptor(listener, self._serve, "nixl sender")
        """It accepts whatever fails: workers heal from here as long as the trainer lives."""
        self._acceptor.start()

    def transport(self, secret: str) -> dict[str, Any]:
        """The `transport` object of the request for what is offered under this secret."""
        return {"backend": BACKEND, "host": self.host, "port": self.port, "secret": secret}

    def offer(
        self,
        secret: str,
        metadata: bytes,
        manifest: Manifest,
        places: Sequence[Sequence[tuple[int, int]]],
        *,
        refetchable: bool = True,
    ) -> None:
        """Offers a version. If the secret is in use, receivers have left the old memory when this returns, and may ask
        again.

        Args:
            secret: what a receiver must know; made for this version.
            metadata: what an agent needs to read this memory, and no other memory of this process.
            manifest: the version's tensors.
            places: for each bucket, (address, bytes) of the whole bucket or of each of its tensors.
            refetchable: the version stays on offer after its update.
        """
        answer = {
            "metadata": metadata,
            "reach": reach(),
            "manifest": manifest.to_wire(),
            "places": [[[*piece, 0] for piece in bucket] for bucket in places],
            "refetchable": refetchable,
        }
        try:
            frame = frame_of(answer)
        except ValueError as error:
            raise InvalidRequest(
                f"the manifest is too large: {error}", field="tensors", fix="use shorter names, or fewer tensors"
            ) from error
        with self._left:
            before = self._offers.get(secret)
            self._offers[secret] = Offer(frame, _memory_of(places))
            if before is not None:
                self._dismiss(before)

    def withdraw(self, secret: str) -> None:
        """Ends an offer. Tells its receivers, and waits until they have left, at most `leave_s`."""
        with self._left:
            offer = self._offers.pop(secret, None)
            if offer is not None:
                self._dismiss(offer)

    def _dismiss(self, offer: Offer) -> None:
        """Ends the connections of an offer. The caller holds the lock."""
        for connection in offer.reads:
            hang_up(connection)  # its thread sends nothing more from then on
        for connection in offer.receivers:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        self._left.wait_for(lambda: not (offer.receivers or offer.reads), self._leave_s)
        for connection in offer.receivers:
            hang_up(connection)

    def offer_relay(self, secret: str, metadata: bytes, places: Sequence[Sequence[tuple[int, int]]]) -> RelayOffer:
        """Offers the buckets of an update to the peers that know its secret, none of them yet. See `offer`."""
        each = [[[*piece, 0] for piece in bucket] for bucket in places]
        answer = {"metadata": metadata, "reach": reach(), "places": each}
        relay = RelayOffer(frame_of(answer), _memory_of(places), self._left)
        with self._left:
            self._relays[secret] = relay
        return relay

    def end_relay(self, relay: RelayOffer) -> None:
        """Ends a relay. Tells its readers, and waits until they have left, at most `leave_s`."""
        with self._left:
            self._relays = {secret: one for secret, one in self._relays.items() if one is not relay}
            relay.ended = True
            self._left.notify_all()
            self._dismiss(relay)

    def close(self) -> None:
        with self._lock:
            offered, relays = list(self._offers), list(self._relays.values())
        for relay in relays:
            self.end_relay(relay)
        for secret in offered:
            self.withdraw(secret)
        self._acceptor.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            asked = read_frame(connection, MAX_REQUEST_BYTES, self._request_s)
            self._acceptor.take(connection)
            connection.settimeout(ANSWER_S)
            if asked.get("protocol") != PROTOCOL:
                connection.sendall(OTHER_PROTOCOL)
                return
            secret = str(asked.get("secret"))
            if asked.get("read") is True:
                self._serve_reads(secret, connection)
            elif asked.get("relay") is True:
                self._serve_peer(secret, connection)
            else:
                self._serve_receiver(secret, connection)

    def _serve_receiver(self, secret: str, connection: socket.socket) -> None:
        with self._joined(lambda: _known(self._offers, secret), "receivers", connection) as offer:
            if offer is None:
                connection.sendall(NOT_KEPT)
                return
            connection.sendall(offer.frame)
            connection.settimeout(None)
            connection.recv(1)  # returns when either side closes the connection

    def _serve_reads(self, secret: str, connection: socket.socket) -> None:
        with self._joined(
            lambda: _known(self._offers, secret) or _known(self._relays, secret), "reads", connection
        ) as offer:
            if offer is not None:
                serve_reads(connection, offer.memory)

    def _serve_peer(self, secret: str, connection: socket.socket) -> None:
        """Tells a peer which buckets are verified, as they are, until the relay ends or the peer leaves."""
        with self._joined(lambda: _known(self._relays, secret), "receivers", connection) as relay:
            if relay is None:
                connection.sendall(NOT_HERE_YET)
                return
            connection.sendall(relay.frame)
            told = 0
            while not relay.ended:
                with self._left:
                    self._left.wait_for(partial(relay.has_news, told), self._relay_look_s)
                    new = relay.verified[told:]
                if new and not relay.ended:
                    send_frame(connection, {"verified": new})
                    told += len(new)
                elif _has_left(connection):
                    return
            connection.settimeout(None)
            connection.recv(1)  # returns when either side closes the connection

    @contextlib.contextmanager
    def _joined(
        self, find: Callable[[], AnyOffer | None], how: Literal["receivers", "reads"], connection: socket.socket
    ) -> Iterator[AnyOffer | None]:
        """The offer that `find` returns under the lock. The connection is in its set `how` until the block ends."""
        with self._lock:
            offer = find()
            joined: set[socket.socket] = set() if offer is None else getattr(offer, how)
            joined.add(connection)
        try:
            yield offer
        finally:
            with self._left:
                joined.discard(connection)
                self._left.notify_all()


def _known(offers: Mapping[str, AnyOffer], secret: str) -> AnyOffer | None:
    """The offer of this secret. The time that it takes tells nothing about the secrets."""
    known = [one for one in offers if hmac.compare_digest(one.encode(), secret.encode())]
    return offers[known[0]] if known else None


def _memory_of(places: Sequence[Sequence[Region]]) -> ReadableMemory:
    return ReadableMemory(region for bucket in places for region in bucket)


def _has_left(connection: socket.socket) -> bool:
    within_s = connection.gettimeout()
    # With a time-out Python would wait for a byte so long, whatever the flags of recv.
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(within_s)
