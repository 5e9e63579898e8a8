"""How a worker and an agent speak: over a Unix socket, one connection for each call, one frame each way.

A frame is four bytes of length, big-endian, and so much msgpack. The caller shuts its side of the connection down to
cancel; it does so by dying, too. An answer is `{value}` or `{error}`, the error as it goes on the plane's own wire.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from pathlib import Path
from typing import Any

import msgpack

MAX_FRAME_BYTES = 64 << 20
"""The largest answer is a model's tensors without their bytes: some 100 each, for half a million of them."""

MAX_SOCKET_DIRECTORY = 80
"""Characters: a Unix socket's whole path has at most 107."""

_LENGTH = struct.Struct(">I")


def socket_directory() -> Path:
    """A new one, which only the worker's user may enter."""
    path = tempfile.mkdtemp(prefix="rl-plane-")
    if len(path) > MAX_SOCKET_DIRECTORY:
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="rl-plane-", dir="/tmp")
    return Path(path)


def socket_of(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.sock"


def send_frame(connection: socket.socket, content: Any) -> None:
    data: bytes = msgpack.packb(content)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(data)} bytes, at most {MAX_FRAME_BYTES} are sent")
    connection.sendall(_LENGTH.pack(len(data)) + data)


def read_frame(connection: socket.socket) -> dict[str, Any]:
    """EOFError when the other side has gone, ValueError for what is no frame of ours."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES} are read")
    content = msgpack.unpackb(_read(connection, length))
    if not isinstance(content, dict):
        raise ValueError(f"a frame that holds a {type(content).__name__}")
    return content


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError("the other side has gone")
        data += piece
    return bytes(data)
