"""What a child that is forked from this process must not keep: it may live on when this one has died."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

not_for_children: weakref.WeakSet[Any] = weakref.WeakSet()
"""Sockets and memory. A child that a trainer forks (a data loader's) would keep them: who is connected would not see
that the trainer has died."""


def _drop_in_child() -> None:
    """Also the descriptors that maps have of their own. What holds them may close them later: the numbers stay."""
    ours = {_identity(one.fileno()) for one in list(not_for_children) if one.fileno() >= 0}
    if ours:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one that lists them is closed
                if _identity(int(name)) in ours:
                    os.dup2(nothing, int(name), inheritable=False)
        os.close(nothing)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


os.register_at_fork(after_in_child=_drop_in_child)
