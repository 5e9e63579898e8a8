"""`rl-plane`, which on SIGUSR1 writes down how many tasks it has: `python -P -m tests.soak.probe worker …`."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from rl_plane.cli.main import run

VARIABLE = "SOAK_COUNTS"
"""The directory for the counts, each in a file by the process's id."""


def count(number: int, frame: FrameType | None) -> None:
    """Of all loops and threads."""
    # By their type: some objects warn when they are asked for anything.
    tasks = sum(not one.done() for one in gc.get_objects() if issubclass(type(one), asyncio.Task))
    file = Path(os.environ[VARIABLE]) / str(os.getpid())
    unfinished = file.with_suffix(".new")
    unfinished.write_text(str(tasks))
    unfinished.rename(file)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, count)
    sys.exit(run())
