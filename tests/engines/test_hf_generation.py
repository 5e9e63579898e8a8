"""The generation of the `hf` engine, on tiny models: what worker/engines/base.py promises, against plain forwards."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_plane.errors import EngineFailed, InvalidRequest, Unsupported
from rl_plane.protocol.generation import GenerateRequest
from rl_plane.protocol.pooling import Task
from rl_plane.protocol.versions import TensorSpec
from rl_plane.protocol.worker_ops import Tokenize
from tests.support.engine_runs import ends_while_tokenized
from tests.support.hf_engines import Start, start
from tests.support.hf_runs import (
    BOUND_S,
    Models,
    Run,
    ask,
    assert_greedy,
    checkpoint,
    freeze_after,
    given_prompt_logprobs,
    models,
    plain,
    plain_logprobs,
    plain_prompt_logprobs,
    prompt_of,
    run,
    stage,
    version,
    witnessed,
)
from tests.support.lacking_files import without
from tests.support.reference import logits_of, penalized, prompt_logprobs
from worker.engines.base import EngineInfo, EngineOptions
from worker.engines.capabilities import CanReleaseMemory, require
from worker.engines.common.scoring import LOGPROB_FLOOR
from worker.engines.common.tokenizing import IncrementalText, eos_tokens, load_tokenizer
from worker.testing.tiny_model import VOCAB_SIZE, make_tiny_model

__all__ = ["models", "plain", "start"]

pytestmark = pytest.mark.slow

PENALTIES = [(1.5, 0.0, 1.0), (0.0, 1.5, 1.0), (0.0, 0.0, 1.7), (-0.2, 0.5, 1.3)]
"""frequency, presence, repetition"""


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


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        ({"temperature": 0.7}, None),
        ({"temperature": 0.7, "top_k": 3}, 3),
        ({"temperature": 0.7, "top_p": 1e-9}, 1),
        ({"temperature": 0.7, "min_p": 1.0}, 1),
        ({"temperature": 0.7, "logit_bias": {"9": 6.0}}, None),
        ({"temperature": 0.7, "allowed_token_ids": [9, 10, 11]}, 3),
        ({"temperature": 0.0}, None),
    ],
)
async def test_processed_logprobs_are_of_the_logits_that_tokens_are_drawn_from(
    models: Models, sampling: dict[str, Any], left: int | None
) -> None:
    from worker.engines.hf.adapter import build

    engine: Any = build(EngineOptions(models.tiny, logprobs_mode="processed_logprobs"))
    info = await engine.start()
    prompt = prompt_of(1, 20)
    try:
        asked = ask(prompt, logprobs=True, top_logprobs=5, prompt_logprobs=True, max_tokens=40, seed=5, **sampling)
        company = ask(prompt, temperature=2.0, max_tokens=40)
        result, _ = await asyncio.gather(run(engine, asked), run(engine, company))
        (scores,) = await engine.score([prompt])
    finally:
        await engine.close()
    assert info.logprobs_mode == "processed_logprobs"
    expected = prompt_logprobs(models.tiny, prompt)
    assert given_prompt_logprobs(result) == pytest.approx(expected, abs=1e-4)
    assert scores == pytest.approx(expected, abs=1e-4)
    rows = logits_of(models.tiny, prompt, result.tokens)
    for token, bias in sampling.get("logit_bias", {}).items():
        rows[:, int(token)] += bias
    if allowed := sampling.get("allowed_token_ids"):
        rows[:, [token for token in range(VOCAB_SIZE) if token not in allowed]] = -math.inf
    if left is not None:
        rows = rows.masked_fill(rows < rows.topk(left).values[:, -1:], -math.inf)
    rows = (rows / (sampling["temperature"] or 1.0)).log_softmax(-1)
    made = [float(row[token]) for row, token in zip(rows, result.tokens, strict=True)]
    assert result.logprobs == pytest.approx(made, abs=1e-4)
    tops = [top for delta in result.deltas for top in delta.top_logprobs or []]
    for row, top in zip(rows, tops, strict=True):
        likeliest = [max(float(value), LOGPROB_FLOOR) for value in row.topk(5).values]
        assert [value for _, value in top] == pytest.approx(likeliest, abs=1e-4)


async def test_a_barred_token_whose_logit_is_no_number_ends_the_request(models: Models) -> None:
    from worker.engines.hf.adapter import build

    engine: Any = build(EngineOptions(models.tiny, logprobs_mode="processed_logprobs"))
    await engine.start()
    try:
        with torch.no_grad():
            engine.model.lm_head.weight[77] = math.nan
        with pytest.raises(EngineFailed, match="finite"):
            await run(engine, ask([5, 6], allowed_token_ids=[1, 2, 3]))
    finally:
        await engine.close()


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


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB_SIZE])
async def test_the_likeliest_tokens_of_a_prompt_are_those_of_a_plain_forward(
    start: Start, models: Models, plain: Any, count: int
) -> None:
    engine = await start(models.tiny, max_batch_tokens=24, page_size=8)
    prompt = prompt_of(1, 70)
    result = await run(engine, ask(prompt, prompt_logprobs=True, prompt_top_logprobs=count, max_tokens=2))
    first, *later = result.deltas
    assert all(delta.prompt_tops is None for delta in later)
    assert first.prompt_tops is not None
    with torch.no_grad():
        truth = plain(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    for place, token, row in zip(first.prompt_tops.rows(), prompt[1:], truth, strict=True):
        ids, values = [one for one, _ in place.tops], [value for _, value in place.tops]
        assert values == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
        assert values == pytest.approx(row[ids].tolist(), abs=1e-4)
        assert abs((place.rank or 0) - int((row >= row[token]).sum())) <= 1  # a tie may round to either side
        assert len(set(ids)) == count
    with pytest.raises(InvalidRequest) as caught:
        await run(engine, ask(prompt, prompt_logprobs=True, prompt_top_logprobs=VOCAB_SIZE + 1))
    assert caught.value.facts["field"] == "prompt_top_logprobs"


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
async def test_no_labelled_token_depends_on_weights_of_noise(
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
        await asyncio.to_thread(engine.holder.overwrite, checkpoint(models.tiny), lambda: False)
        engine.set_version(version(1))
    else:
        await engine.swap(await stage(engine, models.tiny), version(1))
    await engine.resume()
    for one, prompt, spans in zip(running, prompts, ([(0, 0, 1), (1, 3, 40)], [(1, 0, 40)]), strict=True):
        result = await one.end()
        assert [(span.sequence, span.start, span.end) for span in result.spans] == spans
        expected, labelled = plain_logprobs(plain, prompt, result.tokens), spans[-1][1]
        assert result.logprobs[labelled:] == pytest.approx(expected[labelled:], abs=1e-4)


async def test_a_request_without_a_token_has_no_prompt_logprobs(start: Start, models: Models) -> None:
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
    from worker.engines.hf.streams import HfStream, choose, chosen_logprobs

    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -math.inf])

    def shares(**fields: Any) -> list[float]:
        streams = [
            HfStream(str(seed), ask([1], seed=seed, **{"temperature": 1.0} | fields), [1], frozenset())
            for seed in range(4000)
        ]
        rows = logits.expand(len(streams), -1)
        tokens, drawn_from = choose(rows, streams)
        assert chosen_logprobs(rows, tokens) == pytest.approx(
            [float(logits.log_softmax(-1)[token]) for token in tokens], abs=1e-5
        )
        made = [tokens.count(token) / len(tokens) for token in range(len(logits))]
        if streams[0].request.temperature:
            assert made == pytest.approx(drawn_from[0].softmax(-1).tolist(), abs=0.03)
        return made

    def expected(kept: int, temperature: float = 1.0) -> list[float]:
        probs: list[float] = (logits[:kept] / temperature).softmax(-1).tolist()
        return probs + [0.0] * (len(logits) - kept)

    assert shares() == pytest.approx(expected(6), abs=0.03)
    assert shares(temperature=2.0) == pytest.approx(expected(6, 2.0), abs=0.03)
    assert shares(top_k=2) == pytest.approx(expected(2), abs=0.03)
    assert shares(top_k=1) == [1, 0, 0, 0, 0, 0]
    assert shares(top_p=0.5) == [1, 0, 0, 0, 0, 0]  # the first alone has 0.56
    assert shares(top_p=0.7) == pytest.approx(expected(2), abs=0.03)
    assert shares(top_k=2, top_p=0.7) == [1, 0, 0, 0, 0, 0]  # of the two, the first has 0.73
    assert shares(min_p=0.3) == pytest.approx(expected(2), abs=0.03)  # the second has 0.37 of the first, then 0.22
    assert shares(min_p=0.3, temperature=2.0) == pytest.approx(expected(4, 2.0), abs=0.03)
    assert shares(min_p=1.0) == [1, 0, 0, 0, 0, 0]
    assert shares(temperature=1e-30) == [1, 0, 0, 0, 0, 0]
    assert shares(temperature=0.0) == [1, 0, 0, 0, 0, 0]


# how a request ends, streaming, prompts


async def test_stop_tokens_eos_and_length_end_a_request(start: Start, models: Models) -> None:
    engine = await start(models.witness[1])
    chain = witnessed(1, 9, 8)
    stopped = await run(engine, ask([9], stop_token_ids=[chain[3], 511], max_tokens=8))
    assert (stopped.tokens, stopped.finish) == (chain[:4], "stop")
    # The witness's eos follows itself; from here greedy decoding would repeat it for ever.
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
    # Tokenizing alone gives the same tokens.
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


async def test_a_request_allows_and_bars_tokens(start: Start, models: Models, plain: Any) -> None:
    """Each token is the likeliest of the tokens that are left, and its logprob is the raw one."""
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


async def test_the_likeliest_tokens_are_those_of_a_plain_forward(start: Start, models: Models, plain: Any) -> None:
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
async def test_penalties_choose_the_tokens_and_leave_the_logprobs_raw(
    start: Start, models: Models, plain: Any, penalties: tuple[float, float, float]
) -> None:
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


async def test_a_truncated_prompt_is_its_last_tokens(start: Start, models: Models) -> None:
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
    from worker.engines.hf.adapter import build

    with pytest.raises(InvalidRequest) as caught:
        build(EngineOptions(**{"model": models.tiny} | options))
    assert caught.value.facts["field"] == field


async def test_the_hf_engine_describes_itself(models: Models) -> None:
    from worker.engines.hf.adapter import build

    engine = build(EngineOptions(models.tiny, dtype="bfloat16", device="cpu", extra={"num_blocks": "8"}))
    with pytest.raises(EngineFailed):
        await engine.liveness()
    info: EngineInfo = await engine.start()
    assert (info.engine, info.model, info.dtype, info.device) == ("hf", "tiny", "bfloat16", "cpu")
    assert (info.world_size, info.vocab_size, info.max_model_len) == (1, VOCAB_SIZE, 8 * 32)
    assert info.lacks.keys() >= {"release_memory", "resume_memory"}
    with pytest.raises(Unsupported, match="can't release_memory"):
        require(engine, CanReleaseMemory)
    assert set(engine.receiver.weight_spec().values()) >= {TensorSpec("BF16", (VOCAB_SIZE, 128))}
    await engine.close()
    with pytest.raises(EngineFailed):
        await engine.liveness()
    too_long = build(EngineOptions(models.tiny, extra={"num_blocks": "2", "max_model_len": "65"}))
    with pytest.raises(InvalidRequest):
        await too_long.start()


@pytest.mark.parametrize("task", ["generate", "embed"])
async def test_a_model_whose_files_lack_a_tensor_does_not_start(
    models: Models, tmp_path: Path, task: Task
) -> None:
    from worker.engines.hf.adapter import build

    for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
        partial = without({name}, models.tiny, tmp_path / name)
        with pytest.raises(InvalidRequest, match=name) as caught:
            await build(EngineOptions(partial, device="cpu", task=task)).start()
        assert caught.value.facts["field"] == "model"
    tied = without({"lm_head.weight"}, models.tiny, tmp_path / "tied", tie_word_embeddings=True)
    engine = build(EngineOptions(tied, device="cpu", task=task))
    await engine.start()
    await engine.close()


async def test_a_start_that_continuous_batching_refuses_is_a_fault_of_the_options(
    start: Start, models: Models, tmp_path: Path
) -> None:
    """`rl-plane up --restart` starts a worker again whose engine has died, and not a worker with bad options."""
    with pytest.raises(InvalidRequest, match="memory") as caught:
        await start(models.tiny, num_blocks=10**9)
    assert caught.value.facts["field"] == "engine_arg.num_blocks"
    linear = shutil.copytree(models.tiny, tmp_path / "linear")
    config = json.loads((linear / "config.json").read_text())
    (linear / "config.json").write_text(json.dumps(config | {"layer_types": ["linear_attention"] * 2}))
    with pytest.raises(Unsupported, match="linear_attention") as refused:
        await start(linear)
    assert refused.value.facts["field"] == "model"
