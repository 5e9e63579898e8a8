"""SGLang's Engine and its processes: how they start, answer and end.

Every way in which SGLang reacts to a death ends this process, and its shutdown ends every child of this process. Both
are replaced here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rl_plane.errors import EngineDied, EngineFailed
from worker.engines.base import EngineOptions
from worker.engines.common.process_watch import ProcessWatch, StartWatch, descendants, engine_processes, or_death
from worker.engines.sglang.args import ON_CPU
from worker.engines.sglang.plugin import MARK, METHOD, child_failed
from worker.receive.rank_agents.agent_client import AgentClient
from worker.receive.rank_agents.agent_messages import socket_directory
from worker.receive.rank_agents.ranks import Ranks, check_rows

T = TypeVar("T")
log = logging.getLogger("worker.engines.sglang.processes")

POLL_MS = 100
"""Milliseconds after which a thread that waits for SGLang looks whether SGLang is dead."""

END_TIMEOUT_S = 5.0
"""Seconds that a killed process may take to end."""


class SglangProcess:
    """Use it on the loop on which it was started. `on_death(error)`: the engine died, or was closed."""

    def __init__(self, options: EngineOptions, arguments: dict[str, Any], device: str, gpu: int) -> None:
        self._options = options
        self._arguments = arguments
        self._device = device
        self._gpu = gpu
        self._engine: Any = None
        self._manager: Any = None
        self._watch: ProcessWatch | None = None
        self._directory: Path | None = None
        self._ranks: Ranks | None = None
        self._dead: asyncio.Future[NoReturn] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._calling = asyncio.Lock()
        self._rpc = threading.Lock()
        """Held by the thread that uses the socket of remote calls."""
        self._asked: set[asyncio.Task[Any]] = set()
        self._on_death: Callable[[EngineDied], None] = lambda error: None

    async def start(self, first_key: str) -> None:
        """`first_key`: the engine's name of the weights that it starts with."""
        loop = asyncio.get_running_loop()
        self._dead = loop.create_future()
        self._dead.add_done_callback(lambda dead: dead.exception())  # retrieved, even if no call waits
        self._directory = socket_directory()
        with StartWatch(), self._environment(), _as_it_was():
            # On the loop's own thread, which it blocks: SGLang uses the running loop for its sockets.
            self._build(first_key)
        self._read(loop)
        parameters = self._engine.server_args
        self._ranks = Ranks(AgentClient(self._directory, parameters.tp_size * parameters.pp_size))
        await or_death(asyncio.to_thread(self._ranks.start), self._dead)

    def on_death(self, tell: Callable[[EngineDied], None]) -> None:
        self._on_death = tell

    def check_alive(self) -> None:
        if self._engine is None or self._dead is None:
            raise EngineFailed("the engine is not running")
        if self._dead.done():
            raise _reason(self._dead)

    @property
    def ranks(self) -> Ranks:
        if self._ranks is None:
            raise EngineFailed("the engine is not running")
        return self._ranks

    @property
    def engine(self) -> Any:
        """SGLang's Engine."""
        return self._engine

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager. Raises EngineDied once the engine is dead."""
        self.check_alive()
        return self._manager

    async def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the engine's answer, or raises EngineDied if the engine dies meanwhile and would never answer. If the
        caller gives up, the work still runs to its end: its late answer would be taken for the next one's otherwise."""
        dead = self._dead
        if dead is None or dead.done():
            work.close()
            raise EngineFailed("the engine is not running") if dead is None else _reason(dead)
        task = asyncio.ensure_future(work)
        self._asked.add(task)
        task.add_done_callback(self._answered)
        waiting: set[asyncio.Future[Any]] = {task, dead}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _reason(dead)
        return await task

    def _answered(self, task: asyncio.Task[Any]) -> None:
        self._asked.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have given up

    async def call(self, op: str, **arguments: str) -> list[dict[str, Any]]:
        """Runs a method of `scheduler.Rank` in every rank, between two steps, to its end in all. Returns a row per rank
        with its result. Raises what a rank raised; the error's `rank_results` says which."""
        return await self.ask(self._call(op, arguments))

    async def _call(self, op: str, arguments: dict[str, str]) -> list[dict[str, Any]]:
        async with self._calling:
            failure = await asyncio.to_thread(self._remote_call, op, arguments)
            rows = await asyncio.to_thread(self.ranks.rows, "outcome")
            check_rows(rows)  # with their types
            if failure is not None:
                raise EngineFailed(f"{op}: {failure}")
            return rows

    def _remote_call(self, op: str, arguments: dict[str, str]) -> str | None:
        from sglang.srt.managers.io_struct import RpcReqInput, sock_recv, sock_send

        socket, dead = self._engine.send_to_rpc, self._dead
        assert dead is not None, "start sets it"
        with self._rpc:
            if socket.closed:
                return None
            sock_send(socket, RpcReqInput(method=METHOD, parameters={"op": op, **arguments}))
            while not socket.poll(POLL_MS):
                if dead.done():
                    return None
            reply = sock_recv(socket)
        return None if reply.success else str(reply.message)

    async def end(self) -> None:
        self._die(EngineDied("the engine was closed"))
        for task in [*self._asked, *([self._reading] if self._reading is not None else [])]:
            task.cancel()
        if self._watch is not None:
            self._watch.kill()
            await asyncio.to_thread(self._watch.wait, END_TIMEOUT_S)
            self._watch.close()
            self._watch = None
            multiprocessing.active_children()  # collects their exit codes
        # An open socket, or one with unread messages, would block the end of this process.
        if self._manager is not None:
            self._manager.send_to_scheduler.close(linger=0)
            self._manager.recv_from_detokenizer.close(linger=0)
            self._manager = None
        if self._engine is not None:
            await asyncio.to_thread(self._close_rpc)
            self._engine = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _close_rpc(self) -> None:
        with self._rpc:  # a thread that waits for an answer gives up soon
            self._engine.send_to_rpc.close(linger=0)

    # building

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        """Sets the environment for the processes that SGLang starts, and for its own import here."""
        os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"  # raw logprobs, not scaled by the temperature
        os.environ[MARK] = json.dumps(
            {
                "worker": os.getpid(),
                "device": self._device,
                "directory": str(self._directory),
                "model": str(self._options.model.absolute()),
                "places": self._options.places.to_wire(),
            }
        )
        plugins, files = os.environ.get("SGLANG_PLUGINS"), tempfile.tempdir
        if plugins:
            os.environ["SGLANG_PLUGINS"] = f"{plugins},rl_plane"
        tempfile.tempdir = str(self._directory)  # SGLang leaves its sockets there
        try:
            yield
        finally:
            del os.environ[MARK]
            tempfile.tempdir = files
            if plugins:
                os.environ["SGLANG_PLUGINS"] = plugins

    def _build(self, first_key: str) -> None:
        from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager

        class OwnEngine(Engine):  # type: ignore[misc,unused-ignore]
            @staticmethod
            def init_tokenizer_manager_func(*arguments: Any, **more: Any) -> Any:
                made = init_tokenizer_manager(*arguments, **more)
                self._manager = made[0]  # also when the rest fails
                return made

            def shutdown(self) -> None:
                """SGLang calls it at the end of the process, and ends every child. Our `end` has done that already."""

        arguments: dict[str, Any] = dict(ON_CPU) if self._device == "cpu" else {}
        arguments |= self._arguments
        before = descendants()
        try:
            self._engine = OwnEngine(
                model_path=str(self._options.model),
                device=self._device,
                base_gpu_id=self._gpu,
                dtype=self._options.dtype or "auto",
                weight_version=first_key,
                skip_tokenizer_init=True,
                incremental_streaming_output=True,
                custom_sigquit_handler=child_failed,
                **arguments,
            )
        finally:
            self._watch = ProcessWatch(engine_processes(before), "sglang::", self._process_ended)

    # dying

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        manager = self._manager
        manager._subprocess_watchdog.stop()
        manager.event_loop = loop  # otherwise its first request installs signal handlers
        self._reading = loop.create_task(manager.handle_loop())
        self._reading.add_done_callback(self._reading_ended)

    def _process_ended(self, pid: int) -> None:
        self._fail(f"SGLang's process {pid} has ended")

    def _reading_ended(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled():
            self._fail(f"SGLang's answers can't be read any more: {reading.exception()!r}")

    def _fail(self, why: str) -> None:
        """Raises EngineDied in all waiting calls, and kills the remaining processes: some ranks may still work."""
        if self._dead is not None and not self._dead.done():
            log.error("%s", why)
            self._die(EngineDied(why))
            if self._watch is not None:
                self._watch.kill()

    def _die(self, error: EngineDied) -> None:
        if self._dead is None or self._dead.done():
            return
        if self._watch is not None:
            self._watch.stop()
        self._dead.set_exception(error)
        self._on_death(error)


def _reason(dead: asyncio.Future[NoReturn]) -> EngineDied:
    """A new error for each caller."""
    return EngineDied(str(dead.exception()))


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Restores the root logger's handlers, which SGLang replaces, and the event loop policy, which it sets to
    uvloop."""
    root = logging.getLogger()
    handlers, level, policy = list(root.handlers), root.level, asyncio.get_event_loop_policy()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        asyncio.set_event_loop_policy(policy)
