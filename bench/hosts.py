"""A lab of hosts on this machine: network namespaces behind one switch, with links of a given speed.

Each namespace has a process that only holds it. When the measuring process ends, however it ends, the kernel ends these
processes too, and then removes the namespaces with their links. So nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl_plane._util.processes import die_with_parent

TOOLS = ("ip", "tc", "unshare", "nsenter")
BURST_BYTES = 128 << 10
"""The most that leaves a link at once: the kernel sends packets of 64 KB."""
QUEUE_MS = 50
"""The longest wait in a link's queue."""


class NoLab(Exception):
    """This machine can't have a lab."""


@dataclass(frozen=True, slots=True)
class Host:
    """One host: its address, and the process that holds its namespace."""

    address: str
    holder: subprocess.Popen[bytes]
    switch: subprocess.Popen[bytes]
    port: str
    """The switch's end of the link."""

    def command(self, *arguments: str) -> list[str]:
        """The command that runs another one on this host."""
        return [*_inside(self.holder), *arguments]

    def set_rate(self, bits: int) -> None:
        """Sets the speed of the link, both ways."""
        for holder, device in ((self.switch, self.port), (self.holder, "eth0")):
            shape = ["rate", f"{bits}bit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
            _run(holder, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *shape)


@contextlib.contextmanager
def lab(count: int, bits: int) -> Iterator[Sequence[Host]]:
    """Yields hosts whose links have `bits` per second each way. NoLab says why there are none."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not sys.platform.startswith("linux") or missing or os.geteuid() != 0:
        raise NoLab(f"it needs Linux, root, and {', '.join(TOOLS)}")
    holders: list[subprocess.Popen[bytes]] = []
    try:
        holders.extend(_namespace() for _ in range(count + 1))
        switch, *own = holders
        _run(switch, "ip", "link", "add", "name", "switch", "type", "bridge")
        _run(switch, "ip", "link", "set", "switch", "up")
        hosts = [_linked(switch, holder, number) for number, holder in enumerate(own)]
        for host in hosts:
            host.set_rate(bits)
        yield hosts
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _namespace() -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own. It says a line when it is there."""
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo && exec sleep infinity"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=die_with_parent(),
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    if not holder.stdout.readline():
        holder.wait()
        raise NoLab(f"no network namespace can be made here: {holder.stderr.read().decode().strip()}")
    return holder


def _linked(switch: subprocess.Popen[bytes], holder: subprocess.Popen[bytes], number: int) -> Host:
    address, port = f"10.77.{number // 200}.{number % 200 + 1}", f"port{number}"
    _run(switch, *f"ip link add {port} type veth peer name eth0 netns {holder.pid}".split())
    _run(switch, *f"ip link set {port} master switch up".split())
    _run(holder, *f"ip addr add {address}/16 dev eth0".split())
    _run(holder, *["ip", "link", "set", "eth0", "up"])
    _run(holder, *["ip", "link", "set", "lo", "up"])
    # A new connection must not begin as slow as the last one to the same host has ended.
    _run(holder, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save")
    return Host(address, holder, switch, port)


def _inside(holder: subprocess.Popen[bytes]) -> list[str]:
    return ["nsenter", "--target", str(holder.pid), "--net"]


def _run(holder: subprocess.Popen[bytes], *command: str) -> None:
    done = subprocess.run([*_inside(holder), *command], capture_output=True, text=True)
    if done.returncode:
        raise NoLab(f"{' '.join(command)}: {done.stderr.strip()}")
