"""Reads a source's memory over a TCP connection, where UCX would have nothing but TCP.

Over TCP UCX asks the source's process for the bytes, and ends this process if a reader dies before UCX has answered it.
Here a reader's death ends one thread of the source. No byte is copied beyond the kernel's own copies.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plane._util.framing import read_frame, send_frame
from rl_plane.transports.nixl.reads import READ_LIMITS, Piece
from rl_plane.transports.nixl.wire import PROTOCOL

Region = tuple[int, int]
"""The address and the length in bytes of some memory."""

CONNECT_S = 10.0
"""The time to connect in seconds. The source has just answered at the same address."""

SEND_S = 60.0
"""The time in seconds in which a reader must take some bytes that are on their way. A reader has given up before."""

CHUNK_BYTES = 1 << 20
"""The bytes after which a read shows its progress."""

MAX_ASKED_BYTES = 64 << 10
"""The longest request: the pieces of the largest read, with 20 bytes each."""


class ReadableMemory:
    """The memory of one offer: the only bytes that its readers get."""

    def __init__(self, regions: Iterable[Region]) -> None:
        joined: list[list[int]] = []
        for address, nbytes in sorted(one for one in regions if one[1]):
            if joined and address <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], address + nbytes)
            else:
                joined.append([address, address + nbytes])
        self._starts = [start for start, _ in joined]
        self._ends = [end for _, end in joined]

    def view(self, address: int, nbytes: int) -> memoryview:
        """The bytes at an address. ValueError: they are not all of this memory."""
        at = bisect.bisect_right(self._starts, address) - 1
        if nbytes <= 0 or at < 0 or address + nbytes > self._ends[at]:
            raise ValueError(f"{nbytes} bytes at {address} are not offered")
        return _memory_at(address, nbytes)


def _memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def serve_reads(connection: socket.socket, memory: ReadableMemory) -> None:
    """Sends a reader what it asks for, until either side closes the connection. An OSError, EOFError or ValueError ends
    it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        connection.settimeout(None)
        pieces = read_frame(connection, MAX_ASKED_BYTES).get("pieces")
        if not isinstance(pieces, list) or len(pieces) > READ_LIMITS.pieces:
            raise ValueError("it did not say what to read")
        views = [memory.view(address, nbytes) for address, nbytes in map(_checked, pieces)]
        connection.settimeout(SEND_S)
        for number, view in enumerate(views, 1):
            more = socket.MSG_MORE if number < len(views) else 0
            while view:
                view = view[connection.send(view, more) :]


def _checked(piece: object) -> Region:
    if not isinstance(piece, list) or len(piece) != 2 or not all(type(one) is int for one in piece):
        raise ValueError("a piece is not [address, bytes]")
    return piece[0], piece[1]


@dataclass(slots=True)
class TcpRead:
    """A read that was begun."""

    moves: Sequence[Piece]
    owner: Any
    """Keeps the memory here from being freed."""
    state: str = "PROC"
    """PROC, DONE, or why the read has failed."""
    arrived: int = 0
    """Bytes so far."""

    def look(self) -> str:
        return self.state

    def release(self) -> None:
        """Does nothing: the read ends by itself, or with its connection."""


class TcpReads:
    """The connection to one source. A thread does the reads in the order in which they were begun."""

    def __init__(self, where: tuple[str, int], secret: str, wake: Callable[[], None]) -> None:
        """Connects to the source's host and port `where`. `wake` is called when a read has ended."""
        self._where = where
        self._secret = secret
        self._wake = wake
        self._asked: queue.SimpleQueue[TcpRead | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = ""
        """Why no more reads are done."""
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._work, name="nixl tcp reads", daemon=True)
        self._thread.start()

    def begin(self, moves: Sequence[Piece], owner: Any) -> TcpRead:
        """Begins a read. `moves`: from where it reads, each with the address here. `owner` keeps the memory here from
        being freed."""
        read = TcpRead(moves, owner)
        with self._lock:
            if self._over:
                read.state = self._over
            else:
                self._asked.put(read)
        return read

    def close(self) -> None:
        """Ends the connection, and with it every read."""
        with self._lock:
            self._over = self._over or "the connection was closed"
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
        self._asked.put(None)

    def has_ended(self, within_s: float) -> bool:
        """Waits after `close`, and returns whether no more bytes can arrive."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        read: TcpRead | None = None
        why = "the connection was closed"
        try:
            with socket.create_connection(self._where, CONNECT_S) as connection:
                with self._lock:
                    if self._over:
                        return
                    self._connection = connection
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(None)  # the thread that waits for a read closes a connection that hangs
                send_frame(connection, {"protocol": PROTOCOL, "secret": self._secret, "read": True})
                while (read := self._asked.get()) is not None:
                    _take(connection, read)
                    read.state = "DONE"
                    self._wake()
        except Exception as error:  # a reader of `state` reports it
            why = str(error) or type(error).__name__
        finally:
            with self._lock:
                self._over, self._connection = self._over or why, None
                failed = [] if read is None else [read]
                while not self._asked.empty():
                    if (one := self._asked.get()) is not None:
                        failed.append(one)
            for one in failed:
                one.state = self._over
            self._wake()


def _take(connection: socket.socket, read: TcpRead) -> None:
    """Asks for the bytes of a read, and receives them."""
    send_frame(connection, {"pieces": [[address, nbytes] for _, (address, nbytes, _) in read.moves]})
    for here, (_, nbytes, _) in read.moves:
        place, done = _memory_at(here, nbytes), 0
        while done < nbytes:
            came = connection.recv_into(place[done : done + CHUNK_BYTES], 0, socket.MSG_WAITALL)
            if not came:
                raise EOFError("the other side has closed the connection")
            done += came
            read.arrived += came
