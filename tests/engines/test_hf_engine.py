"""The `hf` engine itself, on tiny models: what worker/engines/base.py promises, held against plain forwards."""

from __future__ import annotations

import asyncio
import math
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_runs import models, plain

pytest.importorskip("transformers")

from rl_plane.errors import EngineDied, EngineFailed, InvalidRequest, InvalidWeights, PlaneError, Unsupported
from rl_plane.protocol.generation import GenerateRequest
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.protocol.worker_ops import Tokenize
from rl_plane.weights.checkpoint import write_manifest
from tests.support.engine_runs import ends_while_tokenized, receive, reception
from tests.support.hf_runs import (
    BOUND_S,
    Models,
    Run,
    ask,
    assert_greedy,
    checkpoint,
    freeze_after,
    given_prompt_logprobs,
    hold,
    plain_logprobs,
    plain_prompt_logprobs,
    prompt_of,
    run,
    stage,
    torch,
    version,
    witnessed,
)
from tests.support.reference import logits_of, penalized
from worker.engines.base import EngineInfo, EngineOptions
from worker.engines.capabilities import CanReleaseMemory, require
from worker.engines.common.checkpoint_spec import saved_specs
from worker.engines.common.tokenizing import IncrementalText, eos_tokens, load_tokenizer
from worker.engines.common.torch_weights import ModelWeights
from worker.engines.hf.adapter import HfEngine, build
from worker.engines.hf.streams import HfStream, choose
from worker.receive.staging import TIE_FIX, model_digest
from worker.testing.tiny_model import VOCAB_SIZE, make_tiny_model

__all__ = ["models", "plain"]

pytestmark = pytest.mark.slow

PENALTIES = [(1.5, 0.0, 1.0), (0.0, 1.5, 1.0), (0.0, 0.0, 1.7), (-0.2, 0.5, 1.3)]
"""frequency, presence, repetition"""


Start = Callable[..., Awaitable[HfEngine]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    engines: list[HfEngine] = []

    async def start_one(model: Path, **extra: int) -> HfEngine:
        engine = HfEngine(EngineOptions(model, extra={key: str(value) for key, value in extra.items()}))
        engines.append(engine)
        await engine.start()
        return engine

    yield start_one
    for engine in engines:
        await engine.close()
        await engine.close()


# tokens, logprobs, sampling


async def test_greedy_tokens_and_logprobs_are_those_of_a_plain_forward(
    start: Start, models: Models, plain: Any
) -> None:
    # Small steps and blocks: prompts are prefilled in parts, beside others that decode.
    engine = await start(models.tiny, max_batch_tokens=24, page_size=8, num_blocks=64)
    prompts = [prompt_of(seed, 3 + 11 * seed) for seed in range(6)]
    results = await asyncio.gather(*(run(engine, ask(prompt, logprobs=True)) for prompt in prompts))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.finish == "length"
        assert len(result.tokens) == 16
        assert result.prompt == prompt
        assert_greedy(plain, prompt, result.tokens)
        expected = plain_logprobs(plain, prompt, result.tokens)
        assert result.logprobs == pytest.approx(expected, abs=1e-4)
    silent = await run(engine, ask(prompts[0]))
    assert silent.tokens == results[0].tokens
    assert all(delta.logprobs is None for delta in silent.deltas)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.3}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 2.0, "top_k": 40, "top_p": 0.9}],
)
async def test_logprobs_of_sampled_tokens_are_raw(
    start: Start, models: Models, plain: Any, sampling: dict[str, Any]
) -> None:
    engine = await start(models.tiny)
    prompt = prompt_of(1, 20)
    result = await run(
        engine, ask(prompt, logprobs=True, max_tokens=40, seed=5, **{"temperature": 1.0} | sampling)
    )
    assert result.logprobs == pytest.approx(plain_logprobs(plain, prompt, result.tokens), abs=1e-4)
    assert len(set(result.tokens)) > 5


async def test_prompt_logprobs_are_those_of_a_plain_forward(start: Start, models: Models, plain: Any) -> None:
    # Some prefills are split, and others run beside requests that decode.
    engine = await start(models.tiny, max_batch_tokens=24, page_size=8, num_blocks=128)
    prompts = [prompt_of(seed, 1 + 25 * seed) for seed in range(5)]
    company = [Run(engine, ask(prompts[4], max_tokens=60)), Run(engine, ask(prompts[3], max_tokens=60))]
    await company[0].reach(1)
    sampled: dict[str, Any] = {"temperature": 0.5, "seed": 3, "prompt_logprobs": True}
    results = await asyncio.gather(*(run(engine, ask(prompt, **sampled)) for prompt in prompts))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.prompt == prompt
        assert given_prompt_logprobs(result) == pytest.approx(plain_prompt_logprobs(plain, prompt), abs=1e-4)
        assert all(delta.logprobs is None for delta in result.deltas)
    for prompt, one in zip((prompts[4], prompts[3]), company, strict=True):
        result = await one.end()
        assert_greedy(plain, prompt, result.tokens)
        assert result.deltas[0].prompt_logprobs is None


async def test_scoring_a_prompt_changes_nothing_for_later_requests(
    start: Start, models: Models, plain: Any
) -> None:
    engine = await start(models.tiny, max_batch_tokens=24, page_size=8)
    prompt = prompt_of(1, 70)
    await run(engine, ask(prompt, prompt_logprobs=True))
    later = await run(engine, ask(prompt, logprobs=True))  # finds what the first one computed
    assert later.logprobs == pytest.approx(plain_logprobs(plain, prompt, later.tokens), abs=1e-4)


