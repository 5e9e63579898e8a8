"""A NATS store that has lost what it acknowledged: workers that saw a decision bring it back."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rl_plane.bus.server import NatsServer
from rl_plane.bus.state_store import read_record
from rl_plane.client import RlClient
from rl_plane.errors import BusUnreachable, PlaneError, StaleFence
from rl_plane.protocol.record import VersionSource
from rl_plane.protocol.subjects import RECORD
from rl_plane.protocol.versions import WeightVersion
from tests.support.faulty_bus import BusFaults
from tests.support.fleet_updates import generated, states, update_of
from worker.engines.fake.adapter import fake_token, make_fake_adapter
from worker.receive.staging import model_digest

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = pytest.mark.slow

BACK_S = 60.0
"""Reconnects, registrations and leases after a restart of the server."""


def lose(server: NatsServer, plane: Plane, older: Path | None) -> None:
    """SIGKILL, then it starts with an older copy of its store, or with none."""
    server.kill()
    store = plane.tmp / "store"
    shutil.rmtree(store)
    if older is not None:
        shutil.copytree(older, store)
    server.start()


def copied(server: NatsServer, plane: Plane) -> Path:
    """The store as it is now, whole: the server stands still while it is copied."""
    server.kill()
    older = plane.tmp / "older"
    shutil.copytree(plane.tmp / "store", older)
    server.start()
    return older


async def serves(plane: Plane, client: RlClient, count: int, label: str, sequence: int) -> bool:
    try:
        await client.list_workers()
        state = await client.run("state", {"wait_s": 0, "min_workers": 0})
    except PlaneError:
        return False
    rows = state["workers"]
    return len(rows) == count and all(
        row["status"] == "ok"
        and row["ready"]
        and (row["applied_weight_version"], row["sequence"]) == (label, sequence)
        for row in rows
    )


async def until_back(plane: Plane, client: RlClient, count: int, label: str, sequence: int) -> None:
    async def back() -> bool:
        record = None
        try:
            record = await read_record(client.bus, client.subjects().state)
        except PlaneError:
            return False
        stored = record is not None and (record.made.label, record.sequence) == (label, sequence)
        return stored and await serves(plane, client, count, label, sequence)

    await plane.until(back, BACK_S)


async def next_update(plane: Plane, client: RlClient, seed: int) -> dict[str, Any]:
    """Updates by a client that may not have noticed yet that the server was away."""
    version: dict[str, Any] = (await client.run("update_weights", update_of(plane.model(seed), f"step_{seed}")))[
        "version"
    ]
    return version


@pytest.mark.parametrize("store", ["older", "empty"])
async def test_a_lost_decision_is_written_back(own_nats: tuple[NatsServer, Plane], store: str) -> None:
    server, plane = own_nats
    client = await plane.client()
    ids = plane.spawn_copies(2)
    await client.run("update_weights", update_of(plane.model(1), "step_1"))
    older = copied(server, plane)
    await until_back(plane, client, 2, "step_1", 1)
    committed = (await client.run("update_weights", update_of(plane.model(2), "step_2")))["version"]
    for _ in range(3):  # joins and deaths that the older store knows nothing of
        plane.spawn().kill()

    async def all_left() -> bool:
        with contextlib.suppress(BusUnreachable):  # NATS writes, and three processes begin
            return len(await client.list_workers()) == 2
        return False

    await plane.until(all_left)
    epoch = (await client.list_workers()).epoch
    lose(server, plane, older if store == "older" else None)
    await until_back(plane, client, 2, "step_2", 2)
    assert (await client.run("weight_version"))["version"] == committed
    later = await plane.client("later")  # which knows nothing but what is stored
    await until_back(plane, later, 2, "step_2", 2)
    told = await later.run("weight_version")
    assert told["version"] == committed
    assert told["epoch"] >= epoch
    assert (await later.run("updates"))["updates"][0]["version"] == committed
    version = await next_update(plane, later, 3)
    assert (version["run"], version["sequence"]) == (committed["run"], 3)
    assert {row["sequence"] for row in (await states(client)).values()} == {3}
    digest = model_digest(plane.model(3))
    assert await generated(client, ids[0], [5], 2) == [fake_token(digest, [5], n) for n in range(2)]


async def test_a_fresh_worker_on_an_empty_store_does_not_turn_the_fleet_back(
    own_nats: tuple[NatsServer, Plane],
) -> None:
    server, plane = own_nats
    client = await plane.client()
    old = plane.spawn_many(2)
    committed = (await client.run("update_weights", update_of(plane.model(1), "step_1")))["version"]
    for worker in old:
        worker.stop()
    lose(server, plane, None)
    plane.spawn()
    fresh = await plane.client("fresh")
    await fresh.wait_for(1)
    begun = (await fresh.run("weight_version"))["version"]
    assert (begun["sequence"], begun["label"]) == (0, "initial")
    assert begun["run"] != committed["run"]
    for worker in old:
        worker.go_on()
    for one in (client, fresh):
        await until_back(plane, one, 3, "step_1", 1)
        assert (await one.run("weight_version"))["version"] == committed
    version = await next_update(plane, fresh, 2)
    assert (version["run"], version["sequence"]) == (committed["run"], 2)
    assert await serves(plane, client, 3, "step_2", 2)


async def test_a_decision_does_not_overwrite_a_record_that_a_worker_restored_meanwhile(plane: Plane) -> None:
    """A worker was silent while an update asked for the newest record, and writes back what the store had lost before
    that update is decided."""
    faults = BusFaults()
    client, worker = await plane.client(connect_bus=faults.connect), plane.spawn()
    other, state = await plane.client("other"), client.subjects().state
    digest = model_digest(plane.model(2))

    async def restored_first(key: str) -> None:
        """Restores a record before the first write that follows the seal."""
        base = await read_record(other.bus, state) if key == RECORD else None
        if base is not None and base.seal and base.sequence == 0:
            made = WeightVersion(base.version.run, 7, "lost", digest)
            source = VersionSource({"backend": "filesystem", "path": str(plane.model(2))})
            lost = replace(base, version=made, made=made, source=source, update_id="lost", seal=base.seal + 100)
            await other.bus.put(state, RECORD, lost.encode())

    faults.before_put = restored_first
    with pytest.raises(StaleFence, match="restored a record") as caught:
        await client.run("update_weights", update_of(plane.model(1), "step_1"))
    assert caught.value.facts["fix"]
    await until_back(plane, client, 1, "lost", 7)
    version = await next_update(plane, client, 3)
    assert version["sequence"] == 8
    digest = model_digest(plane.model(3))
    assert await generated(client, worker.instance_id, [5], 2) == [fake_token(digest, [5], n) for n in range(2)]


async def test_adapters_are_written_back_too(own_nats: tuple[NatsServer, Plane]) -> None:
    server, plane = own_nats
    client = await plane.client()
    plane.spawn_many(2)
    await client.wait_for(2)
    path = make_fake_adapter(plane.tmp / "weights" / "a", 1, plane.model())
    adapter = (await client.run("load_lora_adapter", {"lora_name": "a", "lora_path": str(path)}))["version"]
    lose(server, plane, None)

    async def back() -> bool:
        try:
            state = await client.run("state", {"wait_s": 0, "min_workers": 2})
        except PlaneError:
            return False
        return bool(state["ready"]) and state["adapters"] == {"a": adapter}

    await plane.until(back, BACK_S)
    newest = (await client.run("updates"))["updates"][0]  # its own entry was lost
    assert newest["target"] == {"kind": "lora", "op": "load", "name": "a"}
    swapped = make_fake_adapter(plane.tmp / "weights" / "b", 2, plane.model())
    await client.run("load_lora_adapter", {"lora_name": "a", "lora_path": str(swapped)})
    adapter = (await client.run("update_weights", {"rollback": {"sequence": 1}}))["version"] | {"sequence": 3}
    assert adapter["digest"] == newest["digest"]
    assert all(row["adapters"] == {"a": adapter} for row in (await states(client)).values())
