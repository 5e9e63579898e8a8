"""Defines what both halves of `nixl` share: the agent, registered memory, and the protocol by which a receiver asks for
places.

A receiver asks over TCP, with one frame each way: four bytes of length, big-endian, and so many bytes of msgpack.

    receiver → sender   {protocol, secret}
    sender → receiver   {metadata, reach, manifest, places, refetchable}   or {error}

`places` has for each bucket a list of `[address, bytes, device]`: one for the whole bucket, or one for each tensor.
`refetchable` says whether the version stays on offer after its update. The connection stays open while the receiver
pulls: when it ends, the source has died, or has withdrawn the weights. `reach` says by which ways other than TCP the
source's memory can be read (see `in_reach`). Where there is none, the receiver opens a second connection:

    receiver → sender   {protocol, secret, read: true}, and then {pieces: [[address, bytes], …]} for each read
    sender → receiver   the bytes of these pieces

In a relay a receiver asks its peers too, under the secret of the update:

    receiver → peer     {protocol, secret, relay: true}
    peer → receiver     {metadata, reach, places}, and then {verified: [number of a bucket, …]} as they are verified
                        or {error: NOT_YET}: the receiver asks again a little later
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_plane._util.interfaces import other_interfaces
from rl_plane.errors import Unsupported

BACKEND = "nixl"
PROTOCOL = 3
NOT_YET = "not_yet"
"""A peer's answer before it receives the update itself, and after it has ended it."""

EXTRA = "pip install 'rl-plane[nixl]'"

WAKE_US = 100_000
"""Microseconds that the agent's thread sleeps when it is idle. With nixl's default of 0 it keeps a core busy."""

NET_DEVICES = "UCX_NET_DEVICES"
"""UCX's variable for the network devices that it may use. `^` before the list: all but these."""

EMULATION = "UCX_PROTO_EMULATION_ENABLE"
"""UCX's variable for reads that the source's process must answer. Over TCP all reads are of this kind, and UCX ends a
source's process (`Fatal: unexpected error: Endpoint timeout`) if a reader dies before UCX has sent its answer."""

TRANSPORTS = "UCX_TLS"
"""UCX's variable for the ways that it may use."""

_RDMA_DEVICES = Path("/sys/class/infiniband")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")

_environment = threading.Lock()

_ours: weakref.WeakSet[Any] = weakref.WeakSet()
"""The agents that this process has made."""


def have_nixl() -> bool:
    """True if the package is installed."""
    return importlib.util.find_spec("nixl") is not None


def reach() -> dict[str, Any]:
    """The ways by which UCX can read this process's memory without TCP: `machine`, the same for processes that see each
    other on one machine, and `rdma`."""
    if set(os.environ.get(TRANSPORTS, "all").split(",")) <= {"tcp", "self"}:
        return {"machine": "", "rdma": False}
    try:
        machine = f"{_BOOT.read_text().strip()} {_PROCESSES.readlink()}"
    except OSError:  # not Linux, or /proc is hidden
        machine = ""
    return {"machine": machine, "rdma": _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())}


def in_reach(source: Any) -> bool:
    """Whether this process may read by UCX from a source with this `reach`."""
    own = reach()
    if not isinstance(source, dict):
        return False
    return bool(own["machine"] and own["machine"] == source.get("machine")) or (
        own["rdma"] and source.get("rdma") is True
    )


@contextlib.contextmanager
def _ucx_settings(host: str) -> Iterator[None]:
    """Keeps UCX from other IP interfaces than the one of `host`, since over TCP it listens on each that it may use, and
    from reads over TCP. A variable that the operator has set stays. RDMA devices are not affected."""
    import psutil

    others = other_interfaces(host, psutil.net_if_addrs())
    wanted = {EMULATION: "n", **({NET_DEVICES: "^" + ",".join(others)} if others else {})}
    with _environment:
        missing = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(missing)
        try:
            yield
        finally:
            for name in missing:
                del os.environ[name]


def make_agent(host: str) -> Any:
    """Makes a nixl_agent over UCX, at this machine's address `host`. It reads by RDMA, or another process's memory on
    this machine, and never over TCP: see `EMULATION`."""
    if not have_nixl():
        raise Unsupported("nixl is not installed here", field="transport.backend", fix=EXTRA)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # else nixl writes to stdout, which belongs to the program
    try:
        import nixl

        name = f"rl-plane-{secrets.token_hex(8)}"
        agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=[]))
        config = nixl._bindings.nixlAgentConfig()  # the public config can't set the delay
        config.useProgThread = True
        config.pthrDelay = WAKE_US
        agent.agent = nixl._bindings.nixlAgent(name, config)
        with _ucx_settings(host):
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
