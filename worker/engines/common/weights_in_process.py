"""The receiving of weights for an engine that has its model in the worker's own process: one rank, one `Receiver`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed
from rl_plane.protocol.update_requests import CanaryLimits, PreparedReply, ReceiveRequest
from rl_plane.protocol.versions import TensorSpec
from worker.engines.receives_weights import ReceivesWeights
from worker.receive.received_bytes import ByteCount
from worker.receive.weight_receiver import Receiver


class WeightsInProcess(ReceivesWeights):
    """Set `receiver = Receiver(holder, load_transports(options.places))` in `start`, with a `WeightHolder` of yours,
    and `receiver = None` in `close`. `swap` takes the staged weights by `self.receiver.take(staging)`."""

    _receiver: Receiver | None = None

    @property
    def receiver(self) -> Receiver:
        """Raises EngineFailed before `start` and after `close`."""
        if self._receiver is None:
            raise EngineFailed("the engine is not running")
        return self._receiver

    @receiver.setter
    def receiver(self, receiver: Receiver | None) -> None:
        self._receiver = receiver

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self.receiver.holder.weight_spec()

    def open(self, staging: str, request: ReceiveRequest, limits: CanaryLimits | None = None) -> None:
        self.receiver.open(staging, request, limits)

    def receive(self, staging: str, cancelled: Cancelled) -> PreparedReply:
        return self.receiver.receive(staging, cancelled)

    def receive_part(self, staging: str, part: Mapping[str, Any], cancelled: Cancelled) -> int:
        return self.receiver.receive_part(staging, part, cancelled)

    def received(self) -> ByteCount | None:
        return None if self._receiver is None else self._receiver.received.now()

    def cached_digest(self) -> str | None:
        return self.receiver.cached_digest

    async def discard(self, staging: str) -> None:
        await asyncio.to_thread(self.receiver.discard, staging)

    def offer(self, adapters: Collection[str] = ()) -> list[dict[str, Any]]:
        return self.receiver.offer(adapters)

    def relay_addresses(self) -> list[tuple[str, int]]:
        address = self.receiver.relay_address()
        return [] if address is None else [address]

    def init_transport(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.receiver.init_transport(config)
        return [{"rank": 0}]

    def destroy_transport(self, backend: str, group: str | None = None) -> list[dict[str, Any]]:
        self.receiver.destroy_transport(backend, group)
        return [{"rank": 0}]
