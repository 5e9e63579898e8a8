"""OpenAI's own Python client, unchanged, against frontends with fake and hf workers. With the other engines:
tests/engines/test_mixed_fleet.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.support.frontend_process import frontend, tokens_under, update
from tests.support.openai_calls import MESSAGES, PROMPT, chats, completions, models_and_errors, stops_and_batches

if TYPE_CHECKING:
    from tests.conftest import Plane

START_S = 120.0


@asynccontextmanager
async def client_of(plane: Plane, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    key = options.get("api_key", "none")
    async with (
        frontend(plane, **options) as http,
        openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client


async def test_openais_client_works_with_fake_workers(plane: Plane) -> None:
    plane.spawn_many(2)
    digest = (await update(plane, 1))["digest"]
    async with client_of(plane, admission_wait_s=10.0) as client:
        await models_and_errors(client, "seed0")
        made = await completions(client, "seed0", {})
        assert made == [tokens_under(digest, 0, len(made[0]))] * 2
        await chats(client, "seed0", {}, lambda token: f" t{token}")
        await stops_and_batches(client, "seed0", {})


@pytest.mark.slow
@pytest.mark.parallel
async def test_openais_client_works_with_an_hf_worker(plane: Plane) -> None:
    from transformers import AutoTokenizer

    from worker.testing.tiny_model import make_witness_model, witness_next_token

    model = make_witness_model(plane.tmp / "weights" / "witness", seed=1)
    plane.spawn(ready=False, engine="hf", model=model).wait_ready(START_S)
    async with client_of(plane, admission_wait_s=10.0) as client:
        await models_and_errors(client, "witness")
        made = await completions(client, "witness", {})
        token = PROMPT[-1]
        expected = [token := witness_next_token(1, token) for _ in made[0]]
        assert made == [expected] * 2
        tokenizer = AutoTokenizer.from_pretrained(model)
        await chats(client, "witness", {}, lambda token: tokenizer.decode([token]))
        await stops_and_batches(client, "witness", {})


async def test_a_client_with_another_key_is_refused(plane: Plane) -> None:
    plane.spawn()
    async with client_of(plane, api_key="secret") as client:
        assert [one.id async for one in client.models.list()] == ["seed0"]
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="other").models.list()


async def test_an_error_in_a_stream_is_the_clients_error(plane: Plane) -> None:
    """It carries the tokens so far."""
    worker = plane.spawn(token_delay_s=0.02)
    await update(plane, 1)
    async with client_of(plane) as client:
        stream = await client.completions.create(model="seed0", prompt=PROMPT, max_tokens=1000, stream=True)

        async def read() -> None:
            async for _ in stream:
                worker.kill()

        with pytest.raises(openai.APIError) as caught:
            await read()
        body = caught.value.body
        assert isinstance(body, dict)
        assert body["code"] == "worker_lost"
        assert body["partial"]["token_ids"]


async def test_a_refusal_for_good_is_not_asked_again(plane: Plane) -> None:
    async with client_of(plane) as client:
        refused = client.with_options(max_retries=2).completions.with_raw_response
        with pytest.raises(openai.InternalServerError) as caught:
            await refused.create(model="x", prompt="a", suffix="b")
        assert caught.value.request.headers["x-stainless-retry-count"] == "0"
        responses = client.with_options(max_retries=2).responses.with_raw_response
        with pytest.raises(openai.InternalServerError) as caught:
            await responses.create(model="x", input="a")
        assert (caught.value.status_code, caught.value.request.headers["x-stainless-retry-count"]) == (501, "0")
        assert "/v1/chat/completions" in str(caught.value.body)


PARSER = """
from worker.engines.fake import adapter

async def parse_tool_calls(self, token_ids, tools):
    calls = [{"name": tools[0]["function"]["name"], "arguments": "{}"}] if token_ids else []
    return {"content": f"{len(token_ids)} tokens", "calls": calls}

adapter.FakeEngine.parse_tool_calls = parse_tool_calls
"""
"""A stand-in for an engine's parser. The real ones: tests/engines/test_mixed_fleet.py."""


async def test_tools_are_rendered_and_calls_are_read_where_a_worker_has_a_parser(plane: Plane) -> None:
    plane.spawn()
    asked: dict[str, Any] = {
        "model": "seed0",
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "stop": " t",  # each token of the fake engine has it
        "extra_body": {"return_token_ids": True},
    }
    async with client_of(plane, admission_wait_s=10.0) as client:
        create = client.chat.completions.create
        reply = await create(**asked)
        assert reply.model_extra is not None
        assert len(reply.model_extra["prompt_token_ids"]) == len("hi") + len(json.dumps({"tools": asked["tools"]}))
        assert (reply.choices[0].finish_reason, reply.choices[0].message.tool_calls) == ("stop", None)
        unread = await create(**asked, tool_choice="none")
        assert unread.model_extra is not None
        assert unread.model_extra["prompt_token_ids"] == reply.model_extra["prompt_token_ids"]
        with pytest.raises(openai.InternalServerError) as caught:
            await create(**asked, tool_choice="auto")
        assert (caught.value.status_code, caught.value.param) == (501, "tool_choice")

        await asyncio.to_thread(plane.spawn, patch=PARSER)
        await plane.until(lambda: _has_calls(create, asked))
        chunks = [chunk async for chunk in await create(**asked, tool_choice="auto", stream=True)]
        said = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        calls = [call for delta in said for call in delta.tool_calls or ()]
        assert [(call.index, call.function and call.function.name) for call in calls] == [(0, "look")]
        assert "".join(delta.content or "" for delta in said) == "1 tokens"
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def _has_calls(create: Any, asked: dict[str, Any]) -> bool:
    """Whether the frontend knows the worker with the parser. It reads the texts of all workers."""
    (choice,) = (await create(**asked)).choices
    if choice.message.tool_calls is None:
        return False
    assert (choice.message.content, choice.finish_reason) == ("1 tokens", "tool_calls")
    assert choice.message.tool_calls[0].function.name == "look"
    return True
