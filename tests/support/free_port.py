"""A port for a process that can't choose one itself."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Returns a port of 127.0.0.1 that no process listened at a moment ago."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
