"""The memory that this process may still take, by the machine and by its control groups. Linux only."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def machine_room(proc: Path) -> int | None:
    """The bytes that the machine has free. None: they can't be determined."""
    with contextlib.suppress(OSError, KeyError):
        return _numbers(proc / "meminfo")["MemAvailable:"] << 10
    return None


def group_rooms(caches: Collection[str], proc: Path, cgroups: Path) -> Iterator[tuple[int, str]]:
    """Yields the bytes that this process's control groups and their parents have free, each with the name of the limit.

    Reads both versions of control groups (docs.kernel.org: cgroup-v2, and cgroup-v1/memory). In a container the own
    group may be the root of the visible tree.

    Args:
        caches: the parts of the page cache that count as free, as `memory.stat` names them.
        proc: the directory `/proc`.
        cgroups: the directory at which the control groups are mounted.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage, prefix = cgroups, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit, usage, prefix = (
                cgroups / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_",
            )
        else:
            continue
        own = Path(path.lstrip("/"))
        for each in (own, *own.parents):
            room = _room(root / each, limit, usage, [prefix + name for name in caches])
            if room is not None:
                yield room, limit


def _room(group: Path, limit: str, usage: str, caches: Collection[str]) -> int | None:
    """The bytes that a control group has free. None: it has no limit, or is not to be seen from here."""
    with contextlib.suppress(OSError, ValueError):  # the limit may be `max`
        stat = _numbers(group / "memory.stat")
        used = int((group / usage).read_text()) - sum(stat.get(name, 0) for name in caches)
        return int((group / limit).read_text()) - used
    return None


def _numbers(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
