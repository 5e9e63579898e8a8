"""Tells whether weights fit into this host's memory, before the first byte of them comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rl_plane.errors import InvalidRequest

MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")

MIB = 1 << 20


def check_room(nbytes: int, freed: int = 0) -> None:
    """InvalidRequest if staging `nbytes` needs more memory than there is. `freed`: what staging gives back first."""
    for room, what, setting in _rooms():
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
    found = min(_rooms(), default=None)
    return (found[0], found[1]) if found is not None else (None, "")


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // MIB)} MiB"


def _rooms() -> Iterator[tuple[int, str, str]]:
    """Yields what may still be used, what limits it, and the setting that changes the limit."""
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) << 10, "MemAvailable of the machine", "give the machine more memory"
    except OSError:
        return  # not Linux
    for directory, limit, used, cache in _cgroups():
        room = _free_in(directory, limit, used, cache)
        if room is not None:
            yield room, f"{limit} of the control group", "raise the container's memory limit"


def _cgroups() -> Iterator[tuple[Path, str, str, tuple[str, ...]]]:
    """Yields this process's control groups of memory and their parents, with the names of their files."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = CGROUPS, ("memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            files = ("total_inactive_file", "total_active_file")
            base, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", files)
        else:
            continue
        own = Path(path.lstrip("/"))
        for each in (own, *own.parents):
            yield base / each, *names


def _free_in(directory: Path, limit: str, used: str, cache: tuple[str, ...]) -> int | None:
    """The bytes that a control group may still use. None: it has no limit, or this process can't see it. The cache of
    files makes room."""
    try:
        most = (directory / limit).read_text().strip()
        if most == "max":
            return None
        now = int((directory / used).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return int(most) - now + sum(int(stat.get(name, 0)) for name in cache)