async def test_a_prompt_is_scored_by_the_weights_of_the_first_token(
    start: Start, models: Models, plain: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    new = make_tiny_model(tmp_path / "new", seed=2)
    plain_new = AutoModelForCausalLM.from_pretrained(new, dtype="auto", local_files_only=True).eval()
    engine = await start(models.tiny, max_batch_tokens=24, page_size=8, num_blocks=128)
    engine.set_version(version(0))
    prompts = [prompt_of(1, 15), prompt_of(2, 100)]
    frozen = freeze_after(engine, 3)
    running = [Run(engine, ask(prompt, prompt_logprobs=True, max_tokens=40)) for prompt in prompts]
    async with asyncio.timeout(BOUND_S):
        await frozen.wait()
    await running[0].reach(1)
    assert running[1].result.tokens == []  # its prefill is under way
    await engine.swap(await stage(engine, new), version(1))
    await engine.resume()
    for one, prompt, model, first in zip(running, prompts, (plain, plain_new), (0, 1), strict=True):
        result = await one.end()
        assert result.spans[0].sequence == first
        assert given_prompt_logprobs(result) == pytest.approx(plain_prompt_logprobs(model, prompt), abs=1e-4)
    assert_greedy(plain_new, prompts[1], running[1].result.tokens)


@pytest.mark.parametrize("in_place", [False, True])
async def test_what_noise_computed_is_behind_no_labelled_token(
    start: Start, models: Models, plain: Any, in_place: bool
) -> None:
    """The noise is neither in a half-computed prompt nor in a request that generated tokens from it."""
    engine = await start(models.tiny, max_batch_tokens=24, page_size=8, num_blocks=128)
    engine.set_version(version(0))
    prompts = [prompt_of(1, 15), prompt_of(2, 100)]
    await engine.pause("keep", False)
    running = [Run(engine, ask(prompt, logprobs=True, max_tokens=40)) for prompt in prompts]
    await engine.liveness()
    assert engine.load() == (0, 2)  # they have come
    for steps in (1, 2):
        frozen = freeze_after(engine, steps)
        await engine.resume()
        async with asyncio.timeout(BOUND_S):
            await frozen.wait()
        if steps == 1:
            await engine.check_weights("reset_tensors")
    await running[0].reach(3)
    assert running[1].result.tokens == []  # its prefill is under way
    if in_place:
        await asyncio.to_thread(engine.holder.overwrite, checkpoint(models.tiny), False, lambda: False)
        engine.set_version(version(1))
    else:
        await engine.swap(await stage(engine, models.tiny), version(1))
    await engine.resume()
    for one, prompt, spans in zip(running, prompts, ([(0, 0, 1), (1, 3, 40)], [(1, 0, 40)]), strict=True):
        result = await one.end()
        assert [(span.sequence, span.start, span.end) for span in result.spans] == spans
        expected, labelled = plain_logprobs(plain, prompt, result.tokens), spans[-1][1]
        assert result.logprobs[labelled:] == pytest.approx(expected[labelled:], abs=1e-4)


async def test_prompt_logprobs_of_a_request_that_ends_before_its_first_token(start: Start, models: Models) -> None:
    engine = await start(models.tiny, max_batch_tokens=24)
    frozen = freeze_after(engine, 2)
    cut = Run(engine, ask(prompt_of(2, 100), prompt_logprobs=True))
    async with asyncio.timeout(BOUND_S):
        await frozen.wait()
    assert await engine.abort(None) == 1
    (last,) = (await cut.end()).deltas
    assert (last.finish_reason, last.token_ids, last.prompt_logprobs) == ("abort", [], None)
    await engine.resume()
    after = await run(engine, ask(prompt_of(2, 100), prompt_logprobs=True, max_tokens=1))
    assert len(given_prompt_logprobs(after)) == 99


async def test_a_seed_gives_the_same_tokens_whatever_else_runs(start: Start, models: Models) -> None:
    engine = await start(models.tiny)

    def seeded(seed: int | None = 11) -> GenerateRequest:
        return ask(prompt_of(1, 9), temperature=1.2, top_p=0.95, seed=seed, max_tokens=30)

    alone = await run(engine, seeded())
    traffic = [
        Run(engine, ask(prompt_of(n, n + 1), temperature=0.9, seed=n, top_k=n % 3, max_tokens=40))
        for n in range(12)
    ]
    await traffic[0].reach(2)
    among = await run(engine, seeded())
    other, unseeded, again = await asyncio.gather(
        run(engine, seeded(12)), run(engine, seeded(None)), run(engine, seeded(None))
    )
    assert among.tokens == alone.tokens
    assert other.tokens != alone.tokens
    assert unseeded.tokens != again.tokens
    for one in traffic:
        await one.end()


def test_the_sampler_follows_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -math.inf])

    def shares(**fields: Any) -> list[float]:
        streams = [
            HfStream(str(seed), ask([1], seed=seed, **{"temperature": 1.0} | fields), [1], frozenset())
            for seed in range(4000)
        ]
        tokens, logprobs = choose(logits.expand(len(streams), -1), streams)
        assert logprobs == pytest.approx([float(logits.log_softmax(-1)[token]) for token in tokens], abs=1e-5)
        return [tokens.count(token) / len(tokens) for token in range(len(logits))]

    def expected(kept: int, temperature: float = 1.0) -> list[float]:
        probs: list[float] = (logits[:kept] / temperature).softmax(-1).tolist()
        return probs + [0.0] * (len(logits) - kept)

    assert shares() == pytest.approx(expected(6), abs=0.03)
    assert shares(temperature=2.0) == pytest.approx(expected(6, 2.0), abs=0.03)
    assert shares(top_k=2) == pytest.approx(expected(2), abs=0.03)
    assert shares(top_k=1) == [1, 0, 0, 0, 0, 0]
    assert shares(top_p=0.5) == [1, 0, 0, 0, 0, 0]  # the first alone has 0.56
    assert shares(top_p=0.7) == pytest.approx(expected(2), abs=0.03)
    assert shares(min_p=0.3) == pytest.approx(expected(2), abs=0.03)  # the second has 0.37 of the first, then 0.22
    assert shares(min_p=0.3, temperature=2.0) == pytest.approx(expected(4, 2.0), abs=0.03)
    assert shares(min_p=1.0) == [1, 0, 0, 0, 0, 0]
    assert shares(temperature=1e-30) == [1, 0, 0, 0, 0, 0]
    assert shares(temperature=0.0) == [1, 0, 0, 0, 0, 0]


