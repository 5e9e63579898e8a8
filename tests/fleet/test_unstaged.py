"""Updates without staging: new weights overwrite the served ones, and no worker serves a mixture."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rl_plane.errors import (
    InvalidRequest,
    InvalidWeights,
    NotAdmitted,
    PlaneError,
    Unsupported,
    UpdateAborted,
)
from rl_plane.membership.worker_calls import WorkerCalls
from tests.support.adapter_updates import load
from tests.support.faults import StatusLog, Stream, generate, spawn_faulty
from tests.support.fleet_updates import all_serve, coordinator_that_dies, states, update_of, while_preparing
from worker.engines.fake.adapter import fake_token, make_fake_adapter
from worker.receive.staging import model_digest

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

PROMPT = [5, 6, 7]
HEAL_S = 40.0


def unstaged(plane: Plane, seed: int, **policy: Any) -> dict[str, Any]:
    return update_of(plane.model(seed), f"step_{seed}", staging="none", **policy)


def tokens_of(stream: Stream, digests: list[str]) -> list[int]:
    """The tokens that its spans say, which must be of these versions in this order."""
    assert [span["digest"] for span in stream.spans] == digests
    assert stream.spans[-1]["end"] == len(stream.tokens)
    return [
        fake_token(span["digest"], PROMPT, place)
        for span in stream.spans
        for place in range(span["start"], span["end"])
    ]


def only_ever_open_at(statuses: StatusLog, *labels: str) -> None:
    """Every admitted worker held one of these versions."""
    held = {
        status["version"] and status["version"]["label"]
        for status in statuses.events
        if status["admission"]["open"]
    }
    assert held <= set(labels), held


async def until_all_serve(plane: Plane, client: WorkerCalls, label: str) -> None:
    await plane.until(lambda: all_serve(client, label), HEAL_S)


async def test_every_worker_is_closed_from_the_first_byte_to_the_commit(plane: Plane) -> None:
    client = await plane.client()
    workers = plane.spawn_many(2, token_delay_s=0.01)
    await client.wait_for(2)
    statuses = await StatusLog.follow(client)
    streams = [Stream(client, worker.instance_id, PROMPT, 3000) for worker in workers]
    for stream in streams:
        await stream.more()
    await client.run("prepare_weights_update", unstaged(plane, 1))
    for state in (await states(client)).values():
        assert state["version"] is None
        assert state["sequence"] is None
        assert not state["ready"]
        (reason,) = state["admission"]["reasons"]
        assert reason.startswith("behind: ")
    frozen = [len(stream.tokens) for stream in streams]
    with pytest.raises(NotAdmitted):
        await generate(client, workers[0].instance_id, PROMPT, 1)
    await client.run("resume")  # weights of no version make no token
    await client.run("liveness")
    assert [len(stream.tokens) for stream in streams] == frozen
    version = (await client.run("complete_weights_update"))["version"]
    assert (version["sequence"], version["digest"]) == (1, model_digest(plane.model(1)))
    assert await all_serve(client, "step_1")
    for stream in streams:
        await stream.more()
    await client.run("abort_requests", {})
    digests = [model_digest(plane.model(seed)) for seed in (0, 1)]
    for stream in streams:
        await stream.end()
        assert stream.tokens == tokens_of(stream, digests)
    only_ever_open_at(statuses, "initial", "step_1")


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_the_policy_can_let_running_requests_end_before_an_unstaged_update(plane: Plane, mode: str) -> None:
    client = await plane.client()
    worker = plane.spawn(token_delay_s=0.01)
    await client.wait_for(1)
    stream = Stream(client, worker.instance_id, PROMPT, 60)
    await stream.more()
    await client.run("update_weights", unstaged(plane, 1, pause_mode=mode))
    await stream.end()
    assert stream.finish_reason == ("length" if mode == "wait" else "abort")
    assert stream.tokens == tokens_of(stream, [model_digest(plane.model(0))])
    assert await all_serve(client, "step_1")


async def test_unstaged_and_staged_updates_can_follow_each_other(plane: Plane) -> None:
    client = await plane.client()
    (worker, _) = plane.spawn_copies(2)
    for seed, staging in enumerate(("none", "none", "host", "none"), 1):
        body = update_of(plane.model(seed), f"step_{seed}", staging=staging)
        reply = await client.run("update_weights", body)
        assert (reply["version"]["sequence"], reply["excluded"]) == (seed, [])
        stream = await generate(client, worker, PROMPT, 3)
        assert stream.tokens == tokens_of(stream, [model_digest(plane.model(seed))])
    assert await all_serve(client, "step_4")


async def test_a_model_that_does_not_fit_twice_is_updated_in_place(plane: Plane) -> None:
    client = await plane.client()
    first = plane.spawn(staging_bytes=2048)
    await client.wait_for(1)
    with pytest.raises(UpdateAborted):
        await client.run("update_weights", update_of(plane.model(1), "step_1"))
    await client.run("update_weights", unstaged(plane, 1))
    joiner = plane.spawn(staging_bytes=2048)  # heals in place too
    await until_all_serve(plane, client, "step_1")
    first.kill()
    stream = await generate(client, joiner.instance_id, PROMPT, 3)
    assert stream.tokens == tokens_of(stream, [model_digest(plane.model(1))])
    await client.run("update_weights", {"rollback": {"sequence": 0}, "policy": {"staging": "none"}})
    assert await all_serve(client, "initial")


async def test_adapters_stay_over_an_update_in_place(plane: Plane) -> None:
    client = await plane.client()
    (worker,) = plane.spawn_copies(1)
    path = make_fake_adapter(plane.tmp / "weights" / "a", 1, plane.model())
    adapter = await load(client, path)
    base = (await client.run("update_weights", unstaged(plane, 1)))["version"]
    stream = await generate(client, worker, PROMPT, 3, adapter="a")
    assert stream.tokens == [fake_token(base["digest"], PROMPT, n, 512, adapter["digest"]) for n in range(3)]
    assert (await states(client))[worker]["sequence"] == 2


# ---- what is refused ----


@pytest.mark.parametrize(
    ("policy", "field"), [({"barrier": "rolling"}, "policy.staging"), ({"staging": "disk"}, "policy.staging")]
)
async def test_an_impossible_policy_is_refused(plane: Plane, policy: dict[str, Any], field: str) -> None:
    client = await plane.client()
    plane.spawn()
    with pytest.raises(InvalidRequest) as caught:
        await client.run("update_weights", unstaged(plane, 1) | {"policy": {"staging": "none", **policy}})
    assert caught.value.facts["field"] == field
    assert await all_serve(client, "initial")


async def test_an_unstaged_update_is_refused_if_the_committed_weights_are_not_refetchable(plane: Plane) -> None:
    """The committed weights could not be fetched again if it failed."""
    client = await plane.client()
    once = """
