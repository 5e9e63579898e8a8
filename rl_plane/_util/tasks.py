"""Ending what runs in the background, surely."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

log = logging.getLogger("rl_plane._util.tasks")

ROUND_S = 0.5
ROUNDS = 10
"""A cancellation that a library has swallowed is sent again; after so many the task is left behind, and named."""


def never() -> bool:
    """For work that nobody can cancel."""
    return False


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels them and waits until they have ended; their errors have been told elsewhere."""
    pending = {task for task in tasks if not task.done()}
    for _ in range(ROUNDS):
        if not pending:
            return
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=ROUND_S)
    log.error("these tasks do not end: %s", ", ".join(task.get_name() for task in pending))
