"""Watches the processes of an engine, children and grandchildren alike, and ends them. Linux: by process descriptors,
which no new process of the same number can be mistaken for."""

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
"""How often it is looked, while an engine is built, what it has started and what of that was killed."""

SHOWS_S = 1.0
"""A process that ends closes its files before its end can be seen: so long that may take on a busy machine."""


def descendants() -> list[int]:
    return [process.pid for process in psutil.Process().children(recursive=True)]


def engine_processes(before: Iterable[int]) -> dict[int, str]:
    """The descendants of this process that were not there `before`, id → name, without the one that multiprocessing
    keeps for all."""
    known, found = set(before), {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid not in known and not any("resource_tracker" in part for part in process.cmdline()):
                found[process.pid] = process.name()
    return found


def killed(processes: Iterable[BaseProcess], within_s: float = 0.0) -> BaseProcess | None:
    """One that was, by SIGKILL as the kernel and operators do it, of those that have ended when the first one has. What
    any other signal ends would end so again: its own fault, or it was told to."""
    watched: dict[int, BaseProcess] = {}
    for process in processes:
        with contextlib.suppress(ValueError):  # whoever started it has closed it
            watched[process.sentinel] = process
    ended = multiprocessing.connection.wait(watched, within_s) if watched else []
    for process in [one for sentinel, one in watched.items() if sentinel in ended]:
        with contextlib.suppress(ValueError):  # or closes it now
            process.join(SHOWS_S)
            if process.exitcode == -signal.SIGKILL:
                return process
    return None


async def or_death(work: Awaitable[T], dead: asyncio.Future[NoReturn]) -> T:
    """What `work` comes to; where it fails because the engine dies, an EngineDied."""
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
    """Around the building of an engine, which holds up the loop. When one of the processes that multiprocessing starts
    here meanwhile is killed, a thread kills the others, for which the building would wait, and what is raised is an
    EngineDied. One that ends by itself has told why: that is for the engine to tell."""

    def __init__(self) -> None:
        self._others = set(multiprocessing.active_children())
        self._started: set[BaseProcess] = set()
        self._died: BaseProcess | None = None
        """The first that was killed."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="start-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()
        if self._died is not None and (error is None or isinstance(error, Exception)):
            why = f"its process {self._died.pid} was killed while it started"
            raise EngineDied(f"{why}: {error}" if error else why) from error

    def _look_on(self) -> None:
        while self._died is None and not self._over.wait(LOOK_S):
            self._look()
        if self._died is not None:
            for process in self._started:
                process.kill()

    def _look(self) -> None:
        self._started |= set(multiprocessing.active_children()) - self._others
        self._died = self._died or killed(self._started)


class ProcessWatch:
    """`on_death(pid)` is called on the running loop when the first of the `vital` ones ends, once: those whose names
    begin so. The others, a compiler's helpers say, may end when they like."""

    def __init__(self, processes: Mapping[int, str], vital: str, on_death: Callable[[int], None]) -> None:
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

    def stop(self) -> None:
        """No death is told of any more."""
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
        """Until all have ended; blocks. Those that don't in time are left."""
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
