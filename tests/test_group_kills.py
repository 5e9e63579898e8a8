"""Who dies in a pushed update, at each point of it: on real processes, and on one fleet after another's death."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("torch")

from rl_plane.client import RlClient
from rl_plane.errors import Locked, Unavailable, UpdateAborted
from rl_plane.group_place import Place
from rl_plane.lifelines import Lifelines
from rl_plane.tasks import never
from tests.group_trainer import Trainer
from tests.test_frontend_generation import frontend
from tests.test_group_transport import Pushing, _send_all
from tests.test_hf_fleet import HEAL_S, START_S, Witnesses, proven
from tests.test_plane_update import states

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

POINTS: dict[str, tuple[str | int, ...]] = {
    "joined": ("form",),
    "armed": ("prepare",),
    "the first bucket": ("prepare", 1),
    "a middle bucket": ("prepare", 4),
    "the last bucket": ("prepare", 100),
    "all received": ("prepare", 100, "finish"),
}
"""What was done before the death."""

FAKE: dict[str, Any] = {"engine": "fake", "patch": "import torch"}
"""Loading it later would hold up its NATS loop."""
KINDS = {**dict.fromkeys(POINTS, FAKE), "a middle bucket": {"engine": "hf"}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Scene:
    """One `hf` worker that stays, and what it is to serve."""

    def __init__(self, plane: Plane, client: RlClient, http: httpx.AsyncClient, witnesses: Witnesses) -> None:
        self.plane = plane
        self.client = client
        self.http = http
        self.witnesses = witnesses
        self.real: list[str] = []
        """The workers whose tokens tell."""
        self.serves = 1

    @property
    def other(self) -> Path:
        return self.witnesses.base(self._other)

    @property
    def _other(self) -> int:
        return 3 if self.serves == 2 else 2

    async def come_to(self, point: str, trainer: Trainer) -> None:
        pushing = Pushing(self.client, trainer)
        for step in POINTS[point]:
            if step == "prepare":
                await pushing.prepare(self.other, "unborn")
            elif isinstance(step, int):
                await trainer.do("send", step)
            else:
                await trainer.do(step)

    async def is_as_before(self) -> None:
        for one, state in (await states(self.client)).items():
            assert state["staged"] is None, one
            assert state["ready"], one
        await proven(self.http, self.real, self.serves)

    async def published(self, trainer: Trainer) -> None:
        await Pushing(self.client, trainer).push(self.other, f"by {trainer.process.pid}")
        await self.committed()

    async def committed(self) -> None:
        self.serves = self._other
        await self.is_as_before()

    async def publishes_with(self, trainer: Trainer) -> bool:
        """Nobody has ended what the last one left; that it can't be received any more is known within moments."""
        try:
            await self.published(trainer)
        except Locked:
            return False
        return True

    async def left(self, one: Spawned) -> None:
        await self.plane.until(lambda: self._left(one), HEAL_S)

    async def _left(self, one: Spawned) -> bool:
        return all(member.instance_id != one.instance_id for member in await self.client.list_workers())


@pytest.mark.parametrize("why", ["it is full", ""])
def test_a_lifeline_tells_who_has_died_or_why_it_gave_up(why: str) -> None:
    trainer = Lifelines.of_trainer("127.0.0.1")
    place = Place("gloo", "g", "127.0.0.1", 1, world_size=3, rank=1, lifeline_port=trainer.port)
    one, other = (Lifelines.of_rank(replace(place, rank=rank)) for rank in (1, 2))
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
    assert Lifelines.of_rank(replace(place, lifeline_port=None)) is None


async def test_the_next_version_comes_whoever_has_died(plane: Plane) -> None:
    """The last worker that dies is of real weights, and comes back."""
    witnesses = Witnesses(plane)
    client = await plane.client()
    with ExitStack() as stack:
        trainers = {point: stack.enter_context(Trainer(plane)) for point in ("workers die", *POINTS)}
        doomed = {point: plane.spawn(ready=False, model=witnesses.first, **KINDS[point]) for point in POINTS}
        stays = await asyncio.to_thread(witnesses.spawn, 1)
        for one in doomed.values():
            await asyncio.to_thread(one.wait_ready, START_S)
        async with frontend(plane, admission_wait_s=HEAL_S) as http:
            scene = Scene(plane, client, http, witnesses)
            scene.real = stays
            trainer = trainers["workers die"]
            for point, victim in doomed.items():
                print("a worker dies:", point)
                await scene.come_to(point, trainer)
                await _dies(scene, trainer, point, victim)
                await scene.published(trainer)
            returning = doomed["a middle bucket"].instance_id
            scene.real += await asyncio.to_thread(witnesses.spawn, 1, instance_id=returning)
            await scene.published(trainer)
            for point in POINTS:
                print("the trainer dies:", point)
                await scene.come_to(point, trainer)
                trainer.kill()
                if point == "all received":
                    await client.run("complete_weights_update")
                    await scene.committed()
                elif point == "the first bucket":
                    with pytest.raises(UpdateAborted, match="broke"):
                        await client.run("complete_weights_update")
                trainer = trainers[point]
                await plane.until(partial(scene.publishes_with, trainer), HEAL_S)


async def _dies(scene: Scene, trainer: Trainer, point: str, victim: Spawned) -> None:
    """A worker; everybody is told."""
    victim.kill()
    prepared = "prepare" in POINTS[point]
    if prepared and point != "all received":
        with pytest.raises(Unavailable, match="broke"):
            await _send_all(trainer)
        await trainer.do("close")
    if prepared:
        with pytest.raises(UpdateAborted):
            await scene.client.run("complete_weights_update")
    await scene.left(victim)
    await scene.is_as_before()
