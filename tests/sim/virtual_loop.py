"""An event loop whose time jumps, and whose callbacks belong to simulated processes.

Nothing waits: a minute of a fleet's life takes milliseconds. Each callback runs in the process (`PROCESS`) of the
task that asked for it: those of a frozen process wait for its thaw, as after SIGSTOP; those of a dead one never run,
as after SIGKILL, so that no clean-up gives a last word. Each process has clocks of its own: `time` is the monotonic
clock of the process that runs now, and a timer is set by the clock of the process that it belongs to.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol

from tests.sim.clocks import UNIX_S, Clock

THREAD_DELAY_S = (0.0, 0.02)
"""Work on a thread runs at once in real time, and takes this long in virtual time."""
PRUNE_AT = 500
"""Cancelled timers in the heap before it is rebuilt: time-outs are mostly cancelled, an hour ahead of their time."""
MAX_TURNS = 3_000_000
"""The turns of a whole run: a hundred times those of the longest one."""
LIVELOCK_TURNS = 20_000
"""Turns of the loop at one moment of virtual time."""
CLOSING_TURNS = 100
"""Turns of the loop at the end. Nested clean-ups end one after another."""


ROUNDING_S = 1e-9
"""The error of a time that was converted between two clocks."""
LATE_S = 1e-6
BLOCKED_LOOK_S = 0.05
"""The interval at which a blocked thread looks whether it can continue."""


class Blocked(Exception):
    """Raised where work on a thread would wait. The work is called again a moment later."""


class Life(Protocol):
    """The loop's facts about a process."""

    alive: bool
    frozen: bool
    waiting: list[Handle]
    clock: Clock


PROCESS: ContextVar[Any] = ContextVar("process", default=None)
"""The simulated process (a `Life`) that runs now; None: the world itself."""


class Handle:
    __slots__ = ("_when", "args", "callback", "context", "dead", "due", "loop", "process")

    def __init__(
        self, loop: VirtualLoop, callback: Callable[..., Any], args: tuple[Any, ...], context: Context, when: float
    ) -> None:
        self.loop = loop
        self.callback = callback
        self.args = args
        self.context = context
        self.process: Life | None = context.get(PROCESS)
        self.due = when
        """The time on the clock of the process. 0: at once."""
        self._when = when
        """Not 0 while the timer runs."""
        self.dead = False

    def cancel(self) -> None:
        if not self.dead:
            self.dead = True
            if self._when:
                self.loop.cancelled += 1

    def cancelled(self) -> bool:
        return self.dead

    def when(self) -> float:
        return self._when


class SimTask(asyncio.Task[Any]):
    """A task whose hash doesn't depend on its address, so that sets of tasks have the same order in each run."""

    _numbers = itertools.count()
    number: int

    def __new__(cls, *args: Any, **more: Any) -> SimTask:
        self: SimTask = super().__new__(cls)
        self.number = next(cls._numbers)
        return self

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.now = 1000.0
        self.cancelled = 0
        self._turns = self._all_turns = 0
        self._burying = False
        self.slow_thread_share = 0.0
        """The share of the work on threads that takes seconds: a large checkpoint, a slow disk."""
        self._rng = rng
        self._queue: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._order = itertools.count()
        SimTask._numbers = itertools.count()
        self.set_task_factory(lambda loop, work, **more: SimTask(work, loop=loop, **more))

    def time(self) -> float:
        process: Life | None = PROCESS.get()
        return self.now if process is None else process.clock.monotonic(self.now)

    def wall(self) -> float:
        process: Life | None = PROCESS.get()
        return UNIX_S + self.now if process is None else process.clock.wall(self.now)

    def get_debug(self) -> bool:
        return False

    # ---- what is to run ----

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        handle = Handle(self, callback, args, context if context is not None else copy_context(), 0.0)
        self._queue.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        """Schedules a callback. `when`: by the clock of the context's process."""
        handle = Handle(self, callback, args, context if context is not None else copy_context(), when)
        self._set(handle)
        return handle

    def _set(self, handle: Handle) -> None:
        handle._when = handle.due
        when, process = handle.due, handle.process
        if process is not None and not process.clock.is_true:
            when = process.clock.at(when) + LATE_S  # or rounding could let its clock show less when it rings
        heapq.heappush(self._timers, (when, next(self._order), handle))

    def _is_early(self, handle: Handle) -> bool:
        """Has the clock of its process stood still since the timer was set?"""
        process = handle.process
        return process is not None and handle.due > 0 and process.clock.at(handle.due) > self.now + ROUNDING_S

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        context = context if context is not None else copy_context()
        process: Life | None = context.get(PROCESS)
        now = self.now if process is None else process.clock.monotonic(self.now)
        return self.call_at(now + delay, callback, *args, context=context)

    def again(self, handles: list[Handle]) -> None:
        """Takes the callbacks that a process was about to run when it was stopped."""
        for handle in handles:
            if self._is_early(handle):
                self._set(handle)
            else:
                self._queue.append(handle)

    def bury(self, processes: Iterable[Life]) -> None:
        """Cancels whatever still runs, also in dead processes, until all has ended."""
        self._burying = True
        for process in processes:
            self._queue.extend(process.waiting)
        for _ in range(CLOSING_TURNS):
            pending = asyncio.all_tasks(self)
            if not pending:
                break
            for task in pending:
                task.cancel()
            self.call_soon(self.stop)
            self.run_forever()
        self._queue.clear()
        self._timers.clear()
        self.close()

    def _run_once(self) -> None:
        queue, timers = self._queue, self._timers
        self._turns += 1
        self._all_turns += 1
        if self._all_turns > MAX_TURNS:
            raise RuntimeError("the run does not end")
        if self._turns > LIVELOCK_TURNS:
            raise RuntimeError(f"livelock: time stands still in {queue[0].callback if queue else None}")
        if self.cancelled > PRUNE_AT and self.cancelled * 2 > len(timers):
            timers[:] = [timer for timer in timers if not timer[2].dead]
            heapq.heapify(timers)
            self.cancelled = 0
        if not queue and not self._stopping:  # type: ignore[attr-defined]
            while timers and timers[0][2].dead:
                heapq.heappop(timers)
                self.cancelled -= 1
            if not timers:
                raise RuntimeError("deadlock: nothing is ready and no timer runs")
            if timers[0][0] > self.now:
                self.now, self._turns = timers[0][0], 0
        while timers and timers[0][0] <= self.now:
            handle = heapq.heappop(timers)[2]
            if handle.dead:
                self.cancelled -= 1
            elif self._is_early(handle):
                self._set(handle)
            else:
                handle._when = 0.0
                queue.append(handle)
        for _ in range(len(queue)):
            handle = queue.popleft()
            if handle.dead:
                continue
            process = handle.process
            if process is not None and (process.frozen or not process.alive) and not self._burying:
                process.waiting.append(handle)
                continue
            try:
                handle.context.run(handle.callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": "in a callback", "exception": error})

    # ---- threads ----

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        future: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Blocked:
                self.call_later(BLOCKED_LOOK_S, run)
            except Exception as error:
                future.set_exception(error)

        slow = self._rng.random() < self.slow_thread_share
        self.call_later(self._rng.uniform(*(0.2, 4.0) if slow else THREAD_DELAY_S), run)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        return None

    def _write_to_self(self) -> None:
        return None


@contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[None]:
    """`time.monotonic` and `time.time` are the clocks of the process that runs now."""
    real = time.monotonic, time.time
    time.monotonic = loop.time
    time.time = loop.wall
    try:
        yield
    finally:
        time.monotonic, time.time = real
