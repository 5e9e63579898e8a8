"""A trainer that shares the GPU: it releases memory, resumes the weights, updates them, and resumes
the KV cache last."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from rl_plane.errors import Conflict, EngineFailed, InvalidRequest, NotAdmitted, Unsupported
from rl_plane.protocol.record import DesiredMemory
from tests.support.dialect_facade import facade, fine
from tests.support.faults import StatusLog, Stream
from tests.support.fleet_updates import all_serve, generated, paused, states, update_of
from tests.support.frontend_process import frontend
from tests.support.ipc_trainer import Trainer
from tests.support.memory_saver import WITHOUT_A_SAVER
from tests.support.phase_hooks import VARIABLE
from worker.engines.fake.fake_model import fake_token
from worker.receive.staging import model_digest

if TYPE_CHECKING:
    from pathlib import Path

    from rl_plane.membership.worker_calls import WorkerCalls
    from tests.conftest import Plane, Spawned

PROMPT = [5, 6]
TOKENS = 400
"""At 10 ms each they take longer than a release of memory waits for the last requests to leave."""


def made_by(directory: Path, count: int = 4) -> list[int]:
    return [fake_token(model_digest(directory), PROMPT, position) for position in range(count)]


async def reasons(client: WorkerCalls) -> dict[str, list[str]]:
    return {key: one["admission"]["reasons"] for key, one in (await states(client)).items()}


async def test_an_update_needs_the_memory_of_weights_but_no_kv_cache(plane: Plane) -> None:
    ids = plane.spawn_copies(2)
    fleet = await plane.fleet()
    client = fleet.client
    for step in (1, 2):
        directory = plane.model(step)
        await fleet.run("release_memory")
        statuses = await StatusLog.follow(client)
        with pytest.raises(Conflict) as refused:
            await fleet.run("update_weights", update_of(directory, f"step_{step}"))
        assert [row["error"]["field"] for row in refused.value.facts["workers"]] == ["memory"] * 2
        back = await fleet.run("resume_memory", {"tags": ["weights"]})
        assert [row["tags"] for row in back["workers"]] == [["kv_cache"]] * 2
        reply = await fleet.run("update_weights", update_of(directory, f"step_{step}"))
        assert (reply["version"]["label"], reply["excluded"]) == (f"step_{step}", [])
        assert await reasons(client) == {one: ["memory: released: kv_cache"] for one in ids}
        for one in ids:
            with pytest.raises(NotAdmitted, match="kv_cache"):
                await generated(client, one, PROMPT, 4)
        assert not any(statuses.admitted), "no worker has opened since the memory was released"
        await fleet.run("resume_memory", {"tags": ["kv_cache"]})
        assert await all_serve(client, f"step_{step}")
        for one in ids:
            assert await generated(client, one, PROMPT, 4) == made_by(directory)


SLOWLY = """
import time
from worker.receive.weight_receiver import Receiver
opens = Receiver.open
def slowly(self, staging, request, limits=None):
    opens(self, staging, request, limits)
    if request.update_id.startswith("heal-"):
        time.sleep(0.5)