import rl_plane.transports.checkpoint_delivery as delivery
delivery.CheckpointDelivery.refetchable = property(lambda self: False, lambda self, value: None)
"""
    worker = plane.spawn(patch=once)
    await client.wait_for(1)
    await client.run("update_weights", update_of(plane.model(1), "step_1"))
    statuses = await StatusLog.follow(client)
    with pytest.raises(InvalidRequest) as caught:
        await client.run("update_weights", unstaged(plane, 2))
    assert caught.value.facts["field"] == "policy.staging"
    assert set(statuses.admitted) == {frozenset({worker.instance_id})}
    assert await all_serve(client, "step_1")


async def test_an_incapable_engine_is_refused_before_any_worker_changes(plane: Plane) -> None:
    client = await plane.client()
    unable = """
import worker.engines.fake.adapter as fake
from dataclasses import replace
real = fake.FakeEngine.start
async def start(self):
    return replace(await real(self), lacks={"prepare_update:unstaged": "its weights are compiled in"})
fake.FakeEngine.start = start
"""
    plane.spawn_many(2, patch=unable)
    await client.wait_for(2)
    statuses = await StatusLog.follow(client)
    with pytest.raises(Unsupported) as caught:
        await client.run("update_weights", unstaged(plane, 1))
    assert caught.value.facts["field"] == "policy.staging"
    assert await all_serve(client, "initial")
    assert len(set(statuses.admitted)) == 1


@pytest.mark.parametrize("wrong", ["path", "shape"])
async def test_weights_that_do_not_fit_change_no_worker(plane: Plane, wrong: str) -> None:
    client = await plane.client()
    plane.spawn_copies(2)
    statuses = await StatusLog.follow(client)
    path = Path("/etc") if wrong == "path" else plane.model(9, tensors=3)
    with pytest.raises(InvalidRequest):
        await client.run("update_weights", update_of(path, "bad", staging="none"))
    assert await all_serve(client, "initial")
    assert len(set(statuses.admitted)) == 1, "a worker was closed for weights that it could have refused"


# ---- failures on the way ----


async def test_if_one_worker_fails_half_way_all_workers_heal(plane: Plane) -> None:
    client = await plane.client()
    bad, good = spawn_faulty(plane, token_delay_s=0.01), plane.spawn(token_delay_s=0.01)
    await client.wait_for(2)
    await client.run("update_weights", update_of(plane.model(1), "step_1"))
    streams = [Stream(client, one.instance_id, PROMPT, 3000) for one in (bad, good)]
    for stream in streams:
        await stream.more()
    statuses = await StatusLog.follow(client)
    bad.fail("fail_overwrite")
    with pytest.raises(UpdateAborted) as caught:
        await client.run("update_weights", unstaged(plane, 2))
    ended = {row["instance_id"]: row["status"] for row in caught.value.facts["workers"]}
    assert ended.keys() == {bad.instance_id, good.instance_id}
    assert ended[bad.instance_id] == "error"  # the other one was sooner ("ok"), or was cut
    await plane.until(lambda: good.instance_id in statuses.admitted[-1], HEAL_S)
    assert not (await states(client))[bad.instance_id]["admission"]["open"], "healing fails too"
    bad.mend("fail_overwrite")
    await until_all_serve(plane, client, "step_1")
    only_ever_open_at(statuses, "step_1")
    await client.run("abort_requests", {})
    (other,) = [await stream.end() for stream in streams if stream is streams[1]]
    assert other.tokens == tokens_of(other, [model_digest(plane.model(1))])
    assert (await client.run("update_weights", unstaged(plane, 3)))["version"]["sequence"] == 2


async def test_half_way_one_worker_can_be_excluded(plane: Plane) -> None:
    client = await plane.client()
    bad, good = spawn_faulty(plane), plane.spawn()
    await client.wait_for(2)
    bad.fail("fail_overwrite")
    statuses = await StatusLog.follow(client)
    reply = await client.run("update_weights", unstaged(plane, 1, on_prepare_failure="exclude"))
    assert reply["excluded"] == [bad.instance_id]
    stream = await generate(client, good.instance_id, PROMPT, 3)
    assert stream.tokens == tokens_of(stream, [model_digest(plane.model(1))])
    bad.mend("fail_overwrite")
    await until_all_serve(plane, client, "step_1")
    only_ever_open_at(statuses, "initial", "step_1")


async def test_after_weights_with_a_wrong_digest_the_workers_heal(plane: Plane) -> None:
    client = await plane.client()
    ids = plane.spawn_copies(2)
    statuses = await StatusLog.follow(client)
    with pytest.raises((InvalidWeights, UpdateAborted), match="is wanted"):  # the second one may be stopped before
        await client.run("update_weights", {**unstaged(plane, 1), "digest": "blake3:" + "0" * 64})
    await until_all_serve(plane, client, "initial")
    only_ever_open_at(statuses, "initial")
    for one in ids:
        stream = await generate(client, one, PROMPT, 3)
        assert stream.tokens == tokens_of(stream, [model_digest(plane.model(0))])


async def test_after_an_aborted_unstaged_update_the_worker_heals(plane: Plane) -> None:
    client = await plane.client()
    worker = plane.spawn(token_delay_s=0.01)
    await client.wait_for(1)
    statuses = await StatusLog.follow(client)
    stream = Stream(client, worker.instance_id, PROMPT, 3000)
    await stream.more()
    await client.run("prepare_weights_update", unstaged(plane, 1))
    await client.run("abort_weights_update")
    await until_all_serve(plane, client, "initial")
    await stream.more()
    await client.run("abort_requests", {})
    await stream.end()
    assert stream.tokens == tokens_of(stream, [model_digest(plane.model(0))])
    only_ever_open_at(statuses, "initial")


async def test_a_worker_that_is_killed_in_the_middle_heals(plane: Plane) -> None:
    fleet = await plane.fleet()
    client = fleet.client
    doomed, other = plane.spawn(stage_delay_s=600), plane.spawn()
    await client.wait_for(2)
    statuses = await StatusLog.follow(client)
    task = await while_preparing(plane, fleet, unstaged(plane, 1))
    await plane.until(lambda: not statuses.admitted[-1], HEAL_S)
    doomed.kill()
    with pytest.raises(UpdateAborted):
        await task
    again = plane.spawn(instance_id=doomed.instance_id)
    await until_all_serve(plane, client, "initial")
    only_ever_open_at(statuses, "initial")
    assert set(await states(client)) == {again.instance_id, other.instance_id}
    assert (await fleet.run("update_weights", unstaged(plane, 2)))["excluded"] == []


@pytest.mark.parametrize(
    ("at", "label"), [("prepare_update", "initial"), ("follow_record", "one"), ("commit_update", "one")]
)
async def test_without_their_coordinator_the_workers_end_it(plane: Plane, at: str, label: str) -> None:
    client = await plane.client()
    plane.spawn_copies(2)
    statuses = await StatusLog.follow(client)
    await coordinator_that_dies(plane, update_of(plane.model(1), "one", staging="none"), at)
    await until_all_serve(plane, client, label)
    only_ever_open_at(statuses, "initial", label)
    reply = await client.run("update_weights", unstaged(plane, 2))
    assert reply["version"]["sequence"] == (1 if label == "initial" else 2)


async def test_a_source_that_is_gone_keeps_it_closed_and_its_requests_end(plane: Plane) -> None:
    client = await plane.client()
    worker = spawn_faulty(plane, token_delay_s=0.01)
    await client.wait_for(1)
    path = plane.model(1)
    await client.run("update_weights", update_of(path, "step_1"))
    stream = Stream(client, worker.instance_id, PROMPT, 3000)
    await stream.more()
    hidden = path.rename(path.with_name("hidden"))
    worker.fail("fail_overwrite")
    with pytest.raises(PlaneError):
        await client.run("update_weights", unstaged(plane, 2))
    await stream.end()  # what is frozen by weights of no version does not wait for ever
    assert stream.finish_reason == "abort"
    worker.mend("fail_overwrite")
    state = (await states(client))[worker.instance_id]
    assert not state["admission"]["open"]
    assert state["version"] is None
    hidden.rename(path)
    await until_all_serve(plane, client, "step_1")


NO_FLUSH = """
import worker.engines.fake.adapter as fake
really, refused = fake.FakeEngine.flush_cache, []
async def flush_cache(self):
    if refused:
        return await really(self)
    refused.append(True)
    return False
