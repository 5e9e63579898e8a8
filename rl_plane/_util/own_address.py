"""Finds the address at which other machines reach this one."""

from __future__ import annotations

import socket


def own_address(host: str, port: int) -> str:
    """Returns this machine's address on the network by which it reaches `host`. Raises OSError if there is none."""
    why = OSError(f"{host!r} has no address")
    for family, _, _, _, there in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as connection:
                connection.connect(there)  # sends nothing
                return str(connection.getsockname()[0])
        except OSError as error:  # for example: there is no IPv6 here
            why = error
    raise why
