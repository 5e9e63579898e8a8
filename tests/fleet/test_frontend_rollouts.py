"""Sessions, capabilities, demands on versions, and choices that continue at another worker: over `fake` workers, whose
tokens show which weights made them."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.frontend_limits import FrontendLimits
from tests.support.committed_records import record, rolling, span
from tests.support.frontend_process import (
    PROMPT,
    ask,
    error_of,
    events_of,
    frontend,
    next_event,
    tokens_under,
    until_running,
    update,
)
from tests.support.rollout_calls import LONG, PACE_S, rest
from tests.support.scripted_worker import Script, ScriptedWorker, Stream
from tests.support.staged_streams import Stage, staged
from tests.support.streaming_client import Streaming, http, ready
from worker.engines.fake.adapter import fake_token
from worker.receive.staging import model_digest

__all__ = ["http"]

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


async def by_whom(http: httpx.AsyncClient, **headers: str) -> str:
    response = await http.post("/v1/completions", json={"prompt_token_ids": PROMPT}, headers=headers)
    assert response.status_code == 200, response.text
    return str(response.json()["nvext"]["instance_id"])


# ---- sessions ----


async def test_a_session_has_one_worker_until_that_is_gone(plane: Plane, http: httpx.AsyncClient) -> None:
    workers = plane.spawn_many(3)
    await ready(plane, 3)
    for header in ("X-Session-ID", "X-SMG-Routing-Key"):
        assert len({await by_whom(http, **{header: header}) for _ in range(6)}) == 1
    assert {await by_whom(http) for _ in range(6)} == {worker.instance_id for worker in workers}
    first = await by_whom(http, **{"X-Session-ID": "s"})
    next(worker for worker in workers if worker.instance_id == first).kill()
    second = await by_whom(http, **{"X-Session-ID": "s"})
    assert second != first
    assert {await by_whom(http, **{"X-Session-ID": "s"}) for _ in range(4)} == {second}
    fleet = await plane.fleet()
    await fleet.run("disable", {"workers": [second]})
    assert await by_whom(http, **{"X-Session-ID": "s"}) not in (first, second)
    too_long = await http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Session-ID": "s" * 300})
    assert error_of(too_long, 400)["field"] == "X-Session-ID"


async def test_workers_report_the_tokens_that_they_have(plane: Plane, http: httpx.AsyncClient) -> None:
    worker = plane.spawn(token_delay_s=PACE_S)
    client = await plane.client()

    async def state() -> dict[str, Any]:
        return dict((await client.call(worker.instance_id, "state")).body)

    async with Streaming(http, max_tokens=LONG) as stream:
        await stream.until(lambda stream: len(stream.tokens) >= 5)
        told = await state()
        assert told["running_tokens"] >= len(PROMPT) + 5
        assert told["waiting_tokens"] == 0
    await until_running(plane, client, worker.instance_id, 0)
    assert (await state())["running_tokens"] == 0
    fleet = await plane.fleet()
    await fleet.run("pause")
    waiting = asyncio.create_task(ask(http, prompt_token_ids=[5] * 70))
    await until_running(plane, client, worker.instance_id, 1)
    assert (await state())["waiting_tokens"] == 70
    await fleet.run("resume")
    await waiting


async def test_tokens_that_an_engine_cant_witness_have_an_unknown_version(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    """This holds for requests without demands on the weights. Others get another worker, or are refused by name."""
    silent = plane.spawn(witnesses="false")
    described = await (await plane.client()).call(silent.instance_id, "describe")
    assert described.body["witnesses"] is False
    unknown = {"version": "unknown", "sequence": None, "digest": None, "run": None, "start": 0, "end": 5}
    digest = model_digest(plane.model())
    for stream in (False, True):
        body = {"prompt_token_ids": PROMPT, "max_tokens": 5, "return_token_ids": True, "n": 2, "stream": stream}
        told = await http.post("/v1/completions", json=body)
        events = events_of(told.text)[:-1] if stream else [told.json()]
        choices = [choice for event in events for choice in event["choices"]]
        assert events[-1]["nvext"]["weight_version"] is None
        for index in range(2):
            mine = [choice for choice in choices if choice["index"] == index]
            made = [token for choice in mine for token in choice["token_ids"]]
            assert made == tokens_under(digest, 0, 5)
            assert (mine[-1]["weight_versions"], mine[-1]["instance_id"]) == ([unknown], silent.instance_id)
            assert mine[-1]["incarnation"] == described.incarnation
    demands: list[dict[str, Any]] = [{"min_version": 0}, {"max_lag": 9}, {"one_version": True}]
    pinned = {"nvext": {"instance_id": silent.instance_id}}
    for demand in demands:
        for more in ({}, pinned, {"on_stale": "refuse"}):
            body = {"prompt_token_ids": PROMPT, **demand, **more}
            error = error_of(await http.post("/v1/completions", json=body), 501)
            assert (error["code"], [error["field"]]) == ("unsupported", [*demand])
    able = plane.spawn()
    await ready(plane, 2)
    for demand in demands:
        for _ in range(3):
            assert (await ask(http, **demand))["nvext"]["instance_id"] == able.instance_id
        body = {"prompt_token_ids": PROMPT, **demand, **pinned}
        assert error_of(await http.post("/v1/completions", json=body), 501)["field"] in demand
    assert (await ask(http, **pinned))["choices"][0]["weight_versions"][0]["version"] == "unknown"


# ---- too much at once ----


async def test_a_full_fleet_refuses_a_request_at_once(plane: Plane) -> None:
    worker = plane.spawn(token_delay_s=PACE_S)
    async with frontend(plane, limits=FrontendLimits(worker_streams=1)) as http:
        async with Streaming(http, max_tokens=LONG) as stream:
            await stream.more()
            response = await http.post("/v1/completions", json={"prompt": "hi"})
            error = error_of(response, 429)
            assert (error["code"], response.headers["retry-after"]) == ("overloaded", "1")
        client = await plane.client()
        await until_running(plane, client, worker.instance_id, 0)

        async def served() -> bool:  # once the worker has reported that it has no request
            return (await http.post("/v1/completions", json={"prompt": "hi"})).is_success

        await plane.until(served)


async def test_a_request_leaves_a_full_worker_for_another_and_then_gets_a_429(plane: Plane) -> None:
    one = "import worker.generation_service as generation; generation.MAX_STREAMS = 1"
    plane.spawn_many(2, patch=one, token_delay_s=PACE_S)
    await ready(plane, 2)
    async with (
        frontend(plane, admission_wait_s=0.3) as http,
        Streaming(http, max_tokens=LONG) as first,
        Streaming(http, max_tokens=LONG, nvext={"instance_id": (await other_than(http, first))}) as second,
    ):
        await first.more()
        await second.more()
        assert first.last["instance_id"] != second.last["instance_id"]
        assert error_of(await http.post("/v1/completions", json={"prompt": "hi"}), 429)["code"] == "overloaded"


async def other_than(http: httpx.AsyncClient, stream: Streaming) -> str:
    """A worker that takes a request beside this one."""
    await stream.more()
    return await by_whom(http)


async def test_frontends_see_each_others_load(plane: Plane, http: httpx.AsyncClient) -> None:
    busy, idle = plane.spawn_many(2, token_delay_s=PACE_S)
    await ready(plane, 2)
    body = {"max_tokens": LONG, "n": 4, "nvext": {"instance_id": busy.instance_id}}
    async with frontend(plane) as other, Streaming(http, **body) as stream:
        await stream.more()

        async def spared() -> bool:
            return {await by_whom(other) for _ in range(6)} == {idle.instance_id}

        await plane.until(spared)


# ---- another worker continues ----


def continued_under(digest: str, parts: list[int]) -> list[int]:
    """So many tokens by each worker, each asked for the prompt and the tokens before."""
    made: list[int] = []
    for count in parts:
        made += [fake_token(digest, PROMPT + made, position) for position in range(count)]
    return made


def worker_of(workers: list[Spawned], instance_id: str) -> Spawned:
    return next(worker for worker in workers if worker.instance_id == instance_id)


async def test_another_worker_continues_a_choice(plane: Plane, http: httpx.AsyncClient) -> None:
    workers = plane.spawn_many(3, token_delay_s=PACE_S)
    await ready(plane, 3)
    digest = (await ask(http))["nvext"]["weight_version"]["digest"]
    body = {"max_tokens": 240, "seed": 5, "n": 1, "migrate": True}
    async with Streaming(http, **body) as stream:
        for count in (5, 40):  # two of the three die
            await stream.until(lambda stream, count=count: len(stream.tokens) >= count)  # type: ignore[misc]
            worker_of(workers, stream.last["instance_id"]).kill()
        await stream.end()
    assert stream.error is None
    assert stream.last["finish_reason"] == "length"
    makers = stream.last["instances"]
    assert [maker["start"] for maker in makers] == [0, *(maker["end"] for maker in makers[:-1])]
    assert makers[-1]["end"] == 240
    assert len({maker["instance_id"] for maker in makers}) == 3
    assert stream.last["instance_id"] == makers[-1]["instance_id"]
    assert stream.tokens == continued_under(digest, [maker["end"] - maker["start"] for maker in makers])
    assert len(stream.logprobs) == 240
    (span,) = stream.spans
    assert (span["digest"], span["start"], span["end"]) == (digest, 0, 240)


async def test_another_worker_continues_whole_replies_and_every_choice(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    workers = plane.spawn_many(2, token_delay_s=PACE_S)
    await ready(plane, 2)
    client = await plane.client()
    asked = {"max_tokens": 240, "n": 4, "nvext": {"migrate": True}, "return_token_ids": True, "prompt_logprobs": 1}
    asking = asyncio.create_task(ask(http, **asked))
    doomed = workers[0]

    async def has_tokens() -> bool:
        state = (await client.call(doomed.instance_id, "state")).body
        return int(state["running_tokens"]) >= 2 * (len(PROMPT) + 5)

    await plane.until(has_tokens)
    doomed.kill()
    reply = await asking
    moved = [choice for choice in reply["choices"] if "instances" in choice]
    assert len(moved) == 2
    for choice in reply["choices"]:
        (span,) = choice["weight_versions"]
        parts = [maker["end"] - maker["start"] for maker in choice.get("instances", [])] or [240]
        assert choice["token_ids"] == continued_under(span["digest"], parts)
        assert len(choice["logprobs"]["token_logprobs"]) == 240
        assert len(choice["prompt_logprobs"]) == len(PROMPT)
        assert choice["instance_id"] == workers[-1].instance_id
    assert reply["prompt_token_ids"] == PROMPT
    assert reply["usage"]["prompt_tokens"] == len(PROMPT)


async def test_a_choice_names_both_versions_if_the_weights_changed_on_the_way(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    doomed, other = plane.spawn(token_delay_s=PACE_S), plane.spawn()
    await ready(plane, 2)
    fleet = await plane.fleet()
    await fleet.run("disable", {"workers": [other.instance_id]})
    body = {"max_tokens": 200, "migrate": True}
    async with Streaming(http, **body) as stream, Streaming(http, **body, one_version=True) as pure:
        for one in (stream, pure):
            await one.until(lambda one: len(one.tokens) >= 5)
        doomed.kill()
        new = await update(plane, 1)
        await fleet.run("enable", {"workers": [other.instance_id]})
        await stream.end()
        await pure.end()
    old, made = stream.spans[0]["digest"], stream.spans[0]["end"]
    assert [(span["digest"], span["start"], span["end"]) for span in stream.spans] == [
        (old, 0, made),
        (new["digest"], made, 200),
    ]
    assert [maker["start"] for maker in stream.last["instances"]] == [0, made]
    after = [fake_token(new["digest"], PROMPT + stream.tokens[:made], at) for at in range(200 - made)]
    assert stream.tokens == tokens_under(old, 0, made) + after
    assert pure.error is not None
    assert (pure.error["code"], pure.error["field"]) == ("demand_unmet", "one_version")
    assert pure.error["partial"]["token_ids"] == pure.tokens == tokens_under(old, 0, len(pure.tokens))


def failing(base: int, go: asyncio.Event) -> Script:
    """One token; then the engine fails. Of a request for a single token, that one."""

    async def script(stream: Stream) -> None:
        alone = stream.body["request"]["max_tokens"] == 1
        await stream.send([7], span(base, 0, 1), end=alone)
        if not alone:
            await go.wait()
            await stream.send([0], logprob=math.nan)

    return script


async def asked_while_rolling(
    stage: Stage, maker: int, others: list[tuple[Script, int]], **demand: Any
) -> tuple[dict[str, Any], list[ScriptedWorker]]:
    """The choice of a worker that serves version `maker`, of 1 and 2, and fails after its first token, when each of
    the others is known and idle; and those."""
    go = asyncio.Event()
    rolls = rolling(record(2), record(1))
    await stage.decide(rolls)
    first = await stage.worker(failing(maker, go), record(maker))
    body = {"prompt": None, "prompt_token_ids": PROMPT, "max_tokens": 3, "migrate": True}
    asking = asyncio.create_task(stage.ask(**body, **demand))
    await stage.plane.until(lambda: first.requests)
    workers = []
    for script, serves in others:
        workers.append(worker := await stage.worker(script, record(serves)))

        async def takes(worker: ScriptedWorker = worker) -> bool:
            await stage.ask(max_tokens=1)
            return bool(worker.requests)

        await stage.plane.until(takes)
        worker.requests.clear()
    go.set()
    reply = await asking
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice, workers


async def test_a_choice_of_one_version_continues_where_that_version_is_served(plane: Plane) -> None:
    """In a rolling update, a worker that is already updated does not continue the choice, even if its turn came
    earlier."""
    async with staged(plane) as stage:
        choice, workers = await asked_while_rolling(stage, 1, [(rest(2), 2), (rest(1), 1)], one_version=True)
    (made,) = choice["weight_versions"]
    assert (made["sequence"], made["start"], made["end"]) == (1, 0, 3)
    assert (choice["token_ids"], choice["finish_reason"]) == ([7, 8, 8], "length")
    assert choice["instance_id"] == workers[-1].instance_id


@pytest.mark.parametrize(("demand", "maker"), [({"one_version": True}, 1), ({"min_version": 2}, 2)])
async def test_a_choice_with_tokens_that_no_worker_may_continue_is_cut(
    plane: Plane, demand: dict[str, Any], maker: int
) -> None:
    """The choice ends at once, and no worker generates it again."""
    async with staged(plane) as stage:
        others = [(rest(3 - maker), 3 - maker)]
        choice, (other,) = await asked_while_rolling(stage, maker, others, **demand, on_stale="cut")
    assert (choice["token_ids"], choice["finish_reason"]) == ([7], "abort")
    assert choice["cut"]["demand"] == next(iter(demand))
    assert not [body for body in other.requests if body["request"].get("continued")]


async def test_a_reply_is_aborted_by_its_id_with_all_its_choices_wherever_they_are(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    workers = plane.spawn_many(3, token_delay_s=PACE_S)
    await ready(plane, 3)
    client, fleet = await plane.client(), await plane.fleet()
    body = {"prompt_token_ids": PROMPT, "max_tokens": LONG, "n": 3, "migrate": True, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        first, made = await next_event(lines), {0: 0, 1: 0, 2: 0}
        while min(made.values()) < 3:
            made[(await next_event(lines))["choices"][0]["index"]] += 1
        workers[0].kill()
        others = [worker.instance_id for worker in workers[1:]]

        async def moved() -> bool:
            states = [(await client.call(one, "state")).body for one in others]
            return sum(int(state["running"]) for state in states) == 3

        await plane.until(moved)
        await fleet.run("abort_requests", {"request_ids": [first["id"]]})
        ends = []
        while (event := await next_event(lines)) != "[DONE]":
            ends += [choice for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1, 2]
    assert {choice["finish_reason"] for choice in ends} == {"abort"}
    assert sum("instances" in choice for choice in ends) == 1


async def test_a_choice_that_no_other_worker_can_continue_ends_with_its_tokens(plane: Plane) -> None:
    only = plane.spawn(token_delay_s=PACE_S)
    async with (
        frontend(plane, admission_wait_s=0.5) as http,
        Streaming(http, max_tokens=LONG, migrate=True) as one,
    ):
        await one.until(lambda stream: len(stream.tokens) >= 3)
        only.kill()
        await one.end()
    assert one.error is not None
    assert one.error["code"] == "no_workers"
    assert one.error["partial"]["token_ids"] == one.tokens
