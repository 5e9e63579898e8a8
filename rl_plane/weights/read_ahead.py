"""Memory that weights are read into, and reading them on a thread while those before are hashed and staged."""

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
"""From this size on huge pages are asked for: small ones take longer to get and to free than to fill."""

LOOK_S = 0.1
"""How often who waits for an item looks whether it is still wanted."""

END_S = 5.0
"""A read under way ends within milliseconds, unless a disk hangs."""


def host_memory(nbytes: int) -> memoryview:
    """Memory of its own, with anything in it, which goes back with the last tensor in it.

    To be had again for as many bytes: a page that a process has used already takes a fraction of the time of a new one.
    Meanwhile the kernel takes it for others as soon as it needs some (MADV_FREE). What is kept so is never more than
    was used at once.
    """
    if nbytes < HUGE_BYTES:
        return memoryview(bytearray(nbytes))
    mapped = _taken_again(nbytes) or _mapped(nbytes)
    # Not of the map itself: that would end with its last view.
    whole = (ctypes.c_ubyte * nbytes).from_buffer(mapped)
    weakref.finalize(whole, _give_back, mapped).atexit = False
    return memoryview(whole).cast("B")


_given_back: deque[mmap.mmap] = deque()
"""Longest ago first. Without a lock, which a finalizer can't take, since it may run inside of any step: what is done
here is single calls, which nothing comes between."""


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
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _give_back(mapped: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_FREE"):
        with contextlib.suppress(OSError):  # memory that is locked goes at once
            mapped.madvise(mmap.MADV_FREE)
            _given_back.append(mapped)


class ReadAhead(Generic[T]):
    """Iterates `items` on a thread of its own, one item ahead of who takes them: one is used, one is made. What is
    raised there is raised here. `close` ends it with the item that is being made. `cancelled()`: nobody wants that one
    any more; `interrupt()` ends what its making waits for."""

    def __init__(
        self,
        items: Iterable[T],
        cancelled: Callable[[], bool] = never,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._items = items
        self._cancelled = cancelled
        self._interrupt = interrupt
        self._made: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(2)
        self._closed = False
        self._thread = threading.Thread(target=self._make, name="rl-plane-ahead", daemon=True)

    def __iter__(self) -> Iterator[T]:
        """Begins at once."""
        self._thread.start()
        return self._taken()

    def _taken(self) -> Iterator[T]:
        try:
            while (made := self._next()) is not None:
                if isinstance(made, BaseException):
                    raise made
                yield made[0]
                del made  # or three are held
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
