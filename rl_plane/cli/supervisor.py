"""Supervises child processes: decides on a death, restarts a child after a pause, and ends all in order."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from rl_plane.bus.server import LOOK_S, NatsServer
from rl_plane.cli.children import ERR, Child, Printer, exit_of, start_process
from rl_plane.cli.output import exit_words
from rl_plane.errors import PlaneError

FIRST_PAUSE_S = 0.2
"""Seconds before the first restart: a process that was killed once should be back at once."""
MAX_PAUSE_S = 15.0
"""The longest pause, so that a process that dies again and again does not keep the machine busy."""
STEADY_S = 30.0
"""After being ready for so many seconds, a process starts from the first pause again."""
KILL_S = 5.0
"""Seconds after its own bound until a child is killed."""

Event = Callable[..., None]
"""`event(words, name=…, …)` reports something that a person should know."""


def pause_before(restarts: int) -> float:
    """Seconds before restart number `restarts` in a row, counted from 0."""
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(restarts, 16))


def restart_helps(code: int) -> bool:
    """True if a restart may help: the process was killed, or its engine or a part of it failed."""
    from worker import exit_codes

    return code < 0 or code in exit_codes.COME_BACK


class SupervisedProcess:
    """A named child, over all its restarts."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], *, restart: bool) -> None:
        self.name, self.argv, self.env, self.restart = name, argv, env, restart
        self.running: Child | None = None
        """The newest process."""
        self.ready = asyncio.Event()
        """Set once the child has been ready."""
        self.facts: dict[str, Any] = {}
        """The facts of the newest ready line."""
        self.on_ready: Callable[[], None] = lambda: None

    def kill(self) -> None:
        """Kills the newest process and the processes that it has started."""
        if self.running is not None:
            self.running.signal_group(signal.SIGKILL)


class Supervisor:
    """Starts children and restarts them. When a child can't start, `failed` has the error and `end` is set."""

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
        self.processes: dict[str, SupervisedProcess] = {}
        self._nats: NatsServer | None = None

    # ---- children ----

    def supervise(self, process: SupervisedProcess) -> None:
        """Starts a child, and watches it from now on."""
        self.processes[process.name] = process
        self._start(process.name, self._supervise(process))

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work)

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(
                    PlaneError(
                        f"{name} could not be started: {error}", fix="free memory or processes on this machine"
                    )
                )

        task.add_done_callback(done)

    async def _supervise(self, child: SupervisedProcess) -> None:
        restarts = 0
        while not self.end.is_set():
            ready_at: list[float] = []

            def ready(facts: dict[str, Any], ready_at: list[float] = ready_at) -> None:
                ready_at.append(time.monotonic())
                child.facts = facts
                child.on_ready()
                if child.ready.is_set():
                    self._event(
                        f"{child.name} is back (pid {facts.get('pid')})", event="back", name=child.name, **facts
                    )
                child.ready.set()

            process = self._start_process(child.argv, child.env)
            child.running = Child(process, lambda line, fd: self._on_line(child.name, line, fd), ready)
            code = await child.running.wait()
            if self.end.is_set():
                return
            pid = child.running.pid
            words = f"{child.name} (pid {pid}) ended: {exit_words(code)}"
            if not child.ready.is_set() and not (child.restart and restart_helps(code)):
                self._fail(PlaneError(f"{words}, before it was ready", fix=f"see the lines of {child.name} above"))
                return
            restarts = 0 if ready_at and time.monotonic() - ready_at[0] > STEADY_S else restarts
            pause = self._pause(restarts)
            words += f"; it starts again in {pause:g} s" if child.restart else "; the others continue"
            self._event(words, event="died", name=child.name, pid=pid, exit_code=code, restart=child.restart)
            if not child.restart:
                return
            restarts += 1
            await asyncio.sleep(pause)

    def _fail(self, error: PlaneError) -> None:
        self.failed = self.failed or error
        self.end.set()

    # ---- nats-server ----

    def supervise_nats(self, server: NatsServer) -> None:
        """Starts a nats-server, and watches it from now on. BusUnreachable if it does not start."""
        self._nats = server
        server.start()
        self._start("nats", self._supervise_nats(server))

    async def _supervise_nats(self, server: NatsServer) -> None:
        restarts, started = 0, time.monotonic()
        while True:
            ended = exit_of(server.process)
            while not ended.done():
                await asyncio.wait([ended], timeout=LOOK_S)
                self._look_at_nats(server)
            code = ended.result()
            if self.end.is_set():
                return
            restarts = 0 if time.monotonic() - started > STEADY_S else restarts
            self._event(f"nats-server ended: {exit_words(code)}; it starts again", event="died", name="nats")
            while not self.end.is_set():
                try:
                    server.start()  # on this thread, whose end ends it; this takes tens of milliseconds
                except PlaneError as error:
                    self._event(f"nats-server did not start: {error}", event="failed", name="nats")
                    await asyncio.sleep(self._pause(restarts))
                    restarts += 1
                    continue
                pid = server.process.pid
                self._event(f"nats-server is back (pid {pid})", event="back", name="nats", pid=pid)
                break
            restarts, started = restarts + 1, time.monotonic()
            await asyncio.sleep(pause_before(restarts - 1))

    def _look_at_nats(self, server: NatsServer) -> None:
        """Passes the server's errors on, and ends a server that a restart helps."""
        for line in server.new_errors():
            self._event(f"nats-server: {line}", event="error", name="nats", message=line)
        if server.needs_restart and server.process.poll() is None:
            self._event("the disk has room again: nats-server starts again", event="error", name="nats")
            server.process.terminate()

    # ---- the end ----

    def signalled(self) -> None:
        """Handles a signal. The first one ends everything in order, a second one at once."""
        if not self.end.is_set():
            self._event("ending; again to kill at once", event="ending")
            self.end.set()
        else:
            self.kill()

    def kill(self) -> None:
        """Kills everything."""
        for process in self.processes.values():
            process.kill()
        if self._nats is not None and self._nats.process.poll() is None:
            self._nats.process.kill()

    async def stop(self, groups: Sequence[tuple[Sequence[str], float]]) -> None:
        """Ends the groups of children one after another, each within its bound in seconds, then nats-server."""
        self.end.set()
        for names, bound_s in groups:
            await self._stop_group([self.processes[name] for name in names if name in self.processes], bound_s)
        if (task := self._tasks.get("nats")) is not None:
            task.cancel()
        if self._nats is not None:
            await asyncio.to_thread(self._nats.stop)

    async def _stop_group(self, group: Sequence[SupervisedProcess], bound_s: float) -> None:
        living = []
        for child in group:
            task = self._tasks[child.name]
            if child.running is None or child.running.process.poll() is not None:
                task.cancel()  # it was waiting to start again
            else:
                child.running.terminate()
            living.append(task)
        if not living:
            return
        _, late = await asyncio.wait(living, timeout=bound_s + KILL_S)
        for child in group:
            if self._tasks[child.name] in late:
                self._printer.line(
                    f"rl-plane: {child.name} did not end within {bound_s + KILL_S:g} s: killed", ERR
                )
                child.kill()
        if late:
            await asyncio.wait(late, timeout=KILL_S)
