"""A fleet that is started with another model on an old store, and the new run that it needs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from frontend.server.options import FrontendOptions
from rl_plane.bus.server import NatsServer
from rl_plane.cli import main
from rl_plane.client import RlClient
from rl_plane.errors import Conflict, InvalidRequest, NotFound, PlaneError
from tests.support.adapter_updates import adapter, load
from tests.support.dying_coordinator import ENDS, ends_at
from tests.support.faults import StatusLog, generate
from tests.support.fleet_updates import all_serve, states, update_of
from tests.support.frontend_here import started
from tests.support.frontend_process import ask, error_of, frontend, tokens_under
from worker.engines.fake.adapter import fake_token
from worker.receive.staging import model_digest

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

PROMPT = [5, 6, 7]
START_S = 20.0


async def a_fleet_that_was(plane: Plane, server: NatsServer) -> dict[str, Any]:
    """It took an update, and all of it was stopped but the store."""
    client = await plane.client("before")
    plane.spawn_copies(2)
    version: dict[str, Any] = (await client.run("update_weights", update_of(plane.model(1), "step_1")))["version"]
    await load(client, adapter(plane, 1))
    plane.kill_all()
    server.kill()
    server.start()
    return version


async def closed_reasons(client: RlClient) -> list[str]:
    found = (await states(client)).values()
    return ["; ".join(state["admission"]["reasons"]) for state in found if not state["admission"]["open"]]


async def until_closed(plane: Plane, client: RlClient, count: int, words: str) -> list[str]:
    async def told() -> list[str]:
        reasons = [reason for reason in await closed_reasons(client) if words in reason]
        listed = await client.list_workers()  # the fleet finds out a little later which workers were killed
        return reasons if len(reasons) == len(listed) == count else []

    reasons: list[str] = await plane.until(told, START_S)
    return reasons


async def test_another_model_on_an_old_store_begins_a_new_run_on_request(
    own_nats: tuple[NatsServer, Plane],
) -> None:
    server, plane = own_nats
    before = await a_fleet_that_was(plane, server)
    other = plane.model(7, tensors=3)
    ids = plane.spawn_copies(2, model=other)
    client = await plane.client()
    digest = model_digest(other)
    for reason in await until_closed(plane, client, 2, "rl-plane new-run"):
        assert "the weights do not fit the model" in reason
        assert digest in reason
    async with frontend(plane) as http:
        assert error_of(await http.post("/v1/completions", json={"prompt": "hi"}), 503)["code"] == "not_admitted"
        begun = await client.run("new_run", {}, "the-new-run")
        version = begun["version"]
        assert (version["sequence"], version["label"], version["digest"]) == (0, "initial", digest)
        assert version["run"] > before["run"]
        assert begun["excluded"] == []
        assert [row["instance_id"] for row in begun["workers"]] == ids
        reply = await ask(http, max_tokens=3, return_token_ids=True)
        assert reply["choices"][0]["token_ids"] == tokens_under(digest, 0, 3)
        assert reply["nvext"]["weight_version"] == version
        # The adapters were of the model before.
        assert (await client.run("state"))["adapters"] == {}
        new = plane.model(8, tensors=3)
        updated = (await client.run("update_weights", update_of(new, "step_1")))["version"]
        assert (updated["run"], updated["sequence"]) == (version["run"], 1)
        assert (await ask(http))["nvext"]["weight_version"] == updated
        # Asked again, it is not begun again.
        again = await client.run("new_run", {}, "the-new-run")
        assert again["version"] == version
        assert await all_serve(client, "step_1")
    entries = (await client.run("updates"))["updates"]
    mine = [(entry["label"], entry["version"]["sequence"]) for entry in entries[:2]]
    assert mine == [("step_1", 1), ("initial", 0)]
    back = (await client.run("update_weights", {"rollback": {"sequence": 0}}))["version"]
    assert (back["run"], back["sequence"], back["digest"]) == (version["run"], 2, digest)
    with pytest.raises(NotFound):
        await client.run("update_weights", {"rollback": {"label": "2"}})  # of the run before
    joiner = plane.spawn(model=other)
    await plane.until(lambda: all_serve(client, "initial"), START_S)
    stream = await generate(client, joiner.instance_id, PROMPT, 2)
    assert stream.tokens == [fake_token(digest, PROMPT, n) for n in range(2)]


async def test_a_worker_of_another_model_says_why_it_is_closed(own_nats: tuple[NatsServer, Plane]) -> None:
    server, plane = own_nats
    client = await plane.client("before")
    plane.spawn_copies(2)
    await client.list_workers()
    plane.kill_all()
    server.kill()
    server.start()
    other = plane.model(7)
    plane.spawn_copies(2, model=other)
    client = await plane.client("after")
    reasons = await until_closed(plane, client, 2, "new-run")
    for reason in reasons:
        assert model_digest(other) in reason
        assert model_digest(plane.model(0)) in reason
        assert "start it with the fleet's model" in reason
    assert (await client.run("new_run"))["version"]["digest"] == model_digest(other)
    assert await all_serve(client, "initial")


async def test_workers_with_different_models_begin_no_run(plane: Plane) -> None:
    client = await plane.client()
    one = plane.spawn()
    await client.wait_for(1)
    await client.run("update_weights", update_of(plane.model(1), "step_1"))
    before = (await client.run("weight_version"))["version"]
    plane.spawn(model=plane.model(7, tensors=3))
    await client.wait_for(2)
    statuses = await StatusLog.follow(client)
    with pytest.raises(Conflict) as caught:
        await client.run("new_run", {"min_workers": 2})
    assert type(caught.value) is Conflict
    assert "start all workers with the new model" in caught.value.facts["fix"]
    for model in (plane.model(0), plane.model(7, tensors=3)):
        assert model_digest(model) in caught.value.message
    assert (await client.run("weight_version"))["version"] == before
    assert all(one.instance_id in admitted for admitted in statuses.admitted)
    assert [entry["label"] for entry in (await client.run("updates"))["updates"]] == ["step_1", "initial"]


async def test_a_silent_worker_begins_no_run(plane: Plane) -> None:
    client = await plane.client()
    silent, _ = plane.spawn_many(2)
    await client.wait_for(2)
    silent.stop()
    with pytest.raises(Conflict, match="1 did not answer"):
        await client.run("new_run")
    silent.go_on()


async def test_a_fleet_that_was_trained_goes_back_to_its_own_model(plane: Plane) -> None:
    """The new run's weights are the workers' own. Workers with other weights fetch theirs from their model's
    folder."""
    client = await plane.client()
    ids = plane.spawn_copies(2)
    await client.list_workers()
    old = (await client.run("weight_version"))["version"]
    await client.run("update_weights", update_of(plane.model(1), "step_1"))
    await load(client, adapter(plane, 1))
    statuses = await StatusLog.follow(client)
    version = (await client.run("new_run"))["version"]
    assert (version["sequence"], version["digest"]) == (0, old["digest"])
    assert version["run"] > old["run"]
    assert await all_serve(client, "initial")
    for one in ids:
        stream = await generate(client, one, PROMPT, 2)
        assert stream.tokens == [fake_token(old["digest"], PROMPT, n) for n in range(2)]
        assert stream.spans[0]["run"] == version["run"]
    labels = [status["version"]["label"] for status in statuses.events if status["admission"]["open"]]
    assert set(labels) <= {"step_1", "initial"}
    assert (await client.run("update_weights", update_of(plane.model(2), "step_1")))["version"]["sequence"] == 1


@pytest.mark.parametrize("end", ENDS)
async def test_a_repeated_call_continues_an_unreported_new_run(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    ids = plane.spawn_copies(2)
    await one.list_workers()
    await one.run("update_weights", update_of(plane.model(1), "step_1"))
    with monkeypatch.context() as patch:
        ends_at(patch, "gate", end)
        with pytest.raises(type(end)):
            await one.run("new_run", {}, "the-new-run")
    begun = await two.run("new_run", {}, "the-new-run")
    assert (begun["version"]["sequence"], begun["version"]["digest"]) == (0, model_digest(plane.model(0)))
    assert [(row["instance_id"], row["status"]) for row in begun["workers"]] == [(key, "ok") for key in ids]
    assert await all_serve(two, "initial")
    assert (await one.run("weight_version"))["version"] == begun["version"]
    again = await one.run("new_run", {}, "the-new-run")
    assert (again["version"], len(again["workers"])) == (begun["version"], 2), "noted"


async def test_two_that_begin_a_run_at_once_begin_one_after_the_other(plane: Plane) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    plane.spawn()
    await one.list_workers()
    same = await asyncio.gather(
        one.run("new_run", {}, "same"), two.run("new_run", {}, "same"), return_exceptions=True
    )
    done = [reply["version"] for reply in same if isinstance(reply, dict)]
    assert all(isinstance(reply, dict | PlaneError) for reply in same)
    assert done
    assert all(version == done[0] for version in done)
    assert (await one.run("weight_version"))["version"] == done[0]


async def test_a_new_run_is_of_the_whole_fleet(plane: Plane) -> None:
    client = await plane.client()
    worker = plane.spawn()
    await client.wait_for(1)
    with pytest.raises(InvalidRequest) as caught:
        await client.run("new_run", {"workers": [worker.instance_id]})
    assert caught.value.facts["field"] == "workers"


@pytest.mark.parametrize("by", ["http", "nats"])
async def test_the_command_line_begins_runs_and_updates_them(
    plane: Plane, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    plane.spawn_copies(2)
    client = await plane.client()
    await client.run("update_weights", update_of(plane.model(1), "step_1"))
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=None)

    async def command(*argv: str) -> dict[str, Any]:
        reach = (
            ["--url", urls["rl_url"]]
            if by == "http"
            else ["--nats-url", plane.url, "--namespace", plane.namespace, "--component", plane.component]
        )
        assert await asyncio.to_thread(main.run, [*argv, *reach, "--json"]) == 0
        reply: dict[str, Any] = json.loads(capsys.readouterr().out)
        return reply

    async with started(options) as urls:
        begun = await command("new-run")
        assert (begun["version"]["sequence"], begun["excluded"]) == (0, [])
        path: Path = adapter(plane, 1)
        loaded = await command(
            "update", str(path), "--adapter", "a", "--adapter-op", "load", "--barrier", "rolling"
        )
        assert loaded["version"]["sequence"] == 1
        assert (await client.run("state"))["adapters"] == {"a": loaded["version"]}
        updated = await command("update", str(plane.model(2)), "--staging", "none", "--version", "two")
        assert (updated["version"]["sequence"], updated["version"]["label"]) == (2, "two")
        gone = await command("update", "--adapter", "a", "--adapter-op", "unload")
        assert gone["version"]["sequence"] == 3
        assert (await client.run("state"))["adapters"] == {}
    assert await all_serve(client, "two")
