"""Aborts of choices that no worker has: those that wait here for one, where a worker's own abort does not find them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rl_plane.errors import PlaneError

T = TypeVar("T")


class Ending:
    """Choices under way, and whether they were aborted."""

    def __init__(self, names: Collection[str], choices: int) -> None:
        self.names = names
        self.choices = choices
        self.aborted = False
        self._error: PlaneError | None = None
        self._wait: asyncio.Timeout | None = None

    @property
    def waits(self) -> bool:
        return self._wait is not None and not self.aborted

    async def unless_aborted(self, wait: Coroutine[Any, Any, T]) -> T | None:
        """Its result, with nothing awaited after it; None once these are aborted, be it before. Once they are given
        up, the error of that."""
        try:
            over = self._over()
        except PlaneError:
            wait.close()
            raise
        if over:
            wait.close()
            return None
        self._wait = asyncio.timeout(None)  # a bound that an abort brings to its end
        try:
            async with self._wait:
                found = await wait
        except TimeoutError:
            if not self._over():
                raise
            return None
        finally:
            self._wait = None
        return None if self._over() else found

    def _over(self) -> bool:
        if self._error is not None:
            raise self._error
        return self.aborted

    def abort(self) -> None:
        self._end_wait()
        self.aborted = True

    def give_up(self, error: PlaneError) -> None:
        """`error`: its own, since whoever tells it adds to it."""
        self._end_wait()
        self._error = error

    def _end_wait(self) -> None:
        if self.waits and self._wait is not None:
            self._wait.reschedule(asyncio.get_running_loop().time())


class Aborts:
    """What is under way in this frontend, by the names that workers would know it by."""

    def __init__(self) -> None:
        self._under_way: set[Ending] = set()

    @contextmanager
    def of(self, *names: str, choices: int = 1) -> Iterator[Ending]:
        ending = Ending(names, choices)
        self._under_way.add(ending)
        try:
            yield ending
        finally:
            self._under_way.discard(ending)

    def abort(self, request_ids: Collection[str] | None) -> int:
        """Of those that a worker has, only that no other one is to have them: that one ends them. None: all. How many
        choices have waited."""
        asked = None if request_ids is None else frozenset(request_ids)
        count = 0
        for ending in list(self._under_way):
            if asked is None or not asked.isdisjoint(ending.names):
                count += ending.choices if ending.waits else 0
                ending.abort()
        return count

    def give_up(self, error: Callable[[], PlaneError]) -> None:
        """All that wait, and what would wait again."""
        for ending in list(self._under_way):
            ending.give_up(error())
