"""How a worker and an agent speak: over a Unix socket, one connection for each call, one frame each way (see
`rl_plane._util.framing`).

The caller shuts its side of the connection down to cancel; it does so by dying, too. An answer is `{value}` or
`{error}`, the error as it goes on the plane's own wire.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MAX_SOCKET_DIRECTORY = 70
"""Characters: a Unix socket's whole path has at most 107, and vLLM's names of 36 are in there too."""


def socket_directory() -> Path:
    """A new one, which only the worker's user may enter."""
    path = tempfile.mkdtemp(prefix="rl-plane-")
    if len(path) > MAX_SOCKET_DIRECTORY:
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="rl-plane-", dir="/tmp")
    return Path(path)


def socket_of(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.sock"