# how a request ends, streaming, prompts


async def test_stop_tokens_eos_and_length(start: Start, models: Models) -> None:
    engine = await start(models.witness[1])
    chain = witnessed(1, 9, 8)
    stopped = await run(engine, ask([9], stop_token_ids=[chain[3], 511], max_tokens=8))
    assert (stopped.tokens, stopped.finish) == (chain[:4], "stop")
    # The witness's eos follows itself; from here greedy decoding would go on with it for ever.
    ended = await run(engine, ask([0], ignore_eos=False, max_tokens=8))
    assert (ended.tokens, ended.finish, ended.text) == ([0], "stop", "")
    ignored = await run(engine, ask([0], max_tokens=3))
    assert (ignored.tokens, ignored.finish) == ([0, 0, 0], "length")
    both = await run(engine, ask([9], stop_token_ids=[chain[0]], max_tokens=1))
    assert both.finish == "stop"


async def test_tokens_stream_as_they_come_and_the_text_is_whole(start: Start, models: Models) -> None:
    engine = await start(models.tiny)
    for seed in range(3):  # random tokens: many are parts of characters, or of none
        result = await run(engine, ask(prompt_of(1, 5), temperature=1.0, seed=seed, max_tokens=120))
        assert len(result.deltas) > 20
        assert result.deltas[0].prompt_token_ids == prompt_of(1, 5)
        assert [delta.finish_reason for delta in result.deltas[:-1]] == [None] * (len(result.deltas) - 1)
        assert result.text == load_tokenizer(models.tiny).decode(result.tokens, skip_special_tokens=True)


def test_text_comes_in_whole_characters(models: Models) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.tiny, local_files_only=True)
    text = "naïve 日本語 🙂 \ufffd end 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for seed in range(20):
        pick = random.Random(seed)
        stream, parts, rest = IncrementalText(tokenizer), [], list(ids)
        while rest:
            count = pick.randint(1, 3)
            parts.append(stream.add(rest[:count], last=len(rest) <= count))
            rest = rest[count:]
        assert "".join(parts) == text
        assert "".join(parts).count("\ufffd") == 1
    cut = IncrementalText(tokenizer)
    assert cut.add(ids[:-1], last=False) + cut.add([], last=True) == text[:-1] + "\ufffd"
    ended = [*ids, *tokenizer.encode("<|im_end|>")]
    assert IncrementalText(tokenizer).add(ended, last=True) == text
    assert IncrementalText(tokenizer, skip_special_tokens=False).add(ended, last=True) == f"{text}<|im_end|>"


async def test_stop_strings_cut_the_text_and_end_the_request(start: Start, models: Models) -> None:
    engine = await start(models.tiny)
    sampled = {"temperature": 1.0, "seed": 5, "logprobs": True}
    whole = await run(engine, ask([7], max_tokens=200, **sampled))
    stop = next(part for part in whole.text.split("\ufffd") if len(part) > 2)[:3]
    for include in (False, True):
        asked = ask([7], max_tokens=4000, stop=["\x00", stop], include_stop_str_in_output=include, **sampled)
        cut = await run(engine, asked)
        assert (cut.finish, cut.deltas[-1].stop_string) == ("stop", stop)
        assert cut.text == whole.text[: whole.text.index(stop) + len(stop) * include]
        assert cut.tokens == whole.tokens[: len(cut.tokens)]
        assert len(cut.logprobs) == len(cut.tokens)
    assert await engine.abort(None) == 0
    assert engine.load() == (0, 0)


