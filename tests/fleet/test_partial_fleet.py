"""Partial versions in a real fleet: only some tensors come, and the others are those of the version before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_plane.bus.state_store import read_record
from rl_plane.client import RlClient
from rl_plane.errors import CanaryFailed, InvalidRequest, NotAtBase, PlaneError
from tests.conftest import Plane
from tests.support.delta_updates import by_delta, by_partial
from tests.support.fleet_updates import all_serve, generated, states, update_of
from tests.support.publishing import nudged
from worker.engines.fake.adapter import fake_prompt_logprobs, fake_token
from worker.receive.staging import model_digest

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

HEAL_S = 60.0
PROMPT = [5, 6, 7]


async def kept(client: RlClient) -> set[str | None]:
    return {state["kept"] for state in (await states(client)).values()}


def line_of_models(plane: Plane, count: int) -> list[Path]:
    """Models of which each differs from the one before in one of its four tensors."""
    models = [plane.model(1)]
    for number in range(1, count):
        models.append(nudged(plane, models[-1], number))
    return models


async def serves(client: RlClient, instance_id: str, model: Path) -> bool:
    """Whether the engine computes with exactly these bytes, by the tokens that it makes."""
    made = [fake_token(model_digest(model), PROMPT, position) for position in range(4)]
    return await generated(client, instance_id, PROMPT, 4) == made


async def test_late_workers_follow_a_line_of_full_partial_and_delta_versions(plane: Plane) -> None:
    models = line_of_models(plane, 6)
    client = await plane.client()
    doomed, other = (one.instance_id for one in plane.spawn_many(2))
    await client.run("update_weights", update_of(models[0], "full", keep_staged=True))
    reply = await client.run("update_weights", by_partial(plane, models[0], models[1], "one"))
    assert (reply["encoding"], reply["sent_bytes"], reply["model_bytes"]) == ("partial", 1024, 4096)
    await client.run("update_weights", by_delta(plane, models[1], models[2], "two"))
    # A worker is killed, and one joins, between two versions: both come through the whole line.
    next(one for one in plane.spawned if one.instance_id == doomed).kill()
    assert await (await client.view()).wait_until(lambda now: len(now) == 1, HEAL_S)
    await client.run("update_weights", by_partial(plane, models[2], models[3], "three"))
    plane.spawn(instance_id=doomed)
    new = plane.spawn().instance_id
    await plane.until(lambda: all_serve(client, "three"), HEAL_S)
    for one in (doomed, other, new):
        assert await serves(client, one, models[3])
    assert await kept(client) == {model_digest(models[3])}
    state = await client.run("state")
    assert (state["encoding"], state["sent_bytes"], state["model_bytes"]) == ("partial", 1024, 4096)
    listed = (await client.run("updates"))["updates"]
    assert [(one["label"], one["encoding"], one["sent_bytes"]) for one in listed[:4]] == [
        ("three", "partial", 1024),
        ("two", "delta", listed[1]["sent_bytes"]),
        ("one", "partial", 1024),
        ("full", "full", 4096),
    ]
    assert listed[1]["sent_bytes"] < 100
    # Back to a version before a partial one, to a partial one, and on from there.
    for label, model in (("two", models[2]), ("one", models[1]), ("full", models[0]), ("three", models[3])):
        back = await client.run("update_weights", {"rollback": {"label": label}, "policy": {"keep_staged": True}})
        assert back["version"]["digest"] == model_digest(model)
        assert back["excluded"] == []
        for one in (doomed, other, new):
            assert await serves(client, one, model)
    await client.run("update_weights", by_partial(plane, models[3], models[4], "four"))
    assert await all_serve(client, "four")
    assert await serves(client, new, models[4])


async def test_the_same_tensors_each_time_need_only_the_last_full_version(plane: Plane) -> None:
    """Each version builds on the full one, so the chain stays short."""
    full = plane.model(1)
    models = [full]
    for number in (4, 8, 12):  # always the first tensor
        models.append(nudged(plane, models[-1], number))
    client = await plane.client()
    workers = [one.instance_id for one in plane.spawn_many(2)]
    await client.run("update_weights", update_of(full, "full", keep_staged=True))
    for number in (1, 2, 3):
        await client.run("update_weights", by_partial(plane, full, models[number], f"step {number}"))
        record = await read_record(client.bus, client.subjects().state)
        assert record is not None
        assert record.source.deltas == 1
        assert await kept(client) == {model_digest(models[number])}
        for one in workers:
            assert await serves(client, one, models[number])
    workers.append(plane.spawn().instance_id)
    await plane.until(lambda: all_serve(client, "step 3"), HEAL_S)
    assert await serves(client, workers[-1], models[3])


async def test_a_version_of_equal_bytes_gets_a_new_label(plane: Plane) -> None:
    models = line_of_models(plane, 2)
    client = await plane.client()
    (worker,) = (one.instance_id for one in plane.spawn_many(1))
    await client.run("update_weights", update_of(models[0], "full", keep_staged=True))
    await client.run("update_weights", by_partial(plane, models[0], models[1], "one"))
    same = {**by_partial(plane, models[0], models[1], "two"), "base": model_digest(models[1])}
    reply = await client.run("update_weights", same)
    assert (reply["version"]["label"], reply["version"]["sequence"]) == ("two", 3)
    record = await read_record(client.bus, client.subjects().state)
    assert record is not None
    assert record.source.deltas == 1, "the chain of the version before"
    assert await serves(client, worker, models[1])


async def test_a_partial_version_that_can_not_be_applied_changes_nothing(plane: Plane) -> None:
    models = line_of_models(plane, 4)
    client = await plane.client()
    workers = [one.instance_id for one in plane.spawn_many(2)]
    await client.run("update_weights", update_of(models[1], "one", keep_staged=True))
    good = by_partial(plane, models[1], models[2], "two")
    wrong: list[tuple[dict[str, Any], type[PlaneError], str]] = [
        (by_partial(plane, models[0], models[2], "two"), NotAtBase, model_digest(models[1])),
        ({**good, "digest": model_digest(models[3])}, InvalidRequest, "the partial update makes"),
        ({**good, "cast": True}, InvalidRequest, "a cast would lose"),
        ({**good, "policy": {"staging": "none"}}, InvalidRequest, "keeps in host memory"),
        ({**good, "target": {"kind": "lora", "op": "load", "name": "a"}}, InvalidRequest, "an adapter"),
        ({**good, "base": None}, InvalidRequest, "needs the digest of the version that it changes"),
        ({**good, "encoding": "full"}, InvalidRequest, "a full version has no base"),
    ]
    for body, error, words in wrong:
        with pytest.raises(error, match=words):
            await client.run("update_weights", body)
        assert await all_serve(client, "one")
        assert await kept(client) == {model_digest(models[1])}
    # Aborted after it was prepared everywhere.
    prepared = await client.run("prepare_weights_update", good)
    assert await kept(client) == {None}, "it is being changed"
    await client.run("abort_weights_update", {"update_id": prepared["update_id"]})
    assert await kept(client) == {model_digest(models[1])}
    # Every worker fails the canary: the fleet returns to the version before, and its next version works.
    expected = fake_prompt_logprobs(model_digest(models[0]), PROMPT)[1:]
    canary = {"sequences": [PROMPT], "expected": [expected]}
    with pytest.raises(CanaryFailed):
        await client.run("update_weights", {**good, "policy": {"canary": canary}})
    await plane.until(lambda: all_serve(client, "one"), HEAL_S)
    for one in workers:
        assert await serves(client, one, models[1])
    await client.run("update_weights", good)
    for one in workers:
        assert await serves(client, one, models[2])
