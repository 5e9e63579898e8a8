"""The start and the end of every process of the plane."""

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
"""New objects until the garbage collector scans the youngest generation. A step of an engine with 256 streams creates
thousands of objects that the next step frees. Python's default, 700, would scan them all several times."""

EXIT_TOO_SLOW = 75
"""The exit status if the orderly end took too long (EX_TEMPFAIL)."""


def die_with_parent() -> Callable[[], None]:
    """Returns a `preexec_fn`: the kernel kills the child when the thread that started it ends, also by SIGKILL."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def set_death_signal() -> None:
        if prctl is not None:
            prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    return set_death_signal


def exit_within(limit_s: float, code: int = EXIT_TOO_SLOW) -> None:
    """Ends this process after `limit_s`, even if threads still run. A thread of the DNS resolver can't be stopped, and
    the interpreter would wait for it."""

    def end() -> None:
        log.error("the orderly end took more than %g s", limit_s)
        os._exit(code)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()


def spare_collector() -> None:
    """Excludes all objects so far from garbage collection. Call it once, when the process is ready: its imports and
    tables stay, so scanning them again and again is waste."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *gc.get_threshold()[1:])
