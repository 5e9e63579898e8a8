"""Memory for weights, and reading ahead: a thread reads the next item while the one before is hashed and staged."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from rl_plane._util.tasks import never
from rl_plane.errors import EngineFailed

T = TypeVar("T")

HUGE_BYTES = 2 << 20
"""The size in bytes from which memory gets huge pages. Small pages take longer to get and free than to fill."""

LOOK_S = 0.1
"""Seconds between two looks at `cancelled`, while an item is awaited."""

END_S = 5.0
"""Seconds to wait for a read under way, which ends within milliseconds unless a disk hangs."""


def host_memory(nbytes: int) -> memoryview:
    """Uninitialised memory, which is given back with the last view of it.

    Given-back memory is used again for the same number of bytes, since touching a used page takes a fraction of the
    time of a new one. Meanwhile the kernel may take its pages (MADV_FREE). It is never more than was in use at once.
    """
    if nbytes < HUGE_BYTES:
        return memoryview(bytearray(nbytes))
    mapped = _taken_again(nbytes) or _mapped(nbytes)
    # A view of the map itself would end the map with its last view.
    whole = (ctypes.c_ubyte * nbytes).from_buffer(mapped)
    weakref.finalize(whole, _give_back, mapped).atexit = False
    return memoryview(whole).cast("B")


_given_back: deque[mmap.mmap] = deque()
"""Maps that were given back, oldest first. There is no lock, because a finalizer may run inside of any step, and can't
take one. Each access is a single call, which is atomic."""


def _taken_again(nbytes: int) -> mmap.mmap | None:
    for mapped in list(_given_back):
        if len(mapped) == nbytes:
            with contextlib.suppress(ValueError):  # another thread has taken it
                _given_back.remove(mapped)
                return mapped
    return None


def _mapped(nbytes: int) -> mmap.mmap:
    room = nbytes
    with contextlib.suppress(IndexError):
        while room > 0:
            room -= len(_given_back.popleft())
    mapped = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _give_back(mapped: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_FREE"):
        with contextlib.suppress(OSError):  # locked memory can't be marked, and is freed at once
            mapped.madvise(mmap.MADV_FREE)
            _given_back.append(mapped)


class ReadAhead(Generic[T]):
    """Iterates over `items` on a thread, one item ahead of the caller. An error there is raised to the caller."""

    def __init__(
        self,
        items: Iterable[T],
        cancelled: Callable[[], bool] = never,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the iterable.

        Args:
            items: iterated over on the thread.
            cancelled: once it returns true, waiting for an item raises EngineFailed.
            interrupt: ends a wait within `items`. `close` calls it.
        """
        self._items = items
        self._cancelled = cancelled
        self._interrupt = interrupt
        self._made: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(2)
        self._closed = False
        self._thread = threading.Thread(target=self._make, name="rl-plane-ahead", daemon=True)

    def __iter__(self) -> Iterator[T]:
        """Starts the thread at once."""
        self._thread.start()
        return self._taken()

    def _taken(self) -> Iterator[T]:
        try:
            while (made := self._next()) is not None:
                if isinstance(made, BaseException):
                    raise made
                yield made[0]
                del made  # otherwise three items are in memory
                self._room.release()
        finally:
            self.close()

    def _next(self) -> tuple[T] | BaseException | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._made.get(timeout=LOOK_S)
            if self._cancelled():
                raise EngineFailed("staging was cancelled")

    def close(self, within_s: float = END_S) -> None:
        """Ends the thread after the item that it is making, and waits for that up to `within_s` seconds."""
        self._closed = True
        self._interrupt()
        self._room.release()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def _make(self) -> None:
        try:
            items = iter(self._items)
            while True:
                self._room.acquire()
                if self._closed:
                    break
                try:
                    item = next(items)
                except StopIteration:
                    break
                self._made.put((item,))
                del item
        except BaseException as error:
            self._made.put(error)
        self._made.put(None)
