"""How an IpcSender and its receivers speak: what both sides must agree on.

Over a Unix socket of the kind SEQPACKET under an abstract name, which nobody has to remove. A message is one packet: a
small msgpack map. The bytes of the weights, and the manifest, which can be large, are in memory that has no name and
comes as descriptors with the first packet; the kernel frees it when the last process that has it ends.

    trainer → receiver   {protocol, manifest, buffer, cuda} and the descriptors of the manifest and of the buffers
                         {handles}                     of two buffers on its GPU, for a receiver that has said which
                         {bucket: 0}, {bucket: 1}, …   each in its turn, in the buffer number % BUFFERS, or
                         {bucket, starts}              where each tensor that has bytes begins in its own descriptor
                         {bucket, starts, handles}     or in its own share on the receiver's GPU
                         {end: digest | None}          of the version, in the turn after the last bucket
                         {error: text}                 in place of any of them
    receiver → trainer   {gpu: UUID}                   of its own, where the buffers are on GPUs
                         {taken: 0}, {taken: 1}, …     one for each turn; the buffer may be used again
                         {closed: turns}               before the last turn: it has given up the GPU's memory, that of
                                                       the buffers and of the first so many turns
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

import msgpack

from rl_plane.errors import Unsupported
from rl_plane.weights.manifest import ALIGN_BYTES, Manifest

BACKEND = "ipc"

PROTOCOL = 3

BUFFERS = 2
"""One is packed while the other is read."""

MAX_PACKET_BYTES = 64 << 10
"""The largest has the handles of a bucket's tensors. Three, which may be on their way at once, fit into a socket."""

MAX_MANIFEST_BYTES = 256 << 20
"""MAX_TENSORS tensors, their names, shapes and digests: some 200 bytes each, and room."""

NAME = re.compile(r"rl-plane-ipc-[0-9a-f]{32}")
"""Of a socket. Nothing else can be connected to by asking a worker for an update."""

F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1: only the maps that are there already may write. Not in Python's `fcntl`."""

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def check_platform() -> None:
    if sys.platform != "linux":
        raise Unsupported(
            "ipc needs Linux: memory and sockets without names",
            field="transport.backend",
            fix="use nixl or filesystem",
        )


def address(name: str) -> str:
    return f"\0{name}"


def same_user(connection: socket.socket) -> bool:
    """Is the process at the other end (of a connection that we made: the one that listens) of our user? Others may
    know the name: it is in /proc/net/unix."""
    return _credentials(connection)[1] == os.geteuid()


def peer_pid(connection: socket.socket) -> int:
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def buffer_bytes(manifest: Manifest) -> int:
    """A buffer has room for every bucket."""
    return max(ALIGN_BYTES, *(bucket.nbytes for bucket in manifest.buckets))


def buffer_count(manifest: Manifest) -> int:
    return min(BUFFERS, len(manifest.buckets))


def send_packet(connection: socket.socket, content: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(connection, [msgpack.packb(content)], descriptors)


def read_packet(connection: socket.socket, max_descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
    """EOFError when the other side has gone, ValueError for what is no packet of ours. The descriptors are the
    caller's."""
    data, descriptors, flags, _ = socket.recv_fds(
        connection, MAX_PACKET_BYTES, max_descriptors, socket.MSG_CMSG_CLOEXEC
    )
    try:
        if not data:
            raise EOFError("the other side has gone")
        if flags & socket.MSG_TRUNC:
            raise ValueError(f"a packet of more than {MAX_PACKET_BYTES} bytes")
        return _content(data), descriptors
    except (EOFError, ValueError):
        close_all(descriptors)
        raise


def _content(data: bytes) -> dict[str, Any]:
    try:
        content = msgpack.unpackb(data)
    except Exception as error:  # msgpack has no common root for them
        raise ValueError(f"a packet that can't be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"a packet that holds a {type(content).__name__}")
    return content


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def seals(descriptor: int) -> int:
    """0 of what can have none."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return 0
