"""Makes the TCP sockets on which a trainer or a worker listens."""

from __future__ import annotations

import errno
import socket

from rl_plane.errors import InvalidRequest

BUSY = (errno.EADDRINUSE, errno.EACCES)
"""The errors of a port that another process uses, or that only root may use."""


def listen_at(host: str, port: int = 0, *, backlog: int = 1024) -> socket.socket:
    """Listens at one address of this machine, and at no other. `port` 0: any free one. InvalidRequest names
    `options.host`, or `options.port` for a port that is in use."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=backlog)
    except (OSError, UnicodeError) as error:
        busy = getattr(error, "errno", None) in BUSY
        raise InvalidRequest(
            f"can't listen at {host}:{port}: {getattr(error, 'strerror', None) or error}",
            field="options.port" if busy else "options.host",
            fix="give an address of this machine (options.host), and a free port or 0 (options.port)",
        ) from error
