"""The memory that this process may still take, by the machine and by its control groups. Linux only."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Free bytes; 0 if they can't be determined. Reads both versions of control groups (docs.kernel.org: cgroup-v2, and
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
    """The room in a control group and its parents. In a container the own group may be the root of the visible tree."""
    group, room = root / path.lstrip("/"), math.inf
    around = [group, *group.parents]
    for one in around[: around.index(root) + 1]:
        # A group without a limit has no such file, or `max` in it. The page cache counts as used, but can be reclaimed.
        with contextlib.suppress(OSError, KeyError, ValueError):
            used = int((one / usage).read_text()) - _numbers(one / "memory.stat")[reclaimed]
            room = min(room, max(0, int((one / limit).read_text()) - used))
    return room


def _numbers(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
