"""Frames between two processes of the plane: four bytes of length, big-endian, then that many bytes of msgpack."""

from __future__ import annotations

import socket
import struct
import time
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


def read_frame(
    connection: socket.socket, max_bytes: int | None = None, within_s: float | None = None
) -> dict[str, Any]:
    """Reads a frame. EOFError: the other side has closed. ValueError: the bytes are not a frame.

    Args:
        connection: the socket.
        max_bytes: the longest frame; None for MAX_FRAME_BYTES.
        within_s: the time in seconds for the whole frame, however it is cut into pieces, after which TimeoutError
            comes. None: the socket's own time-out, for each piece.
    """
    limit = MAX_FRAME_BYTES if max_bytes is None else max_bytes
    until = None if within_s is None else time.monotonic() + within_s
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, until))
    if length > limit:
        raise ValueError(f"a frame of {length} bytes is too large; at most {limit} are read")
    content = msgpack.unpackb(_read(connection, length, until))
    if not isinstance(content, dict):
        raise ValueError(f"a frame has a {type(content).__name__} in place of a map")
    return content


def _read(connection: socket.socket, count: int, until: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        if until is not None:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the frame did not come in time")
            connection.settimeout(left_s)
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError("the other side has closed the connection")
        data += piece
    return bytes(data)
