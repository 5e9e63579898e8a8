"""Bounds how many ops a worker carries out at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from rl_plane._util.tasks import end_tasks
from rl_plane.errors import Unavailable

Outcome = Awaitable[Mapping[str, Any]]


class OpPool:
    """Runs the ops of one kind. `most`: an op beyond so many is refused. `at_once`: so many run, the others wait."""

    def __init__(self, what: str, most: int, at_once: int | None = None) -> None:
        self._what = what
        self._most = most
        self._turns = asyncio.Semaphore(at_once or most)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, outcome: Outcome, finish: Callable[[Outcome], Coroutine[Any, Any, None]]) -> None:
        """Runs `finish(outcome)` as a task. `finish` bounds and awaits the outcome, and answers the caller."""
        if len(self._tasks) >= self._most:
            if isinstance(outcome, Coroutine):
                outcome.close()
            raise Unavailable(f"{self._most} {self._what} are under way in this worker", retry_after_s=1.0)
        task = asyncio.create_task(finish(self._in_turn(outcome)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        await end_tasks(self._tasks)

    async def _in_turn(self, outcome: Outcome) -> Mapping[str, Any]:
        try:
            async with self._turns:
                return await outcome
        finally:
            if isinstance(outcome, Coroutine):
                outcome.close()  # the caller's deadline may pass before this op's turn comes
