"""The fake engine as the simulation has it: watched, and able to fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, PlaneError, UpdateAborted
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from rl_plane.protocol.update_requests import PreparedReply
from rl_plane.protocol.versions import WeightVersion
from tests.sim import product
from tests.sim.sources import SimTransport
from worker.engines.base import EngineOptions, PauseMode
from worker.engines.fake.adapter import FakeEngine
from worker.engines.fake.fake_model import FakeTensor
from worker.receive.weight_receiver import Receiver

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.world import World


TRANSPORTS = ("filesystem", "gloo")
"""The second one brings the same files, but as if they were pushed: they can't be fetched again."""


class SimReceiver(Receiver):
    def __init__(self, engine: FakeEngine, process: Process) -> None:
        super().__init__(engine.receiver.holder, engine.receiver.transports)
        self._process = process

    def receive(self, staging: str, cancelled: Cancelled) -> PreparedReply:
        """Called again and again while its bytes are awaited."""
        if not cancelled():
            self._check_here(staging)
        return super().receive(staging, cancelled)

    def receive_part(self, staging: str, part: Mapping[str, Any], cancelled: Cancelled) -> int:
        if self._process.plane:
            raise UpdateAborted("simulated: the trainer can't be reached", field="transport.group")
        return super().receive_part(staging, part, cancelled)

    def _check_here(self, staging: str) -> None:
        opened = product.opened_as(self, staging)
        if opened is None:
            return
        transport, delivery = opened
        try:
            transport.check_here(delivery)
        except PlaneError:
            self.discard(staging)
            raise


class SimEngine(FakeEngine):
    def __init__(self, world: World, process: Process, model: Path) -> None:
        extra = {"token_delay_s": str(world.token_delay_s)}
        super().__init__(
            EngineOptions(model, extra=extra), {one: SimTransport(one, world, process) for one in TRANSPORTS}
        )
        self.receiver = SimReceiver(self, process)
        self.hung_until = 0.0
        self.failing_swaps = 0
        self._world = world
        self._process = process

    async def _hang(self) -> None:
        while (left := self.hung_until - self._world.loop.now) > 0:  # noqa: ASYNC110 - it may hang on
            await asyncio.sleep(left)

    async def liveness(self) -> None:
        await self._hang()
        await super().liveness()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        connected = any(bus.conn.is_connected for bus in self._process.buses)
        if connected and not self._closed:  # else no caller hears of it, and its streams count as lost
            self._world.checks.serving.admitted(self._process, self, request.adapter)
        async for delta in super().generate(request):
            yield delta

    async def _turn(self, running: Any) -> None:
        if self.hung_until:
            await self._hang()
        await super()._turn(running)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> bool:
        self._world.checks.touching(self._process, "a pause of the engine")
        await self._hang()
        return await super().pause(mode, clear_cache)

    async def resume(self) -> None:
        await self._hang()
        await super().resume()

    async def swap(self, staging: str, version: WeightVersion, *, keep_kv: bool = False) -> bool:
        self._world.checks.swapping(self._process, version)
        await self._hang()
        if self.failing_swaps:
            self.failing_swaps -= 1
            raise EngineFailed("simulated: the swap failed")
        return await super().swap(staging, version, keep_kv=keep_kv)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        vectors = await super().score(sequences)
        held, _ = product.in_engine(self, None)
        if held is not None:
            self._world.checks.scored(self._process, held.version)
        return vectors

    @contextmanager
    def half_written(self) -> Iterator[dict[str, FakeTensor]]:
        self._world.checks.touching(self._process, "an overwrite")
        self.config.fail_overwrite, self.failing_swaps = bool(self.failing_swaps), 0
        with super().half_written() as mixed:
            yield mixed

    async def swap_adapter(self, name: str, staging: str | None, version: WeightVersion | None) -> bool:
        if version is not None:
            self._world.checks.swapping(self._process, version)
        await self._hang()
        if self.failing_swaps:
            self.failing_swaps -= 1
            raise EngineFailed("simulated: the adapter's swap failed")
        return await super().swap_adapter(name, staging, version)
