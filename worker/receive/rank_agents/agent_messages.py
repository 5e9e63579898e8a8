"""The sockets and messages between a worker, its host agent and the agents of its ranks.

Each call is one connection over a Unix socket, with one frame each way (see `rl_plane._util.framing`). The caller shuts
its side of the connection down to cancel; its death does the same. An answer is `{value}` or `{error}`, with the error
in the plane's wire format. If the value says `descriptor: true`, one byte follows, with a descriptor of shared memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SOCKET_DIRECTORY = 70
"""Characters. The whole path of a Unix socket has at most 107, and vLLM puts names of 36 into the same directory."""


@dataclass(frozen=True, slots=True)
class WithDescriptor:
    """A value that is sent with a descriptor, which is closed afterwards."""

    value: Mapping[str, Any]
    descriptor: int


def socket_directory() -> Path:
    """Makes a directory that only the worker's user may enter."""
    path = tempfile.mkdtemp(prefix="rl-plane-")
    if len(path) > MAX_SOCKET_DIRECTORY:
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="rl-plane-", dir="/tmp")
    return Path(path)


def socket_of(directory: Path, rank: int) -> Path:
    """The socket of the agent of one rank."""
    return directory / f"rank-{rank}.sock"


def host_socket(directory: Path) -> Path:
    """The socket of the host agent."""
    return directory / "host.sock"
