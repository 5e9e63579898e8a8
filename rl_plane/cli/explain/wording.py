"""Times, places and processes in words. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rl_plane.cli.output import clock, ids

_CALLER = re.compile(r"(?P<name>[^@\s]+)@(?P<host>[^:\s]+):(?P<pid>\d+)")


def seconds(value: float) -> str:
    """`12 s`, `3 min` or `2 h`."""
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def in_time(left_s: float, now: float) -> str:
    """`in 279 s (11:08:12)`, or how late it is."""
    return (
        f"in {seconds(left_s)} ({clock(now + left_s)})" if left_s >= 0 else f"{seconds(-left_s)} ago, it is late"
    )


def process_of(caller: str) -> tuple[str, int] | None:
    """Host and pid of a process that names itself `name@host:pid`. None: it gives no name."""
    match = _CALLER.match(caller)
    return (match["host"], int(match["pid"])) if match else None


def in_brackets(place: tuple[str, int] | None) -> str:
    """Pid and host of a process, after its name. Empty: they are not known."""
    return f" (pid {place[1]} on {place[0]})" if place else ""


STOPPED = "is stopped by a signal (SIGSTOP)"
GONE = "is not there any more"
"""The states of a process on this machine that have a fix of their own."""


def look_at(place: tuple[str, int] | None, what: str, said: str = "") -> str:
    """The fix for a process that does not answer. `what`: the process in words. `said`: its state, if known."""
    if place is None:
        return f"see whether {what} runs"
    host, pid = place
    if said == STOPPED:
        return f"`kill -CONT {pid}` on {host} continues it"
    if said == GONE:
        return f"start {what} again"
    return f"on {host} run `ps -o stat,args -p {pid}`: T is stopped (`kill -CONT {pid}` continues it), no line is dead"


def workers_named(names: Sequence[str]) -> str:
    """The first two workers, then a count."""
    return f"worker{'s' if len(names) > 1 else ''} {ids(names, 2)}"


def with_state(begin: str, said: str) -> str:
    """The state of a process as a clause. `begin`: such as `; its`. Empty if nothing is known of the process."""
    return f"{begin} process {said}" if said else ""
