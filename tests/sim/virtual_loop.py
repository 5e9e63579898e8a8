"""An event loop whose time jumps: nothing waits, and a minute of a fleet's life takes milliseconds."""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

THREAD_DELAY_S = (0.0, 0.02)
"""What runs on a thread is done at once in real time, and takes so long in virtual time."""


class _Jump(selectors.SelectSelector):
    """Nothing to wait for: the next timer is now."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: nothing is ready and no timer runs")
        if timeout > 0:
            self.loop.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, rng: random.Random) -> None:
        selector = _Jump()
        selector.loop = self
        self.now = 1000.0
        self._rng = rng
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        future: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self._rng.uniform(*THREAD_DELAY_S), run)
        return future


@contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[None]:
    """`time.monotonic` and `time.time` are the loop's, for everybody."""
    real = time.monotonic, time.time
    time.monotonic = lambda: loop.now
    time.time = lambda: 1.7e9 + loop.now
    try:
        yield
    finally:
        time.monotonic, time.time = real
