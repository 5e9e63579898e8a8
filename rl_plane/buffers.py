"""Memory that weights are read into, and reading them on a thread while those before are hashed and staged."""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

HUGE_BYTES = 2 << 20
"""From this size on huge pages are asked for: small ones take longer to get and to free than to fill."""

END_S = 5.0
"""A read under way ends within milliseconds, unless a disk hangs."""


def fresh(nbytes: int) -> memoryview:
    """Memory of its own, which goes with the last tensor in it."""
    if nbytes < HUGE_BYTES:
        return memoryview(bytearray(nbytes))
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class Ahead(Generic[T]):
    """Iterates `items` on a thread of its own, one item ahead of who takes them: one is used, one is made. What is
    raised there is raised here. `close` ends it with the item that is being made: end first what that waits for."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        self._made: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(2)
        self._closed = False
        self._thread = threading.Thread(target=self._make, name="rl-plane-ahead", daemon=True)

    def __iter__(self) -> Iterator[T]:
        self._thread.start()
        try:
            while (made := self._made.get()) is not None:
                if isinstance(made, BaseException):
                    raise made
                yield made[0]
                del made  # or three are held
                self._room.release()
        finally:
            self.close()

    def close(self) -> None:
        self._closed = True
        self._room.release()
        if self._thread.is_alive():
            self._thread.join(END_S)

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
