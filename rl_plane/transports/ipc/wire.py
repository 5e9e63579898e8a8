"""The protocol between an IpcSender and its receivers.

It uses a Unix socket of the kind SEQPACKET with an abstract name, which need not be removed. A message is one packet: a
small msgpack map. The weights, and the manifest, which may be large, are in unnamed memory, whose descriptors come with
the first packet. The kernel frees that memory when the last process that holds it ends.

    trainer → receiver   {protocol, manifest, buffer, cuda}   with the descriptors of the manifest and of the buffers
                         {handles}                     the two buffers on the GPU that the receiver has named
                         {bucket: 0}, {bucket: 1}, …   one turn each; the bucket is in the buffer number % BUFFERS
                         {bucket, starts}              a lent bucket: the start of each non-empty tensor in a
                                                       descriptor of its own
                         {bucket, starts, handles}     the same in shares on the receiver's GPU
                         {end: digest | None}          the version's digest, in the turn after the last bucket
                         {error: text}                 instead of any of these
    receiver → trainer   {secret}                      first of all; the trainer answers nothing before
                         {gpu: UUID}                   the receiver's GPU, if the buffers are on GPUs
                         {taken: 0}, {taken: 1}, …     one for each turn: its buffer may be used again
                         {closed: turns}               before the last turn: the receiver has closed the GPU's memory of
                                                       the buffers and of the first `turns` turns
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgpack

from rl_plane.errors import Unsupported
from rl_plane.weights.manifest import ALIGN_BYTES, Manifest

BACKEND = "ipc"

PROTOCOL = 4

BUFFERS = 2
"""One buffer is packed while the other is read."""

MAX_PACKET_BYTES = 64 << 10
"""The longest packet: the handles of a bucket's tensors. Three may be under way at once, and fit into a socket."""

MAX_MANIFEST_BYTES = 256 << 20
"""The longest manifest: MAX_TENSORS tensors with about 200 bytes each, and room."""

NAME = re.compile(r"rl-plane-ipc-[0-9a-f]{32}")
"""The name of a sender's socket. A request can't make a worker connect to any other socket."""

SECRET = re.compile(r"[0-9a-f]{32}")
"""The secret of an update, which a receiver has from the update's request."""

F_SEAL_FUTURE_WRITE = 0x10
"""The seal (Linux 5.1) after which only existing maps may write. Python's `fcntl` does not have it."""


def check_platform() -> None:
    """Raises Unsupported unless this is Linux."""
    if sys.platform != "linux":
        raise Unsupported(
            "ipc needs Linux, for unnamed memory and abstract sockets",
            field="transport.backend",
            fix="use nixl or filesystem",
        )


def address(name: str) -> str:
    return f"\0{name}"


def buffer_bytes(manifest: Manifest) -> int:
    """The length of a buffer, which has room for each bucket."""
    return max(ALIGN_BYTES, *(bucket.nbytes for bucket in manifest.buckets))


def buffer_count(manifest: Manifest) -> int:
    return min(BUFFERS, len(manifest.buckets))


def send_packet(connection: socket.socket, content: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(connection, [msgpack.packb(content)], descriptors)


def read_packet(connection: socket.socket, max_descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Reads one packet, and the descriptors that came with it, which the caller must close.

    Raises EOFError if the peer is gone, and ValueError if the packet is not of this protocol.
    """
    data, descriptors, flags, _ = socket.recv_fds(
        connection, MAX_PACKET_BYTES, max_descriptors, socket.MSG_CMSG_CLOEXEC
    )
    try:
        if not data:
            raise EOFError("the other side is gone")
        if flags & socket.MSG_TRUNC:
            raise ValueError(f"a packet of more than {MAX_PACKET_BYTES} bytes")
        return _content(data), descriptors
    except (EOFError, ValueError):
        close_all(descriptors)
        raise


def _content(data: bytes) -> dict[str, Any]:
    try:
        content = msgpack.unpackb(data)
    except Exception as error:  # msgpack's errors have no common base
        raise ValueError(f"a packet that can't be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"a packet that holds a {type(content).__name__}")
    return content


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def seals(descriptor: int) -> int:
    """The seals of a descriptor; 0 if it can't have any."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return 0