fake.FakeEngine.flush_cache = flush_cache
"""


async def test_with_older_kv_in_its_cache_no_worker_is_admitted(plane: Plane) -> None:
    client = await plane.client()
    worker, _ = plane.spawn(patch=NO_FLUSH), plane.spawn()
    await client.wait_for(2)
    statuses = await StatusLog.follow(client)
    reply = await client.run("update_weights", unstaged(plane, 1))
    assert reply["excluded"] == [worker.instance_id]
    (row,) = [row for row in reply["workers"] if row["status"] == "error"]
    assert "flush" in row["error"]["message"]
    await until_all_serve(plane, client, "step_1")
    only_ever_open_at(statuses, "initial", "step_1")
    behind = [event["admission"]["reasons"] for event in statuses.of(worker.instance_id)]
    assert any("flush" in reason for reasons in behind for reason in reasons), behind


async def test_a_paused_fleet_stays_paused_over_an_unstaged_update(plane: Plane) -> None:
    client = await plane.client()
    plane.spawn_copies(2)
    await client.wait_for(2)
    await client.run("pause")
    await client.run("update_weights", unstaged(plane, 1))
    assert {state["pause_state"] for state in (await states(client)).values()} == {"paused"}
    await client.run("prepare_weights_update", unstaged(plane, 2))
    await client.run("abort_weights_update")
    await until_all_serve(plane, client, "step_1")
    assert {state["pause_state"] for state in (await states(client)).values()} == {"paused"}
    await client.run("resume")
    assert {state["pause_state"] for state in (await states(client)).values()} == {"running"}
    await asyncio.gather(*(generate(client, key, PROMPT, 2) for key in await states(client)))


async def test_a_transport_is_set_up_in_every_rank(plane: Plane) -> None:
    client = await plane.client()
    plane.spawn()
    await client.wait_for(1)
    for op in ("init_transport", "destroy_transport"):
        reply = await client.run(op, {"backend": "filesystem"})
        assert [row["rank_results"] for row in reply["workers"]] == [[{"rank": 0}]]
    with pytest.raises(Unsupported):
        await client.run("init_transport", {"backend": "nccl"})
    with pytest.raises(InvalidRequest):
        await client.run("init_transport", {"backend": "pigeon"})
