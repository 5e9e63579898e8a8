"""Closes sockets and memory in a child that is forked from this process."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

not_for_children: weakref.WeakSet[Any] = weakref.WeakSet()
"""Sockets and memory that a forked child must not keep. A data loader that a trainer forks may outlive it, and the
other ends of the sockets would not see that the trainer has died."""


def _drop_in_child() -> None:
    """Replaces each descriptor with /dev/null, also the duplicates that memory maps have. The numbers stay valid,
    because their owners may close them later."""
    ours = {_identity(one.fileno()) for one in list(not_for_children) if one.fileno() >= 0}
    if ours:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
                if _identity(int(name)) in ours:
                    os.dup2(nothing, int(name), inheritable=False)
        os.close(nothing)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


os.register_at_fork(after_in_child=_drop_in_child)
