"""A late worker takes adapters whose trainers are gone from a worker that has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.support.fleet_updates import states
from tests.support.ipc_trainer import Trainer as IpcTrainer
from tests.support.nixl_trainer import Trainer
from tests.support.nixl_trainers import HEAL_S, trainer, update_of
from worker.engines.fake.adapter import make_fake_adapter
from worker.receive.staging import adapter_digest, model_digest

__all__ = ["trainer"]

if TYPE_CHECKING:
    from rl_plane.client import RlClient
    from tests.conftest import Plane

pytestmark = [pytest.mark.engines("nixl"), pytest.mark.timeout(300)]


def lora(name: str, op: str) -> dict[str, Any]:
    return {"target": {"kind": "lora", "op": op, "name": name}}


async def holds(plane: Plane, client: RlClient, instance_id: str, label: str, adapters: dict[str, Path]) -> None:
    """Waits until the worker is open with this base and exactly these adapters."""
    wanted = {name: adapter_digest(path) for name, path in adapters.items()}

    async def at_it() -> bool:
        state = (await states(client)).get(instance_id)
        if state is None or not state["admission"]["open"]:
            return False
        loaded = {name: one["digest"] for name, one in state["adapters"].items()}
        return loaded == wanted and state["applied_weight_version"] == label

    await plane.until(at_it, HEAL_S)


async def all_offers(client: RlClient) -> dict[str, list[dict[str, Any]]]:
    """Worker → the places of what it offers."""
    bucket = client.subjects().offers
    entries = await client.bus.list_keys(bucket, ">") if await client.bus.bucket_exists(bucket) else []
    return {entry.key: json.loads(entry.value)["places"] for entry in entries if entry.value}


async def offers(plane: Plane, client: RlClient, instance_id: str, *digests: str) -> None:
    """Waits until the worker offers exactly these."""

    async def at_it() -> bool:
        places = (await all_offers(client)).get(instance_id, [])
        return {place["digest"] for place in places} == set(digests)

    await plane.until(at_it, HEAL_S)


async def test_adapters_whose_trainers_are_gone_come_from_another_worker(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    """Adapters by `ipc`, which no worker can fetch again, and by `nixl` after its trainer was killed.

    The worker that the late one asks first is killed in the middle. The next late worker heals from the worker that
    has healed itself, with new base weights beneath. An adapter that is unloaded is offered no more."""
    client, pushing = await plane.client(), IpcTrainer()
    old = [one.instance_id for one in await asyncio.to_thread(plane.spawn_many, 2, model=plane.model(0))]
    one, two, three = (make_fake_adapter(plane.tmp / f"a{number}", number, plane.model(0)) for number in (1, 2, 3))
    both = {"a": two, "b": three}
    digests = [adapter_digest(path) for path in both.values()]

    async def push(directory: Path, label: str, body: dict[str, Any], kind: str = "lora") -> None:
        pushing.publish(directory, 2, kind=kind)
        transport = (await pushing.says("transport"))["transport"]
        await client.run("update_weights", {**update_of(transport, label, keep_staged=kind == "base"), **body})
        assert (await pushing.says("ended"))["ended"] is None

    try:
        await push(one, "a1", lora("a", "load"))
        await push(two, "a2", lora("a", "swap"))
        source = trainer()
        transport = await source.offers(three, "lora")
        await client.run("update_weights", {**update_of(transport, "b3"), **lora("b", "load")})
        await source.keeps("b")
        source.kill()
        for key in old:
            await offers(plane, client, key, *digests)
        ports = {places[0]["transport"]["port"]: key for key, places in (await all_offers(client)).items()}
        workers = {one.instance_id: one for one in plane.spawned}
        await client.close()  # it would remove the stopped workers from the members
        for key in old:
            workers[key].stop()
        late = plane.spawn(ready=False, model=plane.model(0))

        async def asked() -> str | None:
            """The stopped worker that the late one asks, and waits for."""
            found = psutil.Process(late.process.pid).net_connections("tcp")
            to = [each.raddr.port for each in found if each.status == psutil.CONN_ESTABLISHED and each.raddr]
            return next((ports[port] for port in to if port in ports), None)

        killed = await plane.until(asked, HEAL_S)
        workers[killed].kill()
        (left,) = {*old} - {killed}
        workers[left].go_on()
        client = await plane.client()
        healed = (await asyncio.to_thread(late.wait_ready, HEAL_S)).instance_id
        await holds(plane, client, healed, "initial", both)

        async def alone() -> bool:
            return {one.instance_id for one in await client.list_workers()} == {left, healed}

        await plane.until(alone, HEAL_S)  # the killed one would fail the update
        base = plane.model(1)
        await push(base, "one", {}, kind="base")
        workers[left].kill()
        await offers(plane, client, healed, *digests, model_digest(base))
        last = (await asyncio.to_thread(plane.spawn, model=plane.model(0))).instance_id
        await holds(plane, client, last, "one", both)

        await client.run("update_weights", lora("a", "unload"))
        for key in (healed, last):
            await holds(plane, client, key, "one", {"b": three})
            await offers(plane, client, key, digests[1], model_digest(base))
    finally:
        pushing.close()