async def test_text_and_messages_are_prompts_too(start: Start, models: Models) -> None:
    engine = await start(models.tiny)
    encode = load_tokenizer(models.tiny).encode
    text = await run(engine, ask(prompt="hello world"))
    assert text.prompt == encode("hello world", add_special_tokens=False)
    chat = await run(engine, ask(messages=[{"role": "user", "content": "hi"}]))
    assert chat.prompt == encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    # The same without generating.
    messages = [{"role": "user", "content": "hi"}]
    for body, rendered in (
        (Tokenize(prompt="hello world"), "hello world"),
        (Tokenize(messages=messages), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        (Tokenize(messages=messages, add_generation_prompt=False), "<|im_start|>user\nhi<|im_end|>\n"),
        (Tokenize(messages=messages, continue_final_message=True), "<|im_start|>user\nhi"),
    ):
        tokens = await engine.tokenize(body)
        assert tokens == encode(rendered, add_special_tokens=False)
        assert await engine.detokenize(tokens) == rendered
    with pytest.raises(InvalidRequest) as caught:
        await engine.detokenize([VOCAB_SIZE])
    assert caught.value.facts["field"] == "tokens"


async def test_an_abort_ends_a_request_that_is_tokenized_still(
    start: Start, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start(models.tiny)
    await ends_while_tokenized(engine, ask(prompt="hello world"), monkeypatch)
    assert (await run(engine, ask(prompt="hello world"))).finish == "length"


async def test_what_a_request_allows_and_bars(start: Start, models: Models, plain: Any) -> None:
    """Each token is the likeliest of those that are left, and its logprob is the raw one."""
    engine = await start(models.tiny)
    prompt = prompt_of(1, 9)
    free = (await run(engine, ask(prompt))).tokens
    few = sorted({*free, 9, 10, 11})
    eos = eos_tokens(models.tiny, load_tokenizer(models.tiny))
    biases = {str(token): -100.0 if token == free[0] else 3.0 for token in few}
    asked: list[dict[str, Any]] = [
        {"allowed_token_ids": [token for token in few if token != free[0]]},
        {"bad_words_token_ids": [[free[0]], [free[1]]]},
        {"bad_words_token_ids": [[free[0], free[1]], [9] * 40]},
        {"logit_bias": biases},
        {"stop_token_ids": [free[0]], "min_tokens": 3},
        {"allowed_token_ids": few, "logit_bias": biases, "bad_words_token_ids": [[few[-1]]], "min_tokens": 16},
    ]
    results = await asyncio.gather(
        run(engine, ask(prompt, max_tokens=16)),
        *(run(engine, ask(prompt, logprobs=True, **fields)) for fields in asked),
    )
    assert results[0].tokens == free
    for fields, result in zip(asked, results[1:], strict=True):
        assert result.logprobs == pytest.approx(plain_logprobs(plain, prompt, result.tokens), abs=1e-4)
        assert result.tokens != free
        with torch.no_grad():
            rows = plain(torch.tensor([prompt + result.tokens])).logits[0, len(prompt) - 1 : -1].float()
        for place, (row, token) in enumerate(zip(rows, result.tokens, strict=True)):
            left = set(fields.get("allowed_token_ids", range(VOCAB_SIZE)))
            for *before, last in fields.get("bad_words_token_ids", ()):
                if result.tokens[:place][place - len(before) :] == before and place >= len(before):
                    left.discard(last)
            if place < fields.get("min_tokens", 0):
                left -= {*fields.get("stop_token_ids", ()), *eos}
            scores = {one: float(row[one]) + fields.get("logit_bias", {}).get(str(one), 0.0) for one in left}
            assert scores[token] > max(scores.values()) - 1e-4
    assert results[2].tokens[1] == free[0] or free[0] not in results[2].tokens


async def test_the_likeliest_tokens(start: Start, models: Models, plain: Any) -> None:
    engine = await start(models.tiny)
    prompt = prompt_of(1, 9)
    sampled = {"temperature": 1.0, "seed": 3, "logprobs": True, "logit_bias": {"9": 50.0}}
    result, few = await asyncio.gather(
        run(engine, ask(prompt, top_logprobs=5, **sampled)), run(engine, ask(prompt, top_logprobs=2, **sampled))
    )
    tops = [top for delta in result.deltas for top in delta.top_logprobs or []]
    rows = logits_of(models.tiny, prompt, result.tokens).log_softmax(-1)
    for row, top in zip(rows, tops, strict=True):
        values, tokens = row.topk(5)
        assert [token for token, _ in top] == tokens.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-4)
    assert [[token for token, _ in top[:2]] for top in tops] == [
        [token for token, _ in top] for delta in few.deltas for top in delta.top_logprobs or []
    ]


@pytest.mark.parametrize("penalties", PENALTIES)
async def test_penalties(start: Start, models: Models, plain: Any, penalties: tuple[float, float, float]) -> None:
    engine = await start(models.tiny)
    prompt = prompt_of(1, 9)
    free = (await run(engine, ask(prompt, max_tokens=40))).tokens
    frequency, presence, repetition = penalties
    fields = {"frequency_penalty": frequency, "presence_penalty": presence, "repetition_penalty": repetition}
    result = await run(engine, ask(prompt, max_tokens=40, logprobs=True, **fields))
    assert result.tokens != free
    assert result.logprobs == pytest.approx(plain_logprobs(plain, prompt, result.tokens), abs=1e-4)
    rows = logits_of(models.tiny, prompt, result.tokens)
    for place, token in enumerate(result.tokens):
        scores = penalized(rows[place], prompt, result.tokens[:place], *penalties)
        assert scores[token] > max(scores) - 1e-4


async def test_the_end_of_a_prompt(start: Start, models: Models) -> None:
    engine = await start(models.tiny, max_model_len=64)
    long = prompt_of(2, 100)
    cut = await run(engine, ask(long, truncate_prompt_tokens=20))
    assert cut.prompt == long[-20:]
    assert cut.tokens == (await run(engine, ask(long[-20:]))).tokens


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
        ({}, "prompt"),
        ({"prompt_token_ids": [1, VOCAB_SIZE]}, "prompt_token_ids"),
        ({"prompt": "a", "stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"prompt_token_ids": [5] * 60, "max_tokens": 5}, "max_tokens"),
        ({"messages": ["no message"]}, None),
        ({"messages": [{"nonsense": 1}], "max_tokens": 64}, "max_tokens"),
    ],
)
async def test_bad_requests_never_reach_the_engine(
    start: Start, models: Models, fields: dict[str, Any], field: str | None
) -> None:
    engine = await start(models.tiny, max_model_len=64)
    with pytest.raises((InvalidRequest, ValueError)) as caught:
        await run(engine, GenerateRequest(id="bad", **fields))
    if field is not None:
        assert isinstance(caught.value, InvalidRequest)
        assert caught.value.facts["field"] == field
        assert caught.value.facts["fix"]
    assert engine.load() == (0, 0)
    fits = await run(engine, ask([5] * 59, max_tokens=5))
    assert len(fits.tokens) == 5


async def test_an_id_is_used_by_one_request_at_a_time(start: Start, models: Models) -> None:
    engine = await start(models.tiny)
    await engine.pause("keep", clear_cache=False)
    first = Run(engine, ask([1], id="same"))
    await engine.liveness()
    assert engine.load() == (0, 1)
    with pytest.raises(InvalidRequest, match="same"):
        await run(engine, ask([1], id="same"))
    await engine.resume()
    assert (await first.end()).finish == "length"
    assert (await run(engine, ask([1], id="same"))).finish == "length"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"extra": {"blocks": "3"}}, "engine_arg.blocks"),
        ({"extra": {"num_blocks": "many"}}, "engine_arg.num_blocks"),
        ({"extra": {"page_size": "2"}}, "engine_arg.page_size"),
        ({"dtype": "int8"}, "dtype"),
        ({"model": Path("/nowhere")}, "model"),
        ({"deterministic": True}, "deterministic"),
        ({"memory_saver": True}, "enable_memory_saver"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    models: Models, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(EngineOptions(**{"model": models.tiny} | options))
    assert caught.value.facts["field"] == field


async def test_the_engine_tells_what_it_is(models: Models) -> None:
    engine = build(EngineOptions(models.tiny, dtype="bfloat16", device="cpu", extra={"num_blocks": "8"}))
    with pytest.raises(EngineFailed):
        await engine.liveness()
    info: EngineInfo = await engine.start()
    assert (info.engine, info.model, info.dtype, info.device) == ("hf", "tiny", "bfloat16", "cpu")
    assert (info.world_size, info.vocab_size, info.max_model_len) == (1, VOCAB_SIZE, 8 * 32)
    assert info.capabilities.keys() >= {"release_memory", "resume_memory"}
    with pytest.raises(Unsupported, match="can't release_memory"):
        require(engine, CanReleaseMemory)
    assert set(engine.weight_spec().values()) >= {TensorSpec("BF16", (VOCAB_SIZE, 128))}
    await engine.close()
    with pytest.raises(EngineFailed):
        await engine.liveness()
    too_long = build(EngineOptions(models.tiny, extra={"num_blocks": "2", "max_model_len": "65"}))
    with pytest.raises(InvalidRequest):
        await too_long.start()


# abort, pause, liveness, death


async def test_abort_ends_some_or_all_with_their_tokens(start: Start, models: Models) -> None:
    engine = await start(models.witness[1])
    runs = [Run(engine, ask([n + 1], id=f"a{n}", max_tokens=4000)) for n in range(3)]
    for one in runs:
        await one.reach(5)
    assert await engine.abort(["a1", "a1", "unknown"]) == 1
    ended = await runs[1].end()
    assert ended.finish == "abort"
    assert ended.tokens == witnessed(1, 2, len(ended.tokens))
    assert engine.load()[0] == 2
    assert await engine.abort(None) == 2
    for one in runs:
        assert (await one.end()).finish == "abort"
    assert engine.load() == (0, 0)
    assert await engine.abort(None) == 0


async def test_closing_the_iterator_ends_the_request_in_the_engine(start: Start, models: Models) -> None:
    engine = await start(models.tiny)
    stream = engine.generate(ask([1], max_tokens=4000))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    cancelled = Run(engine, ask([2], max_tokens=4000))
    await cancelled.reach(1)
    await cancelled.cancel()
    await engine.liveness()  # commands run in order: the aborts are done
    assert engine.loop.running() == 0
    assert engine.load() == (0, 0)


async def test_a_full_cache_evicts_and_goes_on_and_aborts_leave_nobody_stuck(start: Start, models: Models) -> None:
    # 40 blocks of 4 tokens; each of the ten needs 26 in the end.
    engine = await start(models.witness[1], num_blocks=40, page_size=4, max_batch_tokens=32)
    engine.set_version(version(0))
    runs = [Run(engine, ask([n + 1] * 4, max_tokens=100)) for n in range(10)]
    for n, result in enumerate([await one.end() for one in runs]):
        assert result.tokens == witnessed(1, n + 1, 100)
        assert [(span.start, span.end) for span in result.spans] == [(0, 100)]
    runs = [Run(engine, ask([n + 1] * 4, id=f"b{n}", max_tokens=150)) for n in range(10)]
    scheduler = engine.loop.batch_processor.scheduler
    async with asyncio.timeout(BOUND_S):
        while not scheduler.block_new_requests:  # noqa: ASYNC110  until requests are evicted, which nobody tells
            await asyncio.sleep(0)
    await engine.pause("keep", clear_cache=False)
    # The first token of a prompt is the number of its request, counted from 1.
    active = [f"b{state.initial_tokens[0] - 1}" for state in scheduler.active_requests.values()]
    assert 0 < len(active) < 10
    assert await engine.abort(active) == len(active)
    await engine.resume()
    results = [await one.end() for one in runs]
    assert sorted(result.finish or "" for result in results) == ["abort"] * len(active) + ["length"] * (
        10 - len(active)
    )


async def test_pause_keep_freezes_between_two_tokens_and_resume_goes_on(start: Start, models: Models) -> None:
    engine = await start(models.witness[1])
    one = Run(engine, ask([7], max_tokens=300))
    await one.reach(10)
    await engine.pause("keep", clear_cache=False)
    await engine.pause("keep", clear_cache=True)
    await engine.liveness()
    frozen = len(one.result.tokens)
    late = Run(engine, ask([8], max_tokens=20))
    for _ in range(20):
        async with asyncio.timeout(BOUND_S):
            await engine.liveness()
    assert len(one.result.tokens) == frozen < 300
    assert late.result.tokens == []
    assert engine.load() == (1, 1)
    await engine.resume()
    await engine.resume()
    assert (await one.end()).tokens == witnessed(1, 7, 300)
    assert (await late.end()).tokens == witnessed(1, 8, 20)


async def test_pause_wait_lets_the_running_end_and_holds_the_new(start: Start, models: Models) -> None:
    engine = await start(models.tiny)
    one = Run(engine, ask([7], max_tokens=200))
    await one.reach(1)
    waiting = asyncio.create_task(engine.pause("wait", clear_cache=False))
    await engine.liveness()
    late = Run(engine, ask([8]))
    async with asyncio.timeout(BOUND_S):
        await waiting
    assert len((await one.end()).tokens) == 200
    await engine.liveness()
    assert late.result.tokens == []
    async with asyncio.timeout(BOUND_S):
        await engine.pause("wait", clear_cache=True)  # nothing runs: at once
    await engine.resume()
    assert len((await late.end()).tokens) == 16


async def test_a_cancelled_wait_leaves_the_engine_running(start: Start, models: Models) -> None:
    engine = await start(models.tiny)
    one = Run(engine, ask([7], max_tokens=2000))
    await one.reach(1)
    waiting = asyncio.create_task(engine.pause("wait", clear_cache=False))
    await engine.liveness()
    late = Run(engine, ask([8]))
    await engine.liveness()
    assert late.result.tokens == []
    waiting.cancel()
    await asyncio.wait([waiting], timeout=BOUND_S)
    assert waiting.cancelled()
    assert len((await late.end()).tokens) == 16
    assert not one.has_ended
    await one.cancel()


@pytest.mark.parametrize("was_frozen", [False, True])
async def test_a_pause_that_is_cancelled_leaves_the_engine_as_it_was(
    start: Start, models: Models, monkeypatch: pytest.MonkeyPatch, was_frozen: bool
) -> None:
    """The deadline of a pause cancels it during a long step, when it has frozen the engine already."""
    engine = await start(models.witness[1])
    loop: Any = engine.loop
    one = Run(engine, ask([7], max_tokens=300))
    await one.reach(1)
    if was_frozen:
        await engine.pause("keep", clear_cache=False)
    freeze, done, goes_on = loop.freeze, threading.Event(), threading.Event()

    def slow() -> None:
        freeze()
        done.set()
        assert goes_on.wait(BOUND_S)

    monkeypatch.setattr(loop, "freeze", slow)
    pausing = asyncio.create_task(engine.pause("keep", clear_cache=True))
    assert await asyncio.to_thread(done.wait, BOUND_S)
    monkeypatch.undo()
    pausing.cancel()
    await asyncio.wait([pausing], timeout=BOUND_S)
    assert pausing.cancelled()
    goes_on.set()
    await engine.liveness()
    if was_frozen:
        held = len(one.result.tokens)
        for _ in range(10):
            await engine.liveness()
        assert len(one.result.tokens) == held < 300
        await engine.resume()
    assert (await one.end()).tokens == witnessed(1, 7, 300)


@pytest.mark.parametrize("was_frozen", [False, True])
async def test_a_pause_that_fails_leaves_the_engine_as_it_was(
    start: Start, models: Models, monkeypatch: pytest.MonkeyPatch, was_frozen: bool
) -> None:
    engine = await start(models.witness[1])
    loop: Any = engine.loop
    if was_frozen:
        await engine.pause("keep", clear_cache=False)

    def no_abort(streams: None) -> int:
        raise RuntimeError("no abort")

    with monkeypatch.context() as patched:
        patched.setattr(loop, "abort", no_abort)
        with pytest.raises(EngineFailed, match="no abort"):
            await engine.pause("abort", clear_cache=False)
    await engine.liveness()
    assert loop.frozen is was_frozen
    if was_frozen:
        await engine.resume()
    assert (await run(engine, ask([7]))).tokens == witnessed(1, 7, 16)


async def test_waits_and_other_pauses(start: Start, models: Models) -> None:
    engine = await start(models.witness[1])
    one = Run(engine, ask([7], max_tokens=2000))
    await one.reach(1)
    await engine.pause("keep", clear_cache=False)
    held = Run(engine, ask([8]))
    # From `keep`, a wait lets the frozen ones go on; cancelled, it leaves them frozen again.
    waiting = asyncio.create_task(engine.pause("wait", clear_cache=False))
    await one.reach(len(one.result.tokens) + 20)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=BOUND_S)
    await engine.liveness()
    frozen = len(one.result.tokens)
    for _ in range(10):
        await engine.liveness()
    assert len(one.result.tokens) == frozen < 2000
    assert held.result.tokens == []
    # A resume in the middle of a wait ends it.
    waiting = asyncio.create_task(engine.pause("wait", clear_cache=False))
    await engine.liveness()
    await engine.resume()
    with pytest.raises(EngineFailed, match="resume"):
        async with asyncio.timeout(BOUND_S):
            await waiting
    assert (await held.end()).tokens == witnessed(1, 8, 16)
    assert await engine.abort(None) == 1
    result = await one.end()
    assert result.tokens == witnessed(1, 7, len(result.tokens))


