"""The generation API over real worker processes with the fake engine: tokens show which weights made them."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import msgpack
import pytest
from nats.aio.msg import Msg

from frontend.completions.call import MAX_VALUES_ON_LOOP, GenerationCall
from frontend.completions.completion_routes import OPENAI
from frontend.frontend_limits import FrontendLimits
from frontend.main import Frontend
from frontend.routing.engine_client import Event
from frontend.server.bodies import MAX_PROMPTS_BYTES
from frontend.server.options import FrontendOptions
from rl_plane.errors import Overloaded
from rl_plane.protocol.envelope import MAX_MESSAGE_BYTES
from rl_plane.protocol.generation import GATHER_S, MAX_PROMPT_LOGPROBS, GenerateDelta
from rl_plane.protocol.subjects import RECORD, Subjects
from tests.support.call_parsers import parse_calls
from tests.support.faulty_bus import BusFaults
from tests.support.frontend_process import (
    PROMPT,
    ask,
    error_of,
    events_of,
    frontend,
    http,
    next_event,
    tokens_under,
    update,
)
from tests.support.openai_plans import chat, completion
from tests.support.rollout_calls import waiting
from worker.engines.fake.adapter import fake_logprob, fake_prompt_logprobs, fake_token, make_fake_adapter

__all__ = ["http", "waiting"]

if TYPE_CHECKING:
    from tests.conftest import Plane

BOUND_S = 30.0
"""Far more than a stream of three tokens takes."""
LIES = """
import worker.engines.fake.adapter as fake
honest = fake.FakeEngine.generate
async def lying(self, request):
    async for delta in honest(self, request):
        spans = [span.model_copy(update={"digest": "blake3:" + "0" * 64}) for span in delta.spans]
        yield delta.model_copy(update={"spans": spans[:SPANS]})
