"""Sessions, capabilities, demands on versions, and choices that continue at another worker: over `fake` workers, whose
tokens show which weights made them."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.completions.call import GenerationCall
from frontend.completions.reply_choice import Choice
from frontend.main import Frontend
from frontend.routing import span_check
from frontend.routing.committed import Committed
from frontend.routing.demands import Demands
from frontend.routing.engine_client import Event
from frontend.routing.fleet_status import FleetStatus
from frontend.routing.progress import GenerationProgress
from frontend.routing.routing_lease import FrontendLease
from rl_plane.commit.history import UpdateEntry, read_history
from rl_plane.errors import BusUnreachable, DemandUnmet
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.generation import AdapterSpan, GenerateDelta, GenerateRequest
from rl_plane.protocol.record import DecisionRecord
from tests.support.committed_records import record, rolling, span, version
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
from tests.support.lease_calls import follow, running, scripted, tell
from tests.support.scripted_worker import Script, ScriptedWorker, Stream, decide
from tests.support.staged_streams import Stage, always, staged
from tests.support.streaming_client import Streaming, http, ready
from worker.engines.fake.adapter import fake_token, make_fake_adapter
from worker.receive.staging import model_digest

__all__ = ["http"]

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

PACE_S = 0.02
"""Per token, where something is to happen meanwhile."""
LONG = 2000
"""Tokens that no test waits for."""

CANT = """
import worker.engines.fake.adapter as fake
from dataclasses import replace
honest = fake.FakeEngine.start
async def lacking(self):
    return replace(await honest(self), capabilities={
        "generate:min_tokens": "it can't count", "generate:stop+seed": "not both"})
fake.FakeEngine.start = lacking
"""


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


# ---- what engines lack ----


async def test_a_request_goes_to_a_worker_that_can_do_it(plane: Plane, http: httpx.AsyncClient) -> None:
    lacking = plane.spawn_many(2, patch=CANT)
    await ready(plane, 2)
    body = {"prompt_token_ids": PROMPT, "min_tokens": 1}
    error = error_of(await http.post("/v1/completions", json=body), 501)
    assert (error["field"], error["message"]) == ("min_tokens", "it can't count")
    both = {"stop": ["x"], "seed": 1}
    error = error_of(await http.post("/v1/completions", json={"prompt_token_ids": PROMPT, **both}), 501)
    assert (error["field"], error["message"]) == ("stop", "not both")
    for field, value in both.items():
        await ask(http, **{field: value})
    able = plane.spawn()
    await ready(plane, 3)
    for _ in range(4):
        assert (await ask(http, min_tokens=1))["nvext"]["instance_id"] == able.instance_id
        assert (await ask(http, **both))["nvext"]["instance_id"] == able.instance_id
    pinned = {**body, "nvext": {"instance_id": lacking[0].instance_id}}
    assert (await http.post("/v1/completions", json={**pinned, "min_tokens": 0})).status_code == 200


async def test_what_an_engine_cant_witness_is_told_as_unknown(plane: Plane, http: httpx.AsyncClient) -> None:
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


@pytest.mark.parametrize("prompt", [{}, {"prompt_token_ids": None, "prompt": "hello"}])
async def test_a_long_request_goes_to_a_worker_that_has_room_for_it(
    plane: Plane, http: httpx.AsyncClient, prompt: dict[str, Any]
) -> None:
    for length in (16, 32, 64):
        plane.spawn(max_model_len=length)
    await ready(plane, 3)
    made: Counter[int] = Counter()
    for _ in range(6):
        for count in (2, 20, 40):
            reply = await ask(http, max_tokens=count, return_token_ids=True, **prompt)
            made[len(reply["choices"][0]["token_ids"])] += 1
    assert made == {2: 6, 20: 6, 40: 6}
    body = {"prompt_token_ids": PROMPT, "max_tokens": 80}
    error = error_of(await http.post("/v1/completions", json=body), 400)
    assert (error["param"], error["fix"]) == ("max_tokens", "at most 64 together")


def unchosen(size: int, **more: Any) -> list[tuple[str, dict[str, Any]]]:
    """Returns a request for each route with a prompt of `size` tokens and no length: as tokens, as a text, as a
    chat's."""
    ids, text, chat = [5] * size, "x" * size, [{"role": "user", "content": "x" * size}]
    told = {"return_token_ids": True, **more}
    return [
        ("/v1/completions", {"prompt_token_ids": ids, **told}),
        ("/v1/completions", {"prompt": text, **told}),
        ("/v1/completions", {"prompt": "y" * 100 + text, "truncate_prompt_tokens": size, **told}),
        ("/v1/chat/completions", {"prompt_token_ids": ids, **told}),
        ("/v1/chat/completions", {"messages": chat, **told}),
    ]


def native(size: int) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("/inference/v1/generate", {"token_ids": [5] * size, "sampling_params": {}}),
        ("/generate", {"input_ids": [5] * size}),
        ("/generate", {"text": "x" * size}),
    ]


async def lengths(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[int]:
    """The number of tokens of each choice."""
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    made: Counter[int] = Counter()
    for reply in events_of(response.text)[:-1] if body.get("stream") else [response.json()]:
        for choice in reply["choices"] if isinstance(reply, dict) and "choices" in reply else [reply]:
            for at, one in enumerate(choice if isinstance(choice, list) else [choice]):
                made[one.get("index", at)] += len(one["token_ids"] if "token_ids" in one else one["output_ids"])
    return [made[index] for index in sorted(made)]


@pytest.mark.parametrize("pinned", [None, 0, 1])
async def test_tokens_that_the_caller_did_not_count_are_as_many_as_its_worker_has_room_for(
    plane: Plane, http: httpx.AsyncClient, pinned: int | None
) -> None:
    """The length is the chosen worker's room, not the least room of all workers: workers with too little room
    refuse."""
    workers = [plane.spawn(max_model_len=length) for length in (16, 64)]
    await ready(plane, 2)
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert model["max_model_len"] == 16  # of which nobody is refused
    room = {None: 64, 0: 16, 1: 64}[pinned]
    size, more = room - 7, {}
    if pinned is not None:
        more = {"nvext": {"instance_id": workers[pinned].instance_id}}
    asked = unchosen(size, **more) + ([] if pinned is not None else native(size))
    for path, body in asked * len(workers):
        assert await lengths(http, path, body) == [7], body
    for path, body in unchosen(size, n=2, stream=True, **more):
        assert await lengths(http, path, body) == [7, 7], body
    for path, body in unchosen(room, **more) + ([] if pinned is not None else native(room)):
        error = error_of(await http.post(path, json=body), 400)
        prompt = body.keys() & {"prompt", "prompt_token_ids", "messages", "token_ids", "input_ids", "text"}
        assert ({error["field"]}, error["prompt_tokens"]) == (prompt, room), body
    for path, body in unchosen(size, max_tokens=8, **more):
        assert error_of(await http.post(path, json=body), 400)["param"] == "max_tokens", body


async def test_each_of_several_prompts_has_the_length_that_is_left(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn(max_model_len=64)
    await ready(plane, 1)
    texts = ["x" * 60, "y" * 50, "z" * 4]
    assert await lengths(http, "/v1/completions", {"prompt": texts, "return_token_ids": True}) == [4, 14, 16]
    assert await lengths(http, "/generate", {"text": texts}) == [4, 14, 60]
    for path, field in (("/v1/completions", "prompt"), ("/generate", "text")):
        error = error_of(await http.post(path, json={field: ["x", "y" * 64]}), 400)
        assert (error["field"], error["fix"]) == (f"{field}.1", "send at most 63")


async def test_a_length_that_nobody_chose_waits_for_no_longer_worker(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    """The caller gets fewer tokens now, rather than more when a closed worker opens or a lost worker returns."""
    plane.spawn(max_model_len=16)
    longer = plane.spawn(max_model_len=64)
    await ready(plane, 2)
    fleet = await plane.fleet()
    await fleet.run("disable", {"workers": [longer.instance_id]})
    for path, body in unchosen(9):
        assert await lengths(http, path, body) == [7], body
    longer.kill()
    for path, body in unchosen(9):
        assert await lengths(http, path, body) == [7], body


async def test_a_length_that_nobody_chose_takes_a_shorter_worker_while_the_longer_one_is_full(
    plane: Plane, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "frontend.routing.router.MAX_STREAMS", 2
    )  # a late report may count one of the shorter worker's
    plane.spawn(max_model_len=16)
    longer = plane.spawn(max_model_len=64, token_delay_s=60)
    await ready(plane, 2)
    pinned = {"prompt_token_ids": PROMPT, "nvext": {"instance_id": longer.instance_id}}
    open_ = [asyncio.create_task(http.post("/v1/completions", json=pinned)) for _ in range(2)]
    await until_running(plane, await plane.client(), longer.instance_id, 2)
    for path, body in unchosen(9):
        assert await lengths(http, path, body) == [7], body
    for path, body in [*unchosen(9, max_tokens=8), *unchosen(9, min_tokens=8), *unchosen(16)]:
        assert error_of(await http.post(path, json=body), 429)["code"] == "overloaded", body
    for one in open_:
        one.cancel()


@pytest.mark.parametrize(("rooms", "total"), [((64, 32), 12), ((32, 64), 16), ((32, 32), 12)])
async def test_a_length_that_nobody_chose_counts_what_was_made_before(
    plane: Plane, http: httpx.AsyncClient, rooms: tuple[int, int], total: int
) -> None:
    """The tokens of a lost worker count, whatever its room: the total never exceeds the default, nor the last worker's
    room."""
    first, second = plane.spawn(max_model_len=rooms[0], token_delay_s=0.5), plane.spawn(max_model_len=rooms[1])
    await ready(plane, 2)
    fleet = await plane.fleet()
    await fleet.run("disable", {"workers": [second.instance_id]})
    async with Streaming(http, prompt_token_ids=None, prompt="x" * 20, migrate=True) as stream:
        await stream.more()
        first.kill()
        await fleet.run("enable", {"workers": [second.instance_id]})
        await stream.end()
    assert (stream.error, stream.last["finish_reason"]) == (None, "length")
    assert len(stream.last["instances"]) == 2
    assert len(stream.tokens) == total


# ---- what only a worker can do that is away ----

NEEDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "a field": ({"patch": CANT}, {}, {"min_tokens": 1}),
    "room": ({"max_model_len": 16}, {"max_model_len": 64}, {"max_tokens": 40}),
}
"""Name → options of one worker, options of another, and a request that only the other one supports."""


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> set[asyncio.Task[Any] | None]:
    """The requests that have waited for a worker."""
    wait, found = FleetStatus.wait_changed, set[asyncio.Task[Any] | None]()

    async def noted(status: FleetStatus, timeout_s: float) -> None:
        found.add(asyncio.current_task())
        await wait(status, timeout_s)

    monkeypatch.setattr(FleetStatus, "wait_changed", noted)
    return found


async def lose_the_able_one(
    plane: Plane, http: httpx.AsyncClient, waiting: set[asyncio.Task[Any] | None], need: str
) -> tuple[Spawned, asyncio.Task[Any]]:
    """Killed before its first token of the request, while the other one is open; what waited before is forgotten."""
    lesser, more, body = NEEDS[need]
    other, able = plane.spawn(**lesser), plane.spawn(token_delay_s=60, **more)
    await ready(plane, 2)
    fleet = await plane.fleet()
    await fleet.run("disable", {"workers": [other.instance_id]})
    asking = asyncio.create_task(http.post("/v1/completions", json={"prompt_token_ids": PROMPT, **body}))
    await until_running(plane, await plane.client(), able.instance_id, 1)
    await fleet.run("enable", {"workers": [other.instance_id]})
    await ask(http, max_tokens=1, nvext={"instance_id": other.instance_id})  # the frontend knows that it is open
    waiting.clear()
    able.kill()
    return able, asking


@pytest.mark.parametrize("need", NEEDS)
async def test_a_request_that_only_an_absent_worker_can_serve_waits_for_it(
    plane: Plane, http: httpx.AsyncClient, waiting: set[asyncio.Task[Any] | None], need: str
) -> None:
    able, asking = await lose_the_able_one(plane, http, waiting, need)
    await plane.until(lambda: waiting or asking.done())
    assert not asking.done(), asking.result().text
    waiting.clear()
    _, more, body = NEEDS[need]
    # The second one comes while it is away.
    late = asyncio.create_task(http.post("/v1/completions", json={"prompt_token_ids": PROMPT, **body}))
    await plane.until(lambda: waiting or late.done())
    assert not late.done(), late.result().text
    plane.spawn(ready=False, instance_id=able.instance_id, **more)
    for reply in await asyncio.gather(asking, late):
        assert reply.status_code == 200, reply.text
        assert reply.json()["nvext"]["instance_id"] == able.instance_id


async def test_more_tokens_than_an_open_worker_has_room_for_wait_for_a_longer_one(
    plane: Plane, http: httpx.AsyncClient, waiting: set[asyncio.Task[Any] | None]
) -> None:
    """The tokens that the caller asked for with `min_tokens`, where it did not choose the length."""
    plane.spawn(max_model_len=16)
    longer = plane.spawn(max_model_len=64)
    await ready(plane, 2)
    fleet = await plane.fleet()
    await fleet.run("disable", {"workers": [longer.instance_id]})
    for path, body in unchosen(9, min_tokens=7):
        assert await lengths(http, path, body) == [7], body
    waiting.clear()
    asking = [asyncio.create_task(lengths(http, path, body)) for path, body in unchosen(9, min_tokens=8)]
    await plane.until(lambda: len(waiting) == len(asking) or any(one.done() for one in asking))
    assert not any(one.done() for one in asking), await asyncio.gather(*asking)
    await fleet.run("enable", {"workers": [longer.instance_id]})
    for made in await asyncio.gather(*asking):
        assert made[0] >= 8


@pytest.mark.parametrize("need", NEEDS)
async def test_a_request_that_only_a_long_gone_worker_could_serve_is_refused_at_once(
    plane: Plane,
    http: httpx.AsyncClient,
    waiting: set[asyncio.Task[Any] | None],
    monkeypatch: pytest.MonkeyPatch,
    need: str,
) -> None:
    _, asking = await lose_the_able_one(plane, http, waiting, need)
    await plane.until(lambda: waiting)
    before = set(waiting)
    monkeypatch.setattr("frontend.routing.worker_selector.AWAY_S", 0.0)
    body = {"prompt_token_ids": PROMPT, **NEEDS[need][2]}
    status, field = (501, "min_tokens") if need == "a field" else (400, "max_tokens")
    assert error_of(await http.post("/v1/completions", json=body), status)["field"] == field
    assert waiting == before
    asking.cancel()


@pytest.mark.parametrize("need", NEEDS)
async def test_a_request_that_only_an_absent_worker_can_serve_is_refused_if_it_stays_away(
    plane: Plane, waiting: set[asyncio.Task[Any] | None], monkeypatch: pytest.MonkeyPatch, need: str
) -> None:
    """Until the time is over, the caller may repeat the request."""
    async with frontend(plane, admission_wait_s=0.5) as http:
        _, asking = await lose_the_able_one(plane, http, waiting, need)
        reply = await asking
        assert (error_of(reply, 503)["code"], reply.headers["retry-after"]) == ("worker_lost", "1")
        body = {"prompt_token_ids": PROMPT, **NEEDS[need][2]}
        reply = await http.post("/v1/completions", json=body)
        assert (error_of(reply, 503)["code"], reply.headers["retry-after"]) == ("not_admitted", "1")
        monkeypatch.setattr("frontend.routing.worker_selector.AWAY_S", 0.0)
        status, field = (501, "min_tokens") if need == "a field" else (400, "max_tokens")
        assert error_of(await http.post("/v1/completions", json=body), status)["field"] == field


async def test_a_choice_with_tokens_waits_for_a_worker_that_can_go_on(
    plane: Plane, http: httpx.AsyncClient, waiting: set[asyncio.Task[Any] | None]
) -> None:
    plane.spawn(patch=CANT)
    able = plane.spawn(token_delay_s=PACE_S)
    await ready(plane, 2)
    async with Streaming(http, max_tokens=300, min_tokens=1, migrate=True) as stream:
        await stream.until(lambda stream: len(stream.tokens) >= 3)
        waiting.clear()
        able.kill()
        await plane.until(lambda: waiting)
        plane.spawn(ready=False, instance_id=able.instance_id)
        await stream.end()
    assert (stream.error, len(stream.tokens)) == (None, 300)
    assert [maker["instance_id"] for maker in stream.last["instances"]] == [able.instance_id] * 2


# ---- too much at once ----


async def test_a_full_fleet_is_told_at_once(
    plane: Plane, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = plane.spawn(token_delay_s=PACE_S)
    monkeypatch.setattr("frontend.routing.router.MAX_STREAMS", 1)
    async with Streaming(http, max_tokens=LONG) as stream:
        await stream.more()
        response = await http.post("/v1/completions", json={"prompt": "hi"})
        error = error_of(response, 429)
        assert (error["code"], response.headers["retry-after"]) == ("overloaded", "1")
    client = await plane.client()
    await until_running(plane, client, worker.instance_id, 0)
    monkeypatch.undo()
    await ask(http)


async def test_a_full_worker_is_left_for_another_and_then_told(plane: Plane) -> None:
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


# ---- demands ----


def kept(go: asyncio.Event) -> Script:
    """The first request's tokens are made by 1 before `go`, and come after it; what comes later is made by 2."""
    first = [True]

    async def script(stream: Stream) -> None:
        if first.pop() if first else False:
            await go.wait()
            await stream.send([1], span(1, 0, 1), end=True)
        else:
            await stream.send([2], span(2, 0, 1), end=True)

    return script


@pytest.mark.parametrize("on_stale", ["wait", "refuse", "cut"])
async def test_tokens_that_became_too_old_before_they_arrived_are_generated_again(
    plane: Plane, on_stale: str
) -> None:
    go = asyncio.Event()
    async with staged(plane) as stage:
        worker = await stage.worker(kept(go), record(1))
        await stage.decide(record(1))
        asking = asyncio.create_task(stage.ask(max_lag=0, on_stale=on_stale))
        await plane.until(lambda: worker.requests)
        await stage.decide(record(2))
        await worker.hold(record(2))
        go.set()
        reply = await asking
        if on_stale == "refuse":
            assert reply.json()["error"]["code"] == "demand_unmet"
            assert "partial" not in reply.json()["error"]
        else:
            (choice,) = reply.json()["choices"]
            assert (choice["token_ids"], choice["weight_versions"][0]["sequence"]) == ([2], 2)


@pytest.mark.parametrize("demand", [{"min_version": 2}, {"min_version": "step_2"}, {"max_lag": 0}])
async def test_during_a_rolling_update_requests_that_demand_the_new_version_go_to_workers_that_hold_it(
    plane: Plane, demand: dict[str, Any]
) -> None:
    async with staged(plane) as stage:
        old = await stage.worker(always(1, base=1), record(1))
        await stage.worker(always(2, base=2), record(2))
        await stage.decide(rolling(record(2), record(1)))
        for _ in range(4):
            reply = await stage.ask(**demand)
            assert reply.json()["choices"][0]["token_ids"] == [2]
        assert not old.requests
        pinned = {**demand, "on_stale": "refuse", "nvext": {"instance_id": old.instance_id}}
        assert (await stage.ask(**pinned)).json()["error"]["code"] == "demand_unmet"


@pytest.mark.parametrize("demand", [{"min_version": 2}, {"min_version": "step_2"}, {"max_lag": 0}])
async def test_a_demand_is_kept_where_a_worker_is_known_before_the_record(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, demand: dict[str, Any]
) -> None:
    """The record is asked for: what told it is still on its way."""
    take, read, hears = MembershipView.take_record, Committed.try_read, asyncio.Event()

    def taken(view: MembershipView, *told: Any) -> None:
        if hears.is_set():
            take(view, *told)

    async def reading(one: Committed) -> None:
        hears.set()
        await read(one)

    monkeypatch.setattr(MembershipView, "take_record", taken)
    monkeypatch.setattr(Committed, "try_read", reading)
    async with staged(plane) as stage:
        await decide(stage.client.bus, stage.client.subjects(), rolling(record(2), record(1)))
        old = await stage.worker(always(1, base=1), record(1))
        error = error_of(await stage.ask(**demand, on_stale="refuse"), 503)
        assert (error["code"], error["field"]) == ("demand_unmet", next(iter(demand)))
        await stage.worker(always(2, base=2), record(2))
        assert (await stage.ask(**demand)).json()["choices"][0]["token_ids"] == [2]
        assert not old.requests


async def ask_in_process(one: Frontend, demands: Demands) -> list[int]:
    request = GenerateRequest(id="r", prompt="hi")
    events = one.engines.generate(request, demands=demands)
    return [token async for event in events if isinstance(event, GenerateDelta) for token in event.token_ids]


async def test_a_demand_waits_for_the_record(plane: Plane, waiting: set[asyncio.Task[Any] | None]) -> None:
    """No worker takes the request before that, whichever worker is open."""
    client = await plane.client()
    async with running(plane) as one, scripted(plane, record(1), 1) as worker:
        await plane.until(lambda: one.status.admitted())
        asking = asyncio.create_task(ask_in_process(one, Demands(min_version=1)))
        await plane.until(lambda: waiting)
        assert not worker.requests
        await tell(client, one.lease.frontend_id, follow(record(1), 1))
        assert await asking == [1]


async def test_a_request_that_waited_for_the_lease_uses_the_record_that_arrived_meanwhile(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, waits, decided = FrontendLease.wait, asyncio.Event(), asyncio.Event()

    async def late(lease: FrontendLease, give_up: float) -> None:
        waits.set()
        await decided.wait()
        await wait(lease, give_up)

    monkeypatch.setattr(FrontendLease, "wait", late)
    client = await plane.client()
    async with running(plane) as one, scripted(plane, record(1), 1) as worker:
        await plane.until(lambda: one.status.admitted())
        asking = asyncio.create_task(ask_in_process(one, Demands(min_version=2, on_stale="refuse")))
        async with asyncio.timeout(10):
            await waits.wait()
        await tell(client, one.lease.frontend_id, follow(record(1), 1))
        decided.set()
        with pytest.raises(DemandUnmet) as caught:
            await asking
        assert caught.value.facts["field"] == "min_version"
        assert not worker.requests


def in_next_run(decided: DecisionRecord) -> DecisionRecord:
    return replace(decided, run_number=1)


@pytest.mark.parametrize(
    ("asked", "then"), [(1, in_next_run(record(1, "next"))), ("step_1", in_next_run(record(2, "next")))]
)
async def test_tokens_of_an_earlier_run_are_never_new_enough(
    plane: Plane, asked: int | str, then: DecisionRecord
) -> None:
    go = asyncio.Event()

    async def script(stream: Stream) -> None:
        await stream.send([1], span(1, 0, 1))
        await go.wait()
        await stream.send([2], span(1, 0, 2), end=True)

    async with staged(plane) as stage:
        await stage.worker(script, record(1))
        await stage.decide(record(1))
        async with Streaming(stage.http, min_version=asked, on_stale="cut") as stream:
            await stream.until(lambda stream: stream.tokens == [1])
            await stage.decide(then)
            go.set()
            await stream.end()
    assert (stream.error, stream.tokens, stream.last["finish_reason"]) == (None, [1], "abort")
    assert stream.last["cut"]["demand"] == "min_version"


@pytest.mark.parametrize("fails", [False, True])
async def test_a_choice_with_tokens_keeps_the_first_version_of_a_label_that_is_used_twice(
    plane: Plane, fails: bool
) -> None:
    """This also holds where another worker continues the choice. A later request means the later version of the
    label."""
    go, again = asyncio.Event(), replace(version(2), label="step_1")
    then = rolling(replace(record(2), version=again, made=again), record(1))

    async def script(stream: Stream) -> None:
        await stream.send([1], span(1, 0, 1))
        await go.wait()
        if fails:
            await stream.send([0], logprob=math.nan)
        else:
            await stream.send([2, 3], span(1, 0, 3), end=True)

    async with staged(plane) as stage:
        await stage.worker(script, record(1))
        await stage.decide(record(1))
        body = {"min_version": "step_1", "max_tokens": 3, "migrate": True, "on_stale": "cut"}
        async with Streaming(stage.http, **body) as stream:
            await stream.until(lambda stream: stream.tokens == [1])
            await stage.decide(then)
            later = await stage.ask(min_version="step_1", on_stale="refuse")
            assert "min_version is sequence 2" in error_of(later, 503)["message"]
            if fails:
                await stage.worker(rest(1), record(1))
            go.set()
            await stream.end()
    assert (stream.error, stream.last["finish_reason"], "cut" in stream.last) == (None, "length", False)
    assert [(made["sequence"], made["end"]) for made in stream.spans] == [(1, 3)]


async def test_a_choice_leaves_a_worker_that_missed_an_update(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_check, "STALE_AFTER_S", 0.2)
    told = asyncio.Event()

    async def behind(stream: Stream) -> None:
        await stream.send([1], span(1, 0, 1))
        told.set()
        while True:
            await stream.send([1])
            await asyncio.sleep(PACE_S)

    async with staged(plane) as stage:
        await stage.worker(behind, record(1))
        await stage.decide(record(1))
        asking = asyncio.create_task(
            stage.ask(prompt=None, prompt_token_ids=PROMPT, migrate=True, max_tokens=LONG)
        )
        async with asyncio.timeout(10):
            await told.wait()
        other = await stage.worker(always(2, base=2), record(2))
        await stage.decide(record(2))
        (choice,) = (await asking).json()["choices"]
        made = choice["token_ids"]
        assert made == [1] * (len(made) - 1) + [2]
        assert other.requests[0]["request"]["prompt_token_ids"] == PROMPT + made[:-1]
        assert [span["sequence"] for span in choice["weight_versions"]] == [1, 2]
        assert [maker["end"] for maker in choice["instances"]] == [len(made) - 1, len(made)]


@pytest.mark.parametrize("migrate", [True, False])
@pytest.mark.parametrize("alone", [True, False])
async def test_a_choice_without_a_token_leaves_a_worker_that_missed_an_update(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, migrate: bool, alone: bool
) -> None:
    """No token was delivered. Without another worker, the caller gets the reason."""
    monkeypatch.setattr(span_check, "STALE_AFTER_S", 0.0)
    go = asyncio.Event()

    async def behind(stream: Stream) -> None:
        await go.wait()
        await stream.send([1], span(1, 0, 1))

    async with staged(plane, wait_s=0.5 if alone else 5.0) as stage:
        worker = await stage.worker(behind, record(1))
        await stage.decide(record(1))
        asking = asyncio.create_task(stage.ask(prompt=None, prompt_token_ids=PROMPT, migrate=migrate))
        await plane.until(lambda: worker.requests)
        if not alone:
            await stage.worker(always(2, base=2), record(2))
        await stage.decide(record(2))

        async def knows() -> bool:
            reply = await stage.ask(min_version=2, on_stale="refuse")
            return reply.is_success or reply.json()["error"]["code"] == "not_admitted"

        await plane.until(knows)
        go.set()
        reply = await asking
        if alone:
            error = error_of(reply, 503)
            assert (error["code"], "partial" in error) == ("stale_weights", False)
        else:
            (choice,) = reply.json()["choices"]
            assert (choice["token_ids"], choice["weight_versions"][0]["sequence"]) == ([2], 2)


async def test_a_request_waits_for_the_version_that_it_demands(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn_many(2)
    await update(plane, 1)
    for met in ("step_1", 1, 0, "initial"):
        assert (await ask(http, min_version=met))["choices"]
    waiting = [
        asyncio.create_task(ask(http, max_tokens=1, **body))
        for body in ({"min_version": "step_2"}, {"nvext": {"min_version": 2, "on_stale": "cut"}})
    ]
    for asked in ("step_2", 2):
        body = {"prompt": "hi", "min_version": asked, "on_stale": "refuse"}
        error = error_of(await http.post("/v1/completions", json=body), 503)
        assert (error["code"], error["field"]) == ("demand_unmet", "min_version")
    assert not any(task.done() for task in waiting)
    version = await update(plane, 2)
    for reply in await asyncio.gather(*waiting):
        assert reply["nvext"]["weight_version"] == version


async def test_a_demand_waits_within_its_bound(
    plane: Plane, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.spawn()
    await ask(http)
    monkeypatch.setattr("frontend.routing.worker_selector.STALE_WAIT_S", 0.2)
    async with frontend(plane, admission_wait_s=0.1) as hasty:
        error = error_of(await hasty.post("/v1/completions", json={"prompt": "hi", "min_version": 9}), 503)
    assert error["code"] == "demand_unmet"
    assert "sequence 0 is served" in error["message"]


async def test_a_frontend_that_began_later_knows_the_labels_before_it(plane: Plane) -> None:
    plane.spawn()
    for seed in (1, 2, 3):
        await update(plane, seed)
    async with frontend(plane) as http:
        refusing = {"prompt": "hi", "on_stale": "refuse"}
        assert (await http.post("/v1/completions", json={**refusing, "min_version": "step_1"})).status_code == 200
        unknown = await http.post("/v1/completions", json={**refusing, "min_version": "step_4"})
        assert "no version 'step_4'" in error_of(unknown, 503)["message"]


async def test_a_history_that_could_not_be_read_is_read_again_while_a_request_waits(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changes in the fleet. A request that does not wait gets an answer from what the frontend knows."""
    plane.spawn()
    for seed in (1, 2):
        await update(plane, seed)
    failed, go = asyncio.Event(), asyncio.Event()

    async def reading(*args: Any) -> list[UpdateEntry]:
        if not go.is_set():
            failed.set()
            raise BusUnreachable("nobody answers")
        return await read_history(*args)

    monkeypatch.setattr("frontend.routing.committed.read_history", reading)
    async with frontend(plane) as http:
        await ask(http)
        monkeypatch.setattr(FleetStatus, "wake", lambda status: None)
        asking = asyncio.create_task(ask(http, min_version="step_1"))
        async with asyncio.timeout(10):
            await failed.wait()
        refusing = {"prompt": "hi", "min_version": "step_1", "on_stale": "refuse"}
        error = error_of(await http.post("/v1/completions", json=refusing), 503)
        assert (error["code"], error["field"]) == ("demand_unmet", "min_version")
        assert "could not be read" in error["message"]
        assert "none of the last" not in error["message"]
        go.set()
        assert (await asking)["choices"]


async def test_a_label_means_the_base_or_the_requests_own_adapter(plane: Plane) -> None:
    """This also holds where a frontend knows the label from the history."""
    plane.spawn()
    await update(plane, 1)
    fleet = await plane.fleet()
    for number, (name, label) in enumerate([("a", "step_1"), ("b", "step_1"), ("a", "step_2"), ("b", "step_3")]):
        path = make_fake_adapter(plane.tmp / "weights" / f"adapter{number}", number, plane.model())
        body = {"transport": {"backend": "filesystem", "path": str(path)}, "version": label}
        target = {"kind": "lora", "op": "load" if number < 2 else "swap", "name": name}
        await fleet.run("update_weights", {**body, "target": target})
    await fleet.run("unload_lora_adapter", {"lora_name": "b"})
    async with frontend(plane) as http:

        async def status(label: str, model: str | None = None) -> int:
            body = {"prompt": "hi", "model": model, "min_version": label, "on_stale": "refuse"}
            return (await http.post("/v1/completions", json=body)).status_code

        # Only the history knows it: from here on its other labels are there, too.
        assert [await status("step_3"), await status("step_3", "a")] == [503, 503]
        assert [await status("step_2"), await status("step_2", "a")] == [503, 200]
        assert [await status("step_1"), await status("step_1", "a")] == [200, 200]


async def test_adapters_of_one_label_are_not_taken_for_each_other(plane: Plane) -> None:
    both = record(1, a=11, b=12)
    adapters = {
        name: replace(one, version=replace(one.version, label="step_5")) for name, one in both.adapters.items()
    }
    both = replace(both, adapters=adapters, made=adapters["b"].version)

    async def script(stream: Stream) -> None:
        made = span(1, 0, 1)
        if name := stream.body["request"].get("adapter"):
            of = both.adapters[name].version
            made = made.model_copy(
                update={
                    "adapter": AdapterSpan(name=name, version=of.label, sequence=of.sequence, digest=of.digest)
                }
            )
        await stream.send([7], made, end=True)

    async with staged(plane) as stage:
        await stage.worker(script, both)
        await stage.decide(both)
        for model in ("a", "b"):
            reply = await stage.ask(model=model, min_version="step_5", on_stale="refuse")
            assert reply.status_code == 200, reply.text
        refused = await stage.ask(min_version="step_5", on_stale="refuse")
        message = refused.json()["error"]["message"]
        assert "no version 'step_5' of the base" in message
        assert "none of the last 256 updates" in message  # a frontend that began later knows no older ones


@pytest.mark.parametrize("demand", [{"one_version": True}, {"max_lag": 0}])
async def test_a_choice_that_breaks_its_demand_is_cut_or_ends_with_an_error(
    plane: Plane, http: httpx.AsyncClient, demand: dict[str, Any]
) -> None:
    worker = plane.spawn(token_delay_s=PACE_S)
    digest = (await ask(http))["nvext"]["weight_version"]["digest"]
    client = await plane.client()
    cut = {"prompt_token_ids": PROMPT, "max_tokens": LONG, "return_token_ids": True, "on_stale": "cut", **demand}
    whole = asyncio.create_task(http.post("/v1/completions", json=cut))
    refused = asyncio.create_task(http.post("/v1/completions", json={**cut, "on_stale": None}))
    native = {"token_ids": PROMPT, "sampling_params": {"max_tokens": LONG}, "on_stale": "cut", **demand}
    vllm = asyncio.create_task(http.post("/inference/v1/generate", json=native))
    async with Streaming(http, **cut) as stream:
        await until_running(plane, client, worker.instance_id, 4)
        await stream.until(lambda stream: len(stream.tokens) >= 3)
        await update(plane, 1)
        await stream.end()
    assert stream.error is None
    choices = [stream.last, (await whole).json()["choices"][0], (await vllm).json()["choices"][0]]
    for choice in choices:
        assert choice["finish_reason"] == "abort"
        assert choice["cut"]["demand"] == next(iter(demand))
        (span,) = choice["weight_versions"]
        made = stream.tokens if choice is stream.last else choice["token_ids"]
        assert (span["digest"], span["end"]) == (digest, len(made))
        assert made == tokens_under(digest, 0, len(made))
    error = error_of(await refused, 503)
    assert (error["code"], error["field"]) == ("demand_unmet", next(iter(demand)))
    partial = error["partial"]["token_ids"]
    assert partial == tokens_under(digest, 0, len(partial))
    assert partial
    await until_running(plane, client, worker.instance_id, 0)


NO_LONGER_KEPT = [
    ({"max_lag": 0}, record(2)),
    ({"min_version": 1}, in_next_run(record(2, "next"))),
    ({"min_version": "step_1"}, in_next_run(record(2, "next"))),
]
"""Demands that tokens of the first version meet, and the record that is decided while the tokens wait for a slow
reader."""


@pytest.mark.parametrize(("demand", "then"), NO_LONGER_KEPT)
@pytest.mark.parametrize("on_stale", ["wait", "refuse", "cut"])
async def test_a_choice_that_waited_for_the_other_choices_must_still_meet_its_demand(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, on_stale: str, demand: dict[str, Any], then: DecisionRecord
) -> None:
    """One choice ends under the first version. The other waits and is generated by the second. Both are delivered
    together."""
    go, ended = asyncio.Event(), asyncio.Event()
    take = Choice.take

    def taken(choice: Choice, event: Any) -> None:
        take(choice, event)
        if choice.finish_reason is not None:
            ended.set()

    async def script(stream: Stream) -> None:
        if stream.body["id"].endswith("-0"):
            await stream.send([1], span(1, 0, 1), end=True)
        else:
            await go.wait()
            await stream.send([2], span(2, 0, 1, then.version.run), end=True)

    monkeypatch.setattr(Choice, "take", taken)
    async with staged(plane) as stage:
        worker = await stage.worker(script, record(1))
        await stage.decide(record(1))
        asking = asyncio.create_task(stage.ask(n=2, on_stale=on_stale, **demand))
        async with asyncio.timeout(10):
            await ended.wait()
        await plane.until(lambda: len(worker.requests) == 2)
        await stage.decide(then)
        await worker.hold(then)
        go.set()
        reply = (await asking).json()
    if on_stale == "cut":
        first, second = reply["choices"]
        assert (first["finish_reason"], first["cut"]["demand"]) == ("abort", next(iter(demand)))
        assert (second["finish_reason"], "cut" in second) == ("length", False)
    else:
        assert (reply["error"]["code"], reply["error"]["index"]) == ("demand_unmet", 0)
        first, second = reply["error"]["partials"]
    assert [one["weight_versions"][0]["sequence"] for one in (first, second)] == [1, 2]
    assert [one["token_ids"] for one in (first, second)] == [[1], [2]]


@pytest.mark.parametrize(("demand", "then"), NO_LONGER_KEPT)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_is_cut_before_its_reader_had_its_tokens_has_its_prompt(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, stream: bool, demand: dict[str, Any], then: DecisionRecord
) -> None:
    """A slow reader: when it takes the first tokens, they are too old, and what follows was cut already."""
    taken: list[int] = []
    calls: list[GenerationCall] = []
    decided, go = asyncio.Event(), asyncio.Event()
    run, take = GenerationCall._events, GenerationProgress.take

    async def slowly(call: GenerationCall) -> AsyncGenerator[tuple[int, Event], None]:
        calls.append(call)
        async with aclosing(run(call)) as events:
            async for event in events:
                yield event
                await go.wait()

    def noted(progress: GenerationProgress, delta: GenerateDelta) -> None:
        take(progress, delta)
        taken.extend(delta.token_ids)

    async def script(stream: Stream) -> None:
        await stream.send([1], span(1, 0, 1))
        await decided.wait()
        await stream.send([2])

    monkeypatch.setattr(GenerationCall, "_events", slowly)
    monkeypatch.setattr(GenerationProgress, "take", noted)
    async with staged(plane) as stage:
        worker = await stage.worker(script, record(1))
        await stage.decide(record(1))
        body = {"prompt": None, "prompt_token_ids": PROMPT, "n": 2, "on_stale": "cut", **demand}
        asking = asyncio.create_task(stage.ask(**body, stream=stream, logprobs=1))
        await plane.until(lambda: taken == [1, 1])
        (call,) = calls
        generation = call._service
        await stage.decide(then)
        await plane.until(lambda: generation.committed.sequence == 2)
        decided.set()
        async with asyncio.timeout(10):
            for _ in taken:
                await worker.aborted.get()  # it was cut where its tokens come in
        go.set()
        reply = await asking
        choices = (
            [chunk["choices"][0] for chunk in events_of(reply.text)[:-1]] if stream else reply.json()["choices"]
        )
        assert len(choices) == 2
        for choice in choices:
            assert (choice["finish_reason"], choice["cut"]["demand"]) == ("abort", next(iter(demand)))
            assert (choice["token_ids"], choice["weight_versions"]) == ([], [])
            assert choice["prompt_token_ids"] == PROMPT
        assert generation.engines.moves["cut"] == len(choices)


async def test_a_choice_that_keeps_its_demand_goes_on_across_an_update(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    plane.spawn(token_delay_s=PACE_S)
    async with Streaming(http, max_tokens=200, max_lag=1, min_version=0) as stream:
        await stream.until(lambda stream: len(stream.tokens) >= 3)
        await update(plane, 1)
        await stream.end()
    assert (len(stream.tokens), stream.last["finish_reason"], "cut" in stream.last) == (200, "length", False)
    assert [span["sequence"] for span in stream.spans] == [0, 1]


# ---- going on elsewhere ----


def continued_under(digest: str, parts: list[int]) -> list[int]:
    """So many tokens by each worker, each asked for the prompt and the tokens before."""
    made: list[int] = []
    for count in parts:
        made += [fake_token(digest, PROMPT + made, position) for position in range(count)]
    return made


def worker_of(workers: list[Spawned], instance_id: str) -> Spawned:
    return next(worker for worker in workers if worker.instance_id == instance_id)


async def test_a_choice_goes_on_at_another_worker(plane: Plane, http: httpx.AsyncClient) -> None:
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


async def test_whole_replies_and_every_choice_go_on_too(plane: Plane, http: httpx.AsyncClient) -> None:
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


async def test_both_versions_are_told_where_the_weights_changed_on_the_way(
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


def rest(base: int) -> Script:
    """Sends two tokens, or the single token that is requested."""

    async def script(stream: Stream) -> None:
        count = stream.body["request"]["max_tokens"]
        await stream.send([8] * count, span(base, 0, count), end=True)

    return script


async def test_a_choice_of_one_version_goes_on_where_that_is_served(plane: Plane) -> None:
    """In a rolling update, a worker that is already updated does not continue the choice, even if its turn came
    earlier."""
    async with staged(plane) as stage:
        choice, workers = await asked_while_rolling(stage, 1, [(rest(2), 2), (rest(1), 1)], one_version=True)
    (made,) = choice["weight_versions"]
    assert (made["sequence"], made["start"], made["end"]) == (1, 0, 3)
    assert (choice["token_ids"], choice["finish_reason"]) == ([7, 8, 8], "length")
    assert choice["instance_id"] == workers[-1].instance_id


@pytest.mark.parametrize(("demand", "maker"), [({"one_version": True}, 1), ({"min_version": 2}, 2)])
async def test_a_choice_with_tokens_that_nobody_may_go_on_with_is_cut(
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
