"""Finds the sockets on which processes listen, as the kernel reports them."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

TCP_LISTEN = "0A"
UNIX_ACCEPTS = 0x10000
"""The flag of a Unix socket that listens, in /proc/net/unix."""
SOCK_SEQPACKET = "0005"


@dataclass(frozen=True, order=True)
class Listener:
    """A socket on which a process listens."""

    kind: str
    """`tcp`, `unix` or `seqpacket`."""
    address: str
    """The address of a TCP socket, or the path of a Unix socket. An abstract name begins with `@`."""
    port: int = 0
    pid: int = 0

    @property
    def everywhere(self) -> bool:
        """True for an address that every interface of the machine answers."""
        return self.kind == "tcp" and ipaddress.ip_address(self.address).is_unspecified

    @property
    def loopback(self) -> bool:
        """True if only processes of this machine reach it."""
        if self.kind != "tcp":
            return True
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return bool((mapped or address).is_loopback)

    @property
    def private(self) -> bool:
        """True for a Unix socket in a directory that only the process's user may enter."""
        if self.kind == "tcp" or self.address.startswith("@"):
            return False
        directory = Path(self.address).parent.stat()
        return directory.st_uid == os.geteuid() and not stat.S_IMODE(directory.st_mode) & 0o077


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def listeners(pids: Iterable[int]) -> set[Listener]:
    """All sockets on which these processes listen."""
    sockets = _tcp("tcp") | _tcp("tcp6") | _unix()
    found = set()
    for pid in pids:
        for inode in _inodes(pid):
            if inode in sockets:
                kind, address, port = sockets[inode]
                found.add(Listener(kind, address, port, pid))
    return found


def _inodes(pid: int) -> set[str]:
    found = set()
    try:
        names = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # the process has ended
        return set()
    for name in names:
        try:
            target = os.readlink(name)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _tcp(table: str) -> dict[str, tuple[str, str, int]]:
    found = {}
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == TCP_LISTEN:
            address, port = fields[1].split(":")
            words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
            found[fields[9]] = ("tcp", str(ipaddress.ip_address(b"".join(words))), int(port, 16))
    return found


def _unix() -> dict[str, tuple[str, str, int]]:
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & UNIX_ACCEPTS:
            kind = "seqpacket" if fields[4] == SOCK_SEQPACKET else "unix"
            found[fields[6]] = (kind, fields[7] if len(fields) > 7 else "", 0)
    return found
