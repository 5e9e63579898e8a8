"""What every process of the plane does at its start and at its end."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

log = logging.getLogger("rl_plane._util.processes")

COLLECT_EVERY = 10_000
"""Objects more than before, until the youngest are looked through: a step of an engine with 256 streams brings some
thousands that are gone with the next, and Python's own 700 would have them all looked through several times."""

EXIT_TOO_SLOW = 75
"""An orderly end took longer than it may (EX_TEMPFAIL)."""


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: the kernel kills the child when the thread that made it ends, SIGKILL included."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def set_death_signal() -> None:
        if prctl is not None:
            prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    return set_death_signal


def exit_within(limit_s: float, code: int = EXIT_TOO_SLOW) -> None:
    """Ends this process after `limit_s` whatever still runs then: a resolver's thread, for one, can't be stopped,
    and the interpreter would wait for it."""

    def end() -> None:
        log.error("the orderly end took more than %g s", limit_s)
        os._exit(code)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()


def spare_collector() -> None:
    """Once, when a process is ready: what it has imported and built stays, and the garbage collector need not look
    through all of it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *gc.get_threshold()[1:])
