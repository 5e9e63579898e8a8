"""A receiver's connection to one peer in a relay: learns which buckets the peer has verified."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plane._util.framing import read_frame, send_frame
from rl_plane.protocol.relay import RelayPeer
from rl_plane.transports.nixl.channel import ReadSource
from rl_plane.transports.nixl.wire import NOT_YET, PROTOCOL

CONNECT_S = 3.0
"""The time in seconds to connect and to get the first answer. The peer has told the coordinator its address just
before, and answers on a thread of its own."""

AGAIN_S = 0.05
"""The interval in seconds at which a peer is asked again that has not begun to receive the update."""

MAX_NEWS_BYTES = 4 << 20
"""The longest list of verified buckets."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The peer receives the update too. Its memory can be read as `source` and `places` say."""

    peer: str
    source: ReadSource
    places: Any


@dataclass(frozen=True, slots=True)
class Verified:
    """The peer has verified these buckets."""

    peer: str
    buckets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Lost:
    """The peer is gone, or has ended its relay, or does not speak this protocol."""

    peer: str
    why: str


News = Offered | Verified | Lost


class PeerLink:
    """Listens to one peer on a thread of its own, and passes on what it hears, until `close`. Lost comes last."""

    def __init__(self, peer: RelayPeer, secret: str, tell: Callable[[News], None]) -> None:
        self._peer = peer
        self._secret = secret
        self._tell = tell
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        threading.Thread(target=self._listen, name=f"relay from {peer.worker}", daemon=True).start()

    def close(self) -> None:
        """Leaves the peer, which learns it at once."""
        self._closed.set()
        with self._lock, contextlib.suppress(OSError):
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        try:
            while not self._closed.is_set() and self._not_yet():
                self._closed.wait(AGAIN_S)
        except Exception as error:  # msgpack's errors have no common base
            self._tell(Lost(self._peer.worker, str(error) or type(error).__name__))
        else:
            self._tell(Lost(self._peer.worker, "it was left"))

    def _not_yet(self) -> bool:
        """Returns True if the peer has not begun. Otherwise raises when the connection ends."""
        name = self._peer.worker
        with socket.create_connection((self._peer.address, self._peer.port), CONNECT_S) as connection:
            with self._lock:
                self._connection = connection
            if self._closed.is_set():
                return True  # `close` came before there was a connection that it could end
            send_frame(connection, {"protocol": PROTOCOL, "secret": self._secret, "relay": True})
            answer = read_frame(connection, within_s=CONNECT_S)
            if answer.get("error") == NOT_YET:
                return True
            if not isinstance(answer.get("metadata"), bytes):
                raise ValueError(str(answer.get("error", "it gave no metadata"))[:200])
            source = ReadSource(
                connection.getpeername()[:2], self._secret, answer["metadata"], answer.get("reach")
            )
            self._tell(Offered(name, source, answer.get("places")))
            connection.settimeout(None)  # a peer that hangs has nothing that is wanted, and is not waited for
            while True:
                numbers = read_frame(connection, MAX_NEWS_BYTES).get("verified")
                if not isinstance(numbers, list) or not all(type(one) is int for one in numbers):
                    raise ValueError("it did not say which buckets it has")
                self._tell(Verified(name, numbers))