Receiver.open = slowly
"""
"""Workers that heal at the same time open what they receive before one of them receives."""


@pytest.mark.parametrize("count", [1, 2])
async def test_workers_that_all_lose_a_pushed_version_take_it_from_their_own_copies(
    plane: Plane, count: int
) -> None:
    """The trainer is gone, and no worker can fetch by `ipc` again. A worker that fetched from a peer would drop its own
    copy first."""
    ids = [one.instance_id for one in await asyncio.to_thread(plane.spawn_many, count, patch=SLOWLY)]
    fleet, pushing, new = await plane.fleet(), Trainer(), plane.model(1)
    try:
        pushing.publish(new, count)
        transport = (await pushing.says("transport"))["transport"]
        policy = {"keep_staged": True}
        await fleet.run("update_weights", {"transport": transport, "version": "pushed", "policy": policy})
        assert (await pushing.says("ended"))["ended"] is None
    finally:
        pushing.close()
    for _ in range(2):
        await fleet.run("release_memory")
        await fleet.run("resume_memory")
        await plane.until(lambda: all_serve(fleet.client, "pushed"), 30)
        for one in ids:
            assert await generated(fleet.client, one, PROMPT, 4) == made_by(new)
    kept = [row["kept"] for row in (await states(fleet.client)).values()]
    assert kept == [model_digest(new)] * count


async def test_a_caller_waits_for_the_kv_cache_or_gets_the_reason_of_its_absence(plane: Plane) -> None:
    plane.spawn()
    body = {"prompt": "", "prompt_token_ids": PROMPT, "max_tokens": 4, "return_token_ids": True}
    async with facade(plane) as http:
        fine(await http.post("/v1/rl/release_memory"))
        fine(await http.post("/v1/rl/resume_memory", json={"tags": ["weights"]}))
        waits = asyncio.create_task(http.post("/v1/completions", json=body))
        fine(await http.post("/v1/rl/update_weights", json=update_of(plane.model(1), "step_1")))
        assert not waits.done()
        fine(await http.post("/v1/rl/resume_memory", json={"tags": ["kv_cache"]}))
        (choice,) = fine(await waits)["choices"]
        assert choice["token_ids"] == made_by(plane.model(1))
        fine(await http.post("/v1/rl/release_memory", json={"tags": ["kv_cache"]}))
    async with frontend(plane, admission_wait_s=0.1) as http:
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert "memory: released: kv_cache" in answer.json()["error"]["message"]


async def test_running_requests_wait_for_all_memory_whatever_is_resumed(plane: Plane) -> None:
    """Requests that a pause froze continue after the last `resume_memory`, not at `resume`: a step has no memory
    before."""
    one = plane.spawn(token_delay_s=0.01)
    fleet = await plane.fleet()
    stream = Stream(fleet.client, one.instance_id, PROMPT, TOKENS)
    await stream.until(tokens=3)
    with pytest.raises(InvalidRequest, match="running"):
        await fleet.run("release_memory")
    await stream.more()
    await fleet.run("pause", {"mode": "keep"})
    await fleet.run("release_memory", {"tags": ["kv_cache"]})
    await fleet.run("resume")
    assert await paused(fleet.client) == [False]
    await fleet.run("update_weights", update_of(plane.model(1), "step_1"))
    await fleet.run("update_weights", update_of(plane.model(2), "step_2", keep_pause=True))
    await fleet.run("resume")
    made = len(stream.tokens)
    assert made < TOKENS
    await fleet.run("resume_memory", {"tags": ["kv_cache"]})
    await stream.end()
    assert [span["version"] for span in stream.spans] == ["initial", "step_2"]
    assert stream.spans[1]["start"] >= made - 1
    assert await all_serve(fleet.client, "step_2")


async def test_a_wait_lets_no_frozen_request_run_while_memory_is_released(plane: Plane) -> None:
    one = plane.spawn(token_delay_s=0.01)
    fleet = await plane.fleet()
    stream = Stream(fleet.client, one.instance_id, PROMPT, TOKENS)
    await stream.until(tokens=3)
    await fleet.run("pause", {"mode": "keep"})
    await fleet.run("release_memory", {"tags": ["kv_cache"]})
    await fleet.run("pause", {"mode": "wait"})
    assert stream.finish_reason is None
    assert [state["running"] for state in (await states(fleet.client)).values()] == [1]
    await fleet.run("resume_memory", {"tags": ["kv_cache"]})
    await fleet.run("resume")
    assert (await stream.end()).finish_reason == "length"


async def test_a_pause_outlasts_the_resume_of_memory(plane: Plane) -> None:
    plane.spawn()
    fleet = await plane.fleet()
    await fleet.run("pause", {"mode": "abort"})
    await fleet.run("release_memory")
    await fleet.run("resume_memory", {"tags": ["weights"]})
    await fleet.run("update_weights", update_of(plane.model(1), "step_1"))
    await fleet.run("resume_memory")
    assert await paused(fleet.client) == [True]
    assert await all_serve(fleet.client, "step_1")
    await fleet.run("resume")
    assert await paused(fleet.client) == [False]


def two_of_which_one_is_held(
    plane: Plane, point: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Spawned, Spawned, Path]:
    """Returns the other worker, the worker that waits at the point, and the file that appears once it waits."""
    holds = plane.tmp / "holds"
    holds.mkdir()
    monkeypatch.setenv(VARIABLE, str(holds))
    left, doomed = plane.spawn_many(2)
    (holds / f"{point}.{doomed.instance_id}").touch()
    return left, doomed, holds / f"reached.{point}.{doomed.instance_id}"


@pytest.mark.parametrize("point", ["prepare_update.after", "commit_update.before"])
async def test_a_worker_that_dies_in_an_update_restarts_without_the_released_memory(
    plane: Plane, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, doomed, reached = two_of_which_one_is_held(plane, point, monkeypatch)
    fleet = await plane.fleet()
    client = fleet.client
    await fleet.run("release_memory")
    await fleet.run("resume_memory", {"tags": ["weights"]})
    statuses = await StatusLog.follow(client)
    update = asyncio.create_task(fleet.run("update_weights", update_of(plane.model(1), "step_1")))
    await plane.until(reached.exists, 30)
    doomed.kill()
    assert (await update)["version"]["label"] == "step_1"
    again = plane.spawn(instance_id=doomed.instance_id)
    assert all("memory: released: kv_cache" in why for why in (await reasons(client)).values())
    assert not any(statuses.admitted), "no worker has opened since the memory was released"
    await fleet.run("resume_memory", {"tags": ["kv_cache"]})
    await plane.until(lambda: all_serve(client, "step_1"), 30)
    for one in (left, again):
        assert await generated(client, one.instance_id, PROMPT, 4) == made_by(plane.model(1))


async def test_a_worker_that_starts_while_memory_is_released_releases_its_own(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker dies in the release, the second dies after it, and the third is new."""
    left, doomed, reached = two_of_which_one_is_held(plane, "release_memory.before", monkeypatch)
    fleet = await plane.fleet()
    client = fleet.client
    release = asyncio.create_task(fleet.run("release_memory"))
    await plane.until(reached.exists, 30)
    doomed.kill()
    assert [row["tags"] for row in (await release)["workers"]] == [["kv_cache", "weights"]]
    statuses = await StatusLog.follow(client)
    again = plane.spawn(instance_id=doomed.instance_id)
    new = plane.spawn()
    left.kill()
    plane.spawn(instance_id=left.instance_id)
    found = await reasons(client)
    assert found.keys() == {left.instance_id, again.instance_id, new.instance_id}
    assert all("memory: released: kv_cache, weights" in one for one in found.values()), found
    with pytest.raises(Conflict):
        await fleet.run("update_weights", update_of(plane.model(1), "step_1"))
    await fleet.run("resume_memory", {"tags": ["weights"]})
    later = plane.spawn()
    assert "memory: released: kv_cache" in (await reasons(client))[later.instance_id]
    await fleet.run("update_weights", update_of(plane.model(1), "step_1"))
    assert not any(statuses.admitted), "no worker has opened since the memory was released"
    await fleet.run("resume_memory")
    assert await all_serve(client, "step_1")
    for one in found:
        assert await generated(client, one, PROMPT, 4) == made_by(plane.model(1))
    plane.spawn()
    await plane.until(lambda: all_serve(client, "step_1"), 30)


