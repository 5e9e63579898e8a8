"""A process of the simulation: tasks and connections that die together, at once, without a last word."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

from tests.sim.clocks import Clock
from tests.sim.sim_client import SimBus
from tests.sim.sim_nats import PING_S, SimServer
from tests.sim.virtual_loop import PROCESS, Handle, VirtualLoop


class Process:
    def __init__(self, loop: VirtualLoop, server: SimServer, name: str) -> None:
        self.name = name
        self.alive = True
        self.started_at = loop.now
        self.leaving = False
        self.frozen = False
        self.waiting: list[Handle] = []
        self.clock = Clock()
        self.buses: list[SimBus] = []
        self.stood_still_s = 0.0
        self.disturbed_at = 0.0
        """The time of the last fault of the process, its engine, its connection or its source, or the end of that
        fault."""
        self.plane = ""
        """The fate of bytes that it wants to receive: `fails` or `hangs`. Empty: they arrive."""
        self.cut_messages = 0
        """The number of its messages that partitions have cut."""
        self.on_phase: Callable[[str], None] = lambda phase: None
        """Called with the phase that a coordinator of this process enters, before it asks anything in it."""
        self.noted_cuts = 0
        """The number of these that the coverage has noted."""
        self.miscomputed = False
        """Whether its engine has computed with other weights than its own."""
        self._thaw_at = 0.0
        self._clock_stopped_at: float | None = None
        self._loop = loop
        self._server = server
        self._context = copy_context()
        self._context.run(PROCESS.set, self)

    @property
    def faulty(self) -> bool:
        """Was it ever tampered with?"""
        return self.disturbed_at > 0.0

    def disturb(self, seconds: float = 0.0) -> None:
        """Something is done to it now, and lasts so long."""
        self.disturbed_at = max(self.disturbed_at, self._loop.now + seconds)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work, context=self._context.copy())

    def bus(self, name: str) -> SimBus:
        """Makes a bus for the code that runs in this process."""
        bus = SimBus(self._server, name)
        self.buses.append(bus)
        return bus

    def kill(self) -> None:
        self.alive = False
        for bus in self.buses:
            if not bus.conn.is_closed:
                self._server.disconnect(bus.conn, for_good=True)

    def freeze(self, seconds: float, *, clock_too: bool = False) -> None:
        """Sends SIGSTOP, then SIGCONT: the process continues late where it was. `clock_too`: its machine is paused,
        and does not count this time."""
        self.disturb()
        self.stood_still_s += seconds
        self._thaw_at = max(self._thaw_at, self._loop.now + seconds)
        if not self.frozen:
            self.frozen = True
            self._clock_stopped_at = self._loop.now if clock_too else None
            self._server.later(seconds, self._thaw_if_due)
            self._server.later(self._server.rng.uniform(*PING_S), self._pinged)

    def _pinged(self) -> None:
        if self.frozen and self.alive:
            for bus in self.buses:
                self.cut_off(bus)

    def cut_off(self, bus: SimBus) -> None:
        self.disturb()
        if bus.conn.is_connected:
            self._server.disconnect(bus.conn, for_good=False)

    def _thaw_if_due(self) -> None:
        if self.frozen and self._loop.now < self._thaw_at:
            self._server.later(self._thaw_at - self._loop.now, self._thaw_if_due)
        else:
            self.thaw()

    def thaw(self) -> None:
        if self.frozen:
            self.disturb()
            self.frozen = False
            if self._clock_stopped_at is not None:
                self.clock.stood_s += self._loop.now - self._clock_stopped_at
            waiting, self.waiting = self.waiting, []
            self._loop.again(waiting)


class InlineEngine:
    """EngineLoop's interface on the one loop of the simulation."""

    async def run(self, work: Coroutine[Any, Any, Any], *, to_its_end: bool = False) -> Any:
        return await work

    async def stream(self, source: Any, gather_s: float = 0.0) -> Any:
        async with contextlib.aclosing(source) as items:
            async for item in items:
                yield [item]
