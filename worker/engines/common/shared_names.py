"""The names in /dev/shm of the memory that an engine's processes share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

SHM = "/dev/shm/"


def shared_names(processes: Iterable[int], begin: str = "") -> set[Path]:
    """Returns the files in /dev/shm that one of these processes has mapped, and whose names begin so."""
    found = set()
    for pid in processes:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, there, name = line.partition(SHM + begin)
                if there and not name.endswith("(deleted)"):
                    found.add(Path(SHM + begin + name))
    return found