fake.FakeEngine.generate = lying
"""


# ---- replies ----


@pytest.mark.parametrize("fails", [False, True])
async def test_a_choice_whose_calls_are_read_does_not_hold_up_the_others(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    plane.spawn()
    reading, go = asyncio.Event(), asyncio.Event()
    tools = [{"type": "function", "function": {"name": "look"}}]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}

    async def calls_of(*_: Any) -> tuple[str, list[dict[str, Any]]]:
        reading.set()
        if fails:
            raise Overloaded("no reader is free")
        await go.wait()
        return "", [call]

    async def choice_events(_: GenerationCall, index: int) -> AsyncGenerator[Event, None]:
        if index == 0:
            yield GenerateDelta(token_ids=[1], text="<look>", finish_reason="stop")
            return
        await reading.wait()
        yield GenerateDelta(token_ids=[2], text="a")
        yield GenerateDelta(token_ids=[3], text="b", finish_reason="length")

    parse_calls(monkeypatch, calls_of)
    monkeypatch.setattr(GenerationCall, "_choice_events", choice_events)
    options = FrontendOptions(plane.url, plane.namespace, plane.component)
    async with Frontend.running(options) as running:
        (component,) = running.components
        await plane.until(component.status.admitted)
        asked = GenerationCall(component.generation, chat(tools=tools, n=2), OPENAI)
        said: list[tuple[int, str | None]] = []
        async with asyncio.timeout(BOUND_S):
            async for event in asked.stream():
                if event == b"[DONE]":
                    break
                if "error" in (body := json.loads(event)):
                    said.append((0, body["error"]["message"]))
                    break
                (choice,) = body["choices"]
                said.append((choice["index"], choice["finish_reason"]))
                if said[-1] == (1, "length"):
                    go.set()
    assert said == [(1, None), (1, "length"), (0, "no reader is free" if fails else "tool_calls")]
    assert fails or choice["delta"]["tool_calls"] == [{"index": 0, **call}]


async def test_other_tasks_have_turns_of_the_loop_while_a_reply_of_many_tokens_is_written(plane: Plane) -> None:
    plane.spawn()
    loop, turns = asyncio.get_running_loop(), list[bool]()

    def wait_for_a_turn() -> None:
        turn = threading.Event()
        loop.call_soon_threadsafe(turn.set)
        turns.append(turn.wait(BOUND_S))

    class Waits:
        """Waits for a turn of the loop when it is encoded."""

        def __str__(self) -> str:
            wait_for_a_turn()
            return "encoded"

    def written(*_: object) -> dict[str, Any]:
        wait_for_a_turn()
        return {"text": Waits()}

    options = FrontendOptions(plane.url, plane.namespace, plane.component)
    async with Frontend.running(options) as running:
        (component,) = running.components
        await plane.until(component.status.admitted)
        plan = completion(n=16, max_tokens=MAX_VALUES_ON_LOOP // 64 + 1, logprobs=3)
        reply = await GenerationCall(component.generation, plan, replace(OPENAI, whole=written)).whole()
    assert (reply, turns) == (b'{"text":"encoded"}', [True, True])


async def test_a_stream_with_tools_that_no_worker_parses_has_its_text_with_its_tokens(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    plane.spawn(token_delay_s=0.01)
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 20}
    whole = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
    async with http.stream(
        "POST", "/v1/chat/completions", json={**body, "stream": True, "return_token_ids": True}
    ) as reply:
        lines, text, tokens = reply.aiter_lines(), "", 0
        while (event := await next_event(lines)) != "[DONE]":
            (choice,) = event["choices"]
            text += choice["delta"]["content"]
            tokens += len(choice["token_ids"])
            assert text.count(" ") == tokens, "each token of this engine has one space"
    assert (text, tokens) == (whole, 20)


async def test_a_reply_that_is_sent_at_its_end_takes_few_messages(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn(token_delay_s=0.01)
    version = await update(plane, 1)
    listener, messages = (await plane.client()).bus, 0

    async def count(message: Msg) -> None:
        nonlocal messages
        body = msgpack.unpackb(message.data)
        messages += isinstance(body, dict) and bool({"n", "many"} & body.keys())

    await listener.subscribe("_INBOX.>", count)
    await listener.flush()
    began = time.monotonic()
    reply = await ask(http, max_tokens=100, return_token_ids=True)
    elapsed_s = time.monotonic() - began
    await listener.flush()
    assert reply["choices"][0]["token_ids"] == tokens_under(version["digest"], 0, 100)
    # The acceptance, the first token and the end. Between them there is one for each turn.
    assert 3 <= messages <= 4 + elapsed_s / GATHER_S


async def test_a_prompt_of_tokens_gives_labelled_tokens_and_logprobs(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    worker = plane.spawn()
    version = await update(plane, 1)
    reply = await ask(http, max_tokens=4, logprobs=1, return_token_ids=True)
    (choice,) = reply["choices"]
    assert choice["token_ids"] == tokens_under(version["digest"], 0, 4)
    made = [fake_logprob(version["digest"], PROMPT, position) for position in range(4)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(made)
    assert choice["finish_reason"] == "length"
    span = {"version": "step_1", "sequence": 1, "digest": version["digest"], "run": version["run"]}
    assert choice["weight_versions"] == [{**span, "start": 0, "end": 4}]
    assert choice["instance_id"] == reply["nvext"]["instance_id"] == worker.instance_id
    assert reply["nvext"]["weight_version"] == version
    assert reply["prompt_token_ids"] == PROMPT
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert (reply["object"], reply["model"]) == ("text_completion", "seed0")


async def test_the_choices_of_one_request_are_spread_over_the_workers(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    workers = plane.spawn_many(2)
    client = await plane.client()
    await client.run("ready", {"min_workers": 2, "wait_s": 30})
    await ask(http, nvext={"instance_id": workers[0].instance_id})
    await ask(http, nvext={"instance_id": workers[1].instance_id})
    reply = await ask(http, n=4, seed=3, max_tokens=2, return_token_ids=True)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in reply["choices"]}) == 1
    assert {choice["instance_id"] for choice in reply["choices"]} == {worker.instance_id for worker in workers}
    assert reply["usage"]["completion_tokens"] == 8


async def test_a_stream_and_a_whole_reply_say_the_same(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn()
    body = {"prompt_token_ids": PROMPT, "max_tokens": 5, "logprobs": None, "return_token_ids": True, "n": 2}
    whole = await ask(http, **body)
    assert whole["nvext"]["completion_token_ids"] == [choice["token_ids"] for choice in whole["choices"]]
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = await http.post("/v1/completions", json=streamed)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = events_of(response.text)
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        same = whole["choices"][index]
        assert [token for chunk in mine for token in chunk["token_ids"]] == same["token_ids"]
        assert "".join(chunk["text"] for chunk in mine) == same["text"]
        logprobs = [value for chunk in mine for value in chunk["logprobs"]["token_logprobs"]]
        assert logprobs == same["logprobs"]["token_logprobs"]
        assert mine[-1]["weight_versions"] == same["weight_versions"]
        assert mine[-1]["finish_reason"] == "length"
        assert len(logprobs) == 5
        told = [chunk["nvext"] for chunk in chunks if chunk["choices"][0] == mine[-1]]
        assert [nvext["completion_token_ids"] for nvext in told] == [same["token_ids"]]
        assert all(chunk["finish_reason"] is None for chunk in mine[:-1])


async def test_a_chat_gives_the_same_text_whole_and_streamed(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn()
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_completion_tokens": 2, "logprobs": True, "return_token_ids": True}
    reply = (await http.post("/v1/chat/completions", json=body)).json()
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == "".join(f" t{token}" for token in choice["token_ids"])
    assert len(choice["logprobs"]["content"]) == 2
    assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])
    chunks = events_of((await http.post("/v1/chat/completions", json={**body, "stream": True})).text)[:-1]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == choice["message"]["content"]
    ids = {"messages": [], "prompt_token_ids": PROMPT, "max_tokens": 2, "return_token_ids": True}
    reply = (await http.post("/v1/chat/completions", json=ids)).json()
    assert reply["prompt_token_ids"] == PROMPT
    older = {"messages": messages, "nvext": {"token_data": PROMPT, "extra_fields": ["completion_token_ids"]}}
    again = (await http.post("/v1/chat/completions", json={**older, "max_tokens": 2})).json()
    assert again["nvext"]["completion_token_ids"] == reply["choices"][0]["token_ids"]
    assert again["nvext"]["token_ids"] == PROMPT


def prompt_logprobs_under(digest: str, prompt: list[int], *, texts: bool = True) -> list[dict[str, Any] | None]:
    return [
        None
        if value is None
        else {
            str(token): {"logprob": value, "rank": 1, "decoded_token": f" t{token}" if texts else None},
        }
        for token, value in zip(prompt, fake_prompt_logprobs(digest, prompt), strict=True)
    ]


async def test_prompt_logprobs_are_where_vllm_has_them(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn()
    version = await update(plane, 1)
    asked: list[dict[str, Any]] = [
        {"prompt_logprobs": 0},
        {"prompt_logprobs": True},  # the fake engine's likeliest token is the prompt's own
        {"return_prompt_logprobs": True},
        {"nvext": {"return_prompt_logprobs": True}},
    ]
    for fields in asked:
        expected = prompt_logprobs_under(version["digest"], PROMPT, texts="prompt_logprobs" in fields)
        reply = await ask(http, n=2, max_tokens=2, **fields)
        assert [choice["prompt_logprobs"] for choice in reply["choices"]] == [expected, expected]
        assert "prompt_logprobs" not in reply
        body = {"prompt_token_ids": PROMPT, "n": 2, "max_tokens": 2, "stream": True, **fields}
        *chunks, done = events_of((await http.post("/v1/completions", json=body)).text)
        assert done == "[DONE]"
        for index in (0, 1):
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert mine[0]["prompt_logprobs"] == expected
            assert all("prompt_logprobs" not in chunk for chunk in mine[1:])
        reply = (await http.post("/v1/chat/completions", json={**body, "stream": False})).json()
        assert reply["prompt_logprobs"] == expected
        assert all("prompt_logprobs" not in choice for choice in reply["choices"])
        *chunks, _ = events_of((await http.post("/v1/chat/completions", json=body)).text)
        assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [expected]
    assert "prompt_logprobs" not in (await ask(http, prompt_logprobs=False))["choices"][0]


async def test_the_longest_prompt_with_logprobs_gets_them_and_a_longer_one_is_refused(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    plane.spawn(max_model_len=70000, vocab_size=(1 << 31) - 1)
    version = await update(plane, 1)
    prompt = [(1 << 31) - 2] * MAX_PROMPT_LOGPROBS  # as many bytes as a token can take
    reply = await ask(http, prompt_token_ids=prompt, prompt_logprobs=0, max_tokens=3, return_token_ids=True)
    (choice,) = reply["choices"]
    assert choice["prompt_logprobs"] == prompt_logprobs_under(version["digest"], prompt)
    assert len(choice["token_ids"]) == 3
    longer = {"prompt_token_ids": [5, *prompt], "prompt_logprobs": 0}
    error = error_of(await http.post("/v1/completions", json=longer), 400)
    assert error["param"] == "prompt_logprobs"


async def test_many_prompts_may_be_larger_than_a_message_and_one_may_not(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    plane.spawn(max_model_len=2_000_000, vocab_size=(1 << 31) - 1)
    await update(plane, 1)
    prompts = [[1_000_000 + number] * 3_000 for number in range(50)]
    body = {"prompt": prompts, "max_tokens": 1, "return_token_ids": True}
    assert len(json.dumps(body)) > MAX_MESSAGE_BYTES
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert [choice["prompt_token_ids"] for choice in response.json()["choices"]] == prompts
    long = "\u00e9" * (MAX_MESSAGE_BYTES // 2)
    for path, field, texts in (
        ("/v1/completions", "prompt", ["a", long]),
        ("/generate", "input_ids", [[5], [1_000_000] * (MAX_MESSAGE_BYTES // 5)]),
        ("/v1/embeddings", "input", ["a", long]),
    ):
        error = error_of(await http.post(path, json={field: texts}), 413)
        assert (error["param"], error["fix"]) == (f"{field}.1", "send a shorter prompt")
    assert error_of(await http.post("/v1/completions", json={"prompt": long}), 413)["param"] == "prompt"


async def test_a_reply_that_no_message_carries_is_refused(plane: Plane, http: httpx.AsyncClient) -> None:
    """The text fits, the tokens that it makes do not."""
    plane.spawn(max_model_len=2_000_000)
    await update(plane, 1)
    text = "\u00e9" * 450_000  # of each byte a token of two bytes
    error = error_of(await http.post("/v1/completions", json={"prompt": text, "max_tokens": 3}), 413)
    assert error["param"] == "prompt"
    assert "max_payload" in error["fix"]
    assert len((await ask(http, max_tokens=3, return_token_ids=True))["choices"][0]["token_ids"]) == 3


HIDES = """
import worker.engines.fake.adapter as fake
honest = fake.FakeEngine.generate
async def hiding(self, request):
    async for delta in honest(self, request):
        told = delta.prompt_logprobs and CHANGED
        yield delta.model_copy(update={"prompt_logprobs": told})
