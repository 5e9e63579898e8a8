"""Shared parts of the tests of deaths in an update: they kill workers and trainers one by one, each at another
point."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tests.support.commanded_process import CommandedProcess
from tests.support.frontend_process import frontend
from tests.support.hf_fleet import HEAL_S, START_S, Witnesses

if TYPE_CHECKING:
    import httpx

    from rl_plane.client import RlClient
    from tests.conftest import Plane, Spawned

FAKE: dict[str, Any] = {"engine": "fake", "patch": "import torch"}
"""Loading it later would hold up its NATS loop."""

T = TypeVar("T", bound=CommandedProcess)
UNCOMPARED = {"canary": "off"}
"""The policy of updates here: what fake workers compute is made up, and one of real weights stands beside them."""


@dataclass
class Scene:
    """One `hf` worker that stays, and what it is to serve."""

    plane: Plane
    client: RlClient
    http: httpx.AsyncClient
    witnesses: Witnesses
    stays: list[str] = field(default_factory=list)
    """The workers whose tokens show the served weights."""
    serves: int = 1
    """The seed of the witness that is committed."""

    @property
    def other(self) -> int:
        """The seed of the next witness."""
        return 3 if self.serves == 2 else 2

    @property
    def directory(self) -> Path:
        return self.witnesses.base(self.other)

    async def left(self, one: Spawned) -> None:
        """Waits until the worker is not listed any more."""
        await self.plane.until(lambda: self._left(one), HEAL_S)

    async def _left(self, one: Spawned) -> bool:
        return all(member.instance_id != one.instance_id for member in await self.client.list_workers())


S = TypeVar("S", bound=Scene)


@asynccontextmanager
async def scene_of(
    plane: Plane, scene: type[S], trainer: Callable[[Plane], T], points: Sequence[str], real: str
) -> AsyncIterator[tuple[S, dict[str, T], dict[str, Spawned]]]:
    """The scene; the trainers, of which the first serves while workers die (`workers die`) and one takes over at each
    point; and the worker that dies at each, at `real` one of real weights."""
    witnesses = Witnesses(plane)
    client = await plane.client()
    with ExitStack() as stack:
        trainers = {point: trainer(plane) for point in ("workers die", *points)}
        for started in trainers.values():
            stack.enter_context(started)
        kinds = {**dict.fromkeys(points, FAKE), real: {"engine": "hf"}}
        doomed = {point: plane.spawn(ready=False, model=witnesses.first, **kinds[point]) for point in points}
        stays = await asyncio.to_thread(witnesses.spawn, 1)
        for one in doomed.values():
            await asyncio.to_thread(one.wait_ready, START_S)
        async with frontend(plane, admission_wait_s=HEAL_S) as http:
            yield scene(plane, client, http, witnesses, stays), trainers, doomed
