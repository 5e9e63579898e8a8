"""Finds the network interfaces of a machine, by their addresses."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import Any

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def other_interfaces(host: str, listed: Mapping[str, Sequence[Any]]) -> list[str]:
    """The names of the interfaces with IP addresses that do not have the address of `host`. Empty if no interface has
    that address. `listed`: the interfaces and their addresses, as `psutil.net_if_addrs()` lists them."""
    try:
        wanted = {_address(str(one[4][0])) for one in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError, ValueError):
        return []
    names: dict[str, set[Address]] = {}
    for label, addresses in listed.items():
        name = label.partition(":")[0]  # `eth0:1` labels a further address of eth0
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                names.setdefault(name, set()).add(_address(one.address))
    ours = {name for name, found in names.items() if any(_same(one, found) for one in wanted)}
    return sorted(names.keys() - ours) if ours else []


def _address(text: str) -> Address:
    """`fe80::1%eth0` and `fe80::1` are one address: only some sources name the interface."""
    return ipaddress.ip_address(text.partition("%")[0])


def _same(wanted: Address, found: set[Address]) -> bool:
    return wanted in found or (wanted.is_loopback and any(one.is_loopback for one in found))
