"""What both sides of a pull by NIXL share: an agent, registered memory, and how a puller asks where to pull from.

It asks over TCP, with one frame each way: four bytes of length, big-endian, and so much msgpack. The request is
`{protocol, key}`, the answer `{metadata, manifest, places}` or `{error}`. The connection stays open for as long as it
pulls: its end says that the source has died, or keeps these weights no longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from rl_plane.errors import Unsupported

BACKEND = "nixl"
PROTOCOL = 1

EXTRA = "pip install 'rl-plane[nixl]'"

MAX_FRAME_BYTES = 64 << 20
"""A manifest of the largest public checkpoints, with digests and places, takes half of it."""

WAKE_US = 100_000
"""How long the agent's own thread sleeps when nothing comes. With nixl's default of 0 it spins, on a whole core."""

_LENGTH = struct.Struct(">I")


def have_nixl() -> bool:
    return importlib.util.find_spec("nixl") is not None


def make_agent(name: str) -> Any:
    """A nixl_agent over UCX: RDMA where there is some, else shared memory or TCP."""
    if not have_nixl():
        raise Unsupported("nixl is not installed here", field="transport.backend", fix=EXTRA)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # else it writes to stdout, which is not its own
    import nixl

    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=[]))
    config = nixl._bindings.nixlAgentConfig()  # the public one can't set the delay
    config.useProgThread = True
    config.pthrDelay = WAKE_US
    agent.agent = nixl._bindings.nixlAgent(name, config)
    agent.create_backend("UCX")
    return agent


class Memory:
    """Host memory that is registered with an agent, once. Keep it as long as anybody may still read or write it."""

    def __init__(self, agent: Any, nbytes: int) -> None:
        self.nbytes = max(nbytes, 1)
        self.map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.registered = agent.register_memory([(self.address, self.nbytes, 0, "")], "DRAM")

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.map)[offset : offset + nbytes]


def send_frame(connection: socket.socket, content: Mapping[str, Any]) -> None:
    data: bytes = msgpack.packb(content)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(data)} bytes, at most {MAX_FRAME_BYTES} are sent")
    connection.sendall(_LENGTH.pack(len(data)) + data)


def read_frame(connection: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> dict[str, Any]:
    """EOFError when the other side has gone, ValueError for what is no frame of ours."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > max_bytes:
        raise ValueError(f"a frame of {length} bytes, at most {max_bytes} are read")
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
