"""Watches and ends the processes of an engine, children and grandchildren alike.

Linux only: it holds process descriptors, so a new process of the same number is never mistaken for an old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import select
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from multiprocessing.process import BaseProcess
from typing import NoReturn, Self, TypeVar

import psutil

from rl_plane.errors import EngineDied, InvalidRequest

T = TypeVar("T")

LOOK_S = 0.05
"""Seconds between two looks at the processes that an engine starts while it is built, and at killed ones."""

SHOWS_S = 1.0
"""Seconds that a process may take to end after it has closed its files, on a busy machine."""


def descendants() -> list[int]:
    return [process.pid for process in psutil.Process().children(recursive=True)]


def engine_processes(before: Iterable[int]) -> dict[int, str]:
    """The descendants of this process that are not in `before`, id → name. The resource tracker of multiprocessing is
    not among them."""
    known, found = set(before), {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid not in known and not any("resource_tracker" in part for part in process.cmdline()):
                found[process.pid] = process.name()
    return found


def parents_of(processes: Iterable[int]) -> dict[int, int]:
    """Returns the parent of each process, as far as it runs."""
    found = {}
    for pid in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[pid] = psutil.Process(pid).ppid()
    return found


def killed(processes: Iterable[BaseProcess], within_s: float = 0.0) -> BaseProcess | None:
    """Returns a process that SIGKILL ended, as the kernel and operators use it. It looks at the processes that have
    ended when the first one has. Any other signal is the process's own fault, or was asked for, and the process would
    end so again."""
    watched: dict[int, BaseProcess] = {}
    for process in processes:
        with contextlib.suppress(ValueError):  # its owner has closed it
            watched[process.sentinel] = process
    ended = multiprocessing.connection.wait(watched, within_s) if watched else []
    for process in [one for sentinel, one in watched.items() if sentinel in ended]:
        with contextlib.suppress(ValueError):  # its owner closes it now
            process.join(SHOWS_S)
            if process.exitcode == -signal.SIGKILL:
                return process
    return None


async def or_death(work: Awaitable[T], dead: asyncio.Future[NoReturn]) -> T:
    """Returns what `work` returns. If `work` fails because the engine dies, raises EngineDied."""
    try:
        return await work
    except InvalidRequest:
        raise
    except Exception as error:
        await asyncio.wait([dead], timeout=SHOWS_S)
        if dead.done():
            raise EngineDied(str(dead.exception())) from error
        raise


class StartWatch:
    """Surrounds the building of an engine, which blocks the loop.

    If a process that multiprocessing starts meanwhile is killed, a thread kills the others, for which the building
    would wait, and the context raises EngineDied. A process that ends by itself is left to the engine, which reports
    why. The same happens if `lost()` returns a reason: another host's part of the engine has ended.
    """

    def __init__(self, lost: Callable[[], str | None] = lambda: None) -> None:
        self._lost = lost
        self._others = set(multiprocessing.active_children())
        self.started: set[BaseProcess] = set()
        """The processes that have started meanwhile, as far as a look has found them."""
        self._died: BaseProcess | None = None
        """The first process that was killed."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="start-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()
        why = self._lost()
        if why is None and self._died is not None:
            why = f"its process {self._died.pid} was killed while it started"
        if why is not None and (error is None or isinstance(error, Exception)):
            raise EngineDied(f"{why}: {error}" if error else why) from error

    def _look_on(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()
            if self._died is not None or self._lost() is not None:
                for process in self.started:  # the next look also finds processes that start from now on
                    with contextlib.suppress(ValueError):  # its owner has closed it
                        process.kill()

    def _look(self) -> None:
        self.started |= set(multiprocessing.active_children()) - self._others
        self._died = self._died or killed(self.started)


class ProcessWatch:
    """Calls `on_death(pid)` on the running loop, once, when the first vital process ends. A process is vital if its
    name begins with `vital`, or with one of them. Other processes, such as a compiler's helpers, may end at any
    time."""

    def __init__(
        self, processes: Mapping[int, str], vital: str | tuple[str, ...], on_death: Callable[[int], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._watching = False
        self._descriptors: dict[int, int] = {}
        for pid, name in processes.items():
            try:
                self._descriptors[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                if name.startswith(vital):
                    self._loop.call_soon(self._died, pid)
        self._watching = True
        for pid, descriptor in self._descriptors.items():
            if processes[pid].startswith(vital):
                self._loop.add_reader(descriptor, self._died, pid)

    def _died(self, pid: int) -> None:
        if self._watching:
            self.stop()
            self._on_death(pid)

    def pids(self) -> list[int]:
        return sorted(self._descriptors)

    def stop(self) -> None:
        """Stops the calls of `on_death`."""
        if self._watching:
            self._watching = False
            for descriptor in self._descriptors.values():
                self._loop.remove_reader(descriptor)

    def kill(self) -> None:
        for descriptor in self._descriptors.values():
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def wait(self, timeout_s: float) -> None:
        """Waits until all processes have ended, at most `timeout_s` seconds. Blocks."""
        poller = select.poll()
        left = set(self._descriptors.values())
        for descriptor in left:
            poller.register(descriptor, select.POLLIN)
        while left and (ended := poller.poll(timeout_s * 1000)):
            for descriptor, _ in ended:
                poller.unregister(descriptor)
                left.discard(descriptor)

    def close(self) -> None:
        self.stop()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}
