"""SGLang's Engine and its processes: how they start, answer and end.

Every way in which SGLang reacts to a death ends this process, and its shutdown ends every child of this process. Both
are replaced here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rl_plane.errors import EngineDied, EngineFailed
from rl_plane.protocol.generation import RAW_LOGPROBS
from worker.engines.base import EngineOptions
from worker.engines.common.engine_process import EngineProcess
from worker.engines.common.shared_names import shared_names
from worker.engines.sglang.args import ON_CPU
from worker.engines.sglang.plugin import MARK, METHOD, child_failed
from worker.engines.sglang.streams import FIRST_KEY
from worker.receive.rank_agents.ranks import check_rows

T = TypeVar("T")

POLL_MS = 100
"""Milliseconds after which a thread that waits for SGLang looks whether SGLang is dead."""


LOADS = "sglang_loads_"
"""The begin of the name of the file in which SGLang's schedulers report their load. SGLang never deletes it."""

CALL_S = 1800.0
"""Bounds the wait until every rank has ended a call: the longest swap that the hang timer allows. A death ends it at
once."""


class SglangProcess(EngineProcess):
    """`on_death(error)`: the engine died, or was closed."""

    name = "SGLang"
    vital = "sglang::"
    call_s = CALL_S

    def __init__(self, options: EngineOptions, arguments: dict[str, Any], device: str, gpu: int) -> None:
        super().__init__(options, arguments)
        self.device = device
        self._gpu = gpu
        self._manager: Any = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._calling = asyncio.Lock()
        self._rpc = threading.Lock()
        """Held by the thread that uses the socket of remote calls."""
        self._asked: set[asyncio.Task[Any]] = set()
        self._on_death: Callable[[EngineDied], None] = lambda error: None

    def on_death(self, tell: Callable[[EngineDied], None]) -> None:
        self._on_death = tell

    @property
    def replicas(self) -> int:
        """The number of replicas of data parallelism."""
        return int(self.arguments.get("dp_size", 1))

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
            raise EngineFailed("the engine is not running") if dead is None else self._reason()
        task = asyncio.ensure_future(work)
        self._asked.add(task)
        task.add_done_callback(self._answered)
        waiting: set[asyncio.Future[Any]] = {task, dead}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise self._reason()
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
        """Each rank answers by its agent: SGLang passes on the answer of the first one only, and waits neither for the
        later stages of a pipeline nor for replicas."""
        async with self._calling:
            number, failure = next(self._numbers), None
            asked = {"op": op, "call": str(number), **arguments}
            if self.replicas > 1:
                await self._send_to_replicas(asked)
            else:
                failure = await asyncio.to_thread(self._remote_call, asked)
            rows = await asyncio.to_thread(self.ranks.rows, "outcome", {"call": number}, timeout_s=self.call_s)
            check_rows(rows)  # with their types
            if failure is not None:
                raise EngineFailed(f"{op}: {failure}")
            return rows

    async def _send_to_replicas(self, asked: dict[str, str]) -> None:
        """SGLang's own remote calls reach no replica. The call goes by its controller, in line with the pauses and
        requests."""
        from sglang.srt.managers.io_struct import RpcReqInput

        await self.manager._async_dispatch_to_scheduler(RpcReqInput(method=METHOD, parameters=asked))

    def _remote_call(self, asked: dict[str, str]) -> str | None:
        from sglang.srt.managers.io_struct import RpcReqInput, sock_recv, sock_send

        socket, dead = self._engine.send_to_rpc, self._dead
        assert dead is not None, "start sets it"
        with self._rpc:
            if socket.closed:
                return None
            sock_send(socket, RpcReqInput(method=METHOD, parameters=asked))
            while not socket.poll(POLL_MS):
                if dead.done():
                    return None
            reply = sock_recv(socket)
        return None if reply.success else str(reply.message)

    async def end(self) -> None:
        self._die("the engine was closed")
        for task in [*self._asked, *([self._reading] if self._reading is not None else [])]:
            task.cancel()
        await self._end_processes()
        self._delete_load_files()
        multiprocessing.active_children()  # collects their exit codes
        # An open socket, or one with unread messages, would block the end of this process.
        if self._manager is not None:
            self._manager.send_to_scheduler.close(linger=0)
            self._manager.recv_from_detokenizer.close(linger=0)
            self._manager = None
        if self._engine is not None:
            await asyncio.to_thread(self._close_rpc)
            self._engine = None

    def _close_rpc(self) -> None:
        with self._rpc:  # a thread that waits for an answer gives up soon
            if self._engine.send_to_rpc is not None:  # only the head has it
                self._engine.send_to_rpc.close(linger=0)

    @contextlib.contextmanager
    def _environment(self, directory: Path) -> Iterator[None]:
        """Sets the environment for the processes that SGLang starts, and for its own import here."""
        raw = self.options.logprobs_mode == RAW_LOGPROBS
        os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = str(int(raw))  # raw: not divided by the temperature
        os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"  # a node that is not the head has work of ours
        os.environ[MARK] = json.dumps(
            {
                "worker": os.getpid(),
                "device": self.device,
                "directory": str(directory),
                "model": str(self.options.model.absolute()),
                "raw_logprobs": raw,
            }
        )
        # On a CPU, the first request of several ranks would wait for half a minute until each has compiled a function.
        eager = self.device == "cpu" and not self.arguments.get("enable_torch_compile")
        eager = eager and "TORCHDYNAMO_DISABLE" not in os.environ
        if eager:
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
        plugins, files = os.environ.get("SGLANG_PLUGINS"), tempfile.tempdir
        if plugins:
            os.environ["SGLANG_PLUGINS"] = f"{plugins},rl_plane"
        tempfile.tempdir = str(directory)  # SGLang leaves its sockets there
        try:
            yield
        finally:
            del os.environ[MARK]
            if eager:
                del os.environ["TORCHDYNAMO_DISABLE"]
            tempfile.tempdir = files
            if plugins:
                os.environ["SGLANG_PLUGINS"] = plugins

    def _build(self, directory: Path) -> None:
        from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager

        class OwnEngine(Engine):  # type: ignore[misc,unused-ignore]
            @staticmethod
            def init_tokenizer_manager_func(*arguments: Any, **more: Any) -> Any:
                made = init_tokenizer_manager(*arguments, **more)
                self._manager = made[0]  # also when the rest fails
                return made

            @classmethod
            def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
                """Launches none: without a tokenizer the scheduler sends its tokens to this process."""
                return [], []

            def shutdown(self) -> None:
                """SGLang calls it at the end of the process, and ends every child. Our `end` has done that already."""

        arguments: dict[str, Any] = {}
        if self.device == "cpu":
            arguments |= ON_CPU
        arguments |= self.arguments
        if (nodes := self.options.nodes) is not None:
            arguments["nnodes"], arguments["node_rank"] = nodes.settings.count, nodes.settings.rank
            arguments["dist_init_addr"] = nodes.settings.address
        with self._environment(directory), _as_it_was():
            self._engine = OwnEngine(
                model_path=str(self.options.model),
                device=self.device,
                base_gpu_id=self._gpu,
                dtype=self.options.dtype or "auto",
                weight_version=FIRST_KEY,
                skip_tokenizer_init=True,
                incremental_streaming_output=True,
                custom_sigquit_handler=child_failed,
                **arguments,
            )

    async def _start_processes(self) -> Path:
        directory = await super()._start_processes()
        reader = getattr(self._manager, "load_snapshot_reader", None)
        if reader is not None:
            reader.read_all()  # opens the file; a controller of replicas has opened it
        self._delete_load_files()
        return directory

    def _delete_load_files(self) -> None:
        files = shared_names(self.pids(), LOADS)
        path = getattr(getattr(self._manager, "load_snapshot_reader", None), "path", None)
        if path is not None:  # also when the start has failed
            files.add(Path(path))
        for one in files:
            one.unlink(missing_ok=True)

    async def _start_agents(self, directory: Path) -> None:
        self._read()
        await super()._start_agents(directory)

    def _local_ranks(self) -> range:
        from sglang.srt.entrypoints.engine import _calculate_rank_ranges

        parameters = self._engine.server_args
        if self.replicas > 1:
            return range(parameters.tp_size * parameters.pp_size * self.replicas)
        stages, parts, _, _ = _calculate_rank_ranges(parameters.node_rank)
        first = stages.start * parameters.tp_size + parts.start
        return range(first, first + len(stages) * len(parts))

    def _read(self) -> None:
        manager, loop = self._manager, asyncio.get_running_loop()
        manager._subprocess_watchdog.stop()
        manager.event_loop = loop  # otherwise its first request installs signal handlers
        self._reading = loop.create_task(manager.handle_loop())
        self._reading.add_done_callback(self._reading_ended)

    def _reading_ended(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled():
            self._fail(f"SGLang's answers can't be read any more: {reading.exception()!r}")

    def _tell_readers(self, error: EngineDied) -> None:
        self._on_death(error)


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
