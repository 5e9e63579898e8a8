"""Ends background tasks reliably."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger("rl_plane._util.tasks")

ROUND_S = 0.5
ROUNDS = 10
"""A library may swallow a cancellation, so it is sent again. After this many tries the task is left, and logged."""


Cancelled = Callable[[], bool]
"""Returns True once the caller does not want the work any more. Any thread may call it."""


def never() -> bool:
    """The `cancelled` check of work that can't be cancelled."""
    return False


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits until they have ended. Their errors are reported elsewhere."""
    pending = {task for task in tasks if not task.done()}
    for _ in range(ROUNDS):
        if not pending:
            return
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=ROUND_S)
    log.error("these tasks do not end: %s", ", ".join(task.get_name() for task in pending))