async def test_pause_abort_ends_all(start: Start, models: Models) -> None:
    engine = await start(models.tiny)
    runs = [Run(engine, ask([n + 1], max_tokens=4000)) for n in range(3)]
    for one in runs:
        await one.reach(1)
    await engine.pause("abort", clear_cache=True)
    for one in runs:
        assert (await one.end()).finish == "abort"
    late = Run(engine, ask([1]))
    await engine.liveness()
    assert late.result.tokens == []
    await engine.resume()
    assert len((await late.end()).tokens) == 16


async def test_a_dead_generation_thread_fails_everything_at_once(start: Start, models: Models) -> None:
    engine = await start(models.tiny)
    one = Run(engine, ask([7], max_tokens=4000))
    await one.reach(3)
    waiting = asyncio.create_task(engine.pause("wait", clear_cache=False))
    await engine.liveness()
    held = Run(engine, ask([8]))

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the device is gone")

    engine.model.forward = broken
    for failing in (one.end(), held.end(), waiting, engine.liveness(), engine.abort(None), engine.resume()):
        with pytest.raises(EngineDied, match="device is gone"):
            async with asyncio.timeout(BOUND_S):
                await failing
    with pytest.raises(EngineFailed):
        await run(engine, ask([1]))
    assert len(one.result.tokens) >= 3


