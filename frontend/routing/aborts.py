"""Aborts choices that wait here for a worker. A worker's own abort does not find them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rl_plane.errors import PlaneError

T = TypeVar("T")


class Ending:
    """The choices of one call, and whether they were aborted."""

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
        """The result of `wait`, with nothing awaited after it. None if the choices are aborted, before or meanwhile.
        Raises the error of `give_up` once that was called."""
        if (error := self._error) is not None or self.aborted:
            wait.close()
            if error is not None:
                raise error
            return None
        self._wait = asyncio.timeout(None)  # an abort ends this bound
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
        """`error`: an error for these choices alone, because the caller adds facts to it."""
        self._end_wait()
        self._error = error

    def _end_wait(self) -> None:
        if self.waits and self._wait is not None:
            self._wait.reschedule(asyncio.get_running_loop().time())


class Aborts:
    """The choices under way in this frontend, by the ids that workers know."""

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
        """Aborts these requests, or all (None). Returns the number of choices that waited for a worker. A choice that a
        worker has is only barred from other workers: its worker ends it."""
        asked = None if request_ids is None else frozenset(request_ids)
        count = 0
        for ending in list(self._under_way):
            if asked is None or not asked.isdisjoint(ending.names):
                count += ending.choices if ending.waits else 0
                ending.abort()
        return count

    def give_up(self, error: Callable[[], PlaneError]) -> None:
        """Ends all choices that wait, or would wait again. `error` makes the error of each."""
        for ending in list(self._under_way):
            ending.give_up(error())
