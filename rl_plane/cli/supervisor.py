"""Keeps children running: what a death does, when a child comes back, and the orderly end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from rl_plane.bus.server import NatsServer
from rl_plane.cli.children import ERR, Child, Printer, exit_of, start_process
from rl_plane.errors import PlaneError

FIRST_PAUSE_S = 0.2
"""A process that was killed once should be back at once."""
MAX_PAUSE_S = 15.0
"""One that dies again and again should not keep the machine busy."""
STEADY_S = 30.0
"""Who was ready for so long starts from the first pause again."""
KILL_S = 5.0
"""How long after its own bound a child may take to end, until it is killed."""

Event = Callable[..., None]
"""`event(words, name=…, …)`: something a person should know."""


def pause_before(restarts: int) -> float:
    """Seconds before the restart number `restarts` (from 0) in a row."""
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(restarts, 16))


def exit_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def comes_back(code: int) -> bool:
    """Whether the same process, started anew, may fare better: it was killed, or its engine or a part of it failed."""
    from worker import exit_codes

    return code < 0 or code in exit_codes.COME_BACK


class Kept:
    """A child by its name, over all its processes."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], *, restart: bool) -> None:
        self.name, self.argv, self.env, self.restart = name, argv, env, restart
        self.child: Child | None = None
        self.ready = asyncio.Event()
        """It has been ready once."""
        self.facts: dict[str, Any] = {}
        """The newest ready line."""
        self.on_ready: Callable[[], None] = lambda: None

    def kill(self) -> None:
        if self.child is not None:
            self.child.signal_group(signal.SIGKILL)


class Supervisor:
    """`failed` is set when something could not even start; `end` then is, too. `pause`: see `pause_before`."""

    def __init__(
        self,
        printer: Printer,
        event: Event,
        on_line: Callable[[str, bytes, int], None],
        pause: Callable[[int], float] = pause_before,
        start_process: Callable[[Sequence[str], Mapping[str, str]], subprocess.Popen[bytes]] = start_process,
    ) -> None:
        self._printer, self._event, self._on_line = printer, event, on_line
        self._pause, self._start_process = pause, start_process
        self.end = asyncio.Event()
        self.failed: PlaneError | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.kept: dict[str, Kept] = {}
        self._nats: NatsServer | None = None

    # ---- children ----

    def keep(self, kept: Kept) -> None:
        self.kept[kept.name] = kept
        self._start(kept.name, self._keep(kept))

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work)

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(
                    PlaneError(f"{name} can't be kept running: {error}", fix="can this machine start more?")
                )

        task.add_done_callback(done)

    async def _keep(self, kept: Kept) -> None:
        restarts = 0
        while not self.end.is_set():
            ready_at: list[float] = []

            def ready(facts: dict[str, Any], ready_at: list[float] = ready_at) -> None:
                ready_at.append(time.monotonic())
                kept.facts = facts
                kept.on_ready()
                if kept.ready.is_set():
                    self._event(
                        f"{kept.name} is back (pid {facts.get('pid')})", event="back", name=kept.name, **facts
                    )
                kept.ready.set()

            process = self._start_process(kept.argv, kept.env)
            kept.child = Child(process, lambda line, fd: self._on_line(kept.name, line, fd), ready)
            code = await kept.child.wait()
            if self.end.is_set():
                return
            pid = kept.child.pid
            words = f"{kept.name} (pid {pid}) ended: {exit_words(code)}"
            if not kept.ready.is_set() and not (kept.restart and comes_back(code)):
                self._fail(PlaneError(f"{words}, before it was ready", fix=f"see the lines of {kept.name} above"))
                return
            restarts = 0 if ready_at and time.monotonic() - ready_at[0] > STEADY_S else restarts
            pause = self._pause(restarts)
            words += f"; it starts again in {pause:g} s" if kept.restart else "; the others go on"
            self._event(words, event="died", name=kept.name, pid=pid, exit_code=code, restart=kept.restart)
            if not kept.restart:
                return
            restarts += 1
            await asyncio.sleep(pause)

    def _fail(self, error: PlaneError) -> None:
        self.failed = self.failed or error
        self.end.set()

    # ---- nats-server ----

    def keep_nats(self, server: NatsServer, again: Callable[[], NatsServer]) -> None:
        """`server` runs; `again()` makes another on the same port and store."""
        self._nats = server
        self._start("nats", self._keep_nats(again))

    async def _keep_nats(self, again: Callable[[], NatsServer]) -> None:
        assert self._nats is not None
        restarts, started = 0, time.monotonic()
        while True:
            code = await exit_of(self._nats.process)
            if self.end.is_set():
                return
            restarts = 0 if time.monotonic() - started > STEADY_S else restarts
            self._event(f"nats-server ended: {exit_words(code)}; it starts again", event="died", name="nats")
            while not self.end.is_set():
                self._nats.stop()
                self._nats = again()
                try:
                    self._nats.start()  # on this thread, with which it is to die; tens of milliseconds
                except PlaneError as error:
                    self._event(f"nats-server did not start: {error}", event="failed", name="nats")
                    await asyncio.sleep(self._pause(restarts))
                    restarts += 1
                    continue
                pid = self._nats.process.pid
                self._event(f"nats-server is back (pid {pid})", event="back", name="nats", pid=pid)
                break
            restarts, started = restarts + 1, time.monotonic()
            await asyncio.sleep(pause_before(restarts - 1))

    # ---- the end ----

    def signalled(self) -> None:
        """The first signal ends everything in order, a second one at once."""
        if not self.end.is_set():
            self._event("ending; again to kill at once", event="ending")
            self.end.set()
        else:
            self.kill()

    def kill(self) -> None:
        for kept in self.kept.values():
            kept.kill()
        if self._nats is not None and self._nats.process.poll() is None:
            self._nats.process.kill()

    async def stop(self, groups: Sequence[tuple[Sequence[str], float]]) -> None:
        """Ends the groups of children one after another, each within its bound in seconds, then nats-server."""
        self.end.set()
        for names, bound_s in groups:
            await self._stop_group([self.kept[name] for name in names if name in self.kept], bound_s)
        if (task := self._tasks.get("nats")) is not None:
            task.cancel()
        if self._nats is not None:
            await asyncio.to_thread(self._nats.stop)

    async def _stop_group(self, group: Sequence[Kept], bound_s: float) -> None:
        living = []
        for kept in group:
            task = self._tasks[kept.name]
            if kept.child is None or kept.child.process.poll() is not None:
                task.cancel()  # it was waiting to start again
            else:
                kept.child.terminate()
            living.append(task)
        if not living:
            return
        _, late = await asyncio.wait(living, timeout=bound_s + KILL_S)
        for kept in group:
            if self._tasks[kept.name] in late:
                self._printer.line(f"rl-plane: {kept.name} did not end within {bound_s + KILL_S:g} s: killed", ERR)
                kept.kill()
        if late:
            await asyncio.wait(late, timeout=KILL_S)
