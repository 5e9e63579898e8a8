"""`rl-plane`, which on SIGUSR1 writes down how many tasks it has, and whose listeners buffer little, so that a slow
reader holds back more than its sockets: `python -P -m tests.soak.probe worker …`."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

from rl_plane.cli.main import run

VARIABLE = "SOAK_COUNTS"
"""The directory for the counts, each in a file by the process's id."""
SEND_BYTES = 1 << 15
"""The send buffer of a connection that a listener accepts. Linux would buffer megabytes."""


def count(number: int, frame: FrameType | None) -> None:
    """Writes the number of unfinished tasks of all loops and threads to a file."""
    # By their type: some objects warn when they are asked for anything.
    tasks = sum(not one.done() for one in gc.get_objects() if issubclass(type(one), asyncio.Task))
    file = Path(os.environ[VARIABLE]) / str(os.getpid())
    unfinished = file.with_suffix(".new")
    unfinished.write_text(str(tasks))
    unfinished.rename(file)


def listen(listener: socket.socket, *args: int) -> None:
    """Listens with a small send buffer, which accepted connections inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    listen_large(listener, *args)


listen_large = socket.socket.listen

if __name__ == "__main__":
    socket.socket.listen = listen  # type: ignore[method-assign,assignment]
    signal.signal(signal.SIGUSR1, count)
    sys.exit(run())
