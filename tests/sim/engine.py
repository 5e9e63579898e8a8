"""The fake engine and the filesystem transport as the simulation has them: watched, and able to fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plane.errors import EngineFailed
from rl_plane.generation import GenerateDelta, GenerateRequest
from rl_plane.versions import WeightVersion
from worker.engines.base import EngineOptions, PauseMode
from worker.engines.fake import FakeEngine
from worker.engines.fake_model import FakeTensor
from worker.transports.base import Places
from worker.transports.filesystem import FilesystemTransport

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.world import World


TRANSPORTS = ("filesystem", "gloo")
"""The second one brings the same files, but as if they were pushed."""


class SimEngine(FakeEngine):
    def __init__(self, world: World, process: Process, model: Path) -> None:
        extra = {"token_delay_s": str(world.token_delay_s)}
        super().__init__(EngineOptions(model, extra=extra), {one: SimTransport(world) for one in TRANSPORTS})
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
        if connected and not self._closed:  # else nobody hears of it, and its streams count as lost
            self._world.checks.admitted(self._process, self, request.adapter)
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

    async def swap(self, staging: str, version: WeightVersion) -> bool:
        self._world.checks.swapping(self._process, version)
        await self._hang()
        if self.failing_swaps:
            self.failing_swaps -= 1
            raise EngineFailed("simulated: the swap failed")
        return await super().swap(staging, version)

    @contextmanager
    def half_written(self) -> Iterator[dict[str, FakeTensor]]:
        self._world.checks.touching(self._process, "an overwrite")
        self.fail_overwrite, self.failing_swaps = bool(self.failing_swaps), 0
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


class SimTransport(FilesystemTransport):
    """Its checkpoints can go and come back."""

    def __init__(self, world: World) -> None:
        super().__init__(Places((world.models[0].parent,)))
        self._world = world

    def open(self, request: Mapping[str, Any], *kind: Any) -> Any:
        request = {**request, "backend": "filesystem"}
        if request.get("path") in self._world.gone:
            request = {**request, "path": str(request["path"]) + "-gone"}
        return super().open(request, *kind)
