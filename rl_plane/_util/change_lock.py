"""Lets one process at a time change the files of a folder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_plane.errors import Unavailable

OTHERS_S = 10.0
"""The longest wait for other processes. Each changes a few small files."""
AGAIN_S = 0.02


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which ends with this process. Unavailable: another process holds it for `OTHERS_S`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    give_up = time.monotonic() + OTHERS_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > give_up:
                raise Unavailable(
                    f"another process has been changing {folder} for {OTHERS_S:g} s",
                    fix="end that process, or wait",
                ) from error
        time.sleep(AGAIN_S)
