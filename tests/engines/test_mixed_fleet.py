"""One fleet of `hf`, `vllm` and `sglang` workers: a trainer can't distinguish them, and all serve what is committed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from frontend.routing.attempts import Attempts
from rl_plane.client import RlClient
from rl_plane.errors import PlaneError
from tests.support import openai_calls
from tests.support.bad_adapters import BAD
from tests.support.delta_updates import by_delta
from tests.support.dialect_facade import facade, fine
from tests.support.faults import StatusLog, Stream
from tests.support.fleet_updates import all_serve, states, update_of
from tests.support.frontend_process import ask, error_of, events_of, post, until_running
from tests.support.ipc_memory import trainer_of
from tests.support.mixed_fleet import (
    END_S,
    ENDLESS,
    ENGINES,
    HEAL_S,
    LOGPROB,
    PROMPT,
    START_S,
    TOKENS,
    Mixed,
    begun,
    client,
    fails_of_no_numbers,
    http,
    mixed,
    proven,
    seed_of,
    standing,
    witnessed,
)
from tests.support.nixl_trainers import trainer
from tests.support.paths import ROOT
from tests.support.prompt_scores import TRL_TOPS, ask_trl, check_rows, check_skyrl, check_trl, rows_of
from tests.support.reference import logprobs_of, prompt_logprobs
from tests.support.streaming_client import Streaming
from tests.support.update_checks import check_updates
from worker.engines.common.tokenizing import load_tokenizer
from worker.receive.staging import adapter_digest
from worker.testing.tiny_adapter import make_tiny_adapter
from worker.testing.tiny_model import VOCAB_SIZE, witness_next_token

__all__ = ["client", "http", "mixed", "trainer", "trainer_of"]

pytestmark = [pytest.mark.engines("vllm", "sglang", "trl"), pytest.mark.alone, pytest.mark.timeout(600)]

SCORINGS = 20
"""Batches of six prompts, more than enough for three equally loaded engines."""
LONG_PROMPT = 700
"""More than one step of `hf` prefills."""
LONG = 400
"""Tokens of a stream that lives through something."""
MOVES = 6
"""The number of times that one choice moves to another worker: each engine continues after each other."""


def watched_attempts(monkeypatch: pytest.MonkeyPatch) -> list[Attempts]:
    """A list that grows with each attempt of a frontend of this process at a choice."""
    found: list[Attempts] = []
    really = Attempts.run

    def watched(attempts: Attempts, *given: Any) -> Any:
        found.append(attempts)
        return really(attempts, *given)

    monkeypatch.setattr(Attempts, "run", watched)
    return found


async def settled(client: RlClient, mixed: Mixed) -> str:
    """The label that all serve."""

    async def one() -> str:
        rows = [row for row in (await states(client)).values() if row["ready"]]
        labels = {str(row["applied_weight_version"]) for row in rows}
        return labels.pop() if len(labels) == 1 and len(rows) == len(mixed.ids) else ""

    return str(await mixed.plane.until(one, HEAL_S))


async def test_every_engine_serves_each_version_of_a_sequence(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    await proven(http, mixed, "initial", mixed.first)
    one, two = mixed.tiny(1), mixed.tiny(2)
    for label, base in (("base 2", mixed.base(2)), ("tiny 1", one), ("tiny 2", two)):
        await client.run("update_weights", update_of(base, label))
        await proven(http, mixed, label, base)
    # An adapter, loaded, swapped and, with the base beneath it changed, still there.
    for seed in (1, 2):
        await client.run("load_lora_adapter", {"lora_name": "style", "lora_path": str(mixed.adapter(seed))})
        await proven(http, mixed, "tiny 2", two, ("style", mixed.adapter(seed)))
        await proven(http, mixed, "tiny 2", two)
    await client.run("update_weights", {"rollback": {"label": "tiny 1"}, "version": "tiny 1 again"})
    await proven(http, mixed, "tiny 1 again", one, ("style", mixed.adapter(2)))
    await client.run("unload_lora_adapter", {"lora_name": "style"})
    await proven(http, mixed, "tiny 1 again", one)
    refused = await http.post("/v1/completions", json={"prompt": "hi", "model": "style"})
    assert refused.status_code == 404
    rolled = update_of(mixed.base(1), "base 1", barrier="rolling")
    await client.run("update_weights", rolled)
    await proven(http, mixed, "base 1", mixed.base(1))


async def test_every_engine_applies_deltas_to_what_it_keeps(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    one, two, three = map(mixed.tiny, (1, 2, 3))
    await client.run("update_weights", update_of(two, "tiny 2", keep_staged=True))
    await client.run("load_lora_adapter", {"lora_name": "style", "lora_path": str(mixed.adapter(1))})
    for old, new, label in ((two, three, "tiny 3"), (three, one, "tiny 1")):
        # Compiling the comparison takes seconds on a busy machine: in this loop, the connection to NATS would not live.
        body = await asyncio.to_thread(by_delta, mixed.plane, old, new, label)
        with pytest.raises(PlaneError, match="the delta makes"):
            await client.run("update_weights", {**body, "digest": "blake3:" + "0" * 64})
        await client.run("update_weights", body)
        await proven(http, mixed, label, new)
        await proven(http, mixed, label, new, ("style", mixed.adapter(1)))
    await client.run("unload_lora_adapter", {"lora_name": "style"})
    await mixed.witnessed(client)


async def test_trainers_checks_and_resets_work_on_every_engine(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    """slime's check of its first update, miles' checksums, and SkyRL's reset of running requests."""
    await mixed.witnessed(client)
    async with facade(mixed.plane) as trainer:

        async def update() -> None:
            body = {"model_path": str(mixed.first), "weight_version": "checked"}
            fine(await trainer.post("/update_weights_from_disk", json=body))

        await check_updates(mixed.plane, trainer, update)
        await proven(http, mixed, "checked", mixed.first)
        ranks = fine(await trainer.post("/weights_checker", json={"action": "checksum"}))["ranks"]
        assert sorted(rank["instance_id"] for rank in ranks) == sorted(mixed.ids.values())
        assert all(len(rank["checksums"]) > 1 for rank in ranks)
        streams = await begun(client, mixed)
        assert fine(await trainer.post("/reset_prefix_cache", json={}))["success"] is False
        reset = await trainer.post("/reset_prefix_cache", json={"reset_running_requests": True})
        assert fine(reset) == {"success": True}
        for stream in streams.values():
            await stream.until(len(stream.tokens) + TOKENS)
        fine(await trainer.post("/abort_requests", json={}))
        for engine, stream in streams.items():
            assert (await stream.end()).tokens[: 2 * TOKENS] == witnessed(1, 2 * TOKENS), engine
    await mixed.witnessed(client)


