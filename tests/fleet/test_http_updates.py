"""Updates by URL in a real fleet: what a client sees, a server that is killed, an update that is aborted, signed URLs
that end, and healing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl_plane.bus.state_store import read_record
from rl_plane.errors import InvalidRequest, InvalidWeights, UpdateAborted
from rl_plane.weights.checkpoint import SINGLE_NAME
from tests.conftest import Plane
from tests.support.delta_updates import by_delta
from tests.support.fleet_updates import all_serve, generated, update_of
from tests.support.healing import until_behind
from tests.support.range_server import RangeServer, ServerProcess
from worker.engines.fake.adapter import fake_token
from worker.receive.staging import model_digest

HEAL_S = 60.0
PROMPT = [5, 6, 7]
SECRET = "X-Amz-Signature=0123secret"
LARGE = 1 << 18
"""Bytes of each tensor: more than the first request of a file brings."""
SHORT_STALL = """
from rl_plane.transports.http.receiver import HttpTransport
HttpTransport.__init__.__defaults__ = (1.0,)
"""


@pytest.fixture
def server(plane: Plane) -> RangeServer:
    return plane.weight_server


def by_url(transport: dict[str, Any], version: str, **policy: Any) -> dict[str, Any]:
    return {"transport": {"backend": "http", **transport}, "version": version, "policy": policy}


async def test_versions_by_url_reach_late_workers_and_show_no_secret(plane: Plane, server: RangeServer) -> None:
    """A checkpoint at one URL, another by a URL for each file, and a roll-back. A worker that joins fetches by the same
    URL, and no reply shows a secret."""
    models = [plane.model(seed) for seed in range(3)]
    client = await plane.client()
    ids = [one.instance_id for one in await asyncio.to_thread(plane.spawn_many, 2, weight_urls=[server.url])]
    server.behaviour.key = SECRET
    signed = {
        "url": f"{server.url}/{models[1].name}?{SECRET}",
        "headers": {"Authorization": "Bearer hush"},
    }
    reply = await client.run("update_weights", by_url(signed, "one"))
    assert reply["version"]["digest"] == model_digest(models[1])
    place = f"{server.url}/{models[2].name}/{SINGLE_NAME}"
    await client.run("update_weights", by_url({"urls": {SINGLE_NAME: f"{place}?{SECRET}"}}, "two"))
    new = (await asyncio.to_thread(plane.spawn, weight_urls=[server.url])).instance_id
    await plane.until(lambda: all_serve(client, "two"), HEAL_S)
    made = [fake_token(model_digest(models[2]), PROMPT, position) for position in range(4)]
    for one in (*ids, new):
        assert await generated(client, one, PROMPT, 4) == made
    state, updates = await client.run("state"), await client.run("updates")
    assert state["sources"] == [{"backend": "http", "urls": {SINGLE_NAME: f"{place}?…"}}]
    assert [one["transport"] for one in updates["updates"][:2]] == [
        state["sources"][0],
        {"backend": "http", "url": f"{server.url}/seed1?…"},
    ]
    back = await client.run("update_weights", {"rollback": {"label": "one"}})
    assert back["version"]["digest"] == model_digest(models[1])
    record = await read_record(client.bus, client.subjects().state)
    assert record is not None
    assert record.source.transport == {"backend": "http", **signed}
    for text in (state, updates, *(one.log.read_text() for one in plane.spawned)):
        assert "0123secret" not in str(text)
        assert "hush" not in str(text)


@pytest.mark.slow
@pytest.mark.parallel
async def test_a_delta_and_its_base_are_fetched_by_url(plane: Plane, server: RangeServer) -> None:
    """A worker that joins fetches the full version and then the delta, each by its URL."""
    models = [plane.model(seed) for seed in range(3)]
    delta = by_delta(plane, models[1], models[2], "two")  # it compiles for seconds, so no connection is open yet
    delta["transport"] = {"backend": "http", "url": f"{server.url}/{models[1].name}-{models[2].name}"}
    client = await plane.client()
    await asyncio.to_thread(plane.spawn, weight_urls=[server.url])
    await client.run("update_weights", by_url({"url": f"{server.url}/{models[1].name}"}, "one"))
    reply = await client.run("update_weights", delta)
    assert reply["version"]["digest"] == model_digest(models[2])
    await asyncio.to_thread(plane.spawn, weight_urls=[server.url])
    await plane.until(lambda: all_serve(client, "two"), HEAL_S)


async def test_a_worker_refuses_a_url_that_it_may_not_fetch(plane: Plane, server: RangeServer) -> None:
    """It refuses before it connects, and says how to allow the place."""
    client = await plane.client()
    await asyncio.to_thread(plane.spawn_many, 2, weight_urls=["https://elsewhere.example/weights"])
    with pytest.raises(InvalidRequest, match="may not fetch") as caught:
        await client.run("update_weights", by_url({"url": f"{server.url}/seed0"}, "one"))
    assert "--weight-url" in str(caught.value.to_wire())
    assert server.behaviour.asked == []


async def test_a_killed_server_aborts_the_update_and_the_old_version_serves(plane: Plane) -> None:
    first, second = plane.model(0, nbytes=LARGE), plane.model(1, nbytes=LARGE)
    server = ServerProcess(plane.tmp / "weights", 100_000)
    try:
        client = await plane.client()
        how: dict[str, Any] = {"model": first, "weight_urls": [server.url], "patch": SHORT_STALL}
        ids = [one.instance_id for one in await asyncio.to_thread(plane.spawn_many, 2, **how)]
        update = asyncio.create_task(
            client.run("update_weights", by_url({"url": f"{server.url}/{second.name}"}, "never"))
        )
        await asyncio.to_thread(server.wait_held)
        server.kill()
        with pytest.raises(UpdateAborted, match="the connection failed"):
            await update
    finally:
        server.close()
    token = fake_token(model_digest(first), PROMPT, 0)
    for one in ids:
        assert await generated(client, one, PROMPT, 1) == [token]
    await client.run("update_weights", update_of(second, "by file"))
    assert await all_serve(client, "by file")


async def test_an_aborted_update_ends_its_reads_and_may_be_repeated(plane: Plane, server: RangeServer) -> None:
    """The workers end their reads at once, and take the next update from the same server."""
    first, second = plane.model(0, nbytes=LARGE), plane.model(1, nbytes=LARGE)
    client = await plane.client()
    await asyncio.to_thread(plane.spawn, model=first, weight_urls=[server.url])
    plan = server.behaviour
    plan.hold_after = 100_000
    body = by_url({"url": f"{server.url}/{second.name}"}, "two")
    update = asyncio.create_task(client.run("update_weights", body))
    assert await asyncio.to_thread(plan.held.wait, HEAL_S)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    plan.hold_after = None
    await client.run("update_weights", body)
    assert await all_serve(client, "two")
    assert not plan.go.is_set(), "the held answer was never finished"


async def test_a_late_worker_stays_closed_until_an_update_brings_a_valid_url(
    plane: Plane, server: RangeServer
) -> None:
    """A worker that joins later stays closed, and says why, until an update brings a fresh URL."""
    first, second = plane.model(0), plane.model(1)
    client = await plane.client()
    await asyncio.to_thread(plane.spawn, model=first, weight_urls=[server.url])
    server.behaviour.key = SECRET
    body = by_url({"url": f"{server.url}/{second.name}?{SECRET}"}, "two")
    await client.run("update_weights", body)
    server.behaviour.key = fresh = "X-Amz-Signature=another"
    late = await asyncio.to_thread(plane.spawn, model=first, weight_urls=[server.url])
    assert "model.safetensors: 403" in await until_behind(plane, client, late.instance_id)
    body["transport"]["url"] = f"{server.url}/{second.name}?{fresh}"
    await client.run("update_weights", body)
    assert (await client.run("state"))["ready"]


async def test_an_update_with_a_wrong_digest_fails(plane: Plane, server: RangeServer) -> None:
    """The error names both digests, and the fleet still serves the version before."""
    first, second = plane.model(0), plane.model(1)
    client = await plane.client()
    workers = await asyncio.to_thread(plane.spawn_many, 2, model=first, weight_urls=[server.url])
    ids = sorted(one.instance_id for one in workers)
    wrong, computed = "blake3:" + "0" * 64, model_digest(second, algorithm="blake3")
    body = {**by_url({"url": f"{server.url}/{second.name}"}, "one"), "digest": wrong}
    with pytest.raises(InvalidWeights) as caught:
        await client.run("update_weights", body)
    assert caught.value.facts["field"] == "transport"
    rows = caught.value.facts["workers"]
    assert sorted(row["instance_id"] for row in rows) == ids
    # The first worker to find it ends the update. The other one may be stopped before it has all bytes.
    assert {row["error"]["code"] for row in rows} <= {"invalid_weights", "update_aborted"}
    found = [row["error"] for row in rows if row["error"]["code"] == "invalid_weights"]
    assert found
    for error in found:
        assert (error["digest"], error["expected_digest"]) == (computed, wrong)
    assert await all_serve(client, "initial")
    token = fake_token(model_digest(first), PROMPT, 0)
    for one in ids:
        assert await generated(client, one, PROMPT, 1) == [token]
