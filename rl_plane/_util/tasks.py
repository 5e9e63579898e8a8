"""Ends background tasks reliably, and runs work on threads that do not delay the exit of the process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger("rl_plane._util.tasks")

ROUND_S = 0.5
ROUNDS = 10
"""A library may swallow a cancellation, so the caller repeats it. After this many tries the caller logs the task and
leaves it."""


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


def on_daemon_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Runs `work` on a thread that the exit of the process does not wait for. A future that is cancelled meanwhile does
    not end the work."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():
            settle(value)

    def begin() -> None:
        ended: tuple[Callable[[Any], None], Any]
        try:
            ended = outcome.set_result, work()
        except Exception as error:
            ended = outcome.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(tell, *ended)

    threading.Thread(target=begin, name=name, daemon=True).start()
    return outcome
