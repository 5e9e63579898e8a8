"""Deaths of real processes at each point of a pushed update, one after another in one fleet."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from rl_plane._util.tasks import never
from rl_plane.errors import Locked, Unavailable, UpdateAborted
from rl_plane.transports.group.peer_liveness import PeerLiveness
from rl_plane.transports.group.rank_layout import Place
from tests.support import deaths
from tests.support.fleet_updates import states
from tests.support.group_pushes import Pushing, send_all
from tests.support.group_trainer import Trainer
from tests.support.hf_fleet import HEAL_S, proven

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

POINTS: dict[str, tuple[str | int, ...]] = {
    "joined": ("form",),
    "listening": ("prepare",),
    "the first bucket": ("prepare", 1),
    "a middle bucket": ("prepare", 4),
    "the last bucket": ("prepare", 100),
    "all received": ("prepare", 100, "finish"),
}
"""The steps that were done before the death."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Scene(deaths.Scene):
    async def come_to(self, point: str, trainer: Trainer) -> None:
        pushing = Pushing(self.client, trainer)
        for step in POINTS[point]:
            if step == "prepare":
                await pushing.prepare(self.directory, "unborn", policy=deaths.UNCOMPARED)
            elif isinstance(step, int):
                await trainer.do("send", step)
            else:
                await trainer.do(step)

    async def is_as_before(self) -> None:
        for one, state in (await states(self.client)).items():
            assert state["staged"] is None, one
            assert state["ready"], one
        await proven(self.http, self.stays, self.serves)

    async def published(self, trainer: Trainer) -> None:
        await Pushing(self.client, trainer).push(
            self.directory, f"by {trainer.process.pid}", policy=deaths.UNCOMPARED
        )
        await self.committed()

    async def committed(self) -> None:
        self.serves = self.other
        await self.is_as_before()

    async def publishes_with(self, trainer: Trainer) -> bool:
        """The last case left a dead group open. The plane notices within moments that it can't receive any more."""
        try:
            await self.published(trainer)
        except Locked:
            return False
        return True


@pytest.mark.parametrize("why", ["it is full", ""])
def test_a_lifeline_names_the_dead_peer_or_the_reason_of_its_end(why: str) -> None:
    trainer = PeerLiveness.of_trainer("127.0.0.1")
    place = Place("gloo", "g", "127.0.0.1", 1, world_size=3, rank=1)
    place = replace(place, lifeline_port=trainer.port, secret=trainer.secret)
    one, other = (PeerLiveness.of_rank(replace(place, rank=rank)) for rank in (1, 2))
    assert one is not None
    assert other is not None
    for said in (b"", b"gg 1\n", b"\xff" * 5000):
        with socket.create_connection(("127.0.0.1", trainer.port)) as stranger:
            stranger.sendall(said)
    if why:
        one.end(why)
    one.close()
    assert trainer.watch("g", never) == (why or "rank 1 is gone")
    if why:
        trainer.end(why)
    trainer.close()
    assert other.watch("g", never) == (why or "its trainer is gone")
    assert other.watch("g", lambda: True) == ""
    other.close()
    assert PeerLiveness.of_rank(replace(place, lifeline_port=None)) is None


async def test_the_next_version_arrives_after_any_process_has_died(plane: Plane) -> None:
    """The last worker that dies has real weights, and is started again."""
    async with deaths.scene_of(plane, Scene, Trainer, list(POINTS), real="a middle bucket") as (
        scene,
        trainers,
        doomed,
    ):
        trainer = trainers["workers die"]
        for point, victim in doomed.items():
            print("a worker dies:", point)
            await scene.come_to(point, trainer)
            await _dies(scene, trainer, point, victim)
            await scene.published(trainer)
        returning = doomed["a middle bucket"].instance_id
        scene.stays += await asyncio.to_thread(scene.witnesses.spawn, 1, instance_id=returning)
        await scene.published(trainer)
        for point in POINTS:
            print("the trainer dies:", point)
            await scene.come_to(point, trainer)
            trainer.kill()
            if point == "all received":
                await scene.client.run("complete_weights_update")
                await scene.committed()
            elif point == "the first bucket":
                with pytest.raises(UpdateAborted, match="broke"):
                    await scene.client.run("complete_weights_update")
            trainer = trainers[point]
            await plane.until(partial(scene.publishes_with, trainer), HEAL_S)


async def _dies(scene: Scene, trainer: Trainer, point: str, victim: Spawned) -> None:
    """A worker dies, and every other process gets an error."""
    victim.kill()
    prepared = "prepare" in POINTS[point]
    if prepared and point != "all received":
        with pytest.raises(Unavailable, match="broke"):
            await send_all(trainer)
        await trainer.do("close")
    if prepared:
        with pytest.raises(UpdateAborted):
            await scene.client.run("complete_weights_update")
    await scene.left(victim)
    await scene.is_as_before()
