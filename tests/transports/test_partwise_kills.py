"""Deaths of real processes at each point of an update that is sent part by part."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import pytest

from rl_plane.errors import EngineFailed, PlaneError
from tests.support import deaths
from tests.support.broadcast_trainer import BroadcastTrainer, parts_of
from tests.support.broadcast_updates import GLOO_S, PARTS, Broadcasts
from tests.support.fleet_updates import states
from tests.support.hf_fleet import proven

if TYPE_CHECKING:
    from tests.conftest import Plane

POINTS = ("formed", "listening", "between two parts", "in a part", "all received")
ENDS_S = GLOO_S + 10.0
"""Every side has its error by then."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Scene(deaths.Scene):
    """An update that has come to a point."""

    @property
    def parts(self) -> list[dict[str, Any]]:
        return parts_of(self.directory, PARTS)

    async def size(self) -> int:
        return 1 + len(await self.client.list_workers())

    async def come_to(self, point: str, broadcasts: Broadcasts) -> asyncio.Task[dict[str, Any]] | None:
        """Brings the update to the point. Returns the call that is under way there, if there is a call."""
        await broadcasts.form(await self.size())
        if point == "formed":
            return None
        await broadcasts.prepare(version=point, policy=deaths.UNCOMPARED)
        if point == "listening":
            return None
        first, second, *others = self.parts
        await broadcasts.feed(self.directory, first)
        if point == "between two parts":
            return None
        if point == "in a part":
            begun = asyncio.create_task(self.client.run("receive_weights_part", second))
            half = {key: value[: len(value) // 2] for key, value in second.items()}
            await broadcasts.send(self.directory, half)  # it ends when all have it
            return begun
        for part in (second, *others):
            await broadcasts.feed(self.directory, part)
        return None

    async def is_as_before(self) -> None:
        async def nothing_staged() -> bool:
            return all(one["staged"] is None and one["ready"] for one in (await states(self.client)).values())

        await self.plane.until(nothing_staged, ENDS_S)
        await proven(self.http, self.stays, self.serves)

    async def published(self, broadcasts: Broadcasts) -> None:
        await broadcasts.form(await self.size())
        reply = await broadcasts.push(self.directory, self.parts, policy=deaths.UNCOMPARED)
        assert reply["excluded"] == []
        self.serves = self.other
        await proven(self.http, self.stays, self.serves)

    async def fails(self, work: Awaitable[Any]) -> PlaneError:
        with pytest.raises(PlaneError) as caught:
            async with asyncio.timeout(ENDS_S):
                await work
        assert caught.value.http_status in (400, 409), caught.value
        return caught.value


async def test_the_next_version_arrives_after_any_process_has_died(plane: Plane) -> None:
    async with deaths.scene_of(plane, Scene, BroadcastTrainer, POINTS, real="in a part") as (
        scene,
        trainers,
        doomed,
    ):
        client = scene.client
        broadcasts = Broadcasts(client, trainers["workers die"])
        for point, victim in doomed.items():
            print("a worker dies:", point)
            under_way = await scene.come_to(point, broadcasts)
            victim.kill()
            if under_way is not None:
                await scene.fails(under_way)
            elif point == "formed":
                await scene.left(victim)
                await scene.published(broadcasts)
                continue
            elif point == "all received":
                await scene.fails(client.run("complete_weights_update"))
            else:
                call = client.run("receive_weights_part", scene.parts[1])
                sent = asyncio.create_task(broadcasts.send(scene.directory, scene.parts[1]))
                await scene.fails(call)
                with contextlib.suppress(EngineFailed):  # it may have had another child than the dead one
                    async with asyncio.timeout(ENDS_S):
                        await sent
            await scene.left(victim)
            await scene.is_as_before()
            await scene.published(broadcasts)
        trainer = trainers["workers die"]
        for point in POINTS:
            print("the trainer dies:", point)
            under_way = await scene.come_to(point, Broadcasts(client, trainer))
            trainer.kill()
            if under_way is not None:
                await scene.fails(under_way)
            elif point == "all received":
                await client.run("complete_weights_update")
                scene.serves = scene.other
            elif point != "formed":
                await scene.fails(client.run("receive_weights_part", scene.parts[2]))
            await scene.is_as_before()
            trainer = trainers[point]
            await scene.published(Broadcasts(client, trainer))
