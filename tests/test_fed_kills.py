"""Who dies in an update that is fed part by part, at each point of it: on real processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from rl_plane.errors import EngineFailed, PlaneError
from tests.fed_trainer import FedTrainer, parts_of
from tests.test_fed_updates import GLOO_S, PARTS, Feeding
from tests.test_frontend_generation import frontend
from tests.test_hf_fleet import HEAL_S, START_S, Witnesses, proven
from tests.test_plane_update import states

if TYPE_CHECKING:
    import httpx

    from rl_plane.client import RlClient
    from tests.conftest import Plane

POINTS = ("formed", "armed", "between two parts", "in a part", "all received")
FAKE: dict[str, Any] = {"engine": "fake", "patch": "import torch"}
"""Loading it later would hold up its NATS loop."""
KINDS = {**dict.fromkeys(POINTS, FAKE), "in a part": {"engine": "hf"}}
ENDS_S = GLOO_S + 10.0
"""Every side has its error by then."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Scene:
    """One `hf` worker that stays, and an update that has come to a point."""

    def __init__(self, plane: Plane, client: RlClient, http: httpx.AsyncClient, witnesses: Witnesses) -> None:
        self.plane = plane
        self.client = client
        self.http = http
        self.witnesses = witnesses
        self.stays: list[str] = []
        self.serves = 1

    @property
    def _other(self) -> int:
        return 3 if self.serves == 2 else 2

    @property
    def directory(self) -> Path:
        return self.witnesses.base(self._other)

    @property
    def parts(self) -> list[dict[str, Any]]:
        return parts_of(self.directory, PARTS)

    async def size(self) -> int:
        return 1 + len(await self.client.list_workers())

    async def come_to(self, point: str, feeding: Feeding) -> asyncio.Task[dict[str, Any]] | None:
        """The call that is under way there, if one is."""
        await feeding.form(await self.size())
        if point == "formed":
            return None
        await feeding.prepare(version=point)
        if point == "armed":
            return None
        first, second, *others = self.parts
        await feeding.feed(self.directory, first)
        if point == "between two parts":
            return None
        if point == "in a part":
            begun = asyncio.create_task(self.client.run("feed_weights_update", second))
            half = {key: value[: len(value) // 2] for key, value in second.items()}
            await feeding.send(self.directory, half)  # it ends when all have it
            return begun
        for part in (second, *others):
            await feeding.feed(self.directory, part)
        return None

    async def is_as_before(self) -> None:
        async def nothing_staged() -> bool:
            return all(one["staged"] is None and one["ready"] for one in (await states(self.client)).values())

        await self.plane.until(nothing_staged, ENDS_S)
        await proven(self.http, self.stays, self.serves)

    async def published(self, feeding: Feeding) -> None:
        await feeding.form(await self.size())
        assert (await feeding.push(self.directory, self.parts))["excluded"] == []
        self.serves = self._other
        await proven(self.http, self.stays, self.serves)

    async def fails(self, work: Awaitable[Any]) -> PlaneError:
        with pytest.raises(PlaneError) as caught:
            async with asyncio.timeout(ENDS_S):
                await work
        assert caught.value.http_status in (400, 409), caught.value
        return caught.value


async def test_the_next_version_comes_whoever_has_died(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    client = await plane.client()
    with ExitStack() as stack:
        trainers = {point: stack.enter_context(FedTrainer(plane)) for point in ("workers die", *POINTS)}
        doomed = {point: plane.spawn(ready=False, model=witnesses.first, **KINDS[point]) for point in POINTS}
        stays = await asyncio.to_thread(witnesses.spawn, 1)
        for one in doomed.values():
            await asyncio.to_thread(one.wait_ready, START_S)
        async with frontend(plane, admission_wait_s=HEAL_S) as http:
            scene = Scene(plane, client, http, witnesses)
            scene.stays = stays
            feeding = Feeding(client, trainers["workers die"])
            for point, victim in doomed.items():
                print("a worker dies:", point)
                under_way = await scene.come_to(point, feeding)
                victim.kill()
                if under_way is not None:
                    await scene.fails(under_way)
                elif point == "formed":
                    await plane.until(lambda one=victim: _left(client, one.instance_id), HEAL_S)
                    await scene.published(feeding)
                    continue
                elif point == "all received":
                    await scene.fails(client.run("complete_weights_update"))
                else:
                    call = client.run("feed_weights_update", scene.parts[1])
                    sent = asyncio.create_task(feeding.send(scene.directory, scene.parts[1]))
                    await scene.fails(call)
                    with contextlib.suppress(EngineFailed):  # it may have had another child than the dead one
                        async with asyncio.timeout(ENDS_S):
                            await sent
                await plane.until(lambda one=victim: _left(client, one.instance_id), HEAL_S)
                await scene.is_as_before()
                await scene.published(feeding)
            trainer = trainers["workers die"]
            for point in POINTS:
                print("the trainer dies:", point)
                under_way = await scene.come_to(point, Feeding(client, trainer))
                trainer.kill()
                if under_way is not None:
                    await scene.fails(under_way)
                elif point == "all received":
                    await client.run("complete_weights_update")
                    scene.serves = scene._other
                elif point != "formed":
                    await scene.fails(client.run("feed_weights_update", scene.parts[2]))
                await scene.is_as_before()
                trainer = trainers[point]
                await scene.published(Feeding(client, trainer))


async def _left(client: RlClient, instance_id: str) -> bool:
    return all(member.instance_id != instance_id for member in await client.list_workers())
