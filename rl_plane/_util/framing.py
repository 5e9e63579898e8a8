"""Frames between two of our processes: four bytes of length, big-endian, and so much msgpack."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgpack

MAX_FRAME_BYTES = 64 << 20
"""The largest are a model's tensors without their bytes: some 100 each, for half a million of them."""

_LENGTH = struct.Struct(">I")


def frame_of(content: Any) -> bytes:
    """ValueError for what nobody would read."""
    data: bytes = msgpack.packb(content)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(data)} bytes, at most {MAX_FRAME_BYTES} are sent")
    return _LENGTH.pack(len(data)) + data


def send_frame(connection: socket.socket, content: Any) -> None:
    connection.sendall(frame_of(content))


def read_frame(connection: socket.socket, max_bytes: int | None = None) -> dict[str, Any]:
    """EOFError when the other side has gone, ValueError for what is no frame of ours. `max_bytes` None:
    MAX_FRAME_BYTES."""
    limit = MAX_FRAME_BYTES if max_bytes is None else max_bytes
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > limit:
        raise ValueError(f"a frame of {length} bytes, at most {limit} are read")
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
