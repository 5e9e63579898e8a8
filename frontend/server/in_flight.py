"""Work that equal calls share, so that a repeated call does not do it twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rl_plane.errors import InvalidRequest, PlaneError, Unavailable

T = TypeVar("T")
Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class _Shared(Generic[T]):
    content: str
    task: asyncio.Task[T]


def _key(op: str, request_id: str, content: str) -> Key:
    return op, request_id, "" if request_id else content


class InFlight(Generic[T]):
    """The work under way. The first of several equal calls starts it, and all of them get its result.

    Two calls are equal if they have the same op and the same request id; without a request id, the same op and the
    same content. The work is a task of its own: it continues when its callers disconnect."""

    def __init__(self, most: int, log: logging.Logger) -> None:
        self._most = most
        self._log = log
        self._shared: dict[Key, _Shared[T]] = {}

    def __len__(self) -> int:
        return len(self._shared)

    def has(self, op: str, request_id: str, content: str) -> bool:
        return _key(op, request_id, content) in self._shared

    async def share(self, op: str, request_id: str, content: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work`, or of an equal call that is under way."""
        key = _key(op, request_id, content)
        current = self._shared.get(key)
        if current is None:
            current = self._start(key, content, work)
        elif current.content != content:
            raise InvalidRequest(
                f"the request id {request_id!r} belongs to another {op}, which is under way",
                field="Idempotency-Key",
                fix="use a new id for each different request",
            )
        try:
            return await asyncio.shield(current.task)
        finally:
            del current  # an error's traceback keeps this frame, and the task keeps the error

    def _start(self, key: Key, content: str, work: Callable[[], Coroutine[Any, Any, T]]) -> _Shared[T]:
        if len(self._shared) >= self._most:
            raise Unavailable(f"{self._most} calls are under way or waiting here", retry_after_s=1.0)
        op, request_id, _ = key
        task = asyncio.create_task(work(), name=f"{op} {request_id}")
        current = self._shared[key] = _Shared(content, task)

        def on_end(task: asyncio.Task[T]) -> None:
            del self._shared[key]
            # Reading the error here also covers a task that no caller waits for any more.
            if not task.cancelled() and (error := task.exception()) is not None:
                level = logging.INFO if isinstance(error, PlaneError) else logging.ERROR
                self._log.log(level, "%s: %s", op, error)

        task.add_done_callback(on_end)
        return current

    async def close(self, grace_s: float) -> None:
        """Waits for the work at most `grace_s`, then cancels the rest."""
        tasks = [current.task for current in self._shared.values()]
        if tasks and grace_s:
            await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
