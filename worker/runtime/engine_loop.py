"""Runs an adapter's coroutines on the engine loop for callers on the NATS loop.

There are two loops in two threads. The engine's loop may be late, because the engine builds, swaps and samples on it.
The loop that serves NATS must never be late, or it misses the server's PINGs and a busy worker looks dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Generic, TypeVar

from rl_plane._util.alarm import Alarm
from worker.runtime.gathering import Turns

T = TypeVar("T")
log = logging.getLogger("worker.runtime.engine_loop")

UNDO_S = 5.0
"""The time that cancelled work may take to undo what it has begun. A round trip through the engine takes less. A hung
engine must not hold its caller much beyond the deadline."""


class EngineLoop:
    """Runs work on the engine loop. It is created there, and called from another loop."""

    def __init__(self, undo_s: float = UNDO_S) -> None:
        """`undo_s`: the time that cancelled work may take to undo what it has begun."""
        self._undo_s = undo_s
        self._loop = asyncio.get_running_loop()
        self._ferries: dict[asyncio.AbstractEventLoop, _Ferry] = {}

    async def run(self, work: Coroutine[Any, Any, T], *, to_its_end: bool = False) -> T:
        """Runs `work` on the engine loop and returns its result.

        Cancelling the caller cancels `work` (not with `to_its_end`) and waits until it has stopped. So the next caller
        never overlaps it."""
        here, ended = asyncio.get_running_loop(), asyncio.Event()
        begun: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self._loop.create_task(work)
            begun.append(task)
            task.add_done_callback(tell)

        def tell(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                task.exception()  # marks the error as retrieved: the caller may be gone
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed
                here.call_soon_threadsafe(ended.set)

        self._loop.call_soon_threadsafe(start)
        try:
            await ended.wait()
        except asyncio.CancelledError:
            if not to_its_end:
                self._loop.call_soon_threadsafe(lambda: begun[0].cancel())
            try:
                async with asyncio.timeout(self._undo_s):
                    await ended.wait()
            except TimeoutError:
                log.warning("%s does not end after its caller was cancelled", getattr(work, "__qualname__", work))
            raise
        return begun[0].result()

    async def stream(self, source: AsyncIterator[T], gather_s: float = 0.0) -> AsyncIterator[list[T]]:
        """Yields the source's items in batches: everything that has come since the last batch. So a slow reader gets
        fewer and larger batches. The request's length bounds how much can pile up.

        Leaving the iterator closes the source. `gather_s`: each batch but the first one waits for more items, at most
        so many seconds and not beyond the source's end."""
        here = asyncio.get_running_loop()
        ferry = self._ferries.setdefault(here, _Ferry(self._loop, here))
        items: _Inbox[T] = _Inbox(ferry.turns)

        async def pump() -> None:
            end: BaseException | None = None
            try:
                async with contextlib.aclosing(source) as closing:  # type: ignore[type-var]
                    async for item in closing:
                        ferry.put(items, item)
            except BaseException as error:
                end = error
                if isinstance(error, asyncio.CancelledError):
                    raise
            finally:
                ferry.put(items, end)

        begun: list[asyncio.Task[None]] = []
        last: Any = ...
        hold_s = 0.0
        self._loop.call_soon_threadsafe(lambda: begun.append(self._loop.create_task(pump())))
        try:
            while last is ...:
                batch = await items.take(hold_s)
                hold_s = gather_s
                if batch[-1] is None or isinstance(batch[-1], BaseException):
                    last = batch.pop()
                if batch:
                    yield [item for item in batch if item is not None and not isinstance(item, BaseException)]
            if last is not None:
                raise last
        finally:
            if last is ...:
                with contextlib.suppress(RuntimeError):  # the engine's loop is closed
                    self._loop.call_soon_threadsafe(lambda: begun[0].cancel())


class _Inbox(Generic[T]):
    """The items that have come for one reader, on the reader's loop. None and an error are its end."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._items: list[T | BaseException | None] = []
        self._ended = False
        self._alarm = Alarm()
        self._gathers = False
        """The reader waits for the end or for its time, and not for the next item."""

    def put(self, item: T | BaseException | None) -> None:
        self._items.append(item)
        self._ended = self._ended or item is None or isinstance(item, BaseException)
        if self._ended or not self._gathers:
            self._alarm.ring()

    async def take(self, gather_s: float) -> list[T | BaseException | None]:
        """Waits for the first item, and returns all items that have come. With `gather_s` it waits for more items until
        the next turn, unless the end has come."""
        if not self._items:
            await self._alarm.wait()
        if gather_s and not self._ended:
            self._gathers = True
            try:
                await self._alarm.wait_for(self._turns.next(gather_s))
            finally:
                self._gathers = False
        taken, self._items = self._items, []
        return taken


class _Ferry:
    """Carries the items that all streams make in one turn of the engine loop to the readers' loop in one call.

    To wake a thread is a system call, and the two threads would switch at the interpreter for each token."""

    def __init__(self, engine: asyncio.AbstractEventLoop, readers: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._readers = readers
        self.turns = Turns()
        """The turns on the readers' loop."""
        self._load: list[tuple[_Inbox[Any], Any]] = []

    def put(self, inbox: _Inbox[Any], item: Any) -> None:
        """Adds an item for a reader. Called on the engine loop."""
        if not self._load:
            self._engine.call_soon(self._cross)
        self._load.append((inbox, item))

    def _cross(self) -> None:
        load, self._load = self._load, []
        with contextlib.suppress(RuntimeError):  # the readers' loop is closed
            self._readers.call_soon_threadsafe(_unload, load)


def _unload(load: list[tuple[_Inbox[Any], Any]]) -> None:
    for inbox, item in load:
        inbox.put(item)