fake.FakeEngine.generate = hiding
"""


UNFINITE = "the model's logits are not finite numbers"
FAILS = f"""
import worker.engines.fake.adapter as fake
from rl_plane.errors import EngineFailed
async def failing(self, request):
    raise EngineFailed({UNFINITE!r})
    yield
fake.FakeEngine.generate = failing
"""


@pytest.mark.parametrize(
    "changed", ["None", "delta.prompt_logprobs[:-1]", "[None, -1.0, float('nan')]", "[-1.0] * 3"]
)
async def test_a_worker_that_sends_no_right_prompt_logprobs_is_an_error(
    plane: Plane, http: httpx.AsyncClient, changed: str
) -> None:
    worker = plane.spawn(patch=HIDES.replace("CHANGED", changed))
    pinned = {"nvext": {"instance_id": worker.instance_id}}
    body = {"prompt_token_ids": PROMPT, "prompt_logprobs": 0, **pinned}
    error = error_of(await http.post("/v1/completions", json=body), 500)
    assert "prompt logprobs" in error["message"]
    assert len((await ask(http, **pinned))["choices"]) == 1


@pytest.mark.parametrize("count", [1, 2])
async def test_a_request_that_every_engine_fails_gets_the_engines_error_at_once(plane: Plane, count: int) -> None:
    """No worker is lost, so the frontend waits for no other worker. The call would time out otherwise."""
    workers = [plane.spawn(patch=FAILS) for _ in range(count)]
    async with frontend(plane, admission_wait_s=600) as http:

        async def asked() -> bool:
            error = error_of(await http.post("/v1/completions", json={"prompt_token_ids": PROMPT}), 500)
            assert (error["code"], error["message"]) == ("engine_failed", UNFINITE)
            return all(UNFINITE in worker.log.read_text() for worker in workers)

        await plane.until(asked)


async def test_a_request_that_one_engine_fails_waits_for_another_closed_worker(
    plane: Plane, waiting: set[asyncio.Task[Any] | None]
) -> None:
    failing, closed = plane.spawn(patch=FAILS), plane.spawn()
    fleet = await plane.fleet()
    await fleet.run("ready", {"min_workers": 2, "wait_s": 30})
    body: dict[str, Any] = {"prompt_token_ids": PROMPT}
    async with frontend(plane, admission_wait_s=20) as http:
        pinned = {**body, "nvext": {"instance_id": failing.instance_id}}
        error_of(await http.post("/v1/completions", json=pinned), 500)  # so it is known to be open
        await fleet.run("disable", {"workers": [closed.instance_id]})
        waiting.clear()
        asking = asyncio.create_task(ask(http))
        await plane.until(lambda: waiting or asking.done())
        await fleet.run("enable", {"workers": [closed.instance_id]})
        assert (await asking)["nvext"]["instance_id"] == closed.instance_id


async def test_stop_tokens_end_it(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn()
    token = (await ask(http, max_tokens=3, return_token_ids=True))["choices"][0]["token_ids"][2]
    (choice,) = (await ask(http, max_tokens=50, stop_token_ids=[token], return_token_ids=True))["choices"]
    assert (choice["finish_reason"], choice["token_ids"][-1]) == ("stop", token)


async def test_the_served_model_is_listed_and_others_are_refused(plane: Plane, http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/models")).json() == {"object": "list", "data": []}
    plane.spawn()
    client = await plane.client()
    await client.wait_for(1)
    await ask(http, model="seed0")
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert model["max_model_len"] == 4096
    assert (model["id"], model["object"], model["owned_by"]) == ("seed0", "model", "rl_plane")
    response = await http.post("/v1/completions", json={"prompt": "hi", "model": "other"})
    error = error_of(response, 404)
    assert (error["field"], error["models"]) == ("model", ["seed0"])


NEWER = """
import worker.process as process
process.lacking_fields = lambda _: {"of_a_later_version": "no", "seed+of_a_later_version": "no", "min_p": "no"}
"""


WITHOUT_LOGPROBS = """
import worker.process as process
process.lacking_fields = lambda _: {"logprobs": "this engine computes no log probabilities"}
"""


async def test_an_engine_without_logprobs_refuses_the_field_that_the_caller_sent(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    plane.spawn(patch=WITHOUT_LOGPROBS)
    assert len((await ask(http, max_tokens=2))["choices"]) == 1
    response = await http.post("/v1/completions", json={"prompt": "hi", "return_token_ids": True})
    error = error_of(response, 501)
    assert error["field"] == "return_token_ids"
    assert error["message"].startswith("return_token_ids asks for log probabilities too: ")
    response = await http.post("/v1/completions", json={"prompt": "hi", "return_token_ids": True, "logprobs": 1})
    assert error_of(response, 501)["field"] == "logprobs"


async def test_a_frontend_accepts_a_worker_that_lacks_a_field_unknown_to_the_frontend(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    plane.spawn(patch=NEWER)
    assert len((await ask(http, seed=1, max_tokens=2))["choices"]) == 1
    error = error_of(await http.post("/v1/completions", json={"prompt": "hi", "min_p": 0.5}), 501)
    assert error["param"] == "min_p"


async def test_a_key_guards_it(plane: Plane) -> None:
    plane.spawn()
    async with frontend(plane, api_key="k") as http:
        assert (await http.get("/health")).status_code == 200
        assert error_of(await http.get("/v1/models"), 401)["type"] == "authentication_error"
        error_of(await http.post("/v1/completions", json={"prompt": "hi"}), 401)
        http.headers["Authorization"] = "Bearer k"
        await ask(http)
        paths = (await http.get("/openapi.json")).json()["paths"]
        assert [one["name"] for one in paths["/health"]["get"]["parameters"]] == ["component"]
        operation = paths["/v1/completions"]["post"]
        assert "requestBody" in operation
        assert operation["tags"] == ["generate"]
        reply = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert reply == {"$ref": "#/components/schemas/CompletionReply"}


# ---- bad input ----


async def test_bad_input_is_refused_by_name(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn()
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt_token_ids": [1], "prompt": "x"}, 400, "prompt_token_ids"),
        ({"prompt_token_ids": [1 << 30]}, 400, "prompt_token_ids"),
        ({"prompt": "x", "max_tokens": 100_000}, 400, "max_tokens"),
        ({"prompt": "x", "suffix": "a"}, 501, "suffix"),
        ({"prompt": "x", "nvext": {"instance_id": "zz"}}, 400, "nvext.instance_id"),
        ({"prompt": "x", "nvext": {"instance_id": "0123456789abcdef"}}, 404, "nvext.instance_id"),
    ]
    for body, status, field in cases:
        for stream in (False, True):  # a stream's error has its status too, while nothing was sent
            response = await http.post("/v1/completions", json={**body, "stream": stream})
            assert error_of(response, status)["field"] == field
    for content in (b"{", b"[]", b'{"prompt": "x", "temperature": NaN}'):
        error_of(await http.post("/v1/completions", content=content), 400)
    error = error_of(await http.post("/v1/completions", content=b" " * (MAX_PROMPTS_BYTES + 1)), 413)
    assert (error["field"], error["fix"]) == ("body", "send the prompts in several requests")
    error_of(await http.post("/v1/nothing"), 404)
    error_of(await http.get("/v1/completions"), 405)


async def test_an_absent_or_closed_fleet_is_an_error(plane: Plane, http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"prompt": "hi"})
    assert error_of(response, 503)["code"] == "no_workers"
    assert int(response.headers["retry-after"]) >= 1
    worker = plane.spawn()
    await ask(http)
    fleet = await plane.fleet()
    await fleet.run("disable", {"workers": [worker.instance_id]})
    response = await http.post("/v1/completions", json={"prompt": "hi"})
    error = error_of(response, 503)
    assert error["code"] == "not_admitted"
    assert "disabled" in error["message"]
    pinned = {"prompt": "hi", "nvext": {"instance_id": worker.instance_id}}
    error_of(await http.post("/v1/completions", json=pinned), 503)
    waiting = asyncio.create_task(ask(http))
    await fleet.run("enable", {"workers": [worker.instance_id]})
    await waiting


# ---- versions ----


async def test_an_update_under_way_labels_each_token(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn(token_delay_s=0.02)
    old = (await ask(http, max_tokens=1))["nvext"]["weight_version"]
    body = {"prompt_token_ids": PROMPT, "max_tokens": 200, "stream": True, "return_token_ids": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        tokens = (await next_event(lines))["choices"][0]["token_ids"]
        new = await update(plane, 1)
        while (event := await next_event(lines)) != "[DONE]":
            tokens += event["choices"][0]["token_ids"]
            last = event
    first, second = last["choices"][0]["weight_versions"]
    assert (first["digest"], second["digest"]) == (old["digest"], new["digest"])
    assert tokens == tokens_under(old["digest"], 0, first["end"]) + tokens_under(
        new["digest"], second["start"], 200
    )
    assert last["nvext"]["weight_version"] is None
    assert (await ask(http))["nvext"]["weight_version"] == new


@pytest.mark.parametrize("barrier", ["strict", "rolling"])
async def test_updates_cost_callers_nothing(plane: Plane, http: httpx.AsyncClient, barrier: str) -> None:
    plane.spawn_many(2)
    await ask(http)
    digests: dict[int, str] = {}
    done = asyncio.Event()

    async def callers() -> int:
        count = 0
        while not done.is_set():
            (choice,) = (await ask(http, max_tokens=2, return_token_ids=True))["choices"]
            spans = choice["weight_versions"]  # two, if an update came between the two tokens
            parts = [tokens_under(span["digest"], span["start"], span["end"]) for span in spans]
            assert choice["token_ids"] == list(itertools.chain(*parts))
            assert len(choice["token_ids"]) == 2
            for span in spans:
                assert digests.setdefault(span["sequence"], span["digest"]) == span["digest"]
            count += 1
        return count

    tasks = [asyncio.create_task(callers()) for _ in range(4)]
    for seed in range(1, 6):
        version = await update(plane, seed, barrier=barrier)
        # What is asked after the answer is made by the new version.
        assert (await ask(http))["nvext"]["weight_version"] == version
    done.set()
    assert all(await asyncio.gather(*tasks))
    assert len(digests) > 1


@pytest.mark.parametrize("spans", [0, 1])
async def test_tokens_of_no_committed_version_are_not_delivered(
    plane: Plane, http: httpx.AsyncClient, spans: int
) -> None:
    plane.spawn(patch=LIES.replace("SPANS", str(spans)))
    body = {"prompt": "hi", "max_tokens": 1}
    response = await http.post("/v1/completions", json=body)
    error = error_of(response, 503)
    assert error["code"] == "unlabelled"
    assert "partial" not in error
    assert error_of(await http.post("/v1/completions", json={**body, "stream": True}), 503) == error


# ---- what may be lost on the way ----


async def test_every_frontend_serves_the_new_version_after_an_update(plane: Plane) -> None:
    plane.spawn()
    async with frontend(plane) as one, frontend(plane) as two:
        for seed in (1, 2):
            version = await update(plane, seed)
            for http in (one, two):
                assert (await ask(http))["nvext"]["weight_version"] == version


@pytest.mark.slow
@pytest.mark.parallel
async def test_a_frontend_that_hears_no_decision_has_read_it_before_it_is_served(plane: Plane) -> None:
    faults, subjects = BusFaults(), Subjects(plane.namespace, plane.component)
    unheard = subjects.state.feed(RECORD), subjects.frontend("")
    faults.loses = lambda message: message.subject.startswith(unheard)
    plane.spawn()
    async with frontend(plane, faults.connect) as http:
        await ask(http)
        version = await update(plane, 1)
        assert (await ask(http))["nvext"]["weight_version"] == version


async def test_a_frontend_that_hears_no_status_asks(plane: Plane) -> None:
    faults, status = BusFaults(), Subjects(plane.namespace, plane.component).status
    faults.loses = lambda message: message.subject == status
    async with frontend(plane, faults.connect, admission_wait_s=10) as http:
        worker = plane.spawn()
        await ask(http)
        fleet = await plane.fleet()
        await fleet.run("disable", {"workers": [worker.instance_id]})
        waiting = asyncio.create_task(ask(http))
        await fleet.run("enable", {"workers": [worker.instance_id]})
        await waiting


async def test_choices_under_way_are_bounded(plane: Plane) -> None:
    async with frontend(plane, admission_wait_s=60, limits=FrontendLimits(choices=1)) as http:
        # Requests that wait for a first worker are among them.
        two = {asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi"})) for _ in range(2)}
        (refused,), (waiting,) = await asyncio.wait(two, return_when=asyncio.FIRST_COMPLETED)
        error_of(refused.result(), 429)
        assert error_of(await http.post("/tokenize", json={"prompt": "hi"}), 429)["code"] == "overloaded"
        plane.spawn()
        assert (await waiting).status_code == 200
        for stream in (False, True):
            response = await http.post("/v1/completions", json={"prompt": "hi", "n": 2, "stream": stream})
            error = error_of(response, 429)
            assert (error["code"], error["type"]) == ("overloaded", "rate_limit_error")
            assert response.headers["retry-after"] == "1"
        await ask(http)


# ---- adapters ----


async def test_real_workers_serve_adapters_by_model(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn_many(2)
    base = (await ask(http, max_tokens=1))["nvext"]["weight_version"]
    fleet = await plane.fleet()
    versions = []
    for seed in (1, 2):  # loaded, then swapped
        path = make_fake_adapter(plane.tmp / "weights" / f"adapter{seed}", seed, plane.model())
        reply = await fleet.run("load_lora_adapter", {"lora_name": "a", "lora_path": str(path)})
        versions.append(reply["version"])
        models = (await http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["parent"]) for model in models] == [("seed0", None), ("a", "seed0")]
        for _ in range(4):
            answer = await ask(http, model="a", max_tokens=3, return_token_ids=True)
            (choice,) = answer["choices"]
            (span,) = choice["weight_versions"]
            assert (span["sequence"], span["digest"]) == (base["sequence"], base["digest"])
            adapter = span["adapter"]
            assert (adapter["name"], adapter["sequence"]) == ("a", versions[-1]["sequence"])
            made = [fake_token(base["digest"], PROMPT, n, 512, adapter["digest"]) for n in range(3)]
            assert choice["token_ids"] == made
            assert (answer["model"], answer["nvext"]["weight_version"]) == ("a", base)
        plain = await ask(http, max_tokens=3, return_token_ids=True)
        assert plain["choices"][0]["token_ids"] == tokens_under(base["digest"], 0, 3)
        assert "adapter" not in plain["nvext"]
    assert versions[0] != versions[1]
    await fleet.run("unload_lora_adapter", {"lora_name": "a"})
    response = await http.post("/v1/completions", json={"prompt": "hi", "model": "a"})
    assert error_of(response, 404)["models"] == ["seed0"]
    assert (await ask(http))["nvext"]["weight_version"] == base
