"""Real `hf` workers that are killed, paused or left alone in the middle of a choice: witness tokens prove the seams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio

from rl_plane import check_next_prompt, next_prompt
from tests.support.fleet_updates import update_of
from tests.support.frontend_process import PROMPT, ask, frontend, until_running
from tests.support.hf_fleet import START_S, chain
from tests.support.reference import logprobs_of
from tests.support.streaming_client import Streaming, ready
from worker.testing.tiny_model import make_witness_model

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 1000
"""The tokens of a choice that is still running when its worker is killed: the slowest step is a millisecond."""
LOGPROB = 1e-3


@pytest.fixture
def first(plane: Plane) -> Path:
    return make_witness_model(plane.tmp / "weights" / "witness1", 1)


@pytest_asyncio.fixture
async def http(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    async with frontend(plane, admission_wait_s=30.0) as client:
        yield client


async def spawned(plane: Plane, model: Path, count: int) -> list[Spawned]:
    started = [plane.spawn(ready=False, engine="hf", model=model) for _ in range(count)]
    for one in started:
        await asyncio.to_thread(one.wait_ready, START_S)
    await ready(plane, count)
    return started


def greedily(**more: Any) -> dict[str, Any]:
    return {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}


async def test_a_killed_worker_costs_no_token_and_no_letter(
    plane: Plane, http: httpx.AsyncClient, first: Path
) -> None:
    workers = await spawned(plane, first, 2)
    texts: list[str] = []
    body = greedily(max_tokens=TOKENS, migrate=True, skip_special_tokens=False)
    async with Streaming(http, **body) as stream:
        whole = asyncio.create_task(ask(http, **body, n=2))
        while await stream.more():
            texts.append(stream.last["text"])
            if "instances" not in stream.last and len(stream.tokens) >= 20:
                doomed = stream.last["instance_id"]
                next(one for one in workers if one.instance_id == doomed).kill()
        reply = await whole
    assert stream.error is None
    assert len(stream.last["instances"]) == 2
    expected = chain(PROMPT[-1], TOKENS, 1)
    assert stream.tokens == expected
    logprobs, _ = await asyncio.to_thread(logprobs_of, first, PROMPT, expected)
    assert stream.logprobs == pytest.approx(logprobs, abs=LOGPROB)
    (span,) = stream.spans
    assert (span["start"], span["end"]) == (0, TOKENS)
    for choice in reply["choices"]:
        assert choice["token_ids"] == expected
        assert choice["text"] == "".join(texts)
    detokenized = await http.post("/detokenize", json={"tokens": expected})
    assert "".join(texts) == detokenized.json()["prompt"]


async def test_both_versions_stand_where_the_seam_is(plane: Plane, http: httpx.AsyncClient, first: Path) -> None:
    second = make_witness_model(plane.tmp / "weights" / "witness2", 2)
    doomed, other = await spawned(plane, first, 2)
    fleet = await plane.fleet()
    await fleet.run("disable", {"workers": [other.instance_id]})
    async with Streaming(http, **greedily(max_tokens=TOKENS, migrate=True)) as stream:
        await stream.until(lambda stream: len(stream.tokens) >= 20)
        doomed.kill()
        await fleet.run("update_weights", update_of(second, "two"))
        await fleet.run("enable", {"workers": [other.instance_id]})
        await stream.end()
    before, after = stream.spans
    seam = before["end"]
    assert [maker["start"] for maker in stream.last["instances"]] == [0, seam]
    assert (before["sequence"], after["sequence"], after["start"], after["end"]) == (0, 1, seam, TOKENS)
    assert stream.tokens[:seam] == chain(PROMPT[-1], seam, 1)
    assert stream.tokens[seam:] == chain(stream.tokens[seam - 1], TOKENS - seam, 2)
    made = await asyncio.to_thread(logprobs_of, second, PROMPT + stream.tokens[:seam], stream.tokens[seam:])
    assert stream.logprobs[seam:] == pytest.approx(made[0], abs=LOGPROB)


async def test_an_aborting_pause_returns_the_tokens_and_a_new_request_continues_them(
    plane: Plane, http: httpx.AsyncClient, first: Path
) -> None:
    second = make_witness_model(plane.tmp / "weights" / "witness2", 2)
    (worker,) = await spawned(plane, first, 1)
    client, fleet = await plane.client(), await plane.fleet()
    whole = asyncio.create_task(ask(http, **greedily(max_tokens=4000)))
    async with Streaming(http, **greedily(max_tokens=4000)) as stream:
        await stream.until(lambda stream: len(stream.tokens) >= 10)
        await until_running(plane, client, worker.instance_id, 2)
        await fleet.run("pause", {"mode": "abort"})
        await stream.end()
    (choice,) = (await whole)["choices"]
    for ended in (stream.last, choice):
        assert ended["finish_reason"] == "abort"
        (span,) = ended["weight_versions"]
        assert (span["sequence"], span["start"]) == (0, 0)
    for tokens in (stream.tokens, choice["token_ids"]):
        assert tokens
        assert tokens == chain(PROMPT[-1], len(tokens), 1)
    await fleet.run("update_weights", update_of(second, "two"))
    await fleet.run("resume")
    following = next_prompt(PROMPT, stream.tokens, [])
    reply = await ask(http, **greedily(prompt_token_ids=following, max_tokens=20))
    check_next_prompt(PROMPT, stream.tokens, following + reply["choices"][0]["token_ids"])
    assert reply["choices"][0]["token_ids"] == chain(stream.tokens[-1], 20, 2)
    assert [span["sequence"] for span in reply["choices"][0]["weight_versions"]] == [1]


async def test_a_caller_that_leaves_ends_its_request_in_the_engine(
    plane: Plane, http: httpx.AsyncClient, first: Path
) -> None:
    (worker,) = await spawned(plane, first, 1)
    client = await plane.client()
    body = greedily(max_tokens=8000, n=2)
    async with http.stream(
        "POST", "/v1/completions", json={"prompt_token_ids": PROMPT, "stream": True, **body}
    ) as response:
        assert response.status_code == 200
        await until_running(plane, client, worker.instance_id, 2)
    await until_running(plane, client, worker.instance_id, 0)
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/completions", json={"prompt_token_ids": PROMPT, **body}, timeout=0.5)
    await until_running(plane, client, worker.instance_id, 0)
    state = (await client.call(worker.instance_id, "state")).body
    assert (state["running_tokens"], state["waiting_tokens"]) == (0, 0)


async def test_a_text_has_special_tokens_unless_it_says_otherwise(
    plane: Plane, http: httpx.AsyncClient, first: Path
) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(first)
    begin, number = "<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin} $A", None, [(begin, number)])
    tokenizer.save_pretrained(first)
    await spawned(plane, first, 1)
    bare = tokenizer.encode("hello", add_special_tokens=False)
    for asked, expected in (({}, [number, *bare]), ({"add_special_tokens": False}, bare)):
        told = (await http.post("/tokenize", json={"prompt": "hello", **asked})).json()
        made = (await http.post("/v1/completions", json=greedily(prompt=["hello", "hello"], **asked))).json()
        prompts = [choice["prompt_token_ids"] for choice in made["choices"]]
        assert [told["tokens"], *prompts] == [expected] * 3