async def test_logits_that_are_no_numbers_fail_their_requests_and_not_the_engine(
    start: Start, models: Models, plain: Any
) -> None:
    engine = await start(models.tiny, page_size=4)
    embedding = engine.model.model.embed_tokens.weight
    kept = embedding[77].clone()
    with torch.no_grad():
        embedding[77] = math.nan
    prompt = prompt_of(4, 30)
    results = await asyncio.gather(
        run(engine, ask([*prompt, 77], temperature=1.0)), run(engine, ask(prompt)), return_exceptions=True
    )
    assert isinstance(results[0], EngineFailed)
    assert "finite" in results[0].message
    assert engine.load() == (0, 0)
    with torch.no_grad():
        embedding[77] = kept
    for ids in (prompt, [*prompt, 77]):
        result = await run(engine, ask(ids, logprobs=True))
        assert result.logprobs == pytest.approx(plain_logprobs(plain, ids, result.tokens), abs=1e-4)


async def test_closing_ends_what_runs(start: Start, models: Models) -> None:
    engine = await start(models.tiny)
    one = Run(engine, ask([7], max_tokens=4000))
    await one.reach(3)
    loop = engine.loop
    await engine.close()
    assert loop.join_thread(0.0), "the generation thread has ended"
    with pytest.raises(EngineFailed, match="closed"):
        await one.end()
    with pytest.raises(EngineFailed):
        await run(engine, ask([1]))
    again = await start(models.tiny)
    assert (await run(again, ask([7]))).tokens[:3] == one.result.tokens[:3]


