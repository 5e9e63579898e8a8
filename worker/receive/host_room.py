"""Tells whether weights fit into this host's memory, before the first byte of them comes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_plane.errors import InvalidRequest

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """The files in which the kernel says how much memory this process may use."""

    meminfo: Path = Path("/proc/meminfo")
    cgroups: Path = Path("/sys/fs/cgroup")
    own_cgroups: Path = Path("/proc/self/cgroup")


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
    try:
        for line in files.meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) << 10, "MemAvailable of the machine", "give the machine more memory"
    except OSError:
        return  # not Linux
    for directory, limit, used, cache in _cgroups(files):
        room = _free_in(directory, limit, used, cache)
        if room is not None:
            yield room, f"{limit} of the control group", "raise the container's memory limit"


def _cgroups(files: MemoryFiles) -> Iterator[tuple[Path, str, str, tuple[str, ...]]]:
    """Yields this process's control groups of memory and their parents, with the names of their files."""
    try:
        lines = files.own_cgroups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = files.cgroups, ("memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            cache = ("total_inactive_file", "total_active_file")
            base, names = files.cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", cache)
        else:
            continue
        own = Path(path.lstrip("/"))
        for each in (own, *own.parents):
            yield base / each, *names


def _free_in(directory: Path, limit: str, used: str, cache: tuple[str, ...]) -> int | None:
    """The bytes that a control group may still use; None if it has no limit, or is not to be seen from here. The cache
    of files makes room."""
    try:
        most = (directory / limit).read_text().strip()
        if most == "max":
            return None
        now = int((directory / used).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return int(most) - now + sum(int(stat.get(name, 0)) for name in cache)
