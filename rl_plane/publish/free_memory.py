"""The memory that the publisher's copy of a version may take."""

from __future__ import annotations

from pathlib import Path

from rl_plane._util.memory_room import CGROUPS, PROC, group_rooms, machine_room


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Returns the free bytes of the machine or of this process's control groups, whichever is less. 0: the machine's
    are not known. The page cache counts as free, except what was read again lately."""
    machine = machine_room(proc)
    if machine is None:
        return 0
    return max(0, min([machine, *(room for room, _ in group_rooms(("inactive_file",), proc, cgroups))]))
