"""Frames between two processes of the plane: four bytes of length, big-endian, then that many bytes of msgpack."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgpack

MAX_FRAME_BYTES = 64 << 20
"""The largest frame describes the tensors of a model: some 100 bytes for each of half a million."""

_LENGTH = struct.Struct(">I")


def frame_of(content: Any) -> bytes:
    """Encodes a frame. ValueError: it is larger than a reader accepts."""
    data: bytes = msgpack.packb(content)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(data)} bytes is too large; at most {MAX_FRAME_BYTES} are sent")
    return _LENGTH.pack(len(data)) + data


def send_frame(connection: socket.socket, content: Any) -> None:
    connection.sendall(frame_of(content))


def read_frame(connection: socket.socket, max_bytes: int | None = None) -> dict[str, Any]:
    """Reads a frame. EOFError: the other side has closed. ValueError: the bytes are not a frame. `max_bytes` None:
    MAX_FRAME_BYTES."""
    limit = MAX_FRAME_BYTES if max_bytes is None else max_bytes
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > limit:
        raise ValueError(f"a frame of {length} bytes is too large; at most {limit} are read")
    content = msgpack.unpackb(_read(connection, length))
    if not isinstance(content, dict):
        raise ValueError(f"a frame has a {type(content).__name__} in place of a map")
    return content


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError("the other side has closed the connection")
        data += piece
    return bytes(data)
