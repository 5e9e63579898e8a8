"""One frontend serves several components. Nothing that happens to one reaches another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from frontend.completions.call import GenerationCall
from frontend.completions.completion_routes import OPENAI
from frontend.completions.plans import plan_completion
from frontend.main import Frontend
from frontend.served_component import ServedComponent
from frontend.server.options import FrontendOptions
from rl_plane.bus.state_store import read_frontends
from rl_plane.cli import main
from rl_plane.errors import InvalidRequest, Locked, Unavailable
from rl_plane.protocol.subjects import Subjects
from tests.conftest import Plane
from tests.support.component_fleets import BOUND_S, LONG, Fleets, labels, ready, serving
from tests.support.frontend_process import PROMPT, ask, error_of, tokens_under
from tests.support.metrics_pages import values
from worker.receive.staging import model_digest

DELAY_S = 0.005


@pytest_asyncio.fixture
async def reference(plane: Plane) -> AsyncIterator[Plane]:
    made = Plane(plane.url, plane.namespace, plane.tmp, "reference")
    yield made
    await made.close()


@pytest_asyncio.fixture
async def fleets(plane: Plane, reference: Plane) -> AsyncIterator[Fleets]:
    plane.component = "policy"
    plane.spawn(model=plane.model(0), token_delay_s=DELAY_S)
    reference.spawn(model=reference.model(10), token_delay_s=DELAY_S)
    async with serving(plane, "reference") as (http, rl):
        for name in ("policy", "reference"):
            await ready(rl, name)
        yield Fleets(plane, reference, http, rl)


async def test_a_pause_and_an_update_are_of_one_component(fleets: Fleets) -> None:
    first = model_digest(fleets.reference.model(10))
    async with fleets.stream("seed10") as stream:
        await stream.until(lambda it: len(it.tokens) > 3)
        await fleets.steer("pause", mode="keep")
        seen = len(stream.tokens)
        await stream.until(lambda it: len(it.tokens) > seen + 100)  # more than wait in sockets
        paused = [(await fleets.state(name))["pause_state"] for name in ("policy", "reference")]
        assert paused == ["paused", "running"]
        digest = await fleets.update(fleets.policy, fleets.policy.model(1), "step_1")
        await fleets.steer("resume")
        reply = await ask(fleets.http, max_tokens=5, return_token_ids=True)
        assert labels(reply) == [("step_1", 1)]
        assert reply["choices"][0]["token_ids"] == tokens_under(digest, 0, 5)
        await fleets.end(stream, "reference")
        assert [(one["version"], one["sequence"]) for one in stream.spans] == [("initial", 0)]
        assert stream.tokens == tokens_under(first, 0, len(stream.tokens))
    # The other way around: the reference is updated under a stream of the policy.
    async with fleets.stream("policy") as stream:
        await stream.until(lambda it: len(it.tokens) > 3)
        again = await fleets.update(fleets.reference, fleets.reference.model(11), "frozen_2")
        seen = len(stream.tokens)
        await stream.until(lambda it: len(it.tokens) > seen + 100)
        await fleets.end(stream, "policy")
        assert [one["version"] for one in stream.spans] == ["step_1"]
        assert stream.tokens == tokens_under(digest, 0, len(stream.tokens))
    reply = await ask(fleets.http, model="reference", max_tokens=5, return_token_ids=True)
    assert (reply["model"], labels(reply)) == ("reference", [("frozen_2", 1)])
    assert reply["choices"][0]["token_ids"] == tokens_under(again, 0, 5)
    listed = (await fleets.http.get("/v1/models")).json()["data"]
    assert [(row["id"], row["component"], row["weight_version"]["label"]) for row in listed] == [
        ("seed0", "policy", "step_1"),
        ("seed10", "reference", "frozen_2"),
    ]
    assert [row["weight_version"]["digest"] for row in listed] == [digest, again]
    # The facade's listener is one engine for a dialect.
    assert [row["id"] for row in (await fleets.rl.get("/v1/models")).json()["data"]] == ["seed0"]
    error_of(await fleets.rl.post("/v1/completions", json={"prompt_token_ids": PROMPT, "model": "reference"}), 404)


async def test_every_route_asks_the_component_of_the_model(fleets: Fleets) -> None:
    body = {"model": "reference/seed10"}
    digest = model_digest(fleets.reference.model(10))
    for path, more in (
        ("/v1/completions", {"prompt_token_ids": PROMPT, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/tokenize", {"prompt": "abc"}),
        ("/detokenize", {"tokens": [70, 71]}),
    ):
        response = await fleets.http.post(path, json={**body, **more})
        assert response.status_code in (200, 501), response.text
        if "choices" in (reply := response.json()):
            assert {one["digest"] for one in reply["choices"][0]["weight_versions"]} <= {digest}
            assert reply["choices"][0]["instance_id"] == fleets.reference.spawned[0].instance_id
        error = error_of(await fleets.http.post(path, json={**more, "model": "none"}), 404)
        assert error["models"] == ["seed0", "seed10"]
    native: list[tuple[str, str, dict[str, Any]]] = [
        ("/inference/v1/generate", "model", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}),
        ("/generate", "lora_path", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}),
    ]
    for path, field, asked in native:
        for name, made_by in (("reference", digest), ("policy", model_digest(fleets.policy.model(0)))):
            response = await fleets.http.post(path, json={**asked, field: name})
            assert response.status_code == 200, response.text
            assert f'"digest":"{made_by}"' in response.text
        assert (await fleets.http.post(path, json={**asked, field: "none"})).status_code == 404
    scored = await ask(fleets.http, **body, max_tokens=1, prompt_logprobs=1)
    assert scored["choices"][0]["instance_id"] == fleets.reference.spawned[0].instance_id


async def test_an_abort_of_one_component_leaves_the_other_alone(fleets: Fleets) -> None:
    async with fleets.stream("policy") as policy, fleets.stream("reference") as reference:
        for stream in (policy, reference):
            await stream.until(lambda it: len(it.tokens) > 3)
        rows = (await fleets.rl.get("/v1/rl/requests")).json()["requests"]
        assert sorted(row["component"] for row in rows) == ["policy", "reference"]
        asked = (await fleets.rl.get("/v1/rl/requests", params={"component": "reference"})).json()
        assert (asked["count"], asked["requests"][0]["component"]) == (1, "reference")
        error_of_facade = await fleets.rl.get("/v1/rl/requests", params={"component": "none"})
        assert error_of_facade.status_code == 404
        await fleets.steer("abort_requests")
        await policy.end()
        assert policy.last["finish_reason"] == "abort"
        seen = len(reference.tokens)
        await reference.until(lambda it: len(it.tokens) > seen + 5)
        await fleets.end(reference, "reference")


async def test_an_op_that_fails_in_one_component_tells_what_it_has_done_in_the_others(fleets: Fleets) -> None:
    client = await fleets.policy.client()
    (done,), (failed,) = fleets.policy.spawned, fleets.reference.spawned
    both = ["policy", "reference"]
    async with client.lock(await client.view("reference")):
        with pytest.raises(Locked) as caught:
            await client.run("pause", {"component": both})
    assert caught.value.facts["component"] == "reference"
    (row,) = caught.value.facts["workers"]
    assert (row["component"], row["instance_id"], row["status"]) == ("policy", done.instance_id, "ok")
    await client.run("check_weights", {"component": "policy", "action": "snapshot"})
    with pytest.raises(InvalidRequest, match=r"reference: .*no snapshot") as refused:
        await client.run("check_weights", {"component": both, "action": "compare"})
    assert refused.value.facts["component"] == "reference"
    rows = [(row["component"], row["instance_id"], row["status"]) for row in refused.value.facts["workers"]]
    assert rows == [("policy", done.instance_id, "ok"), ("reference", failed.instance_id, "error")]


async def test_a_component_without_a_worker_fails_its_own_requests_only(fleets: Fleets) -> None:
    (worker,) = fleets.reference.spawned
    async with fleets.stream("policy") as policy, fleets.stream("reference") as reference:
        for stream in (policy, reference):
            await stream.until(lambda it: len(it.tokens) > 3)
        worker.kill()
        await reference.end()
        assert reference.error is not None
        assert reference.error["code"] == "worker_lost"
        seen = len(policy.tokens)
        await policy.until(lambda it: len(it.tokens) > seen + 5)
    for model in ("seed10", "reference", "reference/seed10"):
        response = await fleets.http.post("/v1/completions", json={"prompt_token_ids": PROMPT, "model": model})
        error = error_of(response, 503)
        assert error["message"] == "no worker of reference is there"
        assert "--component reference`" in error["fix"], "the fix starts a worker of that component"
    assert len((await ask(fleets.http, max_tokens=3, return_token_ids=True))["choices"][0]["token_ids"]) == 3
    await fleets.update(fleets.policy, fleets.policy.model(1), "step_1")
    unknown = await fleets.http.post("/v1/completions", json={"prompt_token_ids": PROMPT, "model": "none"})
    assert error_of(unknown, 404)["models"] == ["seed0", "seed10"]
    assert [row["id"] for row in (await fleets.http.get("/v1/models")).json()["data"]] == ["seed0"]
    probes: list[tuple[httpx.AsyncClient, str, dict[str, Any], int]] = [
        (fleets.http, "/health", {}, 200),
        (fleets.http, "/health", {"component": "policy"}, 200),
        (fleets.http, "/health", {"component": "reference"}, 503),
        (fleets.http, "/health", {"component": "none"}, 404),
        (fleets.rl, "/health", {}, 200),
        (fleets.rl, "/v1/rl/ready", {}, 200),
        (fleets.rl, "/v1/rl/ready", {"component": "reference", "wait_s": 0}, 503),
    ]
    for http, path, params, status in probes:
        assert (await http.get(path, params=params)).status_code == status, (path, params)
    left = (await fleets.rl.get("/v1/rl/state", params={"component": "reference", "min_workers": 0})).json()[
        "left"
    ]
    assert [one["instance_id"] for one in left] == [worker.instance_id]
    fleets.reference.spawn(model=fleets.reference.model(10))
    await ready(fleets.rl, "reference")
    assert (await fleets.http.get("/health", params={"component": "reference"})).status_code == 200
    assert labels(await ask(fleets.http, model="seed10", max_tokens=3)) == [("initial", 0)]


async def test_facts_and_events_are_of_one_component(fleets: Fleets) -> None:
    await fleets.update(fleets.reference, fleets.reference.model(11), "frozen_2")
    await fleets.steer("pause", component="reference", lease_s=500)

    async def told() -> bool:
        page = (await fleets.rl.get("/metrics")).text
        own, other = values(page, "policy"), values(page, "reference")
        updates = 'rl_plane_updates_total{outcome="committed",transport="filesystem"}'
        return (own[updates], other[updates]) == (0, 1) and (own["rl_plane_paused"], other["rl_plane_paused"]) == (
            0,
            1,
        )

    await fleets.policy.until(told)
    page = (await fleets.rl.get("/metrics")).text
    own, other = values(page, "policy"), values(page, "reference")
    assert (own["rl_plane_committed_sequence"], other["rl_plane_committed_sequence"]) == (0, 1)
    assert 'rl_plane_calls_total{op="update_weights",outcome="ok"}' not in own
    assert other['rl_plane_calls_total{op="update_weights",outcome="ok"}'] == 1
    about = (await fleets.rl.get("/v1/rl/about")).json()
    assert (about["component"], list(about["components"])) == ("policy", ["policy", "reference"])
    assert about["pause_left_s"] == about["components"]["policy"]["pause_left_s"] == 0
    assert about["components"]["reference"]["pause_left_s"] > 0
    assert about["components"]["reference"]["serving_lease"] is True
    past: dict[str, Any] = {"since_s": 600, "follow": "false"}
    for component, changes in ((None, 0), ("reference", 1)):
        params = past if component is None else {**past, "component": component}
        text = (await fleets.rl.get("/v1/rl/events", params=params)).text
        data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        assert sum(one.get("change") == "committed" for one in data) == changes, component
        assert sum(one.get("op") == "pause" for one in data) == changes, component
    assert (await fleets.rl.get("/v1/rl/events", params={"component": "none"})).status_code == 404
    for component, has_url in (("policy", True), ("reference", False)):
        (row,) = (await fleets.rl.get("/v1/rl/workers", params={"component": component})).json()["workers"]
        assert (row["component"], "request_plane_url" in row) == (component, has_url)
    # A service asks the component's own subject, and this frontend answers.
    client = await fleets.reference.client()
    subject = Subjects(fleets.policy.namespace, "reference").fleet
    message = await client.bus.nc.request(subject, b'{"op": "weight_version"}', timeout=BOUND_S)
    assert json.loads(message.data)["body"]["version"]["label"] == "frozen_2"


async def test_a_demand_means_the_versions_of_the_component(fleets: Fleets) -> None:
    await fleets.update(fleets.reference, fleets.reference.model(11), "frozen_2")
    for demand in ({"min_version": "frozen_2"}, {"min_version": 1}):
        body = {"prompt_token_ids": PROMPT, "max_tokens": 2, "on_stale": "refuse", **demand}
        assert labels(await ask(fleets.http, **body, model="reference")) == [("frozen_2", 1)]
        unmet = await fleets.http.post("/v1/completions", json={**body, "model": "policy"})
        assert error_of(unmet, 503)["code"] == "demand_unmet"


async def test_a_frontend_that_ends_drains_every_component(plane: Plane, reference: Plane) -> None:
    for one in (plane, reference):
        one.spawn(token_delay_s=DELAY_S)
    options = FrontendOptions(plane.url, plane.namespace, plane.component, also_serve=("reference",))
    async with Frontend.running(options) as frontend:
        for component in frontend.components:
            await plane.until(component.status.admitted)
        begun = [asyncio.Event() for _ in frontend.components]

        async def run(component: ServedComponent, has_token: asyncio.Event) -> None:
            body = {"prompt_token_ids": PROMPT, "max_tokens": LONG}
            call = GenerationCall(component.generation, plan_completion(body, component.name), OPENAI)
            async for _ in call.stream():
                has_token.set()

        runs = [asyncio.create_task(run(*pair)) for pair in zip(frontend.components, begun, strict=True)]
        for has_token in begun:
            await asyncio.wait_for(has_token.wait(), BOUND_S)
        await frontend.drain(0.01)
        await asyncio.wait_for(asyncio.gather(*runs), BOUND_S)  # each stream ends with an error of its own
        for component in frontend.components:
            assert component.generation.outcomes == {"frontend_ending": 1}
            with pytest.raises(Unavailable):
                await component.generation.check_model(None)


async def test_the_command_line_shows_one_component(fleets: Fleets, capsys: pytest.CaptureFixture[str]) -> None:
    await fleets.update(fleets.reference, fleets.reference.model(11), "frozen_2")
    (worker,) = fleets.reference.spawned

    async def shown(*argv: str) -> str:
        assert await asyncio.to_thread(main.run, [*argv, "--url", str(fleets.rl.base_url)]) == 0
        return capsys.readouterr().out

    of = ("--component", "reference")
    for argv in (["top", "--once"], ["events"], ["updates"], ["workers"]):
        assert "frozen_2" in await shown(*argv, *of), argv
        assert "frozen_2" not in await shown(*argv), argv
    async with fleets.stream("reference") as stream:
        await stream.until(lambda it: len(it.tokens) > 3)
        (row,) = (await fleets.rl.get("/v1/rl/requests")).json()["requests"]
        text = await shown("explain", row["id"], *of)
        assert worker.instance_id in text
        assert await asyncio.to_thread(main.run, ["explain", row["id"], "--url", str(fleets.rl.base_url)]) == 1
        assert "of another component: --component" in capsys.readouterr().err


async def test_an_ambiguous_name_is_refused(plane: Plane, reference: Plane) -> None:
    plane.spawn(model=plane.model(0))
    reference.spawn(model=plane.model(0))
    async with serving(plane, "reference", "later") as (http, rl):
        for name in ("engine", "reference"):
            await ready(rl, name)
        ids = [row["id"] for row in (await http.get("/v1/models")).json()["data"]]
        assert ids == ["engine/seed0", "reference/seed0"]
        response = await http.post("/v1/completions", json={"prompt_token_ids": PROMPT, "model": "seed0"})
        error = error_of(response, 400)
        assert (error["field"], error["models"]) == ("model", ids)
        for model, worker in (
            (None, plane.spawned[0]),
            ("engine", plane.spawned[0]),
            ("engine/seed0", plane.spawned[0]),
            ("reference", reference.spawned[0]),
            ("reference/seed0", reference.spawned[0]),
        ):
            reply = await ask(http, max_tokens=2, **({} if model is None else {"model": model}))
            assert reply["choices"][0]["instance_id"] == worker.instance_id, model
        # A dialect's client steers the own component on the other port, and generates with it.
        assert (await ask(rl, model="seed0", max_tokens=2))["choices"][0]["instance_id"] == plane.spawned[
            0
        ].instance_id
        # A component that has had no worker may serve any model.
        for model in ("later", "later/x", "x"):
            response = await http.post("/v1/completions", json={"prompt_token_ids": PROMPT, "model": model})
            assert "later" in error_of(response, 503)["message"]
        client = await plane.client()
        other = Subjects(plane.namespace, "reference").state
        assert len(await read_frontends(client.bus, other)) == 1
    assert await read_frontends(client.bus, other) == []