# weights


async def test_a_swap_in_mid_stream_takes_effect_between_two_tokens(start: Start, models: Models) -> None:
    engine = await start(models.witness[1])
    engine.set_version(version(0))
    stagings = [await stage(engine, models.witness[1 + round_ % 2]) for round_ in range(1, 4)]
    runs = [Run(engine, ask([n + 20], max_tokens=400)) for n in range(4)]
    for round_, staged in enumerate(stagings, 1):
        for one in runs:
            await one.reach(60 * round_)
        await engine.pause("keep", clear_cache=False)
        assert await engine.swap(staged, version(round_)) is True
        await engine.liveness()
        await engine.resume()
    for n, one in enumerate(runs):
        result = await one.end()
        assert [span.sequence for span in result.spans] == [0, 1, 2, 3]
        assert [span.version for span in result.spans] == ["step_0", "step_1", "step_2", "step_3"]
        assert [span.start for span in result.spans] == [0] + [span.end for span in result.spans[:-1]]
        assert result.spans[-1].end == len(result.tokens) == 400
        before = n + 20
        for span in result.spans:
            assert span.end > span.start
            assert span.sequence is not None
            made = result.tokens[span.start : span.end]
            assert made == witnessed(1 + span.sequence % 2, before, len(made))
            before = made[-1]
    after = await run(engine, ask([3]))
    assert after.tokens == witnessed(2, 3, 16)
    assert [(span.sequence, span.start, span.end) for span in after.spans] == [(3, 0, 16)]
    with pytest.raises(EngineFailed):
        await engine.swap(staged, version(9))  # used once


async def test_after_a_swap_a_prompt_is_computed_again(start: Start, models: Models, plain: Any) -> None:
    """The KV of a prompt decides the logprobs: with one block of the old weights they would be far off."""
    engine = await start(models.witness[1], page_size=4)
    engine.set_version(version(0))
    prompt = prompt_of(1, 30)
    old = Run(engine, ask(prompt, max_tokens=200, logprobs=True))
    await old.reach(20)
    staged = await stage(engine, models.tiny)
    await engine.pause("keep", clear_cache=False)
    assert await engine.swap(staged, version(1)) is True
    before = len(old.result.tokens)
    await engine.resume()
    await old.reach(min(before + 60, 200))
    # The running request has blocks of both weights for all tokens of the second prompt.
    for following in (prompt, prompt + old.result.tokens[: before + 40]):
        result = await run(engine, ask(following, logprobs=True))
        assert result.logprobs == pytest.approx(plain_logprobs(plain, following, result.tokens), abs=1e-4)
    await old.end()
    assert await engine.flush_cache() is True


async def test_staging_checks_and_copies(start: Start, models: Models) -> None:
    engine = await start(models.tiny)
    good = dict(checkpoint(models.tiny))
    name = "lm_head.weight"
    assert dict(engine.weight_spec()) == {key: tensor.spec for key, tensor in good.items()}
    assert engine.holder.tied_tensors() == {}

    def staging(tensors: dict[str, HostTensor], cast: bool = False) -> str:
        return hold(engine, iter(tensors.items()), cast)

    with pytest.raises(InvalidWeights, match=name):
        staging({key: tensor for key, tensor in good.items() if key != name})
    with pytest.raises(InvalidWeights):
        staging({**good, "more.weight": good[name]})
    with pytest.raises(InvalidWeights):
        staging({**good, name: good["model.norm.weight"]})
    half = dict(checkpoint(models.tiny, torch.bfloat16))
    with pytest.raises(InvalidWeights, match="BF16"):
        staging(half)
    with pytest.raises(EngineFailed, match="cancelled"):
        engine.holder.stage(iter(good.items()), False, lambda: True)

    # A transport may use its buffer again as soon as the next tensor is asked for.
    def reused() -> Iterator[tuple[str, HostTensor]]:
        buffer = bytearray(max(tensor.spec.nbytes for tensor in good.values()))
        for key, tensor in good.items():
            buffer[: tensor.spec.nbytes] = tensor.data
            yield key, HostTensor(tensor.spec, memoryview(buffer)[: tensor.spec.nbytes])
        buffer[:] = b"\xff" * len(buffer)

    before = await engine.check_weights("checksum")
    await engine.swap(hold(engine, reused()), version(1))
    assert await engine.check_weights("checksum") == before
    await engine.swap(staging(half, cast=True), version(2))
    assert await engine.check_weights("checksum") != before
    spare = staging(good)
    await engine.discard(spare)
    with pytest.raises(EngineFailed):
        await engine.swap(spare, version(3))


async def test_the_model_does_not_follow_its_file(start: Start, models: Models, tmp_path: Path) -> None:
    path = shutil.copytree(models.witness[1], tmp_path / "model")
    engine = await start(path)
    before = await engine.check_weights("checksum")
    os.truncate(path / "model.safetensors", 100)
    assert await engine.check_weights("checksum") == before
    assert (await run(engine, ask([3]))).tokens == witnessed(1, 3, 16)


async def test_checks_see_every_change(start: Start, models: Models) -> None:
    engine = await start(models.tiny)
    twin = await start(models.tiny)
    with pytest.raises(PlaneError):
        await engine.check_weights("compare")
    (row,) = await engine.check_weights("checksum")
    assert row["rank"] == 0
    assert [row] == await twin.check_weights("checksum")
    await engine.check_weights("snapshot")
    assert await engine.check_weights("compare") == [{"rank": 0, "match": True, "mismatches": []}]
    with torch.no_grad():
        engine.model.model.norm.weight[3] += 1e-6
    assert await engine.check_weights("compare") == [
        {"rank": 0, "match": False, "mismatches": ["model.norm.weight"]}
    ]
    assert await engine.check_weights("checksum") != [row]
    await engine.check_weights("reset_tensors")
    (compared,) = await engine.check_weights("compare")
    assert set(compared["mismatches"]) == set(engine.weight_spec())
    await engine.liveness()
    await engine.swap(await stage(engine, models.tiny), version(1))
    assert await engine.check_weights("compare") == [{"rank": 0, "match": True, "mismatches": []}]