@pytest.mark.slow
@pytest.mark.parallel
async def test_a_worker_that_was_away_has_the_memory_that_the_fleet_has(plane: Plane) -> None:
    """The worker is suspended until the fleet removes it, and returns when the fleet has changed."""
    away, stays = plane.spawn_many(2)
    fleet = await plane.fleet()
    client = fleet.client

    async def members(count: int) -> bool:
        return len((await fleet.run("workers"))["workers"]) == count

    async def changed(op: str) -> None:
        away.stop()
        try:
            await plane.until(lambda: members(1), 60)
            await fleet.run(op)
        finally:
            away.go_on()
        await plane.until(lambda: members(2), 30)

    async def released() -> bool:
        return all("memory: released: kv_cache, weights" in one for one in (await reasons(client)).values())

    await changed("release_memory")
    await plane.until(released, 30)
    await changed("resume_memory")
    await plane.until(lambda: all_serve(client, "initial"), 30)
    # An id names one worker. A worker without memory to return does not keep others from taking theirs.
    await fleet.run("release_memory", {"workers": [away.instance_id]})
    for one in (away, stays):
        one.kill()
        plane.spawn(instance_id=one.instance_id)
    await plane.until(lambda: _serve(client, [stays.instance_id]), 30)
    assert "memory: released: kv_cache, weights" in (await reasons(client))[away.instance_id]
    unable = plane.spawn(patch=WITHOUT_A_SAVER)
    assert await _serve(client, [stays.instance_id, unable.instance_id])
    await fleet.run("resume_memory")
    await plane.until(lambda: all_serve(client, "initial"), 30)


