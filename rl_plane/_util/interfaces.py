"""Finds the network interfaces of this machine, by their addresses."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915
"""Linux's request for an interface's IPv4 address."""
NAME_BYTES = 256
"""The length of the request's buffer, which begins with the interface's name."""


def other_interfaces(host: str) -> list[str]:
    """The names of the interfaces with IP addresses that do not have the address of `host`. Empty if no interface has
    that address, or if the system does not say so."""
    names = _addresses()
    try:
        wanted = {ipaddress.ip_address(one[4][0]) for one in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError, ValueError):
        return []
    ours = {name for name, found in names.items() if any(_same(one, found) for one in wanted)}
    return sorted(names.keys() - ours) if ours else []


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _same(wanted: Address, found: set[Address]) -> bool:
    return wanted in found or (wanted.is_loopback and any(one.is_loopback for one in found))


def _addresses() -> dict[str, set[Address]]:
    found: dict[str, set[Address]] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                request = struct.pack(f"{NAME_BYTES}s", name.encode())
                reply = fcntl.ioctl(asking, SIOCGIFADDR, request)
                found.setdefault(name, set()).add(ipaddress.ip_address(reply[20:24]))
    with contextlib.suppress(OSError):  # there is no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            found.setdefault(name, set()).add(ipaddress.ip_address(bytes.fromhex(address)))
    return found