@pytest.mark.parametrize("in_place", [False, True])
async def test_what_the_model_ties_comes_as_one(start: Start, tmp_path: Path, in_place: bool) -> None:
    """Without the other name the tensor would belong to the version, but no engine would serve it."""
    from safetensors.torch import load_file, save_file

    old, new = (make_tiny_model(tmp_path / f"{seed}", seed, tie_word_embeddings=True) for seed in (1, 2))
    engine = await start(old)
    checksum = await engine.check_weights("checksum")
    tensors = load_file(new / "model.safetensors")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    assert head not in tensors

    async def send(name: str, given: dict[str, Any], *, stated: bool = False) -> str:
        path = old / name  # beneath what may be read
        path.mkdir()
        save_file(given, path / "model.safetensors")
        if stated:
            write_manifest(path)
        staging, reply = await receive(engine, reception(path, in_place=in_place))
        assert reply["digest"] == model_digest(path)
        return staging

    await engine.pause("keep", False)
    other = {**tensors, head: tensors[embedding] + 1}
    for stated in (False, True):
        with pytest.raises(InvalidWeights, match=f"to '{embedding}', but they differ") as caught:
            await send(f"other, {stated}", other, stated=stated)
        assert (caught.value.facts["field"], caught.value.facts["fix"]) == (head, TIE_FIX)
        changed = await engine.check_weights("checksum") != checksum
        assert changed == (in_place and not stated), "only what is stated is known before a byte is written"
        if changed:
            await receive(engine, reception(old, in_place=True))
            assert await engine.check_weights("checksum") == checksum
    for name, wrong in {
        "shape": torch.zeros(3, 3, dtype=torch.int8),
        "dtype": tensors[embedding].view(torch.int32).clone(),
    }.items():
        with pytest.raises(InvalidWeights, match="they differ") as caught:
            await send(name, {**tensors, head: wrong})
        assert caught.value.facts["field"] == head
    with pytest.raises(InvalidWeights, match="1 missing"):
        await send("alone", {head if name == embedding else name: one for name, one in tensors.items()})
    assert await engine.check_weights("checksum") == checksum
    # As older checkpoints have them.
    staging = await send("both", {**tensors, head: tensors[embedding].clone()})
    if not in_place:
        await engine.swap(staging, version(1))
    await engine.resume()
    assert torch.equal(engine.model.lm_head.weight, tensors[embedding])


async def test_a_model_whose_head_is_not_what_its_config_ties_it_to_is_served_as_it_lies_there(
    start: Start, tmp_path: Path
) -> None:
    """transformers does not tie it then: its digest is true, and the engine starts."""
    from safetensors.torch import load_file, save_file

    path = make_tiny_model(tmp_path / "model", 1, tie_word_embeddings=True)
    file, head = path / "model.safetensors", "lm_head.weight"
    tensors = load_file(file)
    own = tensors["model.embed_tokens.weight"] + 1
    save_file({**tensors, head: own}, file, {"format": "pt"})
    engine = await start(path)
    assert torch.equal(engine.model.lm_head.weight, own)
    assert model_digest(path, tied=engine.info.tied) == model_digest(path)
    assert head in engine.weight_spec()


@pytest.mark.parametrize("tied", [False, True])
def test_fused_and_tied_weights_keep_their_checkpoint_names(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    for seed in (1, 2):
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / str(seed))
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / seed).eval() for seed in "12")
    weights = ModelWeights(one)
    assert dict(weights.spec) == {key: tensor.spec for key, tensor in checkpoint(tmp_path / "2")}
    assert weights.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert not torch.allclose(one(ids).logits, two(ids).logits)
        weights.load(weights.stage(checkpoint(tmp_path / "2"), False, lambda: False))
        assert torch.equal(one(ids).logits, two(ids).logits)
    assert weights.checks.checksum() == ModelWeights(two).checks.checksum()


def test_a_tensor_that_the_model_keeps_wider_is_taken_as_it_was_saved_and_never_rounded(tmp_path: Path) -> None:
    """The biases of GLM-4-MoE's routers are float32 in a bfloat16 model. One directory has one of them in bfloat16."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from tests.support.moe import make_glm_moe

    file = make_glm_moe(tmp_path / "moe", 1) / "model.safetensors"
    bias, narrow = (f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2))
    exact = load_file(file)
    save_file({**exact, narrow: exact[narrow].bfloat16()}, file, metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype="auto", local_files_only=True)
    weights = ModelWeights(model, saved_specs(file.parent))
    types = {name: spec.dtype for name, spec in weights.spec.items() if spec.dtype != "BF16"}
    assert types == {bias: "F32"}
    assert weights.stage(checkpoint(file.parent), False, lambda: False).tensors.keys() == exact.keys()
    wide = {name: tensor.to(torch.float32) for name, tensor in exact.items()}
    save_file(wide, file, metadata={"format": "pt"})
    weights.load(weights.stage(checkpoint(file.parent), True, lambda: False))
    held = model.state_dict()
    assert all(torch.equal(held[name], exact[name]) for name in (bias, narrow))


def test_a_head_that_the_checkpoint_calls_otherwise_is_tied_all_the_same(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**shape, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64}
    config = Gemma3Config(text_config=text, vision_config={**shape, "image_size": 28, "patch_size": 14})
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    file, head = tmp_path / "model.safetensors", "language_model.lm_head.weight"
    tensors, embedding = load_file(file), "language_model.model.embed_tokens.weight"
    save_file({**tensors, head: tensors[embedding].clone()}, file, metadata={"format": "pt"})
    weights = ModelWeights(AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True))
    assert weights.tied == {head: embedding}
    assert weights.spec.keys() == tensors.keys()
