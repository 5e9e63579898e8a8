"""What both sides of a pull by NIXL share: an agent, registered memory, and how a puller asks where to pull from.

It asks over TCP, with one frame each way: four bytes of length, big-endian, and so much msgpack. The request is
`{protocol, key}`, the answer `{metadata, manifest, places, refetchable}` or `{error}`: for each bucket its places,
`[address, bytes, device]`, either one with all of it or one for each of its tensors; and whether it will be kept once
it is committed. The connection stays open for as long as it pulls: its end says that the source has died, or keeps
these weights no longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
import weakref
from typing import Any

from rl_plane.errors import Unsupported

BACKEND = "nixl"
PROTOCOL = 2

EXTRA = "pip install 'rl-plane[nixl]'"

WAKE_US = 100_000
"""How long the agent's own thread sleeps when nothing comes. With nixl's default of 0 it spins, on a whole core."""

_ours: weakref.WeakSet[Any] = weakref.WeakSet()
"""This process's agents."""


def have_nixl() -> bool:
    return importlib.util.find_spec("nixl") is not None


def make_agent(name: str) -> Any:
    """A nixl_agent over UCX: RDMA where there is some, else shared memory or TCP."""
    if not have_nixl():
        raise Unsupported("nixl is not installed here", field="transport.backend", fix=EXTRA)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # else it writes to stdout, which is not its own
    try:
        import nixl

        agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=[]))
        config = nixl._bindings.nixlAgentConfig()  # the public one can't set the delay
        config.useProgThread = True
        config.pthrDelay = WAKE_US
        agent.agent = nixl._bindings.nixlAgent(name, config)
        agent.create_backend("UCX")
    except Exception as error:  # nixl's errors have no root of their own, and a broken install raises any
        raise Unsupported(
            f"nixl does not work here: {error}",
            field="transport.backend",
            fix=f"install it anew ({EXTRA}), or use another transport",
        ) from error
    _ours.add(agent)
    return agent


def is_ours(agent: Any) -> bool:
    """It was made by this process: a child that is forked has its parent's, and must leave them alone."""
    return agent in _ours


def _leave_in_child() -> None:
    """Nothing there may end an agent, not even the interpreter's end: UCX would take its connections out of epoll sets
    that are the parent's too, which dies of that. So there is a reference to each that nobody gives back."""
    for agent in list(_ours):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent))
    _ours.clear()


os.register_at_fork(after_in_child=_leave_in_child)


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
