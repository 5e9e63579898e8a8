"""An update over nixl of which workers fetch parts from one another, and workers that heal from the nearest one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.fleet_updates import all_serve, states
from tests.support.healing import until_open
from tests.support.nixl_trainer import Trainer
from tests.support.nixl_trainers import trainer, update_of
from worker.receive.staging import model_digest
from worker.reconcile.peers import nearest

__all__ = ["trainer"]

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.engines("nixl"), pytest.mark.timeout(400)]

SHAPE: dict[str, Any] = {"tensors": 24, "nbytes": 1 << 19}
TOTAL = 24 << 19


async def test_workers_fetch_an_update_from_one_another_and_the_history_says_so(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    """The names of machines differ, as those of several hosts: each worker takes a share from the trainer."""
    source = trainer()
    hosts = [f"import platform\nplatform.node = lambda: 'host-{number}'\n" for number in range(3)]
    workers = [plane.spawn(patch=patch, model=plane.model(0, **SHAPE)) for patch in hosts]
    client = await plane.client()
    new = plane.model(1, **SHAPE)
    transport = await source.offers(new, bucket_bytes=1 << 20)
    reply = await client.run("update_weights", update_of(transport, "one"))
    assert reply["version"]["digest"] == model_digest(new)
    assert await all_serve(client, "one")
    sources = reply["sources"]
    assert sources.keys() == {worker.instance_id for worker in workers}
    for key, uses in sources.items():
        assert sum(use["bytes"] for use in uses) >= TOTAL
        assert {use["source"] for use in uses} <= {"trainer", *sources} - {key}
    (entry,) = [one for one in (await client.run("updates"))["updates"] if one["label"] == "one"]
    assert entry["sources"] == sources
    state = await states(client)
    assert {key: sorted(map(str, one["received_from"])) for key, one in state.items()} == {
        key: sorted(map(str, uses)) for key, uses in sources.items()
    }
    assert transport["secret"] not in repr([reply, entry, state])
    again = await source.offers(plane.model(2, **SHAPE), bucket_bytes=1 << 20)
    reply = await client.run("update_weights", update_of(again, "two"))
    assert reply["version"]["digest"] == model_digest(plane.model(2, **SHAPE)), "the areas are not mixed up"


async def test_one_worker_alone_fetches_from_the_trainer(plane: Plane, trainer: Callable[..., Trainer]) -> None:
    source = trainer()
    plane.spawn(model=plane.model(0, **SHAPE))
    client = await plane.client()
    transport = await source.offers(plane.model(1, **SHAPE), bucket_bytes=1 << 20)
    reply = await client.run("update_weights", update_of(transport, "one"))
    assert "sources" not in reply
    assert [one["received_from"] for one in (await states(client)).values()] == [[]]


@pytest.mark.parametrize(("shape", "policy"), [({}, {}), (SHAPE, {"relay": False})])
async def test_a_small_update_and_one_without_relay_come_from_the_trainer_alone(
    plane: Plane, trainer: Callable[..., Trainer], shape: dict[str, Any], policy: dict[str, Any]
) -> None:
    source = trainer()
    plane.spawn_many(2, model=plane.model(0, **shape))
    client = await plane.client()
    transport = await source.offers(plane.model(1, **shape), bucket_bytes=1 << 20)
    reply = await client.run("update_weights", update_of(transport, "one", **policy))
    assert "sources" not in reply
    assert await all_serve(client, "one")


async def test_a_worker_that_joins_late_heals_from_a_worker_and_not_from_the_trainer(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    source = trainer()
    plane.spawn_many(2, model=plane.model(0, **SHAPE))
    client = await plane.client()
    new = plane.model(1, **SHAPE)
    transport = await source.offers(new, bucket_bytes=1 << 20)
    await client.run("update_weights", update_of(transport, "one", keep_staged=True))
    await source.keeps()
    late = plane.spawn(model=plane.model(0, **SHAPE), ready=False)
    await asyncio.to_thread(late.wait_ready, 60.0)
    await client.wait_for(3)
    await until_open(plane, client, late.instance_id, "one", 60.0)
    assert "took the weights from a peer" in late.log.read_text()


def test_the_nearest_worker_is_asked_first_and_workers_that_heal_at_once_ask_different_ones() -> None:
    offers = {"a": "h1", "b": "h2", "c": "h2", "d": "h3"}
    assert nearest("b2", "h2", offers) == ["c", "b", "d", "a"]
    assert nearest("a1", "h9", offers) == ["b", "c", "d", "a"]
    assert nearest("z", "h9", offers) == ["a", "b", "c", "d"]
    assert nearest("z", "h3", offers)[0] == "d"
    assert nearest("z", "h1", {}) == []
