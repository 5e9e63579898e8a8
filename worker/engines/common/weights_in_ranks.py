"""The receiving of weights for an engine whose ranks are processes of their own.

The host agent receives and stages once for all ranks, which map and load what it has staged."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import PlaneError
from rl_plane.protocol.update_requests import CanaryLimits, PreparedReply, ReceiveRequest
from rl_plane.protocol.versions import TensorSpec
from worker.receive.host_agent.host_agent_client import HostAgentClient
from worker.receive.rank_agents.model_description import ModelDescription
from worker.receive.rank_agents.ranks import Ranks
from worker.receive.received_bytes import ByteCount
from worker.receive.receives_weights import ReceivesWeights


class WeightsInRanks(ReceivesWeights):
    """Call `super().__init__()`, and set `engine_loop` in `start`. The engine is its own receiver."""

    engine_loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.receiver: ReceivesWeights = self
        self._in_place: set[str] = set()
        """Stagings that are open and will overwrite the served weights."""
        self._of_adapters: set[str] = set()
        """Stagings that are open and will bring an adapter."""

    @property
    @abstractmethod
    def ranks(self) -> Ranks:
        """The agents of all ranks. Raises EngineFailed if the engine is not running."""

    @property
    @abstractmethod
    def host(self) -> HostAgentClient:
        """The host agent. Raises EngineFailed if the engine is not running."""

    @property
    @abstractmethod
    def model(self) -> ModelDescription:
        """The model, as the ranks describe it. Raises EngineFailed if the engine is not running."""

    @abstractmethod
    async def before_overwrite(self) -> None:
        """Runs on the engine loop before received tensors overwrite the served weights: from here on, the weights are
        of no version. Raises EngineFailed if the engine is not paused."""

    async def after_overwrite(self) -> None:
        """Runs on the engine loop when all ranks have overwritten their weights."""

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self.model.tensors

    def open(self, staging: str, request: ReceiveRequest, limits: CanaryLimits | None = None) -> None:
        self.host.open(staging, request, limits)
        if request.in_place:
            self._in_place.add(staging)
        if request.adapter is not None:
            self._of_adapters.add(staging)

    def receive(self, staging: str, cancelled: Cancelled) -> PreparedReply:
        host = self.host
        if staging in self._in_place:
            self._in_place.discard(staging)
            return self._overwrite(staging, cancelled)
        reply = host.receive(staging, cancelled)
        of_adapter = staging in self._of_adapters
        self._of_adapters.discard(staging)
        try:
            if of_adapter:
                self.ranks.stage_adapter(staging, cancelled)
            else:
                self.ranks.stage(staging, cancelled)
        except BaseException:
            self._forget(staging)
            raise
        return reply

    def _overwrite(self, staging: str, cancelled: Cancelled) -> PreparedReply:
        host = self.host
        try:
            asyncio.run_coroutine_threadsafe(self.before_overwrite(), self.engine_loop).result()
        except BaseException:
            host.discard(staging)
            raise
        reply = host.receive(staging, cancelled)
        asyncio.run_coroutine_threadsafe(self.after_overwrite(), self.engine_loop).result()
        return reply

    def receive_part(self, staging: str, part: Mapping[str, Any], cancelled: Cancelled) -> int:
        return self.host.receive_part(staging, part, cancelled)

    def received(self) -> ByteCount | None:
        return self.host.received()

    def cached_digest(self) -> str | None:
        return self.host.cached_digest()

    def discard(self, staging: str) -> None:
        self._in_place.discard(staging)
        self._of_adapters.discard(staging)
        self.ranks.discard(staging)
        self.host.discard(staging)

    def _forget(self, staging: str) -> None:
        self.ranks.forget(staging)
        self.host.forget(staging)

    def _adapter_taken(self, staging: str) -> None:
        """Frees the memory in which an adapter came, once every rank has made its own form of it. The host agent may
        keep a copy for other workers."""
        try:
            self.host.take(staging)
        except PlaneError:  # the ranks have it
            self.host.forget(staging)
        else:
            self.host.loaded(staging)

    async def _loaded(self, staging: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Gives the memory of swapped weights back, if every rank has copied them. `rows`: the answers to the swap."""
        if all(row.get("copied") for row in rows):
            await asyncio.to_thread(self.host.loaded, staging)

    def offer(self, adapters: Collection[str] = ()) -> list[dict[str, Any]]:
        return self.host.offer(adapters)

    def relay_addresses(self) -> list[tuple[str, int]]:
        return self.host.relay_addresses()

    def init_transport(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.host.init_transport(config)
        return self._rows()

    def destroy_transport(self, backend: str, group: str | None = None) -> list[dict[str, Any]]:
        self.host.destroy_transport(backend, group)
        return self._rows()

    def _rows(self) -> list[dict[str, Any]]:
        """One row for each rank: the host agent acts for all of them."""
        return [{"rank": rank} for rank in range(self.ranks.count)]
