"""How much memory this process may yet take: of the machine, and of the control groups that hold it. Linux."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Bytes; 0 where it can't be known. Of control groups both versions are read (docs.kernel.org: cgroup-v2, and
    cgroup-v1/memory)."""
    try:
        free: float = _numbers(proc / "meminfo")["MemAvailable:"] << 10
        groups = [line.split(":", 2)[1:] for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except (OSError, KeyError):
        return 0
    for controllers, path in groups:
        if controllers == "":
            free = min(free, _room(cgroups, path, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            free = min(free, _room(cgroups / "memory", path, *names))
    return free


def _room(root: Path, path: str, limit: str, usage: str, reclaimed: str) -> float:
    """Of the group and those around it. In a container its own may be the root of what it sees."""
    group, room = root / path.lstrip("/"), math.inf
    around = [group, *group.parents]
    for one in around[: around.index(root) + 1]:
        # What has none is not limited, or says `max`. Files that were read count as used, and go when room is wanted.
        with contextlib.suppress(OSError, KeyError, ValueError):
            used = int((one / usage).read_text()) - _numbers(one / "memory.stat")[reclaimed]
            room = min(room, max(0, int((one / limit).read_text()) - used))
    return room


def _numbers(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
