"""Defines what both halves of `nixl` share: the agent, registered memory, and the protocol by which a receiver asks for
places.

A receiver asks over TCP, with one frame each way: four bytes of length, big-endian, and so many bytes of msgpack.

    receiver → sender   {protocol, secret}
    sender → receiver   {metadata, manifest, places, refetchable}   or {error}

`places` has for each bucket a list of `[address, bytes, device]`: one for the whole bucket, or one for each tensor.
`refetchable` says whether the version stays on offer after its update. The connection stays open while the receiver
pulls: when it ends, the source has died, or has withdrawn the weights.

In a relay a receiver asks its peers too, under the secret of the update:

    receiver → peer     {protocol, secret, relay: true}
    peer → receiver     {metadata, places}, and then {verified: [number of a bucket, …]} as they are verified
                        or {error: NOT_YET}: the receiver asks again a little later
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from rl_plane._util.interfaces import other_interfaces
from rl_plane.errors import Unsupported

BACKEND = "nixl"
PROTOCOL = 2
NOT_YET = "not_yet"
"""A peer's answer before it receives the update itself, and after it has ended it."""

EXTRA = "pip install 'rl-plane[nixl]'"

WAKE_US = 100_000
"""Microseconds that the agent's thread sleeps when it is idle. With nixl's default of 0 it keeps a core busy."""

NET_DEVICES = "UCX_NET_DEVICES"
"""UCX's variable for the network devices that it may use. `^` before the list: all but these."""

_environment = threading.Lock()

_ours: weakref.WeakSet[Any] = weakref.WeakSet()
"""The agents that this process has made."""


def have_nixl() -> bool:
    """True if the package is installed."""
    return importlib.util.find_spec("nixl") is not None


@contextlib.contextmanager
def _devices(host: str) -> Iterator[None]:
    """Keeps UCX from other IP interfaces than the one of `host`: over TCP it listens on each that it may use. RDMA
    devices are not affected, nor is a process whose operator has set the variable."""
    others = other_interfaces(host)
    with _environment:
        if NET_DEVICES in os.environ or not others:
            yield
            return
        os.environ[NET_DEVICES] = "^" + ",".join(others)
        try:
            yield
        finally:
            del os.environ[NET_DEVICES]


def make_agent(name: str, host: str) -> Any:
    """Makes a nixl_agent over UCX: RDMA if there is any, else shared memory or TCP at this machine's address
    `host`."""
    if not have_nixl():
        raise Unsupported("nixl is not installed here", field="transport.backend", fix=EXTRA)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # else nixl writes to stdout, which belongs to the program
    try:
        import nixl

        agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=[]))
        config = nixl._bindings.nixlAgentConfig()  # the public config can't set the delay
        config.useProgThread = True
        config.pthrDelay = WAKE_US
        agent.agent = nixl._bindings.nixlAgent(name, config)
        with _devices(host):
            agent.create_backend("UCX")
    except Exception as error:  # nixl's errors have no common base, and a broken install may raise any error
        raise Unsupported(
            f"nixl does not work here: {error}",
            field="transport.backend",
            fix=f"install it again ({EXTRA}), or use another transport",
        ) from error
    _ours.add(agent)
    return agent


def is_ours(agent: Any) -> bool:
    """True if this process has made the agent. A forked child has its parent's agents, and must not touch them."""
    return agent in _ours


def _leave_in_child() -> None:
    """Keeps a forked child from ending an agent, even when its interpreter ends.

    UCX would remove its connections from epoll sets that the child shares with its parent, and the parent would die. So
    each agent gets a reference that is never released.
    """
    for agent in list(_ours):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent))
    _ours.clear()


os.register_at_fork(after_in_child=_leave_in_child)


class RegisteredMemory:
    """Host memory that is registered with an agent. Keep the object while any process may read or write the memory."""

    def __init__(self, agent: Any, nbytes: int) -> None:
        self.nbytes = max(nbytes, 1)
        self.map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.registered = agent.register_memory([(self.address, self.nbytes, 0, "")], "DRAM")

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.map)[offset : offset + nbytes]
