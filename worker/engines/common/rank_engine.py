"""The base class of vLLM and SGLang, whose ranks are processes of their own."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Generic, TypeVar

from rl_plane.errors import EngineFailed, PlaneError
from rl_plane.protocol.pooling import lacking_tasks
from worker.engines.base import EngineOptions, PauseMode
from worker.engines.capabilities import FullEngine
from worker.engines.common.engine_process import EngineProcess
from worker.engines.common.pooled_requests import NO_LOGPROBS, NO_POOLING_LORA, PooledRequests
from worker.engines.common.scoring import check_memory, check_sequences, checked_scores
from worker.engines.common.tool_call_parsing import NO_PARSER, ToolCallParsing
from worker.engines.common.weights_in_ranks import WeightsInRanks
from worker.nodes.head_link import HeadLink
from worker.nodes.node_part import NodePart
from worker.nodes.spans_hosts import SpansHosts
from worker.receive.host_agent.host_agent_client import HostAgentClient
from worker.receive.rank_agents.model_description import ModelDescription
from worker.receive.rank_agents.ranks import Ranks

P = TypeVar("P", bound=EngineProcess)


class RankEngine(PooledRequests, ToolCallParsing, WeightsInRanks, FullEngine, SpansHosts, Generic[P]):
    def __init__(self, options: EngineOptions, process: P) -> None:
        super().__init__(options)
        self.process = process
        """The library's engine and its processes."""
        self._paused = False

    async def close(self) -> None:
        await self.process.end()

    async def start_node(self) -> NodePart:
        try:
            return await self.process.start_node()
        except BaseException:
            await self.close()
            raise

    def _lacking_in_common(self) -> dict[str, str]:
        """Returns what both engines lack for the same reasons: with this task, over these hosts, without a parser."""
        lacking, nodes = lacking_tasks(self._options.task), self.process.options.nodes
        if isinstance(nodes, HeadLink):
            lacking |= {f"transport:{name}": why for name, why in nodes.lacking_transports().items()}
        if self._tool_call_parser is None:
            lacking["parse_tool_calls"] = NO_PARSER
        if self._head is not None:
            lacking |= NO_POOLING_LORA | {"score": NO_LOGPROBS}
        return lacking

    async def node_died(self) -> str:
        return await self.process.died()

    @property
    def ranks(self) -> Ranks:
        return self.process.ranks

    @property
    def host(self) -> HostAgentClient:
        return self.process.host

    @property
    def model(self) -> ModelDescription:
        return self.process.model

    async def liveness(self) -> None:
        self._running()
        self.process.check_nodes()
        await self._ranks_answer()
        await self.host.ping()

    @abstractmethod
    async def _ranks_answer(self) -> None:
        """Waits for one round trip through the engine's loop and all ranks."""

    def _running(self) -> None:
        self.process.check_alive()

    def _check_paused(self) -> None:
        if not self._paused:
            raise EngineFailed("the engine is not paused")

    async def pause(self, mode: PauseMode, clear_cache: bool) -> bool:
        """After `clear_cache`, running requests compute their KV again."""
        was_paused = self._paused
        try:
            await self._pause(mode, clear_cache)
            return clear_cache and await self.flush_cache()
        except BaseException:
            with contextlib.suppress(PlaneError):  # the first error counts
                if was_paused:  # only requests that a `keep` froze were running
                    await self._freeze()
                else:
                    await self.resume()
            raise

    @abstractmethod
    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Pauses. It may leave the engine in any state if it fails."""

    @abstractmethod
    async def _freeze(self) -> None:
        """Freezes all requests between two tokens."""

    @contextlib.asynccontextmanager
    async def _stopped(self) -> AsyncIterator[None]:
        """Lets the engine run again afterwards if it runs now. The caller freezes it."""
        was_paused = self._paused
        try:
            yield
        finally:
            if not was_paused:
                await self.resume()

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Running requests compute their KV again."""
        self._running()
        self.info.require("score", "op")
        checked = check_sequences(sequences, self.info.vocab_size, self.info.max_model_len)
        check_memory(self._released_tags())
        async with self._stopped():
            scores = await self._score(checked)
        return checked_scores(scores, checked)

    @abstractmethod
    async def _score(self, sequences: list[list[int]]) -> Any:
        """Freezes the engine and scores. `score` has checked the arguments, and lets the engine run again."""

    @abstractmethod
    def _released_tags(self) -> Collection[str]:
        """The tags of the memory that is released, or may be."""
