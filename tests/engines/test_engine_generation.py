"""The life and the generation of real vLLM and real SGLang on a CPU, against a plain transformers model.

Each engine starts once for all tests of a module; `-k vllm` runs one of them. `tests/support/engine_kinds.py` has the
differences of the two. `tests/engines/test_two_ranks.py` runs them with several ranks, and kills them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from rl_plane.errors import EngineFailed, InvalidRequest, Unsupported
from rl_plane.protocol.generation import GATHER_S, GenerateRequest
from rl_plane.protocol.pooling import lacking_tasks
from rl_plane.protocol.versions import TensorSpec
from rl_plane.protocol.worker_ops import Tokenize
from tests.support.engine_kinds import BATCH_TOKENS, Kind, OffersMemory
from tests.support.engine_models import LOGPROBS, Models, is_of, kind, models
from tests.support.engine_runs import (
    BOUND_S,
    Run,
    ask,
    ends_while_tokenized,
    run,
    update,
    version,
    witnessed,
)
from tests.support.lacking_files import without
from tests.support.reference import logits_of, logprobs_of, penalized, prompt_logprobs
from tests.support.shared_engine import ENDLESS, engine, info, prompt_of, scratch, shared
from worker.engines.base import EngineInfo, PauseMode
from worker.engines.capabilities import with_missing
from worker.engines.common.scoring import LOGPROB_FLOOR
from worker.engines.common.tokenizing import load_tokenizer
from worker.receive.staging import model_digest
from worker.testing.engine_contract import CHECKS, Check, EngineUnderTest
from worker.testing.tiny_model import VOCAB_SIZE

__all__ = ["engine", "info", "kind", "models", "scratch", "shared"]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::(torch|vllm|sglang|transformers|multiprocessing)"),  # theirs, not ours
]


EOS = (0,)
"""The eos tokens of the tiny models."""


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
async def test_the_engine_keeps_the_contract(
    check: Check, engine: OffersMemory, info: EngineInfo, models: Models
) -> None:
    base, other = models.witness[1], models.witness[2]
    known = with_missing(engine, info)
    await check(EngineUnderTest(engine, known, base, other, adapter=models.adapters[1]))
    engine.set_version(version(0, base))


# what it is


async def test_the_engine_describes_itself(kind: Kind, engine: OffersMemory, info: EngineInfo) -> None:
    assert (info.engine, info.dtype, info.device, info.world_size) == (kind.name, "bfloat16", "cpu", 1)
    assert info.vocab_size == VOCAB_SIZE
    assert (info.max_model_len, info.max_adapters) == (kind.max_model_len, kind.places)
    assert "filesystem" in info.transports
    assert set(info.lacks) == {
        "parse_tool_calls",
        "release_memory",
        "resume_memory",
        *lacking_tasks("generate"),
        *(f"generate:{field}" for field in kind.lacks),
    }
    assert engine.receiver.weight_spec()["lm_head.weight"] == TensorSpec("BF16", (VOCAB_SIZE, 128))
    for memory in (engine.release_memory, engine.resume_memory):
        with pytest.raises(Unsupported, match=r"[CG]PU"):
            await memory(["weights"])
    await engine.liveness()
    said = await engine.tokenize(Tokenize(messages=[{"role": "user", "content": "hi"}]))
    assert await engine.detokenize(said) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_arguments_are_the_engines_own(kind: Kind, models: Models) -> None:
    for name, value in kind.bad_arguments.items():
        with pytest.raises(InvalidRequest) as caught:
            kind.build(kind.options(models.tiny[1], **{name: value}))
        assert caught.value.facts["field"] == f"engine_arg.{name}"
        assert caught.value.facts["fix"]


async def test_modes_for_gpus_are_refused_on_a_cpu(kind: Kind, models: Models) -> None:
    before, given = kind.children(), kind.options(models.tiny[1])
    for mode in (dataclasses.replace(given, deterministic=True), dataclasses.replace(given, memory_saver=True)):
        with pytest.raises(InvalidRequest, match="GPU"):
            await kind.build(mode).start()
    assert kind.children() == before


async def test_modes_for_gpus_are_what_the_engine_is_built_with(
    kind: Kind, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modes win over the environment and other arguments, as far as a machine without a GPU can show."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    given = dataclasses.replace(kind.options(models.tiny[1], **kind.no_modes), device="cuda")
    assert kind.modes(given) == (False, False)
    for modes in ((True, False), (False, True), (True, True)):
        both = dataclasses.replace(given, deterministic=modes[0], memory_saver=modes[1])
        assert kind.modes(both) == modes


# generation


async def test_greedy_tokens_are_those_of_a_plain_forward_before_and_after_swaps(
    engine: OffersMemory, models: Models
) -> None:
    prompts = [prompt_of(seed, 3 + 11 * seed) for seed in range(4)]
    made = []
    for sequence, seed in ((1, 1), (2, 2), (3, 1)):
        await update(engine, models.tiny[seed], sequence)
        requests = [ask(prompt, logprobs=True, gather_s=GATHER_S * (len(prompt) % 2)) for prompt in prompts]
        results = await asyncio.gather(*(run(engine, request) for request in requests))
        for result in results:
            assert is_of(result, models.tiny[seed])
            (span,) = result.spans
            assert (span.sequence, span.digest) == (sequence, model_digest(models.tiny[seed]))
            assert (span.start, span.end) == (0, 16)
        made.append([result.tokens for result in results])
    assert made[0] == made[2] != made[1]


async def test_a_request_gives_its_tokens_text_and_spans_until_it_stops(
    engine: OffersMemory, models: Models
) -> None:
    chain = witnessed(1, 7, 16)
    result = await run(engine, ask([7], logprobs=True))
    assert (result.tokens, result.finish, len(result.logprobs)) == (chain, "length", 16)
    assert all(value > -0.5 for value in result.logprobs)  # a wide gap
    assert [(span.sequence, span.start, span.end) for span in result.spans] == [(0, 0, 16)]
    assert result.deltas[0].prompt_token_ids == [7]
    assert all(delta.prompt_token_ids is None for delta in result.deltas[1:])
    assert result.deltas[0].spans
    assert not any(delta.spans for delta in result.deltas[1:-1])
    assert result.text == load_tokenizer(models.witness[1]).decode(chain, skip_special_tokens=True)
    for ignore_eos in (True, False):
        stopped = await run(engine, ask([7], stop_token_ids=[chain[4], 511], ignore_eos=ignore_eos))
        assert (stopped.tokens, stopped.finish) == (chain[:5], "stop")
    ended = await run(engine, ask([0], ignore_eos=False))
    assert (ended.tokens, ended.finish) == ([0], "stop")
    assert (await run(engine, ask([0], max_tokens=3))).tokens == [0, 0, 0]
    both = await run(engine, ask([7], stop_token_ids=[chain[0]], max_tokens=1))
    assert (both.tokens, both.finish) == (chain[:1], "stop")


async def test_stop_strings_cut_the_text_and_end_the_request(engine: OffersMemory, models: Models) -> None:
    whole = await run(engine, ask([7], max_tokens=ENDLESS // 10, skip_special_tokens=False))
    text, decode = whole.text, load_tokenizer(models.witness[1]).decode
    stop = text[len(text) // 2 :][:3]
    made = next(n for n in range(1, len(whole.tokens)) if stop in decode(whole.tokens[:n]))
    for include in (False, True):
        asked = ask(
            [7],
            max_tokens=ENDLESS,
            skip_special_tokens=False,
            logprobs=True,
            stop=["never said", stop],
            include_stop_str_in_output=include,
        )
        cut = await run(engine, asked)
        assert (cut.finish, cut.deltas[-1].stop_string) == ("stop", stop)
        assert cut.text == text[: text.index(stop) + len(stop) * include]
        assert cut.tokens == whole.tokens[:made]
        assert len(cut.logprobs) == made
        assert [(span.start, span.end) for span in cut.spans] == [(0, made)]
    assert engine.load() == (0, 0)


async def test_a_seed_gives_the_same_tokens_whatever_else_runs(engine: OffersMemory, models: Models) -> None:
    await update(engine, models.tiny[1], 5)
    prompt = prompt_of(1, 9)

    def seeded(seed: int | None, top_p: float = 0.95) -> Any:
        return ask(prompt, temperature=1.2, top_p=top_p, seed=seed, max_tokens=30, logprobs=True)

    alone = await run(engine, seeded(11))
    traffic = [Run(engine, ask(prompt_of(n, n + 1), temperature=0.9, seed=n, max_tokens=60)) for n in range(8)]
    await traffic[0].reach(2)
    among, other, unseeded, again = await asyncio.gather(
        *(run(engine, seeded(seed)) for seed in (11, 12, None, None))
    )
    assert among.tokens == alone.tokens != other.tokens
    assert unseeded.tokens != again.tokens
    for one in traffic:
        await one.end()
    free = await run(engine, seeded(11, top_p=1.0))
    for limits in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5}):
        beside = Run(engine, ask(prompt_of(2, 5), max_tokens=200, **limits))
        await beside.reach(2)
        assert (await run(engine, seeded(11, top_p=1.0))).tokens == free.tokens
        await beside.end()
    # The logprobs of the chosen tokens, in the raw distribution.
    expected, _ = logprobs_of(models.tiny[1], prompt, alone.tokens)
    assert alone.logprobs == pytest.approx(expected, abs=LOGPROBS)
    assert is_of(await run(engine, ask(prompt, temperature=1.0, top_k=1, logprobs=True)), models.tiny[1])


async def test_a_seed_gives_the_same_tokens_for_a_prompt_computed_in_parts(
    engine: OffersMemory, models: Models
) -> None:
    await update(engine, models.tiny[1], 6)
    seeded = ask(prompt_of(2, 2 * BATCH_TOKENS + 20), temperature=1.2, seed=11, max_tokens=30)
    in_parts = await run(engine, seeded)
    # From the cache, the same prompt is one part.
    assert (await run(engine, seeded.model_copy(update={"id": "again"}))).tokens == in_parts.tokens


async def test_a_request_allows_and_bars_tokens(kind: Kind, engine: OffersMemory, models: Models) -> None:
    await update(engine, models.tiny[1], 7)
    prompt = prompt_of(3, 2 * BATCH_TOKENS)
    first, second = (await run(engine, ask(prompt, max_tokens=2))).tokens
    every = range(VOCAB_SIZE)
    # Fields, and of each token made what may have been chosen instead.
    cases: list[tuple[dict[str, Any], Callable[[list[int]], Collection[int]]]] = [
        ({"allowed_token_ids": [9, 10, 11]}, lambda made: {9, 10, 11}),
        ({"bad_words_token_ids": [[first]]}, lambda made: {*every} - {first}),
        (
            {"bad_words_token_ids": [[first, second], [9] * 30]},
            lambda made: {*every} - ({second} if made[-1:] == [first] else set()),
        ),
        (
            {"stop_token_ids": [first], "min_tokens": 5},
            lambda made: {*every} - ({first, *EOS} if len(made) < 5 else set()),
        ),
    ]
    for fields, left in cases:
        if kind.lacks & fields.keys():
            with pytest.raises(Unsupported) as caught:
                await run(engine, ask(prompt, **fields))
            assert caught.value.facts["field"] in kind.lacks & fields.keys()
            continue
        result = await run(engine, ask(prompt, logprobs=True, **fields))
        rows = logits_of(models.tiny[1], prompt, result.tokens)
        for place, token in enumerate(result.tokens):
            best = max(float(rows[place][one]) for one in left(result.tokens[:place]))
            assert float(rows[place][token]) > best - LOGPROBS
            assert token in left(result.tokens[:place])
        raw = [float(row.log_softmax(-1)[token]) for row, token in zip(rows, result.tokens, strict=True)]
        assert result.logprobs == pytest.approx(raw, abs=LOGPROBS)
    bias = {"9": 100.0, str(first): -100.0}
    assert (await run(engine, ask(prompt, logit_bias=bias))).tokens == [9] * 16
    with_logprobs = ask(prompt, logprobs=True, logit_bias=bias)
    biased = await run(engine, with_logprobs)
    expected, _ = logprobs_of(models.tiny[1], prompt, biased.tokens)
    assert biased.logprobs == pytest.approx(expected, abs=LOGPROBS)
    cut = await run(
        engine, ask([9, *prompt], truncate_prompt_tokens=len(prompt), cache_salt="pepper", logprobs=True)
    )
    assert cut.deltas[0].prompt_token_ids == prompt
    assert is_of(cut, models.tiny[1])


async def test_an_abort_ends_a_request_that_is_tokenized_still(
    engine: OffersMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = GenerateRequest(id="text", prompt="hello world", max_tokens=2, temperature=0.0)
    await ends_while_tokenized(engine, text, monkeypatch)
    assert (await run(engine, text)).finish == "length"


async def test_a_prefix_is_shared_with_the_same_salt_alone(
    kind: Kind, engine: OffersMemory, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    await update(engine, models.tiny[1], 7)
    cached, prompt = kind.cached_tokens(monkeypatch), prompt_of(3, 6 * BATCH_TOKENS)
    for salt, is_shared in (("one", False), ("one", True), ("two", False), (None, False), (None, True)):
        result = await run(engine, ask(prompt, cache_salt=salt, logprobs=True))
        assert is_of(result, models.tiny[1])
        assert (cached[-1] > 0) is is_shared, salt
    assert len(cached) == 5


@pytest.mark.parametrize("penalties", [(1.5, 0.0, 1.0), (0.0, 1.5, 1.0), (0.0, 0.0, 1.7), (-0.2, 0.5, 1.3)])
async def test_penalties_choose_the_tokens_and_leave_the_logprobs_raw(
    kind: Kind, engine: OffersMemory, models: Models, penalties: tuple[float, float, float]
) -> None:
    await update(engine, models.tiny[1], 7)
    prompt = prompt_of(3, 9)
    names = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    request = ask(prompt, logprobs=True, max_tokens=40, **dict(zip(names, penalties, strict=True)))
    if kind.lacks & {*names}:
        with pytest.raises(Unsupported, match="logprobs"):
            await run(engine, request)
        return
    free = await run(engine, ask(prompt, max_tokens=40))
    result = await run(engine, request)
    assert result.tokens != free.tokens
    rows = logits_of(models.tiny[1], prompt, result.tokens)
    for place, token in enumerate(result.tokens):
        scores = penalized(rows[place], prompt, result.tokens[:place], *penalties)
        assert scores[token] > max(scores) - 2 * LOGPROBS
    raw, gap = logprobs_of(models.tiny[1], prompt, result.tokens)
    assert gap > 2 * LOGPROBS, "without penalties another token is the likeliest"
    assert result.logprobs == pytest.approx(raw, abs=LOGPROBS)


async def test_processed_logprobs_are_of_the_logits_divided_by_the_temperature(kind: Kind, models: Models) -> None:
    temperature = 0.7
    given = dataclasses.replace(kind.options(models.tiny[1]), logprobs_mode="processed_logprobs")
    fresh = kind.build(given)
    info = await fresh.start()
    fresh.set_version(version(0, models.tiny[1]))
    prompt, near = prompt_of(1, 9), LOGPROBS / temperature
    more = {"temperature": temperature, "seed": 3, "logprobs": True, "top_logprobs": 5, "max_tokens": 30}
    try:
        plain, biased, limited, greedy = await asyncio.gather(
            run(fresh, ask(prompt, prompt_logprobs=True, **more)),
            run(fresh, ask(prompt, logit_bias={"9": 8.0}, **more)),
            run(fresh, ask(prompt, top_k=3, **more)),
            run(fresh, ask(prompt, logprobs=True)),
        )
        (scores,) = await fresh.score([prompt])
    finally:
        await fresh.close()
    assert info.logprobs_mode == "processed_logprobs"
    assert is_of(greedy, models.tiny[1])
    expected = prompt_logprobs(models.tiny[1], prompt)
    assert scores == pytest.approx(expected, abs=LOGPROBS)
    assert (plain.deltas[0].prompt_logprobs or [])[1:] == pytest.approx(expected, abs=LOGPROBS)
    raw, _ = logprobs_of(models.tiny[1], prompt, plain.tokens)
    assert max(abs(one - other) for one, other in zip(raw, plain.logprobs, strict=True)) > 5 * near
    for result, bias in ((plain, 0.0), (biased, 8.0), (limited, 0.0)):
        logits = logits_of(models.tiny[1], prompt, result.tokens)
        logits[:, 9] += bias
        rows = (logits / temperature).log_softmax(-1)
        tops = [top for delta in result.deltas for top in delta.top_logprobs or []]
        if result is limited and kind.name == "vllm":  # its logprobs are of the logits that `top_k` has left
            for row, top in zip(rows, tops, strict=True):
                left = [token for token, value in top if value > LOGPROB_FLOOR]
                assert 3 <= len(left) < 5, "with a tie there are more than three"
                row[[token for token in range(VOCAB_SIZE) if token not in left]] = -math.inf
            rows = rows.log_softmax(-1)
        made = [float(row[token]) for row, token in zip(rows, result.tokens, strict=True)]
        assert result.logprobs == pytest.approx(made, abs=near)
        for row, top in zip(rows, tops, strict=True):
            likeliest = [max(float(value), LOGPROB_FLOOR) for value in row.topk(5).values]
            assert [value for _, value in top] == pytest.approx(likeliest, abs=near)


async def test_the_likeliest_tokens_are_those_of_a_plain_forward(engine: OffersMemory, models: Models) -> None:
    await update(engine, models.tiny[1], 9)
    prompt = prompt_of(3, 9)
    for count in (1, 5):
        # Far from greedy: most tokens that are made are none of these.
        more = {"top_logprobs": count, "max_tokens": 40, "gather_s": GATHER_S if count == 5 else 0.0}
        request = ask(prompt, temperature=2.0, seed=3, logprobs=True, **more)
        result = await run(engine, request)
        tops = [top for delta in result.deltas for top in delta.top_logprobs or []]
        rows = logits_of(models.tiny[1], prompt, result.tokens).log_softmax(-1)
        for row, top in zip(rows, tops, strict=True):
            assert [value for _, value in top] == pytest.approx(row.topk(count).values.tolist(), abs=LOGPROBS)
            assert [value for _, value in top] == pytest.approx(
                [float(row[token]) for token, _ in top], abs=LOGPROBS
            )
        raw, _ = logprobs_of(models.tiny[1], prompt, result.tokens)
        assert result.logprobs == pytest.approx(raw, abs=LOGPROBS)


async def test_top_p_is_a_share_of_what_top_k_leaves(engine: OffersMemory) -> None:
    first = await run(engine, ask([7], max_tokens=1, logprobs=True, top_logprobs=4))
    (top,) = first.deltas[0].top_logprobs or []
    shares = dict(zip((token for token, _ in top), (0.4, 0.3, 0.2, 0.1), strict=True))
    bias = {str(token): 50.0 + math.log(shares[token]) - value for token, value in top}

    async def made(**limits: Any) -> set[int]:
        requests = [
            ask([7], max_tokens=1, temperature=1.0, seed=seed, logit_bias=bias, **limits) for seed in range(200)
        ]
        results = await asyncio.gather(*(run(engine, request) for request in requests))
        return {result.tokens[0] for result in results}

    likeliest = list(shares)
    assert await made(top_k=2, top_p=0.5) == {likeliest[0]}
    assert await made(top_k=3, top_p=0.5) == set(likeliest[:2])
    assert await made(top_k=2) == await made(top_p=0.5) == set(likeliest[:2])
    assert await made() == set(likeliest)


async def test_min_p_excludes_unlikely_tokens_or_is_refused(
    kind: Kind, engine: OffersMemory, models: Models
) -> None:
    await update(engine, models.tiny[1], 8)
    prompt = prompt_of(3, 9)
    request = ask(prompt, temperature=1.0, seed=3, min_p=0.5, max_tokens=40, logprobs=True)
    if "min_p" in kind.lacks:
        with pytest.raises(Unsupported) as caught:
            await run(engine, request)
        assert caught.value.facts["field"] == "min_p"
        return
    result = await run(engine, request)
    for row, token in zip(logits_of(models.tiny[1], prompt, result.tokens), result.tokens, strict=True):
        assert float(row[token]) > float(row.max()) + math.log(0.5) - 2 * LOGPROBS


async def test_bad_requests_do_not_reach_the_engine(engine: OffersMemory, info: EngineInfo) -> None:
    length = info.max_model_len
    for field, request in (
        ("prompt_token_ids", ask([VOCAB_SIZE])),
        ("stop_token_ids", ask([1], stop_token_ids=[VOCAB_SIZE])),
        ("allowed_token_ids", ask([1], allowed_token_ids=[VOCAB_SIZE])),
        ("logit_bias", ask([1], logit_bias={str(VOCAB_SIZE): 1.0})),
        ("max_tokens", ask([1], max_tokens=length)),
        ("model", ask([1], adapter="never")),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await run(engine, request)
        assert caught.value.facts["field"] == field
    for left in (1, 8):
        assert len((await run(engine, ask(prompt_of(1, length - left), max_tokens=left))).tokens) == left
    one = Run(engine, ask([20], max_tokens=ENDLESS))
    await one.reach(1)
    with pytest.raises(InvalidRequest) as caught:
        await run(engine, ask([3]).model_copy(update={"id": one.request.id}))
    assert caught.value.facts["field"] == "id"
    assert await engine.abort([one.request.id]) == 1
    await one.end()
    assert (await run(engine, ask([3]))).tokens == witnessed(1, 3, 16)
    assert engine.load() == (0, 0)


@pytest.mark.parametrize(
    "extreme",
    [
        {"seed": (1 << 63) - 1, "temperature": 1.0},
        {"seed": 0, "temperature": 1.0},
        {"temperature": 1e-9},
        {"temperature": 2.0},
        {"temperature": 5e-324},
        {"temperature": 1.0, "top_p": 1e-300},
        {"temperature": 1.0, "top_k": 1 << 40},
        {"temperature": 1.0, "top_k": VOCAB_SIZE + 1, "top_p": 0.5},
        {"stop_token_ids": list(range(VOCAB_SIZE)) * 2},
        {"max_tokens": 1, "logprobs": True},
    ],
)
async def test_extremes_do_not_hurt_the_engine(engine: OffersMemory, extreme: dict[str, Any]) -> None:
    assert (await run(engine, ask([7], **extreme))).tokens
    assert (await run(engine, ask([3]))).tokens == witnessed(1, 3, 16)


async def test_a_low_temperature_is_not_raised(engine: OffersMemory) -> None:
    """Two tokens have logits that differ by 0.01: the lesser one must come as often as the temperature says."""
    first = await run(engine, ask([7], max_tokens=1, logprobs=True, top_logprobs=2))
    ((one, likely), (other, rare)) = (first.deltas[0].top_logprobs or [])[0]
    bias = {str(one): 50.0, str(other): 50.0 + likely - rare - 0.01}
    runs = [
        Run(engine, ask([7], max_tokens=1, temperature=0.005, seed=seed, logit_bias=bias)) for seed in range(400)
    ]
    made = Counter([(await each.end()).tokens[0] for each in runs])
    assert made.total() == made[one] + made[other]
    assert made[other] / 400 == pytest.approx(1 / (1 + math.exp(0.01 / 0.005)), abs=0.07)  # at 0.01 it is 0.27


async def test_requests_beyond_the_engines_limit_wait_and_complete(engine: OffersMemory) -> None:
    runs = [Run(engine, ask([token], max_tokens=8)) for token in range(400)]
    for token, one in enumerate(runs):
        assert (await one.end()).tokens == witnessed(1, token, 8)


async def test_an_abort_or_a_caller_that_leaves_ends_the_request(engine: OffersMemory) -> None:
    runs = [Run(engine, ask([20], max_tokens=ENDLESS)) for _ in range(3)]
    for one in runs:
        await one.reach(3)
    assert engine.load() == (3, 0)
    assert await engine.abort([runs[0].request.id, "never"]) == 1
    result = await runs[0].end()
    assert result.finish == "abort"
    assert result.tokens == witnessed(1, 20, len(result.tokens))
    assert result.spans[-1].end == len(result.tokens)
    runs[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await runs[1].end()
    assert await engine.abort(None) == 1
    assert (await runs[2].end()).finish == "abort"
    assert engine.load() == (0, 0)


# hangs and death


async def test_a_hang_is_seen_and_passes(kind: Kind, engine: OffersMemory) -> None:
    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(3)
    ranks = kind.rank_pids(engine)
    assert ranks
    try:
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await engine.liveness()
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
    await engine.liveness()
    assert (await one.end()).tokens == witnessed(1, 20, 300)
    assert await engine.pause("abort", True) is True
    await engine.resume()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_pause_that_a_hang_cuts_leaves_it_running(
    kind: Kind, engine: OffersMemory, mode: PauseMode
) -> None:
    """A hang cuts the pause at its deadline, and the engine continues later."""
    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(3)
    ranks = kind.rank_pids(engine)
    try:
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        pausing = asyncio.create_task(engine.pause(mode, False))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await engine.liveness()
        assert not pausing.done()
        pausing.cancel()
        late = Run(engine, ask([21]))
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(BOUND_S):
            await pausing
    assert (await late.end()).tokens == witnessed(1, 21, 16)
    result = await one.end()
    assert result.tokens == witnessed(1, 20, len(result.tokens))
    assert len(result.tokens) == 300 or (mode, result.finish) == ("abort", "abort")


async def test_a_start_that_fails_leaves_nothing(kind: Kind, models: Models, scratch: Path) -> None:
    """A model that the engine can't load: SGLang would end this process."""
    before = kind.children()
    broken = shutil.copytree(models.tiny[1], scratch / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(EngineFailed, match="did not start"):
        await kind.build(kind.options(broken)).start()
    assert kind.children() == before


@pytest.mark.parametrize("lacking", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
async def test_a_model_whose_files_lack_a_tensor_does_not_start(
    kind: Kind, models: Models, scratch: Path, lacking: str
) -> None:
    before = kind.children()
    partial = without({lacking}, models.tiny[1], scratch / "partial")
    with pytest.raises(InvalidRequest, match=lacking) as caught:
        await kind.build(kind.options(partial)).start()
    assert caught.value.facts["field"] == "model"
    assert kind.children() == before


async def test_engines_that_begin_alike_draw_other_numbers(kind: Kind, models: Models) -> None:
    """A group's choices are spread over the workers: the choices of one prompt without a seed must differ.

    Behind the tests that look for processes which were left: those of these two are reaped by and by."""
    made = []
    for _ in range(2):
        fresh = kind.build(kind.options(models.tiny[1]))
        await fresh.start()
        fresh.set_version(version(0, models.tiny[1]))
        try:
            made.append((await run(fresh, ask(prompt_of(1, 9), temperature=1.2, max_tokens=30))).tokens)
        finally:
            await fresh.close()
    assert made[0] != made[1]


async def test_closing_ends_streams_and_processes(kind: Kind, shared: tuple[OffersMemory, EngineInfo]) -> None:
    """The last one: it closes the shared engine."""
    engine, _ = shared
    pids, directory = kind.pids(engine), kind.directory(engine)
    stream = Run(engine, ask([20], max_tokens=ENDLESS))
    await stream.reach(2)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineFailed):
        await stream.end()
    assert all(map(gone, pids))
    assert not directory.exists()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
