"""Rolling updates: worker after worker, while the others serve the version before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from rl_plane.bus.state_store import read_record
from rl_plane.client import RlClient
from tests.support.adapter_updates import adapter, load
from tests.support.dying_coordinator import CoordinatorDies, ends_at
from tests.support.faults import StatusLog, Stream, generate, spawn_faulty
from tests.support.fleet_updates import all_serve, coordinator_that_dies, states, update_of
from tests.support.frontend_process import PROMPT, ask, frontend, tokens_under
from worker.engines.fake.adapter import fake_token
from worker.receive.staging import model_digest

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

FINISH_S = 60.0


def rolling(plane: Plane, seed: int, **policy: Any) -> dict[str, Any]:
    return update_of(plane.model(seed), f"step_{seed}", barrier="rolling", **policy)


async def test_workers_roll_one_by_one_and_one_always_serves(plane: Plane) -> None:
    client = await plane.client()
    workers = plane.spawn_many(3, swap_delay_s=0.1)
    await client.wait_for(3)
    ids = sorted(worker.instance_id for worker in workers)
    statuses = await StatusLog.follow(client)
    assert statuses.admitted[0] == frozenset(ids)
    reply = await client.run("update_weights", rolling(plane, 1))
    assert reply["version"]["sequence"] == 1
    assert reply["excluded"] == []
    assert [row["instance_id"] for row in reply["workers"]] == ids
    assert await all_serve(client, "step_1")
    assert min(len(admitted) for admitted in statuses.admitted) == 2, (statuses.events, reply)
    closed = [next(iter(set(ids) - admitted)) for admitted in statuses.admitted if len(admitted) == 2]
    assert list(dict.fromkeys(closed)) == ids
    record = await read_record(client.bus, client.subjects().state)
    assert record is not None
    assert record.final
    # A worker that starts now serves the new version only.
    joiner = plane.spawn()
    stream = await generate(client, joiner.instance_id, PROMPT, 2)
    assert [span["sequence"] for span in stream.spans] == [1]


async def test_tokens_are_labelled_by_the_version_that_made_them(plane: Plane) -> None:
    """Clients of a frontend wait for no worker. They get the old or the new version until the update is answered, then
    only the new one."""
    client = await plane.client()
    plane.spawn_many(3, swap_delay_s=0.2, token_delay_s=0.01)
    await client.wait_for(3)
    old = (await client.run("weight_version"))["version"]
    seen: set[str] = set()
    answered = asyncio.Event()

    async def caller(http: httpx.AsyncClient) -> int:
        count = 0
        while not answered.is_set():
            (choice,) = (await ask(http, max_tokens=8, return_token_ids=True))["choices"]
            spans = choice["weight_versions"]
            made = [token for span in spans for token in tokens_under(span["digest"], span["start"], span["end"])]
            assert choice["token_ids"] == made
            seen.update(span["digest"] for span in spans)
            count += 1
        return count

    async with frontend(plane) as one, frontend(plane) as two:
        await ask(one)
        await ask(two)
        callers = [asyncio.create_task(caller(http)) for http in (one, two, one, two)]
        await plane.until(lambda: seen)
        new = (await client.run("update_weights", rolling(plane, 1)))["version"]
        for http in (one, two) * 3:
            reply = await ask(http, max_tokens=2, return_token_ids=True)
            (choice,) = reply["choices"]
            assert reply["nvext"]["weight_version"] == new
            assert choice["token_ids"] == tokens_under(new["digest"], 0, 2)
        await plane.until(lambda: new["digest"] in seen)
        answered.set()
        assert all(await asyncio.gather(*callers))
    assert seen == {old["digest"], new["digest"]}


async def test_a_stream_continues_through_its_workers_turn(plane: Plane) -> None:
    client = await plane.client()
    workers = plane.spawn_many(2, token_delay_s=0.01)
    await client.wait_for(2)
    streams = [Stream(client, worker.instance_id, PROMPT, 3000) for worker in workers]
    for stream in streams:
        await stream.more()
    await client.run("update_weights", rolling(plane, 1))
    for stream in streams:
        await stream.more()
    await client.run("abort_requests", {})
    for stream in streams:
        await stream.end()
        assert [span["digest"] for span in stream.spans] == [model_digest(plane.model(seed)) for seed in (0, 1)]
        made = [
            token for span in stream.spans for token in tokens_under(span["digest"], span["start"], span["end"])
        ]
        assert stream.tokens == made


@pytest.mark.parametrize("op", ["load", "swap", "unload"])
async def test_an_adapter_rolls_too(plane: Plane, op: str) -> None:
    client = await plane.client()
    workers = plane.spawn_many(2, swap_delay_s=0.2)
    await client.wait_for(2)
    base = (await client.run("weight_version"))["version"]
    if op != "load":
        await load(client, adapter(plane, 1))
    statuses = await StatusLog.follow(client)
    done = asyncio.Event()

    async def caller(http: httpx.AsyncClient) -> int:
        count = 0
        while not done.is_set():
            reply = await ask(http, max_tokens=3, return_token_ids=True)
            assert reply["choices"][0]["token_ids"] == tokens_under(base["digest"], 0, 3)
            count += 1
        return count

    async with frontend(plane) as http:
        await ask(http)
        task = asyncio.create_task(caller(http))
        transport = {"backend": "filesystem", "path": str(adapter(plane, 2))}
        body: dict[str, Any] = {
            "target": {"kind": "lora", "op": op, "name": "a"},
            "policy": {"barrier": "rolling"},
        }
        reply = await client.run("update_weights", body if op == "unload" else {**body, "transport": transport})
        done.set()
        assert await task
    assert reply["excluded"] == []
    assert all(statuses.admitted), (statuses.events, reply)
    for worker in workers:
        assert "AssertionError" not in worker.log.read_text()
    for state in (await states(client)).values():
        assert state["sequence"] == reply["version"]["sequence"]
        assert state["adapters"] == ({} if op == "unload" else {"a": reply["version"]})


@pytest.mark.parametrize("rolled", [0, 1, 2, 3])
async def test_a_coordinator_that_dies_in_the_roll_is_not_needed(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, rolled: int
) -> None:
    doomed, client = await plane.client("doomed"), await plane.client()
    ids = plane.spawn_copies(3)
    with monkeypatch.context() as patch:
        if rolled < 3:
            ends_at(patch, "roll", CoordinatorDies(), after=rolled)
            with pytest.raises(CoordinatorDies):
                await doomed.run("update_weights", rolling(plane, 1))
        else:  # all have swapped: only the record is left half done
            ends_at(patch, "open", CoordinatorDies())
            with pytest.raises(CoordinatorDies):
                await doomed.run("update_weights", rolling(plane, 1))
    await plane.until(lambda: all_serve(client, "step_1"), FINISH_S)
    digest = model_digest(plane.model(1))
    for one in ids:
        assert (await generate(client, one, PROMPT, 3)).tokens == tokens_under(digest, 0, 3)
    reply = await client.run("update_weights", rolling(plane, 2))
    assert (reply["version"]["sequence"], reply["excluded"]) == (2, [])
    assert await all_serve(client, "step_2")


async def test_a_roll_ends_though_the_process_of_its_coordinator_is_killed(plane: Plane) -> None:
    client = await plane.client()
    plane.spawn_copies(3)
    body = update_of(plane.model(1), "one", barrier="rolling")
    await coordinator_that_dies(plane, body, "commit_update")
    await plane.until(lambda: all_serve(client, "one"), FINISH_S)
    assert (await client.run("update_weights", rolling(plane, 2)))["version"]["sequence"] == 2


async def test_a_frontend_finishes_what_a_dead_coordinator_rolled(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed, client = await plane.client("doomed"), await plane.client()
    plane.spawn_many(2)
    await client.wait_for(2)
    async with frontend(plane) as http:
        old = (await ask(http))["nvext"]["weight_version"]
        with monkeypatch.context() as patch:
            ends_at(patch, "roll", CoordinatorDies(), after=1)
            with pytest.raises(CoordinatorDies):
                await doomed.run("update_weights", rolling(plane, 1))

        async def final() -> bool:
            record = await read_record(client.bus, client.subjects().state)
            assert record is not None
            return record.final and record.made.label == "step_1"

        await plane.until(final, FINISH_S)
        await plane.until(lambda: all_serve(client, "step_1"), FINISH_S)
        new = (await ask(http))["nvext"]["weight_version"]
        assert new["sequence"] == old["sequence"] + 1


async def test_a_worker_that_dies_in_the_roll_is_excluded_and_heals(plane: Plane) -> None:
    client = await plane.client()
    first = plane.spawn(instance_id="0" * 16)
    doomed = plane.spawn(instance_id="8" * 16, swap_delay_s=60)
    last = plane.spawn(instance_id="f" * 16)
    await client.wait_for(3)
    statuses = await StatusLog.follow(client)
    task = asyncio.create_task(client.run("update_weights", rolling(plane, 1)))
    # Its turn has come when it is closed.
    await plane.until(lambda: doomed.instance_id not in statuses.admitted[-1], FINISH_S)
    assert {first.instance_id, last.instance_id} <= statuses.admitted[-1]
    doomed.kill()
    reply = await task
    assert reply["excluded"] == [doomed.instance_id]
    assert reply["version"]["sequence"] == 1
    again = plane.spawn(instance_id=doomed.instance_id)
    await plane.until(lambda: all_serve(client, "step_1"), FINISH_S)
    stream = await generate(client, again.instance_id, PROMPT, 2)
    assert stream.tokens == tokens_under(model_digest(plane.model(1)), 0, 2)
    assert all(statuses.admitted)


async def test_a_swap_that_fails_in_the_roll_excludes_one(plane: Plane) -> None:
    client = await plane.client()
    bad, good = spawn_faulty(plane), plane.spawn()
    await client.wait_for(2)
    statuses = await StatusLog.follow(client)
    bad.fail("fail_swap")
    reply = await client.run("update_weights", rolling(plane, 1))
    assert reply["excluded"] == [bad.instance_id]
    assert good.instance_id in statuses.admitted[-1]
    bad.mend("fail_swap")
    await plane.until(lambda: all_serve(client, "step_1"), FINISH_S)


async def test_a_worker_that_could_not_prepare_is_closed_after_the_roll(plane: Plane) -> None:
    client = await plane.client()
    bad, good = spawn_faulty(plane), plane.spawn()
    await client.wait_for(2)
    bad.fail("fail_stage")
    body = rolling(plane, 1, on_prepare_failure="exclude")
    reply = await client.run("update_weights", body)
    assert reply["excluded"] == [bad.instance_id]
    state = await states(client)
    assert not state[bad.instance_id]["admission"]["open"]
    assert state[good.instance_id]["admission"]["open"]
    bad.mend("fail_stage")
    await plane.until(lambda: all_serve(client, "step_1"), FINISH_S)


async def test_before_the_decision_a_rolling_update_changes_nothing(plane: Plane) -> None:
    client = await plane.client()
    bad, _ = spawn_faulty(plane), plane.spawn()
    await client.wait_for(2)
    statuses = await StatusLog.follow(client)
    bad.fail("fail_stage")
    with pytest.raises(Exception, match="fail_stage"):
        await client.run("update_weights", rolling(plane, 1))
    assert len(set(statuses.admitted)) == 1
    assert await all_serve(client, "initial")


async def test_one_worker_rolls_alone(plane: Plane) -> None:
    client = await plane.client()
    worker = plane.spawn()
    await client.wait_for(1)
    reply = await client.run("update_weights", rolling(plane, 1))
    assert reply["version"]["sequence"] == 1
    stream = await generate(client, worker.instance_id, PROMPT, 2)
    assert stream.tokens == [fake_token(model_digest(plane.model(1)), PROMPT, n) for n in range(2)]


async def test_rolling_and_strict_updates_follow_each_other(plane: Plane) -> None:
    client: RlClient = await plane.client()
    plane.spawn_copies(2)
    paths: list[Path] = [plane.model(seed) for seed in range(5)]
    for step, barrier in enumerate(("rolling", "strict", "rolling", "rolling"), 1):
        await client.run("update_weights", update_of(paths[step], f"step_{step}", barrier=barrier))
        assert await all_serve(client, f"step_{step}")
    await client.run("update_weights", {"rollback": {"sequence": 1}, "policy": {"barrier": "rolling"}})
    assert await all_serve(client, "step_1")
