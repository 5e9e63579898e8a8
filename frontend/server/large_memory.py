"""The memory of a large body, which is freed in steps beside the event loop."""

from __future__ import annotations

import functools
import queue
import threading

AT_ONCE_BYTES = 1 << 20
"""Freeing so much takes 0.1 ms."""

_ENDED: queue.SimpleQueue[LargeMemory] = queue.SimpleQueue()
"""Memory without a reader. A SimpleQueue may be filled from a finalizer."""


class LargeMemory(bytearray):
    """Bytes that a thread frees once nothing refers to them or to a view of them any more.

    Freeing 256 MB takes 25 ms, and Python runs nothing else meanwhile: neither the event loop nor another thread."""

    __slots__ = ()

    def __init__(self, source: bytes | bytearray = b"") -> None:
        super().__init__(source)
        _start_freeing()

    def __del__(self) -> None:
        if len(self) > AT_ONCE_BYTES:
            _ENDED.put(self)


@functools.cache
def _start_freeing() -> None:
    threading.Thread(target=_free, name="large-memory", daemon=True).start()


def _free() -> None:
    while True:
        memory = _ENDED.get()
        while len(memory) > AT_ONCE_BYTES:
            # A bytearray gives memory back as soon as it needs less than half of it. Between two steps others run.
            del memory[len(memory) // 2 - 1 :]
        del memory
