"""Tells receivers that know a version's secret where in memory to pull it from (see `nixl.wire`)."""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from rl_plane._util.forks import not_for_children
from rl_plane._util.framing import frame_of, read_frame
from rl_plane._util.listening import listen_at
from rl_plane.errors import InvalidRequest
from rl_plane.transports.nixl.wire import BACKEND, PROTOCOL
from rl_plane.weights.manifest import Manifest

log = logging.getLogger("rl_plane.transports.nixl.sender")

REQUEST_S = 10.0
"""The time for a receiver's whole request in seconds. It sends the request as soon as it has connected."""

STRANGERS = 64
"""The most connections that have not asked yet. Each has a thread, and may be silent for REQUEST_S. Beyond them the
server closes the oldest."""

ANSWER_S = 60.0
"""The time for a receiver to take the answer in seconds: a manifest of megabytes, over a slow network."""

LEAVE_S = 1.0
"""The time in seconds for receivers to leave a version that is withdrawn. While they read they look for it every half
millisecond. A receiver that hangs longer finds later that the version was withdrawn, and uses nothing of what it
read."""

ACCEPT_AGAIN_S = 0.2
"""Seconds to wait after a failed accept: without descriptors or threads the next one fails at once."""

MAX_REQUEST_BYTES = 1024

OTHER_PROTOCOL = frame_of({"error": f"this trainer speaks version {PROTOCOL}: update both sides"})
NOT_KEPT = frame_of({"error": "source_gone: these weights are no longer kept"})


class MetadataServer:
    """Answers receivers over TCP, with a thread for each; there are as many as ranks, and STRANGERS.

    Only a receiver that knows a version's secret gets an answer about it. A receiver keeps its connection open while it
    pulls, so the server knows when it has left.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self._listener = listen_at(host, port)
        not_for_children.add(self._listener)
        self.port: int = self._listener.getsockname()[1]
        self._offers: dict[str, bytes] = {}
        """The answer to each secret."""
        self._strangers: dict[socket.socket, None] = {}
        """The connections that have not asked yet, the oldest first."""
        self._pulling: dict[str, set[socket.socket]] = {}
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="nixl sender", daemon=True).start()

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
            pulling = self._pulling.pop(secret, set())
            self._offers[secret] = frame
            self._pulling[secret] = set()
            self._dismiss(pulling)

    def withdraw(self, secret: str) -> None:
        """Ends an offer. Tells its receivers, and waits until they have left, at most LEAVE_S."""
        with self._left:
            self._offers.pop(secret, None)
            self._dismiss(self._pulling.pop(secret, set()))

    def _dismiss(self, pulling: set[socket.socket]) -> None:
        """Ends the connections of receivers. The caller holds the lock."""
        for connection in pulling:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        self._left.wait_for(lambda: not pulling, LEAVE_S)
        for connection in pulling:
            _hang_up(connection)

    def close(self) -> None:
        with self._lock:
            offered = list(self._offers)
        for secret in offered:
            self.withdraw(secret)
        self._closed.set()
        _hang_up(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        """Accepts receivers until `close`, whatever fails: workers heal from here as long as the trainer lives."""
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed.wait(ACCEPT_AGAIN_S):
                    log.warning("a receiver could not be accepted: %s", error)
                continue
            not_for_children.add(connection)
            self._add_stranger(connection)
            serving = threading.Thread(target=self._serve, args=(connection,), name="nixl puller", daemon=True)
            try:
                serving.start()
            except RuntimeError as error:
                with self._lock:
                    self._strangers.pop(connection, None)
                connection.close()
                self._closed.wait(ACCEPT_AGAIN_S)
                log.warning("a receiver could not be served: %s", error)

    def _add_stranger(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._strangers) >= STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _hang_up(oldest)  # its thread closes it
            self._strangers[connection] = None

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            try:
                asked = read_frame(connection, MAX_REQUEST_BYTES, REQUEST_S)
            finally:
                with self._lock:
                    self._strangers.pop(connection, None)
            connection.settimeout(ANSWER_S)
            if asked.get("protocol") != PROTOCOL:
                connection.sendall(OTHER_PROTOCOL)
                return
            with self._held(str(asked.get("secret")), connection) as answer:
                connection.sendall(answer or NOT_KEPT)
                if answer is not None:
                    connection.settimeout(None)
                    connection.recv(1)  # returns when either side closes the connection

    @contextlib.contextmanager
    def _held(self, secret: str, connection: socket.socket) -> Iterator[bytes | None]:
        """The answer for a secret. Meanwhile the connection counts as one of the receivers of that secret."""
        with self._lock:
            known = [one for one in self._offers if hmac.compare_digest(one.encode(), secret.encode())]
            answer = self._offers[known[0]] if known else None
            pulling = self._pulling.get(secret, set()) if known else set()
            pulling.add(connection)
        try:
            yield answer
        finally:
            with self._left:
                pulling.discard(connection)
                self._left.notify_all()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
