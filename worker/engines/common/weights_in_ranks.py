"""The receiving of weights for an engine whose ranks are processes of their own, each with a receiver and an agent."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.protocol.update_requests import CanaryLimits, PreparedReply, ReceiveRequest
from rl_plane.protocol.versions import TensorSpec
from worker.engines.base import EngineAdapter
from worker.receive.rank_agents.ranks import Ranks


class WeightsInRanks(EngineAdapter):
    """Call `super().__init__()`, and set `engine_loop` in `start`."""

    engine_loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self._in_place: set[str] = set()
        """Stagings that are open and will overwrite the served weights."""

    @property
    @abstractmethod
    def ranks(self) -> Ranks:
        """The agents of all ranks. Raises EngineFailed if the engine is not running."""

    @abstractmethod
    async def before_overwrite(self) -> None:
        """Runs on the engine loop before received tensors overwrite the served weights: from here on, the weights are
        of no version. Raises EngineFailed if the engine is not paused."""

    async def after_overwrite(self) -> None:
        """Runs on the engine loop when all ranks have overwritten their weights."""

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self.ranks.weight_spec()

    def open(self, staging: str, request: ReceiveRequest, limits: CanaryLimits | None = None) -> None:
        self.ranks.open(staging, request, limits)
        if request.in_place:
            self._in_place.add(staging)

    def receive(self, staging: str, cancelled: Cancelled) -> PreparedReply:
        ranks = self.ranks
        if staging not in self._in_place:
            return ranks.receive(staging, cancelled)
        self._in_place.discard(staging)
        try:
            asyncio.run_coroutine_threadsafe(self.before_overwrite(), self.engine_loop).result()
        except BaseException:
            ranks.discard(staging)
            raise
        reply = ranks.receive(staging, cancelled)
        asyncio.run_coroutine_threadsafe(self.after_overwrite(), self.engine_loop).result()
        return reply

    def receive_part(self, staging: str, part: Mapping[str, Any], cancelled: Cancelled) -> int:
        return self.ranks.receive_part(staging, part, cancelled)

    def cached_digest(self) -> str | None:
        return self.ranks.cached_digest()

    async def discard(self, staging: str) -> None:
        self._in_place.discard(staging)
        await asyncio.to_thread(self.ranks.discard, staging)

    def offer(self) -> dict[str, Any] | None:
        return self.ranks.offer()

    def relay_address(self) -> tuple[str, int] | None:
        return self.ranks.relay_address()

    def init_transport(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self.ranks.init_transport(config)

    def destroy_transport(self, backend: str, group: str | None = None) -> list[dict[str, Any]]:
        return self.ranks.destroy_transport(backend, group)
