"""Updates by delta in a real fleet: a worker with the base changes it, and a worker without it fetches the chain of
deltas."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import pytest

from rl_plane.bus.state_store import read_record
from rl_plane.client import RlClient
from rl_plane.errors import InvalidRequest, NotAtBase, PlaneError, UpdateAborted
from rl_plane.protocol.record import MAX_DELTAS
from tests.conftest import Plane
from tests.support.delta_updates import by_delta
from tests.support.fleet_updates import all_serve, generated, states, update_of
from worker.engines.fake.adapter import fake_token
from worker.receive.staging import model_digest

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

HEAL_S = 60.0
NO_OFFERS = "from worker.receive.weight_receiver import Receiver; Receiver.offer = lambda self: None"
"""A worker that gives its weights to no other."""
PROMPT = [5, 6, 7]


async def kept(client: RlClient) -> set[str | None]:
    return {state["kept"] for state in (await states(client)).values()}


async def test_workers_apply_deltas_and_later_workers_fetch_the_chain(plane: Plane) -> None:
    models = [plane.model(seed) for seed in range(5)]
    client = await plane.client()
    doomed, other = (one.instance_id for one in plane.spawn_many(2))
    # The base is each worker's own model, of which no worker has a kept copy yet.
    reply = await client.run("update_weights", by_delta(plane, models[0], models[1], "one"))
    assert reply["version"]["digest"] == model_digest(models[1])
    assert await kept(client) == {model_digest(models[1])}
    for number in (2, 3):
        body = by_delta(plane, models[number - 1], models[number], f"step {number}")
        await client.run("update_weights", body)
        assert await all_serve(client, f"step {number}")
    for one in (doomed, other):
        made = [fake_token(model_digest(models[3]), PROMPT, position) for position in range(4)]
        assert await generated(client, one, PROMPT, 4) == made
    # Who was away, and who is new, comes through the chain.
    next(one for one in plane.spawned if one.instance_id == doomed).kill()
    plane.spawn(instance_id=doomed)
    new = plane.spawn().instance_id
    await plane.until(lambda: all_serve(client, "step 3"), HEAL_S)
    assert await generated(client, new, PROMPT, 4) == made
    assert await kept(client) == {model_digest(models[3])}
    await client.run("update_weights", by_delta(plane, models[3], models[4], "step 4"))
    assert await all_serve(client, "step 4")
    # A roll-back to a version that was a delta, and a delta from there.
    told = (await client.run("updates"))["updates"]
    assert [(one["label"], one["encoding"]) for one in told[:2]] == [("step 4", "delta"), ("step 3", "delta")]
    assert told[0]["base"] == model_digest(models[3])
    back = await client.run("update_weights", {"rollback": {"label": "step 2"}})
    assert back["version"]["digest"] == model_digest(models[2])
    assert back["excluded"] == []
    await client.run("update_weights", by_delta(plane, models[2], models[3], "on"))
    # A full version ends the chain, and the kept copies.
    await client.run("update_weights", update_of(models[1], "full"))
    assert await kept(client) == {None}
    record = await read_record(client.bus, client.subjects().state)
    assert record is not None
    assert record.source.deltas == 0


async def test_unchanged_weights_leave_every_worker_a_copy(plane: Plane) -> None:
    one, two = plane.model(1), plane.model(2)
    client = await plane.client()
    plane.spawn_many(2)
    for label in ("first", "again"):
        await client.run("update_weights", update_of(one, label, keep_staged=True))
        assert await kept(client) == {model_digest(one)}
    reply = await client.run("update_weights", by_delta(plane, one, two, "changed"))
    assert reply["excluded"] == []
    assert await kept(client) == {model_digest(two)}


async def test_versions_of_both_algorithms_follow_one_another(plane: Plane) -> None:
    """A delta may change a version of one algorithm into one of the other. So may a roll-back, and healing."""
    models = [plane.model(seed) for seed in range(5)]
    by_blake3 = [model_digest(model, algorithm="blake3") for model in models]
    client = await plane.client()
    doomed, other = (one.instance_id for one in plane.spawn_many(2))

    async def serve(digest: str, *ids: str) -> None:
        made = [fake_token(digest, PROMPT, position) for position in range(4)]
        assert [await generated(client, one, PROMPT, 4) for one in ids] == [made] * len(ids)

    async def update(body: dict[str, Any], digest: str) -> None:
        reply = await client.run("update_weights", body)
        assert (reply["version"]["digest"], reply["excluded"]) == (digest, [])
        await serve(digest, doomed, other)

    await update({**update_of(models[1], "one", keep_staged=True), "digest": by_blake3[1]}, by_blake3[1])
    assert await kept(client) == {by_blake3[1]}
    two = model_digest(models[2])
    await update(by_delta(plane, models[1], models[2], "two", base=by_blake3[1]), two)
    await update(by_delta(plane, models[2], models[3], "three", digest=by_blake3[3]), by_blake3[3])
    next(one for one in plane.spawned if one.instance_id == doomed).kill()
    plane.spawn(instance_id=doomed)
    await plane.until(lambda: all_serve(client, "three"), HEAL_S)
    await serve(by_blake3[3], doomed, other)
    assert await kept(client) == {by_blake3[3]}
    await update({"rollback": {"label": "two"}}, two)
    await update({"rollback": {"label": "one"}}, by_blake3[1])
    # A pinned digest is compared by its own algorithm. A late worker needs the algorithm before.
    with pytest.raises(InvalidRequest, match="the bytes make"):
        await client.run("update_weights", {**update_of(models[4], "four"), "digest": by_blake3[3]})
    four = update_of(models[4], "four")
    prepared = await client.run("prepare_weights_update", four)
    with pytest.raises(UpdateAborted, match="the caller stated blake3") as caught:
        await client.run("complete_weights_update", {"update_id": prepared["update_id"], "digest": by_blake3[4]})
    assert caught.value.facts["fix"] == "prepare the update with digest_algorithm blake3"
    prepared = await client.run("prepare_weights_update", {**four, "digest_algorithm": "blake3"})
    await client.run("complete_weights_update", {"update_id": prepared["update_id"], "digest": by_blake3[4]})
    await serve(by_blake3[4], doomed, other)


async def test_a_delta_that_can_not_be_applied_changes_nothing(plane: Plane) -> None:
    models = [plane.model(seed) for seed in range(4)]
    client = await plane.client()
    plane.spawn_many(2)
    await client.run("update_weights", update_of(models[1], "one", keep_staged=True))
    assert await kept(client) == {model_digest(models[1])}
    good = by_delta(plane, models[1], models[2], "two")
    wrong: list[tuple[dict[str, Any], type[PlaneError], str]] = [
        (by_delta(plane, models[0], models[2], "two"), NotAtBase, model_digest(models[1])),
        ({**good, "digest": "blake3:" + "0" * 64}, InvalidRequest, "the delta makes"),
        (
            {**good, "transport": {"backend": "filesystem", "path": str(models[2])}},
            InvalidRequest,
            "not the delta",
        ),
    ]
    for body, error, words in wrong:
        with pytest.raises(error, match=words):
            await client.run("update_weights", body)
        assert await all_serve(client, "one")
        assert await kept(client) == {model_digest(models[1])}
    # After an abort of a prepared update, and after an update whose worker fails, the next update works.
    prepared = await client.run("prepare_weights_update", good)
    assert await kept(client) == {None}, "it is being changed"
    await client.run("abort_weights_update", {"update_id": prepared["update_id"]})
    assert await kept(client) == {model_digest(models[1])}
    prepared = await client.run("prepare_weights_update", good)
    await client.run("complete_weights_update", {"update_id": prepared["update_id"]})
    assert await all_serve(client, "two")
    await client.run("update_weights", by_delta(plane, models[2], models[3], "three"))
    assert await all_serve(client, "three")


async def test_a_chain_of_deltas_has_an_end(plane: Plane) -> None:
    models = [plane.model(seed) for seed in range(2)]
    client = await plane.client()
    plane.spawn()
    for number in range(MAX_DELTAS):
        base, new = models[number % 2], models[(number + 1) % 2]
        await client.run("update_weights", by_delta(plane, base, new, f"step_{number}"))
    with pytest.raises(NotAtBase, match=f"{MAX_DELTAS} deltas away"):
        await client.run("update_weights", by_delta(plane, models[0], models[1], "next"))
    await client.run("update_weights", update_of(models[1], "whole"))
    await client.run("update_weights", by_delta(plane, models[1], models[0], "again"))
    assert await all_serve(client, "again")


async def test_a_base_that_is_gone_excludes_the_worker_that_needs_it(plane: Plane) -> None:
    models = [plane.model(seed) for seed in range(3)]
    client = await plane.client()
    ids = [one.instance_id for one in plane.spawn_many(2, patch=NO_OFFERS)]
    await client.run("update_weights", by_delta(plane, models[0], models[1], "one"))
    # One worker loses what it kept, and what would bring it back is gone.
    (plane.tmp / "weights" / "seed0-seed1" / "model.safetensors").rename(plane.tmp / "away")
    next(one for one in plane.spawned if one.instance_id == ids[0]).kill()
    await plane.until(lambda: _count(client, 1))
    plane.spawn(instance_id=ids[0])
    two = await client.run("update_weights", by_delta(plane, models[1], models[2], "two"))
    assert two["excluded"] == [ids[0]], "closed before, so it delays no request"
    await client.run("update_weights", update_of(models[2], "three"))
    assert await all_serve(client, "three")


async def _count(client: RlClient, count: int) -> bool:
    return len(await client.list_workers()) == count


@pytest.mark.timeout(300)
@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("torch", "peft"))), reason="hf's packages")
async def test_a_real_model_serves_each_version_that_comes_as_a_delta(plane: Plane) -> None:
    from tests.support.hf_fleet import Witnesses, chain

    witnesses = Witnesses(plane)
    models = [witnesses.base(seed) for seed in (1, 2, 3, 4)]
    client = await plane.client()
    (one,) = await asyncio.to_thread(witnesses.spawn, 1)

    async def proven(seed: int) -> None:
        assert await generated(client, one, PROMPT, 8, temperature=0.0) == chain(PROMPT[-1], 8, seed)

    await client.run("update_weights", update_of(models[1], "two", keep_staged=True))
    await proven(2)
    bad = by_delta(plane, models[1], models[2], "bad", digest="blake3:" + "0" * 64)
    with pytest.raises(InvalidRequest, match="the delta makes"):
        await client.run("update_weights", bad)
    await client.run("update_weights", by_delta(plane, models[1], models[2], "three"))
    await proven(3)
    plane.spawned[0].kill()
    await asyncio.to_thread(witnesses.spawn, 1, instance_id=one)
    await plane.until(lambda: all_serve(client, "three"), HEAL_S)
    await client.run("update_weights", by_delta(plane, models[2], models[3], "four"))
    await proven(4)
    assert await kept(client) == {model_digest(models[3])}
