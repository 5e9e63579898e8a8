"""Accepts connections as long as a process listens, and serves each on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from rl_plane._util.forks import not_for_children

log = logging.getLogger("rl_plane.accepting")

STRANGERS = 64
"""The most connections that have not shown whose they are, unless a caller says otherwise. Each has a thread. Beyond
them the oldest is hung up."""

ACCEPT_AGAIN_S = 0.2
"""Seconds to wait after a failed accept: without descriptors or threads the next one fails at once."""


class Acceptor:
    """Accepts connections from `start` to `close`, whatever fails.

    A connection is a *stranger* until its thread calls `take`, or ends. The number of strangers is bounded, so that
    silent ones keep no other connection out.
    """

    def __init__(
        self, listener: socket.socket, serve: Callable[[socket.socket], None], name: str, most: int = STRANGERS
    ) -> None:
        """`serve`: serves a connection, and closes it. `name`: that of the threads. `most`: the bound of strangers."""
        self._listener = listener
        self._serve = serve
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        """The oldest comes first."""
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._accept, name=self._name, daemon=True).start()

    def take(self, connection: socket.socket) -> bool:
        """Takes a connection out of the strangers. Returns False if it was hung up before."""
        with self._lock:
            was_there = connection in self._strangers
            self._strangers.pop(connection, None)
            return was_there

    def close(self) -> None:
        """Ends the listening, and hangs up every stranger. Its thread closes it."""
        self._closed.set()
        hang_up(self._listener)  # closing alone does not wake the thread
        self._listener.close()
        with self._lock:
            for stranger in self._strangers:
                hang_up(stranger)
            self._strangers.clear()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                self._pause(error)
                continue
            not_for_children.add(connection)
            self._add_stranger(connection)
            try:
                threading.Thread(target=self._run, args=(connection,), name=self._name, daemon=True).start()
            except RuntimeError as error:
                self.take(connection)
                connection.close()
                self._pause(error)

    def _run(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        finally:
            self.take(connection)

    def _pause(self, error: Exception) -> None:
        if not self._closed.wait(ACCEPT_AGAIN_S):
            log.warning("a connection to %s could not be served: %s", self._name, error)

    def _add_stranger(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._strangers) >= self._most:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                hang_up(oldest)  # its thread closes it
            self._strangers[connection] = None


def hang_up(connection: socket.socket) -> None:
    """Ends a connection, or a listening. A thread that waits for it wakes."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
