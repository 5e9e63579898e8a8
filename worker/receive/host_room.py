"""Tells whether weights fit into this host's memory, before the first byte of them comes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_plane._util.memory_room import CGROUPS, PROC, group_rooms, machine_room
from rl_plane.errors import InvalidRequest

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """The directories in which the kernel says how much memory this process may use."""

    proc: Path = PROC
    cgroups: Path = CGROUPS


MEMORY_FILES = MemoryFiles()


def check_room(nbytes: int, freed: int = 0, files: MemoryFiles = MEMORY_FILES) -> None:
    """InvalidRequest if staging `nbytes` needs more memory than there is. `freed`: what staging gives back first."""
    for room, what, setting in _rooms(files):
        if nbytes > room + freed:
            raise InvalidRequest(
                f"staging needs {_mib(nbytes)} of host memory, and {_mib(room + freed)} are there ({what})",
                field="policy.staging",
                fix=f"{setting}, or use staging none, which needs no copy of the model in host memory",
                needed_bytes=nbytes,
                free_bytes=room + freed,
            )


def least_room() -> tuple[int | None, str]:
    """The host memory that may still be used, and what limits it. None: this is no Linux, so it is not known."""
    found = min(_rooms(MEMORY_FILES), default=None)
    return (found[0], found[1]) if found is not None else (None, "")


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // MIB)} MiB"


def _rooms(files: MemoryFiles) -> Iterator[tuple[int, str, str]]:
    """Yields what may still be used, what limits it, and the setting that changes the limit."""
    machine = machine_room(files.proc)
    if machine is not None:
        yield machine, "MemAvailable of the machine", "give the machine more memory"
    for room, limit in group_rooms(("inactive_file", "active_file"), files.proc, files.cgroups):
        yield room, f"{limit} of the control group", "raise the container's memory limit"
