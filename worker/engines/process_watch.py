"""Watches the processes of an engine, children and grandchildren alike, and ends them. Linux: by process descriptors,
which no new process of the same number can be mistaken for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterable, Mapping

import psutil


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