def _truncated(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])


def _without_one(path: Path) -> None:

    tensors = load_file(path / "model.safetensors")
    tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, path / "model.safetensors")


def _other_shape(path: Path) -> None:

    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("spoil", [_truncated, _without_one, _other_shape, shutil.rmtree])
async def test_a_bad_checkpoint_is_refused_and_touches_no_engine(
    spoil: Callable[[Path], None], mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    label = await settled(client, mixed)
    bad = mixed.plane.tmp / "weights" / f"bad-{spoil.__name__}"
    shutil.copytree(mixed.base(2), bad)
    spoil(bad)
    with pytest.raises(PlaneError) as caught:
        await client.run("update_weights", update_of(bad, "bad"))
    assert caught.value.http_status == 400, caught.value
    assert await settled(client, mixed) == label
    await proven(http, mixed, label, mixed.base(seed_of(label)))


async def test_a_bad_adapter_is_refused_and_touches_no_engine(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    await client.run("update_weights", update_of(mixed.tiny(1), "tiny 1"))
    await client.run("load_lora_adapter", {"lora_name": "style", "lora_path": str(mixed.adapter(1))})
    statuses = await StatusLog.follow(client)

    async def lasting() -> dict[str, list[Any]]:
        keys = ("admission", "version", "sequence", "adapters", "pause")
        return {one: [row[key] for key in keys] for one, row in (await states(client)).items()}

    before = await lasting()
    for what, bad in BAD.items():
        path = bad.make(mixed.adapter(2), mixed.plane.tmp / "weights" / f"adapter {what}")
        for name in ("style", "another"):
            with pytest.raises(PlaneError) as caught:
                await client.run("load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
            bad.check(caught.value)
            assert caught.value.http_status == 400
    await proven(http, mixed, "tiny 1", mixed.tiny(1), ("style", mixed.adapter(1)))
    refused = await http.post("/v1/completions", json={"prompt": "hi", "model": "another"})
    assert refused.status_code == 404
    assert await lasting() == before
    assert set(statuses.admitted) == {frozenset(mixed.ids.values())}
    await client.run("load_lora_adapter", {"lora_name": "style", "lora_path": str(mixed.adapter(2))})
    await proven(http, mixed, "tiny 1", mixed.tiny(1), ("style", mixed.adapter(2)))
    await client.run("unload_lora_adapter", {"lora_name": "style"})
    await mixed.witnessed(client)


def late_ones(client: RlClient, mixed: Mixed) -> dict[str, Stream]:
    return {
        engine: Stream(client, one, PROMPT, 4, temperature=0.0, ignore_eos=True)
        for engine, one in mixed.ids.items()
    }


async def test_streams_continue_after_a_keep_pause(mixed: Mixed, client: RlClient) -> None:
    base = seed_of(await settled(client, mixed))
    streams = await begun(client, mixed)
    await client.run("pause", {"mode": "keep"})
    late = late_ones(client, mixed)
    had = await standing(mixed, client, streams.values())
    assert set(await standing(mixed, client, late.values())) == {0}
    await client.run("resume", {})
    for (engine, stream), tokens in zip(streams.items(), had, strict=True):
        await stream.until(tokens=tokens + 20)
        stream.stop()
        assert stream.tokens == witnessed(base, len(stream.tokens)), engine
    for engine, one in late.items():
        assert (await one.end()).tokens == witnessed(base, 4), engine


async def test_a_pause_that_waits_lets_streams_end(mixed: Mixed, client: RlClient) -> None:
    base = seed_of(await settled(client, mixed))
    streams = await begun(client, mixed, LONG)
    await client.run("pause", {"mode": "wait"})
    late = late_ones(client, mixed)
    for engine, stream in streams.items():
        await stream.end()
        assert (stream.finish_reason, stream.tokens) == ("length", witnessed(base, LONG)), engine
    assert set(await standing(mixed, client, late.values())) == {0}
    await client.run("resume", {})
    for engine, one in late.items():
        assert (await one.end()).tokens == witnessed(base, 4), engine


async def test_a_pause_that_aborts_gives_the_tokens_so_far(mixed: Mixed, client: RlClient) -> None:
    base = seed_of(await settled(client, mixed))
    streams = await begun(client, mixed)
    await client.run("pause", {"mode": "abort"})
    for engine, stream in streams.items():
        await stream.end()
        assert stream.finish_reason == "abort", engine
        assert 0 < len(stream.tokens) < ENDLESS[engine], engine
        assert stream.tokens == witnessed(base, len(stream.tokens)), engine
        (span,) = stream.spans
        assert span["end"] == len(stream.tokens), engine
    await client.run("resume", {})


async def test_a_stream_across_an_update_names_the_weights_of_each_token(mixed: Mixed, client: RlClient) -> None:
    before = seed_of(await settled(client, mixed))
    after = before % 3 + 1
    streams = await begun(client, mixed)
    await client.run("update_weights", update_of(mixed.base(after), f"base {after}"))
    for engine, stream in streams.items():
        await stream.until(spans=2)
        stream.stop()
        assert [seed_of(span["version"]) for span in stream.spans] == [before, after], engine
        last, change = PROMPT[-1], stream.spans[1]["start"]
        for place, token in enumerate(stream.tokens):
            last = witness_next_token(before if place < change else after, last)
            assert token == last, (engine, place, stream.spans, stream.tokens[max(0, place - 3) : place + 3])


async def test_streams_of_a_swapped_adapter_continue_with_the_new_adapter(mixed: Mixed, client: RlClient) -> None:
    await client.run("update_weights", update_of(mixed.tiny(1), "tiny 1"))
    await client.run("load_lora_adapter", {"lora_name": "style", "lora_path": str(mixed.adapter(1))})
    streams = await begun(client, mixed, adapter="style")
    await client.run("load_lora_adapter", {"lora_name": "style", "lora_path": str(mixed.adapter(2))})
    made_by = [adapter_digest(mixed.adapter(seed)) for seed in (1, 2)]
    for engine, stream in streams.items():
        await stream.until(spans=2)
        assert [span["adapter"]["digest"] for span in stream.spans] == made_by, engine
    await client.run("unload_lora_adapter", {"lora_name": "style"})
    for engine, stream in streams.items():
        assert (await stream.end()).finish_reason == "abort", engine
        assert stream.spans[-1]["end"] == len(stream.tokens) < ENDLESS[engine], engine
    await mixed.witnessed(client)


async def test_a_request_goes_to_an_engine_that_can_do_it(mixed: Mixed, http: httpx.AsyncClient) -> None:
    await http.get("/v1/models")
    for _ in range(6):
        reply = await ask(
            http, prompt_token_ids=PROMPT, allowed_token_ids=[7, 8], max_tokens=2, return_token_ids=True
        )
        (choice,) = reply["choices"]
        assert choice["instance_id"] != mixed.ids["sglang"]
        assert set(choice["token_ids"]) <= {7, 8}


async def test_any_other_engine_continues_a_choice(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, logprobs, text and labels, as if one had made it."""
    await mixed.witnessed(client)
    base = seed_of(await settled(client, mixed))
    found = watched_attempts(monkeypatch)
    body = {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False, "migrate": True}
    texts: list[str] = []
    async with Streaming(http, max_tokens=LONG, **body) as stream:
        while await stream.more():
            texts.append(stream.last["text"])
            if len(stream.tokens) >= 20 * len(found) and len(found) <= MOVES:
                found[-1].on_lost(stream.last["instance_id"])
    assert stream.error is None
    assert stream.tokens == witnessed(base, LONG)
    makers = [maker["instance_id"] for maker in stream.last["instances"]]
    assert len(makers) == MOVES + 1
    assert set(makers) == set(mixed.ids.values())
    expected, _ = await asyncio.to_thread(logprobs_of, mixed.base(base), PROMPT, stream.tokens)
    assert stream.logprobs == pytest.approx(expected, abs=LOGPROB)
    (span,) = stream.spans
    assert (span["start"], span["end"]) == (0, LONG)
    whole = await http.post("/detokenize", json={"tokens": stream.tokens})
    assert "".join(texts) == whole.json()["prompt"]


async def test_a_text_has_its_form_by_every_route(mixed: Mixed, client: RlClient, http: httpx.AsyncClient) -> None:
    """vLLM and SGLang give a text its form. `hf` does not, so such a request goes to one of the two."""
    await client.run("update_weights", update_of(mixed.tiny(1), "tiny 1"))
    ids = {"prompt_token_ids": PROMPT, "max_tokens": 64}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["yes", "no"]}}}
    tokens: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 64}}
    tokens["sampling_params"]["structured_outputs"] = {"choice": ["maybe", "never"]}
    native = {"input_ids": PROMPT, "sampling_params": {"ebnf": 'root ::= [x-z]+ "!"', "max_new_tokens": 1000}}
    able = {mixed.ids[engine] for engine in ("vllm", "sglang")}
    for engine in ("vllm", "sglang"):
        chosen = {"nvext": {"instance_id": mixed.ids[engine]}}
        (chat,) = (await post(http, "/v1/chat/completions", **ids, **chosen, response_format=schema))["choices"]
        assert json.loads(chat["message"]["content"]) in ("yes", "no")
        form = {"structured_outputs": {"regex": "[a-f]{9}"}}
        (text,) = (await post(http, "/v1/completions", **ids, **chosen, **form))["choices"]
        assert re.fullmatch("[a-f]{9}", text["text"])
    for _ in range(4):
        (choice,) = (await post(http, "/inference/v1/generate", **tokens))["choices"]
        text = (await http.post("/detokenize", json={"tokens": choice["token_ids"][:-1]})).json()["prompt"]
        assert (choice["instance_id"] in able, text in ("maybe", "never")) == (True, True), text
        reply = await post(http, "/generate", **native)
        assert reply["meta_info"]["instance_id"] in able
        assert re.fullmatch("[x-z]+!?", reply["text"]), reply["text"]
    await _forced_calls(http, mixed)
    await _calls_by_itself(http, mixed)
    alone = {"nvext": {"instance_id": mixed.ids["hf"]}, "regex": "a"}
    error = error_of(await http.post("/v1/completions", json={**ids, **alone}), 501)
    assert (error["field"], bool(error["fix"])) == ("regex", True)


async def _forced_calls(http: httpx.AsyncClient, mixed: Mixed) -> None:
    """OpenAI's client gets the calls that its `tool_choice` forces, whole and streamed."""
    tokenizer = load_tokenizer(mixed.first)
    blank = {str(token): -100 for token in range(VOCAB_SIZE) if tokenizer.decode([token]).isspace()}
    place = {"type": "object", "properties": {"place": {"enum": ["here"]}}, "required": ["place"]}
    function = {"name": "look", "parameters": {**place, "additionalProperties": False}}
    tools: list[Any] = [{"type": "function", "function": function}]
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none") as caller:
        for choice in ({"type": "function", "function": {"name": "look"}}, "required"):
            asked: dict[str, Any] = {
                "model": mixed.first.name,
                "messages": [{"role": "user", "content": "hi"}],
                "tools": tools,
                "tool_choice": choice,
                "max_tokens": 1000,
                "logit_bias": blank,
            }
            reply = await caller.chat.completions.create(**asked)
            _check_calls(reply.choices[0].message.tool_calls, choice)
            assert reply.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
            calls = [
                call
                async for chunk in await caller.chat.completions.create(**asked, stream=True)
                for call in chunk.choices[0].delta.tool_calls or ()
            ]
            _check_calls(calls, choice)


async def _calls_by_itself(http: httpx.AsyncClient, mixed: Mixed) -> None:
    """The engines' own parsers read the calls that a model has written. A form makes the tiny model write one."""
    written = '<tool_call>\\{"name": "look", "arguments": \\{"place": "here"\\}\\}</tool_call>'
    function = {"name": "look", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}
    for engine in ("vllm", "sglang"):
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": function}],
            "max_tokens": 200,
            "structured_outputs": {"regex": written},
            "nvext": {"instance_id": mixed.ids[engine]},
        }
        (choice,) = (await post(http, "/v1/chat/completions", **body))["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "look"), engine
        assert json.loads(call["function"]["arguments"]) == {"place": "here"}


def _check_calls(calls: Any, choice: Any) -> None:
    """Each call is of the function, with arguments that fit. A function that is named is called once."""
    assert len(calls) == 1 if isinstance(choice, dict) else calls
    for call in calls:
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"place": "here"})


async def test_another_engine_continues_a_text_in_its_form(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.run("update_weights", update_of(mixed.tiny(1), "tiny 1"))
    found = watched_attempts(monkeypatch)
    body = {"temperature": 0, "migrate": True, "structured_outputs": {"regex": "[a-f]{100}=[0-9]{100}"}}
    texts: list[str] = []
    async with Streaming(http, max_tokens=LONG, **body) as stream:
        while await stream.more():
            texts.append(stream.last["text"])
            if len(stream.tokens) >= 20 * len(found) and len(found) <= 3:
                found[-1].on_lost(stream.last["instance_id"])
    assert stream.error is None
    assert re.fullmatch("[a-f]{100}=[0-9]{100}", "".join(texts))
    makers = [maker["instance_id"] for maker in stream.last["instances"]]
    assert len(makers) == 4
    assert set(makers) == {mixed.ids["vllm"], mixed.ids["sglang"]}
    expected, _ = await asyncio.to_thread(logprobs_of, mixed.tiny(1), PROMPT, stream.tokens)
    assert stream.logprobs == pytest.approx(expected, abs=LOGPROB)


async def test_a_caller_that_leaves_ends_its_request_in_each_engine(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    for engine, instance_id in mixed.ids.items():
        body = {"max_tokens": ENDLESS[engine], "ignore_eos": True, "nvext": {"instance_id": instance_id}}
        async with Streaming(http, **body) as stream:
            await stream.until(lambda stream: len(stream.tokens) >= 5)
            assert (await states(client))[instance_id]["running_tokens"] > len(PROMPT), engine
        await until_running(mixed.plane, client, instance_id, 0)


async def test_engines_report_the_load_that_they_count_themselves(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    """vLLM and SGLang report the use of their KV cache. `hf` does not, and then there is no number."""
    rooms = {name: (await client.call(key, "describe")).body["kv_tokens"] for name, key in mixed.ids.items()}
    assert rooms["hf"] is None
    assert min(rooms["vllm"], rooms["sglang"]) > 1000
    assert (await states(client))[mixed.ids["hf"]]["engine_load"] is None
    for engine in ("vllm", "sglang"):
        instance_id = mixed.ids[engine]

        async def load(instance_id: str = instance_id) -> dict[str, Any]:
            return (await states(client))[instance_id]["engine_load"] or {}

        async def runs() -> bool:
            found = await load()
            return found.get("running") == 1 and 0 < found["kv_usage"] < 1

        async def rests() -> bool:
            found = await load()
            return (found.get("running"), found.get("waiting")) == (0, 0)

        body = {"max_tokens": ENDLESS[engine], "ignore_eos": True, "nvext": {"instance_id": instance_id}}
        async with Streaming(http, **body) as stream:
            await stream.until(lambda stream: len(stream.tokens) >= 5)
            await mixed.plane.until(runs, END_S)
        await mixed.plane.until(rests, END_S)
        found = await load()
        assert found["preemptions"] == (0 if engine == "vllm" else None)
        assert (found["tokens_per_s"] is None) == (engine == "vllm")


async def test_prompt_logprobs_are_the_references(mixed: Mixed, client: RlClient, http: httpx.AsyncClient) -> None:
    # Not a witness: its logits are so large that one step of bfloat16 is more than the bound.
    weights = mixed.plane.tmp / "weights"
    base = mixed.tiny(1)
    adapter = make_tiny_adapter(base, weights / "tiny-adapter", seed=3)
    await client.run("update_weights", update_of(base, "tiny 1"))
    await client.run("load_lora_adapter", {"lora_name": "scored", "lora_path": str(adapter)})
    pick = random.Random(7)
    prompt = [pick.randrange(3, VOCAB_SIZE) for _ in range(LONG_PROMPT)]
    truth = {
        name: await asyncio.to_thread(prompt_logprobs, base, prompt, path)
        for name, path in ((None, None), ("scored", adapter))
    }
    # The compared values must differ between the two.
    assert max(abs(one - other) for one, other in zip(*truth.values(), strict=True)) > 4 * LOGPROB
    for engine, instance_id in mixed.ids.items():
        for name in truth:
            body: dict[str, Any] = {"prompt_token_ids": prompt, "max_tokens": 2, "temperature": 0.5, "seed": 1}
            body |= {"nvext": {"instance_id": instance_id}, **({"model": name} if name else {})}
            await ask(http, **body)  # from here on the prompt is in the prefix cache
            reply = await ask(http, **body, n=2, prompt_logprobs=0)
            for choice in reply["choices"]:
                first, *rows = choice["prompt_logprobs"]
                assert first is None, engine
                assert [list(row) for row in rows] == [[str(token)] for token in prompt[1:]], engine
                told = [row[str(token)]["logprob"] for row, token in zip(rows, prompt[1:], strict=True)]
                off = [abs(one - other) for one, other in zip(told, truth[name], strict=True)]
                assert max(off) < LOGPROB, (engine, name, off)
            alone = await ask(http, **{**body, "prompt_token_ids": prompt[:1]}, prompt_logprobs=0)
            assert alone["choices"][0]["prompt_logprobs"] == [None], engine
    await _scored_by_all(mixed, http, prompt, truth[None])
    await client.run("unload_lora_adapter", {"lora_name": "scored"})
    await mixed.witnessed(client)


async def _scored_by_all(mixed: Mixed, http: httpx.AsyncClient, prompt: list[int], truth: list[float]) -> None:
    """Sends miles' and slime's batched scoring until each engine has scored the prompt."""
    start, left = 600, set(mixed.ids.values())
    body = {
        "input_ids": [prompt] * 6,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": start,
    }
    for _ in range(SCORINGS):
        response = await http.post("/generate", json=body)
        for output in response.raise_for_status().json():
            (empty, _, _), *rows = output["meta_info"]["input_token_logprobs"]
            assert (empty, output["output_ids"]) == (None, [])
            assert [token for _, token, _ in rows] == prompt[start + 1 :]
            assert [value for value, *_ in rows] == pytest.approx(truth[start:], abs=LOGPROB)
            left.discard(output["meta_info"]["instance_id"])
        if not left:
            return
    raise AssertionError(f"these have scored nothing: {left}")


async def test_the_likeliest_tokens_of_prompts_are_the_references(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    base = mixed.tiny(1)
    await client.run("update_weights", update_of(base, "tiny 1"))
    pick = random.Random(8)
    sequences = [[pick.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (LONG_PROMPT, 40)]
    truths = [await asyncio.to_thread(rows_of, base, sequence) for sequence in sequences]
    prompt, truth = sequences[0], truths[0]
    tokenizer = await asyncio.to_thread(load_tokenizer, mixed.first)
    for engine, instance_id in mixed.ids.items():
        body: dict[str, Any] = {"prompt_token_ids": prompt, "max_tokens": 1, "nvext": {"instance_id": instance_id}}
        for count in (0, 1, 8):
            (choice,) = (await ask(http, **body, prompt_logprobs=count, logprobs=2))["choices"]
            rows = choice["prompt_logprobs"]
            check_rows(rows, prompt, truth, count, LOGPROB, ranks=engine != "sglang")
            assert all(
                one["decoded_token"] == tokenizer.decode([int(token)])
                for row in rows[1:]
                for token, one in row.items()
            )
            assert len(choice["logprobs"]["top_logprobs"][0]) in (2, 3), engine
        most = {"vllm": TRL_TOPS}.get(engine, VOCAB_SIZE)
        refused = await http.post("/v1/completions", json={**body, "prompt_logprobs": most + 1})
        assert (refused.status_code, refused.json()["error"]["limit"]) == (400, most), engine
        await _echoed_by(http, instance_id, sequences[1], truths[1], tokenizer)
    starts = [600, 10]
    by_trl = await ask_trl(str(http.base_url), list(mixed.ids.values()), sequences, starts, START_S)
    assert by_trl.keys() == set(mixed.ids.values())
    for found in by_trl.values():
        check_trl(found, sequences, starts, truths, LOGPROB)
    left = set(mixed.ids.values())
    for first in range(3, 3 + 6 * SCORINGS, 6):
        # Each prompt has a beginning of its own, so that all do not go to the worker that knows it.
        prompts = [[token, *sequences[1]] for token in range(first, first + 6)]
        rows = [await asyncio.to_thread(rows_of, base, prompt) for prompt in prompts]
        pairs = zip(prompts, rows, strict=True)
        calls = (check_skyrl(http, mixed.first.name, prompt, truth, 2, LOGPROB) for prompt, truth in pairs)
        left -= set(await asyncio.gather(*calls))
        if not left:
            break
    assert not left, "these have scored nothing"
    await mixed.witnessed(client)


async def _echoed_by(
    http: httpx.AsyncClient, instance_id: str, prompt: list[int], truth: torch.Tensor, tokenizer: Any
) -> None:
    """An echoed prompt of tokens, scored without a new token, and one of text with new tokens."""
    pinned = {"nvext": {"instance_id": instance_id}}
    (choice,) = (await ask(http, prompt_token_ids=prompt, echo=True, max_tokens=0, logprobs=2, **pinned))[
        "choices"
    ]
    assert choice["text"] == tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
    told = choice["logprobs"]
    assert told["tokens"] == [tokenizer.decode([token]) for token in prompt]
    true = truth.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert told["token_logprobs"] == [None, *(pytest.approx(value, abs=LOGPROB) for value in true)]
    # By their ids: several tokens of this vocabulary read alike.
    body = {"prompt_token_ids": prompt, "echo": True, "max_tokens": 0, "return_tokens_as_token_ids": True}
    told = (await ask(http, **body, logprobs=2, **pinned))["choices"][0]["logprobs"]
    assert told["tokens"] == [f"token_id:{token}" for token in prompt]
    for row, values in zip(told["top_logprobs"][1:], truth, strict=True):
        assert max(row.values()) == pytest.approx(float(values.max()), abs=LOGPROB)
    text = "hello there"
    body = {"prompt_token_ids": None, "prompt": text, "echo": True, "max_tokens": 3, "logprobs": 1, "n": 2}
    for choice in (await ask(http, **body, temperature=0, **pinned))["choices"]:
        tokens = tokenizer.encode(text)
        assert choice["text"].startswith(text)
        assert choice["logprobs"]["tokens"][: len(tokens)] == [tokenizer.decode([token]) for token in tokens]
        assert len(choice["logprobs"]["token_logprobs"]) == len(tokens) + 3


async def test_weights_that_are_no_numbers_make_no_tokens(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    await fails_of_no_numbers(http, mixed, client)
    await mixed.witnessed(client)


async def test_openais_client_finds_the_same_with_each(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    base, name = seed_of(await settled(client, mixed)), mixed.first.name
    tokenizer = await asyncio.to_thread(load_tokenizer, mixed.first)
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as caller:
        await openai_calls.models_and_errors(caller, name)
        for engine, instance_id in mixed.ids.items():
            nvext = {"instance_id": instance_id}
            for made in await openai_calls.completions(caller, name, nvext):
                assert made == witnessed(base, len(made)), engine
            await openai_calls.chats(caller, name, nvext, lambda token: tokenizer.decode([token]))
            await openai_calls.stops_and_batches(caller, name, nvext)


async def own_api(engine: str, requests: list[dict[str, Any]], model: Path, tmp: Path) -> list[dict[str, Any]]:
    asked, told, log = (tmp / f"own-{engine}.{end}" for end in ("asked", "told", "log"))
    asked.write_text(json.dumps(requests))
    command = (sys.executable, "-m", "tests.support.own_api", engine, str(model), str(asked), str(told))
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"},
        )
    try:
        async with asyncio.timeout(START_S):
            assert await process.wait() == 0, log.read_text()[-3000:]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    replies: list[dict[str, Any]] = json.loads(told.read_text())
    return replies


async def test_the_engines_generate_the_same_tokens_as_without_the_plane(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    """Called directly, in a process without any of ours: greedy, and where its own seeds do something, sampled."""
    base = mixed.tiny(1)
    await client.run("update_weights", update_of(base, "tiny 1"))
    pick = random.Random(5)
    prompts = [[pick.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (4, 17, 33)]
    greedy = [{"prompt": one, "tokens": TOKENS, "temperature": 0.0, "seed": 1} for one in prompts]
    sampled = [{**one, "temperature": 0.8, "seed": 11 + place} for place, one in enumerate(greedy)]
    asked = {engine: greedy + sampled if engine == "vllm" else greedy for engine in mixed.ids}
    told = await asyncio.gather(*(own_api(*one, base, mixed.plane.tmp) for one in asked.items()))
    for (engine, requests), replies in zip(asked.items(), told, strict=True):
        instance_id = mixed.ids[engine]
        for request, truth in zip(requests, replies, strict=True):
            body = {
                "prompt_token_ids": request["prompt"],
                "max_tokens": TOKENS,
                "temperature": request["temperature"],
                "seed": request["seed"],
                "ignore_eos": True,
                "return_token_ids": True,
                "prompt_logprobs": 0,
                "nvext": {"instance_id": instance_id},
            }
            (choice,) = (await ask(http, **body))["choices"]
            assert choice["token_ids"] == truth["tokens"], (engine, request)
            made = choice["logprobs"]["token_logprobs"]
            assert made == pytest.approx(truth["logprobs"], abs=LOGPROB), engine
            scored = [row and next(iter(row.values()))["logprob"] for row in choice["prompt_logprobs"]]
            assert scored[0] is truth["prompt_logprobs"][0] is None, engine
            assert scored[1:] == pytest.approx(truth["prompt_logprobs"][1:], abs=LOGPROB), engine
    await mixed.witnessed(client)


async def test_an_adapter_gives_the_same_tokens_whole_and_streamed(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    base, adapter = mixed.tiny(1), mixed.adapter(3)
    await client.run("update_weights", update_of(base, "tiny 1"))
    await client.run("load_lora_adapter", {"lora_name": "voice", "lora_path": str(adapter)})
    for engine, instance_id in mixed.ids.items():
        body = {
            "model": "voice",
            "messages": [],
            "prompt_token_ids": PROMPT,
            "max_tokens": TOKENS,
            "n": 2,
            "temperature": 1.0,
            "seed": 3,
            "ignore_eos": True,
            "return_token_ids": True,
            "nvext": {"instance_id": instance_id},
        }
        whole = (await http.post("/v1/chat/completions", json=body)).json()
        response = await http.post("/v1/chat/completions", json={**body, "stream": True})
        *chunks, done = events_of(response.text)
        assert done == "[DONE]", engine
        assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == PROMPT
        parts: list[Any] = [[], []]
        for chunk in chunks:
            (part,) = chunk["choices"]
            parts[part["index"]].append(part)
        seen = []
        for several in ([[one] for one in whole["choices"]], parts):
            for mine in several:
                tokens = [token for part in mine for token in part["token_ids"]]
                rows = [row for part in mine for row in part["logprobs"]["content"]]
                assert [row["token"] for row in rows] == [f"token_id:{token}" for token in tokens], engine
                truth, _ = await asyncio.to_thread(logprobs_of, base, PROMPT, tokens, adapter)
                assert [row["logprob"] for row in rows] == pytest.approx(truth, abs=LOGPROB), engine
                assert mine[-1]["weight_versions"][0]["adapter"]["name"] == "voice", engine
                seen.append(tokens)
        assert {len(tokens) for tokens in seen} == {TOKENS}, engine
        assert seen[:2] == seen[2:], engine
        assert seen[0] != seen[1], engine
    await client.run("unload_lora_adapter", {"lora_name": "voice"})
    await mixed.witnessed(client)


async def test_describe_says_the_same_of_all(mixed: Mixed, client: RlClient) -> None:
    rows = {row["instance_id"]: row for row in (await client.run("describe"))["workers"]}
    told = {engine: rows[one] for engine, one in mixed.ids.items()}
    assert {row["status"] for row in told.values()} == {"ok"}, told
    assert {engine: row["engine"] for engine, row in told.items()} == {engine: engine for engine in ENGINES}
    for key in ("dtype", "vocab_size", "tensors", "weight_bytes", "world_size", "version"):
        assert len({json.dumps(row[key]) for row in told.values()}) == 1, key


async def test_the_page_of_engines_has_what_they_say(mixed: Mixed, client: RlClient) -> None:
    """Else: python docs/generate_engines.py, by a fleet that was started like this one."""
    rows = (await client.run("describe"))["workers"]
    spec = importlib.util.spec_from_file_location("generate_engines", ROOT / "docs" / "generate_engines.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = (ROOT / "docs" / "engines.md").read_text()
    assert page == generate.with_table(page, rows)


async def test_weights_overwritten_in_place_are_served_unless_wrong(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    await client.run("update_weights", update_of(mixed.tiny(1), "tiny 1"))
    await client.run("load_lora_adapter", {"lora_name": "style", "lora_path": str(mixed.adapter(1))})
    await client.run("update_weights", update_of(mixed.tiny(2), "tiny 2", staging="none"))
    await proven(http, mixed, "tiny 2", mixed.tiny(2), ("style", mixed.adapter(1)))
    # What turns out to be another than was said, when it is half-way in, is not kept.
    spoilt = {**update_of(mixed.tiny(1), "spoilt", staging="none"), "digest": "blake3:" + "0" * 64}
    with pytest.raises(PlaneError, match="blake3"):
        await client.run("update_weights", spoilt)
    await mixed.plane.until(lambda: all_serve(client, "tiny 2"), HEAL_S)
    await proven(http, mixed, "tiny 2", mixed.tiny(2), ("style", mixed.adapter(1)))
    await client.run("unload_lora_adapter", {"lora_name": "style"})
    await mixed.witnessed(client)
