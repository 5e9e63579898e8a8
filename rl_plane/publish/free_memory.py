"""How much memory this process may yet take: of the machine, and of the control groups that hold it. Linux."""

from __future__ import annotations

from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes; 0 where it can't be known. Of control groups version 2 is read (docs.kernel.org, cgroup-v2, memory)."""
    try:
        free = _numbers(proc / "meminfo")["MemAvailable:"] << 10
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except (OSError, KeyError):
        return 0
    group = cgroups / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    around = [group, *group.parents]
    for one in around[: around.index(cgroups) + 1]:
        try:
            limit = int((one / "memory.max").read_text())
            # Files that were read count as used, and go when room is wanted.
            used = int((one / "memory.current").read_text()) - _numbers(one / "memory.stat")["inactive_file"]
        except (OSError, KeyError, ValueError):  # `max`, or there is none
            continue
        free = min(free, max(0, limit - used))
    return free


def _numbers(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
