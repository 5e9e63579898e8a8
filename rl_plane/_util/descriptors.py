"""The number of files and sockets that this process may open."""

from __future__ import annotations

import contextlib
import resource

ENOUGH = 65_536
"""Both listeners of a frontend have 16,384 connections each, and leave a quarter for everything else. A hard limit may
be infinite, or a thousand million."""


def bounded(limit: int) -> int:
    return ENOUGH if limit == resource.RLIM_INFINITY else min(limit, ENOUGH)


def open_limit() -> int:
    return bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_open_limit() -> None:
    """Raises the soft limit to the hard one, or to ENOUGH. The usual soft limit of 1024 is for programs that call
    `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if bounded(soft) < bounded(hard):
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it: the process works with fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (bounded(hard), hard))
