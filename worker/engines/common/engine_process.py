"""The processes of an engine that has them, its ranks and its host agent among them: how they start, die and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from rl_plane.errors import EngineDied, EngineFailed
from worker.engines.base import EngineHung, EngineOptions
from worker.engines.common.process_watch import (
    ProcessWatch,
    StartWatch,
    descendants,
    engine_processes,
    or_death,
    parents_of,
)
from worker.engines.common.replicas import replica_of
from worker.nodes.head_link import HeadLink
from worker.nodes.node_link import NodeLink
from worker.nodes.node_part import NodePart
from worker.nodes.spanning_client import SpanningClient
from worker.receive.host_agent.host_agent_client import HostAgentClient
from worker.receive.host_agent.host_agent_process import HostAgentProcess
from worker.receive.rank_agents.agent_messages import socket_directory
from worker.receive.rank_agents.model_description import ModelDescription
from worker.receive.rank_agents.ranks import Agents, Ranks

log = logging.getLogger("worker.engines.common.engine_process")

HOST_AGENT = "host agent"

END_TIMEOUT_S = 5.0
"""Seconds that killed processes may take to end."""


class EngineProcess(ABC):
    """Use it on the loop on which it was started. A subclass sets `_engine` in `_build`, and implements `end`."""

    name: ClassVar[str]
    vital: ClassVar[str]
    """The begin of the names of the processes without which the engine is dead."""

    def __init__(self, options: EngineOptions, arguments: dict[str, Any]) -> None:
        self.options = options
        self.arguments = arguments
        """The engine arguments, without the arguments that the options set."""
        self._engine: Any = None
        """The library's own engine."""
        self.directory: Path | None = None
        """The directory of the sockets and other files of the processes, while they run."""
        self._ranks: Ranks | None = None
        self._host: HostAgentClient | None = None
        self._model: ModelDescription | None = None
        self._agent: HostAgentProcess | None = None
        self._watch: ProcessWatch | None = None
        self._processes: dict[int, str] = {}
        self._parents: dict[int, int] = {}
        """The names and the parents of the processes: a dead process has none any more."""
        self._blaming: asyncio.Future[None] | None = None
        self._dead: asyncio.Future[NoReturn] | None = None

    async def start(self) -> None:
        """Starts the engine. With several hosts, this process is the head."""
        directory = await self._start_processes()
        assert self._dead is not None, "set"
        await or_death(self._start_agents(directory), self._dead)

    async def start_node(self) -> NodePart:
        """Starts this host's part of an engine whose head is another host."""
        return self._part(await self._start_processes())

    async def _start_processes(self) -> Path:
        self._dead = asyncio.get_running_loop().create_future()
        self._dead.add_done_callback(lambda dead: dead.exception())  # retrieved, even if no call waits
        self.directory = socket_directory()
        self._agent = HostAgentProcess(self.directory)  # on this thread: it ends with it
        before = descendants()
        nodes, loop = self.options.nodes, asyncio.get_running_loop()
        # On this thread, which it blocks: vLLM's processes end with the thread that starts them, and SGLang uses the
        # running loop for its sockets.
        with StartWatch(lambda: None if nodes is None else nodes.lost):
            try:
                self._build(self.directory)
            finally:
                processes = engine_processes(before) | {self._agent.pid: HOST_AGENT}
                self._processes, self._parents = processes, parents_of(processes)
                self._watch = ProcessWatch(processes, (self.vital, HOST_AGENT), self._process_ended)
        if nodes is not None:

            def fail(why: str) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(self._fail, why)

            nodes.on_lost(fail)
        return self.directory

    @abstractmethod
    def _build(self, directory: Path) -> None:
        """Builds the library's engine, or this host's part of it."""

    async def _start_agents(self, directory: Path) -> None:
        """Asks the ranks of this host for their model, and tells its host agent. The other nodes do the same."""
        part, nodes = self._part(directory), self.options.nodes
        self._model, host = await asyncio.to_thread(part.begin), part.host
        ranks: Agents = part.ranks
        if isinstance(nodes, HeadLink):
            nodes.me.ranks = part.numbers
            await asyncio.to_thread(nodes.begin, self._model)
            ranks = SpanningClient(part.ranks, nodes, "ranks")
            host.span(SpanningClient(host.agent, nodes, "host"), nodes.common(host.transports))
        self._ranks, self._host = Ranks(ranks), host

    def _part(self, directory: Path) -> NodePart:
        assert self._agent is not None, "started"
        return NodePart(directory, self._local_ranks(), self._agent.pid, self.options.places)

    @abstractmethod
    def _local_ranks(self) -> range:
        """The ranks of the model on this host."""

    def check_alive(self) -> None:
        if self._dead is not None and self._dead.done():
            raise self._reason()
        if self._engine is None:
            raise EngineFailed("the engine is not running")

    @property
    def engine(self) -> Any:
        """The library's own engine. Raises EngineDied once it is dead."""
        self.check_alive()
        return self._engine

    def pids(self) -> list[int]:
        """The processes of the engine, while it runs."""
        return [] if self._watch is None else self._watch.pids()

    @property
    def ranks(self) -> Ranks:
        if self._ranks is None or self._engine is None:
            raise EngineFailed("the engine is not running")
        return self._ranks

    @property
    def host(self) -> HostAgentClient:
        if self._host is None or self._engine is None:
            raise EngineFailed("the engine is not running")
        return self._host

    @property
    def model(self) -> ModelDescription:
        if self._model is None or self._engine is None:
            raise EngineFailed("the engine is not running")
        return self._model

    def _reason(self) -> EngineDied:
        """Returns a new error for each caller."""
        assert self._dead is not None, "start sets it"
        return EngineDied(str(self._dead.exception()))

    # dying

    async def died(self) -> str:
        """Waits until the engine has died, and returns the reason."""
        assert self._dead is not None, "start sets it"
        await asyncio.wait([self._dead])
        return self._reason().message

    def check_nodes(self) -> None:
        """Raises EngineHung if another host's part of the engine does not answer."""
        nodes = self.options.nodes
        if isinstance(nodes, HeadLink) and (why := nodes.hanging) is not None:
            raise EngineHung(why)

    def _process_ended(self, pid: int) -> None:
        why = f"{self._name_of(pid)} has ended"
        if self.options.nodes is None:
            self._fail(why)
        else:
            self._blaming = asyncio.ensure_future(self._blame(why, self.options.nodes))

    def _name_of(self, pid: int) -> str:
        if self._agent is not None and pid == self._agent.pid:
            return f"the host agent (pid {pid})"
        replica = replica_of(pid, self._processes, self._parents)
        return f"{self.name}'s process {pid}" + ("" if replica is None else f" of replica {replica}")

    async def _blame(self, why: str, nodes: NodeLink) -> None:
        """Fails with the reason that counts: a rank ends when the ranks of another host have."""
        await asyncio.to_thread(nodes.look_for_lost)
        self._fail(nodes.lost or why)

    def _fail(self, why: str) -> None:
        """Raises EngineDied in all waiting calls, and kills the remaining processes: some ranks may still work."""
        if self._die(why):
            log.error("%s", why)
            if self._watch is not None:
                self._watch.kill()

    def _die(self, why: str) -> bool:
        """Raises EngineDied in all waiting calls. Returns False if the engine is dead already."""
        if self._dead is None or self._dead.done():
            return False
        error = EngineDied(why)
        self._dead.set_exception(error)
        if self._watch is not None:
            self._watch.stop()
        self._tell_readers(error)
        return True

    @abstractmethod
    def _tell_readers(self, error: EngineDied) -> None:
        """Ends the requests in flight."""

    @abstractmethod
    async def end(self) -> None:
        """Ends the engine. It may come at any time, and twice."""

    async def _end_processes(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.kill()
            await asyncio.to_thread(watch.wait, END_TIMEOUT_S)
            watch.close()
        agent, self._agent = self._agent, None
        if agent is not None:
            await asyncio.to_thread(agent.kill)
        directory, self.directory = self.directory, None
        if directory is not None:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
