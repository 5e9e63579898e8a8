"""Asks the kernel which process is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def same_user(connection: socket.socket) -> bool:
    """True if the peer of the connection runs as this process's user."""
    return _credentials(connection)[1] == os.geteuid()


def peer_pid(connection: socket.socket) -> int:
    """The process id of the peer, in this process's PID namespace."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid
