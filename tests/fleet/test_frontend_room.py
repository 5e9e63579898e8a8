"""A request goes to a worker that supports its fields and has room for its tokens, or waits for one."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.frontend_limits import FrontendLimits
from tests.support.frontend_process import (
    PROMPT,
    ask,
    error_of,
    events_of,
    frontend,
    until_running,
)
from tests.support.rollout_calls import PACE_S, native, waiting
from tests.support.streaming_client import Streaming, http, ready

__all__ = ["http", "waiting"]

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

CANT = """
import worker.engines.fake.adapter as fake
from dataclasses import replace
honest = fake.FakeEngine.start
async def lacking(self):
    return replace(await honest(self), lacks={
        "generate:min_tokens": "it can't count", "generate:stop+seed": "not both"})
fake.FakeEngine.start = lacking
"""


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
    assert model["max_model_len"] == 16  # of which no request is refused
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


async def test_a_rollout_by_vllms_route_without_a_length_fills_the_context(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    plane.spawn(max_model_len=600)
    await ready(plane, 1)
    body = {"token_ids": [5] * 7, "sampling_params": {"logprobs": 1}}
    assert await lengths(http, "/inference/v1/generate", body) == [593]


async def test_each_of_several_prompts_has_the_length_that_is_left(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn(max_model_len=64)
    await ready(plane, 1)
    texts = ["x" * 60, "y" * 50, "z" * 4]
    assert await lengths(http, "/v1/completions", {"prompt": texts, "return_token_ids": True}) == [4, 14, 16]
    assert await lengths(http, "/generate", {"text": texts}) == [4, 14, 60]
    for path, field in (("/v1/completions", "prompt"), ("/generate", "text")):
        error = error_of(await http.post(path, json={field: ["x", "y" * 64]}), 400)
        assert (error["field"], error["fix"]) == (f"{field}.1", "send at most 63")


async def test_a_default_length_waits_for_no_longer_worker(plane: Plane, http: httpx.AsyncClient) -> None:
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


async def test_a_default_length_takes_a_shorter_worker_while_the_longer_worker_is_full(
    plane: Plane,
) -> None:
    plane.spawn(max_model_len=16)
    longer = plane.spawn(max_model_len=64, token_delay_s=60)
    await ready(plane, 2)
    pinned = {"prompt_token_ids": PROMPT, "nvext": {"instance_id": longer.instance_id}}
    two = FrontendLimits(worker_streams=2)  # a late report may count a request of the shorter worker
    async with frontend(plane, limits=two) as http:
        open_ = [asyncio.create_task(http.post("/v1/completions", json=pinned)) for _ in range(2)]
        await until_running(plane, await plane.client(), longer.instance_id, 2)
        for path, body in unchosen(9):
            assert await lengths(http, path, body) == [7], body
        for path, body in [*unchosen(9, max_tokens=8), *unchosen(9, min_tokens=8), *unchosen(16)]:
            assert error_of(await http.post(path, json=body), 429)["code"] == "overloaded", body
        for one in open_:
            one.cancel()


@pytest.mark.parametrize(("rooms", "total"), [((64, 32), 12), ((32, 64), 16), ((32, 32), 12)])
async def test_a_default_length_counts_the_tokens_of_lost_workers(
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
    plane: Plane, http: httpx.AsyncClient, waiting: set[asyncio.Task[Any] | None], need: str
) -> None:
    async with frontend(plane, limits=FrontendLimits(away_s=0.0)) as hasty:
        _, asking = await lose_the_able_one(plane, http, waiting, need)
        await plane.until(lambda: waiting)
        before = set(waiting)
        body = {"prompt_token_ids": PROMPT, **NEEDS[need][2]}
        status, field = (501, "min_tokens") if need == "a field" else (400, "max_tokens")
        assert error_of(await hasty.post("/v1/completions", json=body), status)["field"] == field
        assert waiting == before
        asking.cancel()


@pytest.mark.parametrize("need", NEEDS)
async def test_a_request_that_only_an_absent_worker_can_serve_is_refused_if_it_stays_away(
    plane: Plane, waiting: set[asyncio.Task[Any] | None], need: str
) -> None:
    """Until the time is over, the caller may repeat the request."""
    at_once = FrontendLimits(away_s=0.0)
    async with (
        frontend(plane, admission_wait_s=0.5) as http,
        frontend(plane, admission_wait_s=0.5, limits=at_once) as later,
    ):
        _, asking = await lose_the_able_one(plane, http, waiting, need)
        reply = await asking
        assert (error_of(reply, 503)["code"], reply.headers["retry-after"]) == ("worker_lost", "1")
        body = {"prompt_token_ids": PROMPT, **NEEDS[need][2]}
        reply = await http.post("/v1/completions", json=body)
        assert (error_of(reply, 503)["code"], reply.headers["retry-after"]) == ("not_admitted", "1")
        status, field = (501, "min_tokens") if need == "a field" else (400, "max_tokens")
        assert error_of(await later.post("/v1/completions", json=body), status)["field"] == field


async def test_a_choice_with_tokens_waits_for_a_worker_that_can_continue_it(
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
