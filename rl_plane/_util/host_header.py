"""Tells from a request's `Host` header whether its sender surely means this machine."""

from __future__ import annotations

import ipaddress


def name_in(host: str) -> str:
    """The name or address in a `Host` header, without the port."""
    text = host.lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0].rstrip(".")


def is_own_name(name: str) -> bool:
    """True for an address, `localhost` and a name without a dot. The owner of a domain makes its names mean any
    machine, so a web page could reach a listener by them."""
    if "." not in name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
