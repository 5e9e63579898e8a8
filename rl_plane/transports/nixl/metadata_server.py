"""Where pullers learn where to pull from: who shows a key is told what is offered under it (see `nixl_wire`)."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from rl_plane._util.forks import not_for_children
from rl_plane._util.framing import frame_of, read_frame
from rl_plane.errors import InvalidRequest
from rl_plane.transports.nixl.wire import BACKEND, PROTOCOL
from rl_plane.weights.manifest import Manifest

log = logging.getLogger("rl_plane.transports.nixl.sender")

REQUEST_S = 10.0
"""A puller sends its request as soon as it has connected."""

ANSWER_S = 60.0
"""For it to take a manifest of megabytes, over any network."""

LEAVE_S = 1.0
"""For pullers to leave what is withdrawn: they look every half a millisecond while they read. One that stands still so
long finds, when it goes on, that it was withdrawn, and uses nothing of what it reads then."""

ACCEPT_AGAIN_S = 0.2
"""After a puller that could not be taken: without descriptors, or threads, the next one can't be either at once."""

MAX_REQUEST_BYTES = 1024

OTHER_PROTOCOL = frame_of({"error": f"this trainer speaks version {PROTOCOL}: update both sides"})
NOT_KEPT = frame_of({"error": "source_gone: these weights are not kept any more"})


class MetadataServer:
    """Tells those who know a version's key where it is. A thread for each that asks: they are as many as ranks."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=1024)
        except (OSError, UnicodeError) as error:
            raise InvalidRequest(
                f"can't listen at {host}:{port}: {getattr(error, 'strerror', None) or error}",
                field="options.host",
                fix="give an address of this machine, and a free port or 0",
            ) from error
        not_for_children.add(self._listener)
        self.port: int = self._listener.getsockname()[1]
        self._offers: dict[str, bytes] = {}
        self._pulling: dict[str, set[socket.socket]] = {}
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="nixl sender", daemon=True).start()

    def transport(self, key: str) -> dict[str, Any]:
        """Of the request for what is offered under this key."""
        return {"backend": BACKEND, "host": self.host, "port": self.port, "key": key}

    def offer(
        self,
        key: str,
        metadata: bytes,
        manifest: Manifest,
        places: Sequence[Sequence[tuple[int, int]]],
        *,
        refetchable: bool = True,
    ) -> None:
        """`metadata`: what an agent needs to read this memory, and nothing else of ours. `places`: for each bucket
        (address, bytes) of the whole of it, or of each of its tensors. `refetchable`: it will be kept. Again under the
        same key: those who pull from where it was have left as after `withdraw`, and may ask again."""
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
            pulling = self._pulling.pop(key, set())
            self._offers[key] = frame
            self._pulling[key] = set()
            self._dismiss(pulling)

    def withdraw(self, key: str) -> None:
        """Tells those who pull it, and waits until they have left, at most LEAVE_S."""
        with self._left:
            self._offers.pop(key, None)
            self._dismiss(self._pulling.pop(key, set()))

    def _dismiss(self, pulling: set[socket.socket]) -> None:
        """The lock is held."""
        for connection in pulling:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        self._left.wait_for(lambda: not pulling, LEAVE_S)
        for connection in pulling:
            _hang_up(connection)

    def close(self) -> None:
        with self._lock:
            keys = list(self._offers)
        for key in keys:
            self.withdraw(key)
        self._closed.set()
        _hang_up(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        """Until it is closed, whatever fails: workers heal from here for as long as the trainer lives."""
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed.wait(ACCEPT_AGAIN_S):
                    log.warning("a puller could not be accepted: %s", error)
                continue
            not_for_children.add(connection)
            serving = threading.Thread(target=self._serve, args=(connection,), name="nixl puller", daemon=True)
            try:
                serving.start()
            except RuntimeError as error:
                connection.close()
                self._closed.wait(ACCEPT_AGAIN_S)
                log.warning("a puller could not be served: %s", error)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            connection.settimeout(REQUEST_S)
            asked = read_frame(connection, MAX_REQUEST_BYTES)
            connection.settimeout(ANSWER_S)
            if asked.get("protocol") != PROTOCOL:
                connection.sendall(OTHER_PROTOCOL)
                return
            with self._held(str(asked.get("key")), connection) as answer:
                connection.sendall(answer or NOT_KEPT)
                if answer is not None:
                    connection.settimeout(None)
                    connection.recv(1)  # until one of us hangs up

    @contextlib.contextmanager
    def _held(self, key: str, connection: socket.socket) -> Iterator[bytes | None]:
        """The answer for a key, and a place among those who pull it."""
        with self._lock:
            answer = self._offers.get(key)
            pulling = self._pulling.get(key, set())
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