async def _serve(client: WorkerCalls, ids: list[str]) -> bool:
    return {key for key, one in (await reasons(client)).items() if not one} == {*ids}


def test_the_desired_memory_follows_each_release_and_resume() -> None:
    none = DesiredMemory()
    both = none.after("release_memory", ["weights", "kv_cache"], None)
    assert both.of("a") == {"weights", "kv_cache"}
    one = both.after("resume_memory", ["weights"], ["a"])
    assert (one.of("a"), one.of("b")) == (frozenset({"kv_cache"}), both.released)
    assert DesiredMemory.decode(one.encode()) == one
    rest = one.after("resume_memory", ["weights"], None)
    assert rest == DesiredMemory(frozenset({"kv_cache"})), "a worker like all others has no entry"
    assert one.after("resume_memory", ["weights", "kv_cache"], None) == none
    assert not none.after("release_memory", ["kv_cache"], ["a"]).of("b")


PAUSE_FAILS_ONCE = """
import worker.engines.fake.adapter as fake
from rl_plane.errors import EngineFailed
really, release, left = fake.FakeEngine.pause, fake.FakeEngine.release_memory, [1]
async def pause(self, *given):
    if left:
        left.pop()
        raise EngineFailed("no pause")
    return await really(self, *given)
async def release_memory(self, tags):
    if not self.gate.is_paused:
        raise EngineFailed("not paused")
    await release(self, tags)
fake.FakeEngine.pause, fake.FakeEngine.release_memory = pause, release_memory
"""


async def test_a_release_that_failed_before_its_pause_pauses_when_it_comes_again(plane: Plane) -> None:
    plane.spawn(patch=PAUSE_FAILS_ONCE)
    fleet = await plane.fleet()
    with pytest.raises(EngineFailed, match="no pause"):
        await fleet.run("release_memory")
    await fleet.run("release_memory")
    await fleet.run("resume_memory")
    await plane.until(lambda: all_serve(fleet.client, "initial"), 30)


async def test_all_workers_release_their_memory_or_none_does(plane: Plane) -> None:
    able = plane.spawn()
    one = plane.spawn(patch=WITHOUT_A_SAVER)
    fleet = await plane.fleet()
    with pytest.raises(Unsupported) as refused:
        await fleet.run("release_memory")
    assert refused.value.facts["lacking"] == {one.instance_id: "it has no saver"}
    assert await reasons(fleet.client) == {able.instance_id: [], one.instance_id: []}
    await fleet.run("release_memory", {"workers": [able.instance_id]})
