"""The contract of an EngineAdapter, tested on real vLLM and real SGLang on a CPU, against a plain transformers model.

Each engine starts once for all tests; `-k vllm` runs one of them. `tests/support/engine_kinds.py` has the differences
of the two. `tests/engines/test_two_ranks.py` runs them with several ranks, and kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.engine_models import kind, models

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::(torch|vllm|sglang|transformers|multiprocessing)"),  # theirs, not ours
]

from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, Unsupported  # noqa: E402
from rl_plane.protocol.generation import GenerateRequest  # noqa: E402
from rl_plane.protocol.versions import TensorSpec  # noqa: E402
from rl_plane.protocol.worker_ops import Tokenize  # noqa: E402
from rl_plane.weights.checkpoint import ADAPTER_NAME, write_manifest  # noqa: E402
from tests.support.bad_adapters import BAD, DTYPES, in_dtype  # noqa: E402
from tests.support.engine_kinds import BATCH_TOKENS, Kind, offer_memory  # noqa: E402
from tests.support.engine_models import LOGPROBS, Models, is_of  # noqa: E402
from tests.support.engine_runs import (  # noqa: E402
    BOUND_S,
    Result,
    Run,
    adapter_version,
    ask,
    ends_while_tokenized,
    load_adapter,
    receive,
    reception,
    run,
    unload_adapter,
    update,
    version,
    witnessed,
)
from tests.support.reference import logits_of, logprobs_of, penalized  # noqa: E402
from worker.engines.base import EngineInfo, PauseMode  # noqa: E402
from worker.engines.capabilities import FullEngine, with_missing  # noqa: E402
from worker.engines.common.finite_logits import NOT_FINITE  # noqa: E402
from worker.receive.staging import adapter_digest, model_digest  # noqa: E402
from worker.testing.engine_contract import CHECKS, Check, EngineUnderTest  # noqa: E402
from worker.testing.tiny_adapter import make_tiny_adapter, make_witness_adapter, witness_adapter_next_token  # noqa: E402
from worker.testing.tiny_model import VOCAB_SIZE  # noqa: E402

__all__ = ["kind", "models"]

ENDLESS = 2000
"""More tokens than an engine makes meanwhile."""


EOS = (0,)
"""The eos tokens of the tiny models."""

ADAPTERS = ("x", "y", "z")
"""Names that tests use."""


@pytest.fixture
def scratch(models: Models) -> Iterator[Path]:
    """Weights may be read from here."""
    with tempfile.TemporaryDirectory(dir=models.root) as path:
        yield Path(path)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(kind: Kind, models: Models) -> AsyncIterator[tuple[FullEngine, EngineInfo]]:
    engine = kind.build(kind.options(models.witness[1]))
    with pytest.MonkeyPatch.context() as patched:
        # Unix sockets have paths of 107 characters at most.
        long = models.root / ("x" * 100)
        long.mkdir(exist_ok=True)
        patched.setenv("TMPDIR", str(long))
        patched.setattr(tempfile, "tempdir", None)
        info = await engine.start()
    yield engine, info
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: tuple[FullEngine, EngineInfo], models: Models) -> AsyncIterator[FullEngine]:
    """A running engine with witness 1 and without adapters."""
    engine, _ = shared
    spans = (await run(engine, ask([3], max_tokens=1))).spans
    if [span.digest for span in spans] != [model_digest(models.witness[1])]:
        await update(engine, models.witness[1], 0)
    engine.set_version(version(0, models.witness[1]))
    yield engine
    await engine.pause("abort", False)
    for name in ADAPTERS:
        await engine.swap_adapter(name, None, None)
    await engine.resume()


@pytest.fixture
def info(shared: tuple[FullEngine, EngineInfo]) -> EngineInfo:
    return shared[1]


def prompt_of(seed: int, length: int) -> list[int]:
    return [random.Random(f"{seed} {length}").randrange(3, VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
async def test_the_engine_keeps_the_contract(
    check: Check, engine: FullEngine, info: EngineInfo, models: Models
) -> None:
    base, other = models.witness[1], models.witness[2]
    known = with_missing(engine, info)
    await check(EngineUnderTest(engine, known, base, other, adapter=models.adapters[1]))
    engine.set_version(version(0, base))


# what it is


async def test_what_it_says_of_itself(kind: Kind, engine: FullEngine, info: EngineInfo) -> None:
    assert (info.engine, info.dtype, info.device, info.world_size) == (kind.name, "bfloat16", "cpu", 1)
    assert info.vocab_size == VOCAB_SIZE
    assert (info.max_model_len, info.max_adapters) == (kind.max_model_len, kind.places)
    assert "filesystem" in info.transports
    assert set(info.capabilities) == {
        "release_memory",
        "resume_memory",
        *(f"generate:{field}" for field in kind.lacks),
    }
    assert engine.weight_spec()["lm_head.weight"] == TensorSpec("BF16", (VOCAB_SIZE, 128))
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
    assert kind.modes(kind.build(given)) == (False, False)
    for modes in ((True, False), (False, True), (True, True)):
        both = dataclasses.replace(given, deterministic=modes[0], memory_saver=modes[1])
        assert kind.modes(kind.build(both)) == modes


# generation


async def test_greedy_tokens_are_those_of_a_plain_forward_before_and_after_swaps(
    engine: FullEngine, models: Models
) -> None:
    prompts = [prompt_of(seed, 3 + 11 * seed) for seed in range(4)]
    made = []
    for sequence, seed in ((1, 1), (2, 2), (3, 1)):
        await update(engine, models.tiny[seed], sequence)
        results = await asyncio.gather(*(run(engine, ask(prompt, logprobs=True)) for prompt in prompts))
        for result in results:
            assert is_of(result, models.tiny[seed])
            (span,) = result.spans
            assert (span.sequence, span.digest) == (sequence, model_digest(models.tiny[seed]))
            assert (span.start, span.end) == (0, 16)
        made.append([result.tokens for result in results])
    assert made[0] == made[2] != made[1]


async def test_deltas_text_and_stops(engine: Any) -> None:
    chain = witnessed(1, 7, 16)
    result = await run(engine, ask([7], logprobs=True))
    assert (result.tokens, result.finish, len(result.logprobs)) == (chain, "length", 16)
    assert all(value > -0.5 for value in result.logprobs)  # a wide gap
    assert [(span.sequence, span.start, span.end) for span in result.spans] == [(0, 0, 16)]
    assert result.deltas[0].prompt_token_ids == [7]
    assert all(delta.prompt_token_ids is None for delta in result.deltas[1:])
    assert result.deltas[0].spans
    assert not any(delta.spans for delta in result.deltas[1:-1])
    assert result.text == engine._tokenizer.decode(chain, skip_special_tokens=True)
    for ignore_eos in (True, False):
        stopped = await run(engine, ask([7], stop_token_ids=[chain[4], 511], ignore_eos=ignore_eos))
        assert (stopped.tokens, stopped.finish) == (chain[:5], "stop")
    ended = await run(engine, ask([0], ignore_eos=False))
    assert (ended.tokens, ended.finish) == ([0], "stop")
    assert (await run(engine, ask([0], max_tokens=3))).tokens == [0, 0, 0]
    both = await run(engine, ask([7], stop_token_ids=[chain[0]], max_tokens=1))
    assert (both.tokens, both.finish) == (chain[:1], "stop")


async def test_stop_strings_cut_the_text_and_end_the_request(engine: Any) -> None:
    whole = await run(engine, ask([7], max_tokens=ENDLESS // 10, skip_special_tokens=False))
    text, decode = whole.text, engine._tokenizer.decode
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


async def test_seeds_whatever_else_runs(engine: FullEngine, models: Models) -> None:
    await update(engine, models.tiny[1], 5)
    prompt = prompt_of(1, 9)

    def seeded(seed: int | None) -> Any:
        return ask(prompt, temperature=1.2, top_p=0.95, seed=seed, max_tokens=30, logprobs=True)

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
    # What was chosen, in the raw distribution.
    expected, _ = logprobs_of(models.tiny[1], prompt, alone.tokens)
    assert alone.logprobs == pytest.approx(expected, abs=LOGPROBS)
    assert is_of(await run(engine, ask(prompt, temperature=1.0, top_k=1, logprobs=True)), models.tiny[1])


async def test_seeds_of_a_prompt_that_is_computed_in_parts(engine: FullEngine, models: Models) -> None:
    await update(engine, models.tiny[1], 6)
    seeded = ask(prompt_of(2, 2 * BATCH_TOKENS + 20), temperature=1.2, seed=11, max_tokens=30)
    in_parts = await run(engine, seeded)
    # From the cache, the same prompt is one part.
    assert (await run(engine, seeded.model_copy(update={"id": "again"}))).tokens == in_parts.tokens


async def test_what_a_request_allows_and_bars(kind: Kind, engine: FullEngine, models: Models) -> None:
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
    if "logit_bias+logprobs" in kind.lacks:
        with pytest.raises(Unsupported, match="biased") as caught:
            await run(engine, with_logprobs)
        assert caught.value.facts["field"] == "logit_bias"
    else:
        biased = await run(engine, with_logprobs)
        expected, _ = logprobs_of(models.tiny[1], prompt, biased.tokens)
        assert biased.logprobs == pytest.approx(expected, abs=LOGPROBS)
    cut = await run(
        engine, ask([9, *prompt], truncate_prompt_tokens=len(prompt), cache_salt="pepper", logprobs=True)
    )
    assert cut.deltas[0].prompt_token_ids == prompt
    assert is_of(cut, models.tiny[1])


async def test_an_abort_ends_a_request_that_is_tokenized_still(
    engine: FullEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = GenerateRequest(id="text", prompt="hello world", max_tokens=2, temperature=0.0)
    await ends_while_tokenized(engine, text, monkeypatch)
    assert (await run(engine, text)).finish == "length"


async def test_a_prefix_is_shared_with_the_same_salt_alone(
    kind: Kind, engine: FullEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    await update(engine, models.tiny[1], 7)
    cached, prompt = kind.cached_tokens(monkeypatch), prompt_of(3, 6 * BATCH_TOKENS)
    for salt, is_shared in (("one", False), ("one", True), ("two", False), (None, False), (None, True)):
        result = await run(engine, ask(prompt, cache_salt=salt, logprobs=True))
        assert is_of(result, models.tiny[1])
        assert (cached[-1] > 0) is is_shared, salt
    assert len(cached) == 5


@pytest.mark.parametrize("penalties", [(1.5, 0.0, 1.0), (0.0, 1.5, 1.0), (0.0, 0.0, 1.7), (-0.2, 0.5, 1.3)])
async def test_penalties(
    kind: Kind, engine: FullEngine, models: Models, penalties: tuple[float, float, float]
) -> None:
    await update(engine, models.tiny[1], 7)
    prompt = prompt_of(3, 9)
    names = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    request = ask(prompt, logprobs=True, max_tokens=40, **dict(zip(names, penalties, strict=True)))
    if kind.lacks & {*names}:
        with pytest.raises(Unsupported, match="logprobs"):
            await run(engine, request)
        return
    result = await run(engine, request)
    rows = logits_of(models.tiny[1], prompt, result.tokens)
    for place, token in enumerate(result.tokens):
        scores = penalized(rows[place], prompt, result.tokens[:place], *penalties)
        assert scores[token] > max(scores) - 2 * LOGPROBS
    raw, _ = logprobs_of(models.tiny[1], prompt, result.tokens)
    assert result.logprobs == pytest.approx(raw, abs=LOGPROBS)


async def test_the_likeliest_tokens(engine: FullEngine, models: Models) -> None:
    await update(engine, models.tiny[1], 9)
    prompt = prompt_of(3, 9)
    for count in (1, 5):
        # Far from greedy: most tokens that are made are none of these.
        request = ask(prompt, temperature=2.0, seed=3, logprobs=True, top_logprobs=count, max_tokens=40)
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


async def test_the_least_likely_tokens(kind: Kind, engine: FullEngine, models: Models) -> None:
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


async def test_bad_requests_do_not_reach_the_engine(engine: FullEngine, info: EngineInfo) -> None:
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
async def test_extremes_do_not_hurt_the_engine(engine: FullEngine, extreme: dict[str, Any]) -> None:
    assert (await run(engine, ask([7], **extreme))).tokens
    assert (await run(engine, ask([3]))).tokens == witnessed(1, 3, 16)


async def test_a_low_temperature_is_not_raised(engine: FullEngine) -> None:
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


async def test_more_requests_than_the_engine_takes_at_once(engine: FullEngine) -> None:
    runs = [Run(engine, ask([token], max_tokens=8)) for token in range(400)]
    for token, one in enumerate(runs):
        assert (await one.end()).tokens == witnessed(1, token, 8)


async def test_aborting_and_leaving(engine: FullEngine) -> None:
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


# pause


async def test_keep_freezes_and_goes_on(engine: FullEngine) -> None:
    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(10)
    await engine.pause("keep", False)
    await engine.pause("keep", False)
    late = Run(engine, ask([21]))
    await engine.liveness()  # what was on its way has come
    held = list(one.result.tokens)
    for _ in range(3):
        await engine.liveness()
    assert one.result.tokens == held
    assert engine.load() == (1, 1)
    assert await engine.flush_cache() is True  # it is computed anew
    await engine.resume()
    await engine.resume()
    assert (await one.end()).tokens == witnessed(1, 20, 300)
    assert (await late.end()).tokens == witnessed(1, 21, 16)


async def test_wait_drains(engine: FullEngine) -> None:
    one = Run(engine, ask([20], max_tokens=200))
    await one.reach(1)
    assert await engine.pause("wait", True) is True
    assert len((await one.end()).tokens) == 200
    late = Run(engine, ask([21]))
    await engine.liveness()
    assert late.result.tokens == []
    await engine.resume()
    assert len((await late.end()).tokens) == 16


@pytest.mark.parametrize("meanwhile", ["nothing", "a flush", "new weights", "a reset", "a release of memory"])
async def test_wait_drains_what_was_frozen(
    engine: FullEngine, models: Models, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """This also holds after the engine lost its KV cache. Requests that came after `keep` are not drained."""
    offer_memory(engine, monkeypatch)
    staging, _ = await receive(engine, reception(models.witness[1]))
    runs = [Run(engine, ask([20 + number], max_tokens=200)) for number in range(3)]
    for one in runs:
        await one.reach(1)
    await engine.pause("keep", False)
    late = Run(engine, ask([9]))
    await engine.liveness()  # it has come
    assert engine.load() == (3, 1)
    if meanwhile == "a flush":
        assert await engine.flush_cache() is True
    elif meanwhile == "a release of memory":
        await engine.release_memory(["weights", "kv_cache"])
        await engine.resume_memory(["kv_cache", "weights"])
    elif meanwhile == "a reset":
        await engine.check_weights("reset_tensors")
    if meanwhile in ("new weights", "a reset"):
        await engine.swap(staging, version(1, models.witness[1]))
    await engine.discard(staging)
    await engine.pause("wait", False)
    assert engine.load() == (0, 1)
    for number, one in enumerate(runs):
        result = await one.end()
        assert (result.finish, result.tokens) == ("length", witnessed(1, 20 + number, 200))
    await engine.liveness()
    assert late.result.tokens == []
    await engine.resume()
    assert (await late.end()).tokens == witnessed(1, 9, 16)


@pytest.mark.parametrize("before", ["running", "frozen", "flushed"])
async def test_a_wait_that_is_cancelled_leaves_it_as_it_was(engine: FullEngine, before: str) -> None:
    """The deadline of a pause cancels it."""
    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(1)
    if before != "running":
        await engine.pause("keep", before == "flushed")
    waiting = asyncio.create_task(engine.pause("wait", False))
    await one.reach(len(one.result.tokens) + 5)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if before != "running":
        await _goes_on_from_frozen(engine, one)
    assert len((await run(engine, ask([21]))).tokens) == 16
    assert (await one.end()).tokens == witnessed(1, 20, 300)


async def waited_for(engine: FullEngine) -> tuple[Run, Run, asyncio.Task[bool]]:
    """Returns a request that was frozen and continues, a request that came meanwhile, and the `wait` for the first."""
    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(1)
    await engine.pause("keep", True)
    late = Run(engine, ask([21]))
    waiting = asyncio.create_task(engine.pause("wait", False))
    await one.reach(len(one.result.tokens) + 5)
    return one, late, waiting


@pytest.mark.parametrize("then", ["abort", "keep", "wait"])
async def test_a_pause_after_a_wait_that_was_cancelled(engine: FullEngine, then: PauseMode) -> None:
    """The cancelled wait had to restart the requests that it waits for."""
    one, late, waiting = await waited_for(engine)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert late.result.tokens == []
    assert await engine.pause(then, True) is True
    if then == "abort":
        assert (await one.end()).finish == (await late.end()).finish == "abort"
    elif then == "wait":
        assert engine.load() == (0, 1)
    await engine.resume()
    if then != "abort":
        assert (await late.end()).tokens == witnessed(1, 21, 16)
    result = await one.end()
    assert result.tokens == witnessed(1, 20, len(result.tokens) if then == "abort" else 300)


async def test_a_resume_ends_a_wait(engine: FullEngine) -> None:
    """The wait returns when the requests that ran before have ended."""
    one, late, waiting = await waited_for(engine)
    await engine.resume()
    assert (await late.end()).tokens == witnessed(1, 21, 16)
    assert (await one.end()).tokens == witnessed(1, 20, 300)
    async with asyncio.timeout(BOUND_S):
        await waiting
    await engine.resume()


async def _goes_on_from_frozen(engine: FullEngine, one: Run) -> None:
    """It stood still, with less than 300 tokens."""
    await engine.liveness()
    held = len(one.result.tokens)
    await engine.liveness()
    assert len(one.result.tokens) == held < 300
    await engine.resume()


async def test_a_pause_that_fails_leaves_it_as_it_was(engine: FullEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_flush() -> bool:
        raise EngineFailed("no flush")

    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(5)
    for frozen in (True, False):
        if frozen:
            await engine.pause("keep", False)
        with monkeypatch.context() as patched:
            patched.setattr(engine, "flush_cache", no_flush)
            with pytest.raises(EngineFailed, match="no flush"):
                await engine.pause("keep", True)
        if frozen:
            await _goes_on_from_frozen(engine, one)
    assert (await run(engine, ask([21]))).tokens == witnessed(1, 21, 16)
    assert (await one.end()).tokens == witnessed(1, 20, 300)


async def test_abort_ends_all_at_once(engine: FullEngine) -> None:
    one = Run(engine, ask([20], max_tokens=ENDLESS))
    await one.reach(5)
    assert await engine.pause("abort", True) is True
    result = await one.end()
    assert result.finish == "abort"
    assert result.tokens == witnessed(1, 20, len(result.tokens))
    await engine.resume()


async def test_frozen_requests_outlast_a_release_of_memory(
    engine: FullEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen requests generate nothing before `resume`, even when all memory is back. On a CPU no memory is freed."""
    offer_memory(engine, monkeypatch)
    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(10)
    await engine.pause("keep", False)
    await engine.release_memory(["weights", "kv_cache"])
    late = Run(engine, ask([21]))
    await engine.liveness()  # what was on its way has come
    held = list(one.result.tokens)
    for tag in ("weights", "kv_cache"):
        await engine.resume_memory([tag])
        for _ in range(3):
            await engine.liveness()
    assert one.result.tokens == held
    assert late.result.tokens == []
    await engine.resume()
    assert (await one.end()).tokens == witnessed(1, 20, 300)
    assert (await late.end()).tokens == witnessed(1, 21, 16)


async def test_a_frozen_request_can_be_aborted(engine: FullEngine) -> None:
    one, other = (Run(engine, ask([20], max_tokens=300)) for _ in range(2))
    await one.reach(5)
    await other.reach(5)
    await engine.pause("keep", False)
    assert await engine.abort([one.request.id]) == 1
    assert (await one.end()).finish == "abort"
    await engine.resume()
    assert (await other.end()).tokens == witnessed(1, 20, 300)


async def test_flushing(engine: FullEngine) -> None:
    assert await engine.flush_cache() is True
    one = Run(engine, ask([20], max_tokens=ENDLESS))
    await one.reach(5)
    assert await engine.flush_cache() is False
    assert await engine.pause("keep", True) is True
    await engine.resume()
    await one.reach(len(one.result.tokens) + 50)
    await engine.abort(None)
    result = await one.end()
    assert (result.tokens, result.finish) == (witnessed(1, 20, len(result.tokens)), "abort")


# weights


async def test_a_swap_under_streams(engine: FullEngine, models: Models) -> None:
    runs = [Run(engine, ask([20 + number], max_tokens=300)) for number in range(3)]
    staging, _ = await receive(engine, reception(models.witness[2]))
    await runs[2].reach(20)
    await engine.pause("keep", False)
    late = Run(engine, ask([9]))
    await engine.swap(staging, version(1, models.witness[2]))
    await engine.resume()
    for number, one in enumerate(runs):
        result = await one.end()
        assert [span.sequence for span in result.spans] == [0, 1]
        before = 20 + number
        for span in result.spans:
            assert span.sequence is not None
            made = result.tokens[span.start : span.end]
            assert made == witnessed(1 + span.sequence, before, len(made))
            before = made[-1]
    result = await late.end()
    assert (result.tokens, result.spans[0].sequence) == (witnessed(2, 9, 16), 1)


async def test_no_request_uses_older_kv(engine: FullEngine, models: Models) -> None:
    """The logprobs show it: a stale prefix would move them by far more than the bound."""
    await update(engine, models.tiny[1], 1)
    prompt = prompt_of(5, 60)
    await run(engine, ask(prompt))
    running = Run(engine, ask([*prompt, 7], max_tokens=300, logprobs=True))
    await running.reach(5)
    await update(engine, models.tiny[2], 2)
    assert is_of(await run(engine, ask(prompt, logprobs=True)), models.tiny[2])
    result = await running.end()
    assert [span.sequence for span in result.spans] == [1, 2]
    for span in result.spans:
        assert span.sequence is not None
        before = [*prompt, 7, *result.tokens[: span.start]]
        expected, _ = logprobs_of(models.tiny[span.sequence], before, result.tokens[span.start : span.end])
        assert result.logprobs[span.start : span.end] == pytest.approx(expected, abs=LOGPROBS)


def changed(weights: Path, path: Path, name: str, where: Any, value: Any) -> Path:
    """Such weights, but with these values in places of a tensor."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(shutil.copytree(weights, path) / "model.safetensors")
    tensors[name][where] = value
    save_file(tensors, path / "model.safetensors")
    return path


async def fails(one: Run) -> list[int]:
    """The tokens that it has made before."""
    with pytest.raises(EngineFailed) as caught:
        await one.end()
    assert caught.value.message == NOT_FINITE
    return one.result.tokens


async def test_weights_that_are_no_numbers_fail_each_request_and_not_the_engine(
    kind: Kind, engine: FullEngine, models: Models, scratch: Path
) -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"logprobs": True},
        {"prompt_logprobs": True},
        {"temperature": 1.0},
        {"temperature": 1e-9, "seed": 4},
        {"temperature": 1.0, "seed": 5, "top_p": 0.5, "top_k": 7},
        {"logit_bias": {"9": 50.0}},
        {"max_tokens": 1},
        {"stop_token_ids": list(range(VOCAB_SIZE))},
        {"ignore_eos": False},
    ]
    if "allowed_token_ids" not in kind.lacks:
        asked += [{"allowed_token_ids": [9]}, {"temperature": 1.0, "bad_words_token_ids": [[77]]}]
    either = torch.tensor([math.inf, -math.inf], dtype=torch.bfloat16)  # of two logits one is infinity, always
    broken = [
        ("model.layers.1.mlp.down_proj.weight", ..., math.nan),
        ("model.norm.weight", ..., math.inf),
        ("lm_head.weight", 77, math.nan),
        ("lm_head.weight", ([77, 78], 3), either),
    ]
    prompts = [prompt_of(1, 5), prompt_of(2, 2 * BATCH_TOKENS)]
    for number, (name, where, value) in enumerate(broken):
        path = changed(models.tiny[1], scratch / str(number), name, where, value)
        await update(engine, path, 1 + number)
        runs = [Run(engine, ask(prompt, **more)) for prompt in prompts for more in asked]
        assert [await fails(one) for one in runs] == [[]] * len(runs)
    assert engine.load() == (0, 0)
    await update(engine, models.tiny[1], 9)
    for result in await asyncio.gather(*(run(engine, ask(prompt, logprobs=True)) for prompt in prompts)):
        assert is_of(result, models.tiny[1])


async def test_a_request_ends_before_the_first_token_of_no_numbers_and_no_other_does(
    engine: FullEngine, models: Models, scratch: Path
) -> None:
    """The tokens before such a token are delivered. It holds for weights that come meanwhile, too."""
    chain = witnessed(1, 7, 200)
    token = chain[120]
    lone = changed(models.witness[1], scratch / "token", "model.embed_tokens.weight", token, math.nan)
    await update(engine, lone, 1)
    starts = [start for start in range(20, 60) if token not in witnessed(1, start, 16)][:8]
    reaching = [Run(engine, ask([7], max_tokens=200, **more)) for more in ({}, {"logprobs": True})]
    await asyncio.gather(*(one.reach(1) for one in reaching))
    for start, result in zip(
        starts, await asyncio.gather(*(run(engine, ask([one])) for one in starts)), strict=True
    ):
        assert (result.tokens, result.finish) == (witnessed(1, start, 16), "length")
    for one in reaching:
        made = await fails(one)
        assert made == chain[: len(made)]
        assert len(made) <= 121
    assert await fails(Run(engine, ask([token]))) == []
    await update(engine, models.witness[1], 2)
    assert (await run(engine, ask([7], max_tokens=200))).tokens == chain
    under = Run(engine, ask([7], max_tokens=ENDLESS))
    await under.reach(3)
    whole = changed(models.witness[1], scratch / "whole", "model.norm.weight", ..., math.nan)
    await update(engine, whole, 3)
    made = await fails(under)
    assert made == witnessed(1, 7, len(made))
    await update(engine, models.witness[1], 4)
    assert (await run(engine, ask([7]))).tokens == chain[:16]
    assert engine.load() == (0, 0)


async def test_generation_goes_on_while_weights_are_received(engine: FullEngine, models: Models) -> None:
    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(5)
    for _ in range(3):
        staging, _ = await receive(engine, reception(models.witness[2]))
        await engine.discard(staging)
    await engine.discard("never")
    assert (await one.end()).tokens == witnessed(1, 20, 300)
    with pytest.raises(EngineFailed, match="paused"):
        await engine.swap(staging, version(1, models.witness[2]))
    await engine.pause("keep", False)
    with pytest.raises(EngineFailed, match="discarded"):
        await engine.swap(staging, version(1, models.witness[2]))
    await engine.resume()
    result = await run(engine, ask([9]))
    assert (result.tokens, [span.sequence for span in result.spans]) == (witnessed(1, 9, 16), [0])


async def test_bad_checkpoints_change_nothing(
    engine: FullEngine, models: Models, scratch: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    good = load_file(models.witness[2] / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    bad = {
        "missing": {key: tensor for key, tensor in good.items() if key != name},
        "unknown": good | {"extra.weight": good[name].clone()},
        "of another shape": good | {name: good[name][:-1].clone()},
        "of another dtype": good | {name: good[name].float()},
    }
    for what, tensors in bad.items():
        path = scratch / what
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        with pytest.raises(InvalidWeights, match=what):
            await receive(engine, reception(path))
    truncated = scratch / "truncated"
    truncated.mkdir()
    whole = (models.witness[2] / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(InvalidWeights, match="truncated"):
        await receive(engine, reception(truncated))
    with pytest.raises(InvalidWeights, match="is wanted"):
        await receive(engine, reception(models.witness[2], digest="blake3:" + "0" * 64))
    for path in (scratch / "absent", tmp_path):
        with pytest.raises(InvalidRequest):
            await receive(engine, reception(path))
    assert (await run(engine, ask([9]))).tokens == witnessed(1, 9, 16)
    wide = scratch / "wide"
    wide.mkdir()
    save_file({key: tensor.float() for key, tensor in good.items()}, wide / "model.safetensors")
    staging, _ = await receive(engine, reception(wide, cast=True))
    await engine.pause("keep", False)
    await engine.swap(staging, version(1, models.witness[2]))
    await engine.resume()
    assert (await run(engine, ask([9]))).tokens == witnessed(2, 9, 16)


async def test_overwriting_in_place(engine: FullEngine, models: Models) -> None:
    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(10)
    with pytest.raises(EngineFailed, match="paused"):
        await receive(engine, reception(models.witness[2], in_place=True))
    await engine.pause("keep", False)
    _, reply = await receive(engine, reception(models.witness[2], in_place=True))
    assert reply["digest"] == model_digest(models.witness[2])
    engine.set_version(version(1, models.witness[2]))
    assert await engine.flush_cache() is True
    await engine.resume()
    assert [span.sequence for span in (await one.end()).spans] == [0, 1]
    assert (await run(engine, ask([9]))).tokens == witnessed(2, 9, 16)


async def test_an_overwrite_that_fails_can_be_healed(engine: FullEngine, models: Models, scratch: Path) -> None:
    await engine.pause("keep", False)
    wrong = reception(models.witness[2], in_place=True, digest="blake3:" + "0" * 64)
    with pytest.raises(InvalidWeights, match="the bytes make"):
        await receive(engine, wrong)
    what = reception(models.witness[2], in_place=True)
    await asyncio.to_thread(engine.open, *what)
    with pytest.raises(EngineFailed, match="cancelled"):
        await asyncio.to_thread(engine.receive, what.staging, lambda: True)
    cut = shutil.copytree(models.witness[2], scratch / "cut")
    write_manifest(cut)
    raw = bytearray((cut / "model.safetensors").read_bytes())
    raw[len(raw) // 2] ^= 1
    (cut / "model.safetensors").write_bytes(raw)
    with pytest.raises(InvalidWeights, match="its publisher stated"):  # in the middle
        await receive(engine, reception(cut, in_place=True))
    await engine.resume()
    assert (await run(engine, ask([9]))).spans == []
    await engine.pause("keep", False)
    await receive(engine, reception(models.witness[2], in_place=True))
    engine.set_version(version(1, models.witness[2]))
    assert await engine.flush_cache() is True
    await engine.resume()
    result = await run(engine, ask([9]))
    assert (result.tokens, result.spans[0].sequence) == (witnessed(2, 9, 16), 1)


async def test_checks_see_every_change(engine: FullEngine, models: Models, scratch: Path) -> None:
    from safetensors.torch import load_file, save_file

    (before,) = await engine.check_weights("checksum")
    assert (await engine.check_weights("snapshot")) == [{"rank": 0}]
    assert (await engine.check_weights("compare")) == [{"rank": 0, "match": True, "mismatches": []}]
    seen = {before["checksum"]}
    tensors = load_file(models.witness[1] / "model.safetensors")
    for name in tensors:  # one element of each
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[name].view(-1)[-1] += 1.0
        path = scratch / name
        path.mkdir()
        save_file(changed, path / "model.safetensors")
        await update(engine, path, 1)
        (row,) = await engine.check_weights("checksum")
        assert row["checksum"] not in seen, name
        seen.add(row["checksum"])
        (compared,) = await engine.check_weights("compare")
        # SGLang's LoRA has a second name for what it wraps.
        assert len({each.replace(".base_layer", "") for each in compared["mismatches"]}) == 1, name
    await update(engine, models.witness[1], 2)
    assert await engine.check_weights("checksum") == [before]
    await engine.check_weights("reset_tensors")
    (compared,) = await engine.check_weights("compare")
    assert not compared["match"]
    assert (await run(engine, ask([9]))).spans == []
    await update(engine, models.witness[1], 3)
    assert await engine.check_weights("checksum") == [before]
    assert (await run(engine, ask([9]))).tokens == witnessed(1, 9, 16)


# adapters


async def test_adapters_load_swap_and_unload(kind: Kind, engine: FullEngine, models: Models) -> None:
    await update(engine, models.tiny[1], 1)

    async def says(name: str | None, seed: int = 1) -> Result:
        return await run(engine, ask(prompt_of(seed, 12), adapter=name, logprobs=True))

    for sequence, seed in ((2, 1), (3, 2)):
        await load_adapter(engine, "x", models.adapters[seed], sequence)
        result = await says("x")
        assert is_of(result, models.tiny[1], models.adapters[seed])
        assert not is_of(result, models.tiny[1])
        (span,) = result.spans
        assert span.adapter is not None
        assert (span.sequence, span.adapter.sequence) == (1, sequence)
        bare = await says(None)
        assert is_of(bare, models.tiny[1])
        assert bare.spans[0].adapter is None
    # In one batch.
    await load_adapter(engine, "y", models.adapters[1])
    asked = [(name, seed) for seed in range(4) for name in ("x", "y", None)]
    await engine.pause("keep", False)
    together = [asyncio.create_task(says(name, seed)) for name, seed in asked]
    await engine.resume()
    loaded = {"x": models.adapters[2], "y": models.adapters[1]}
    for (name, _), result in zip(asked, await asyncio.gather(*together), strict=True):
        assert is_of(result, models.tiny[1], loaded[name] if name is not None else None), name
    if kind.places == len(loaded):
        with pytest.raises(InvalidRequest, match="no place"):
            await load_adapter(engine, "z", models.adapters[1])
    # New base weights keep the adapters, also those that are written in place.
    await update(engine, models.tiny[2], 4)
    result = await says("x")
    assert is_of(result, models.tiny[2], models.adapters[2])
    assert result.spans[0].adapter is not None
    assert (result.spans[0].sequence, result.spans[0].adapter.sequence) == (4, 3)
    assert is_of(await says(None), models.tiny[2])
    await engine.pause("keep", False)
    await receive(engine, reception(models.tiny[1], in_place=True))
    assert await engine.flush_cache() is True
    await engine.resume()
    assert is_of(await says("x"), models.tiny[1], models.adapters[2])
    for _ in range(2):
        await unload_adapter(engine, "x")
    with pytest.raises(InvalidRequest):
        await says("x")
    assert is_of(await says("y"), models.tiny[1], models.adapters[1])


@pytest.mark.parametrize(
    "target", ["q_proj", "k_proj", "up_proj", "layers.0.self_attn.v_proj", "layers.1.mlp.gate_proj"]
)
async def test_adapters_of_a_part_of_a_layer(
    engine: FullEngine, models: Models, scratch: Path, target: str
) -> None:
    """Engines have the query, the key and the value in one layer."""
    await update(engine, models.tiny[1], 1)
    path = make_tiny_adapter(models.tiny[1], scratch / "part", seed=3, targets=(target,), std=0.3)
    await load_adapter(engine, "x", path)
    result = await run(engine, ask(prompt_of(1, 12), adapter="x", logprobs=True))
    assert is_of(result, models.tiny[1], path)
    assert not is_of(result, models.tiny[1])


async def test_an_adapter_that_goes_ends_its_requests(engine: FullEngine, models: Models) -> None:
    await load_adapter(engine, "x", models.adapters[1])
    mine = Run(engine, ask([20], adapter="x", max_tokens=ENDLESS))
    other = Run(engine, ask([20], max_tokens=300))
    await mine.reach(3)
    await other.reach(3)
    await unload_adapter(engine, "x")
    assert (await mine.end()).finish == "abort"
    assert (await other.end()).tokens == witnessed(1, 20, 300)


async def test_an_adapter_that_goes_ends_what_waits_for_it(engine: FullEngine, models: Models) -> None:
    """The adapter was loaded when the requests came in a pause."""
    await load_adapter(engine, "x", models.adapters[1])
    await engine.pause("keep", False)
    mine, other = Run(engine, ask([20], adapter="x")), Run(engine, ask([20]))
    await engine.liveness()  # they have come
    assert engine.load() == (0, 2)
    await engine.swap_adapter("x", None, None)
    await engine.resume()
    result = await mine.end()
    assert (result.tokens, result.finish) == ([], "abort")
    assert (await other.end()).tokens == witnessed(1, 20, 16)


async def test_a_reset_under_a_request_of_an_adapter_that_was_replaced(engine: FullEngine, models: Models) -> None:
    """vLLM drops the adapters with the weights, and would look for the files of the first one."""
    await load_adapter(engine, "x", models.adapters[1])
    one = Run(engine, ask([20], adapter="x", max_tokens=ENDLESS))
    await one.reach(3)
    await load_adapter(engine, "x", models.adapters[2])
    await engine.check_weights("reset_tensors")
    await one.reach(len(one.result.tokens) + 3)
    await engine.liveness()
    await engine.abort(None)
    assert (await one.end()).finish == "abort"


async def test_an_adapter_that_is_replaced_goes_on_with_its_requests(engine: FullEngine, models: Models) -> None:
    """This also holds in the middle of the requested tokens, and with everything that belongs to them."""
    await update(engine, models.tiny[1], 1)
    await load_adapter(engine, "x", models.adapters[1])
    prompt = prompt_of(5, 12)
    asked: dict[str, Any] = {"adapter": "x", "logprobs": True, "prompt_logprobs": True, "max_tokens": 200}
    runs = [Run(engine, ask([*prompt, token], **asked)) for token in (7, 8)]
    other = Run(engine, ask([20], max_tokens=300))
    for sequence, seed in ((2, 2), (3, 1)):
        staging, _ = await receive(engine, reception(models.adapters[seed], kind="lora"))
        for one in runs:
            await one.reach(len(one.result.tokens) + 3)
        await engine.pause("keep", False)
        late = Run(engine, ask([*prompt, 9], **asked))
        await engine.swap_adapter("x", staging, adapter_version(sequence, models.adapters[seed]))
        await engine.resume()
        runs.append(late)
    for number, one in enumerate(runs):
        result = await one.end()
        assert (result.finish, len(result.tokens), len(result.logprobs)) == ("length", 200, 200)
        told = [(span.adapter.sequence, span.start) for span in result.spans if span.adapter is not None]
        assert [sequence for sequence, _ in told] == [1, 2, 3][max(0, number - 1) :]
        assert [span.end for span in result.spans] == [*(start for _, start in told[1:]), 200]
        assert [delta.prompt_token_ids is not None for delta in result.deltas].count(True) == 1
        (of_prompt,) = (delta.prompt_logprobs for delta in result.deltas if delta.prompt_logprobs is not None)
        assert len(of_prompt) == len(prompt) + 1
        assert result.deltas[0].prompt_token_ids == one.request.prompt_token_ids
        for (sequence, start), span in zip(told, result.spans, strict=True):
            adapter = models.adapters[2 - sequence % 2]
            before = [*(one.request.prompt_token_ids or ()), *result.tokens[:start]]
            expected, gap = logprobs_of(models.tiny[1], before, result.tokens[start : span.end], adapter)
            assert gap <= LOGPROBS
            assert result.logprobs[start : span.end] == pytest.approx(expected, abs=2 * LOGPROBS)
    assert (await other.end()).finish == "length"


@pytest.mark.parametrize("then", ["unload", "wait"])
async def test_what_follows_the_swap_of_an_adapter_in_one_pause(
    engine: FullEngine, models: Models, then: str
) -> None:
    """The adapter's frozen requests are neither lost nor forgotten."""
    await update(engine, models.tiny[1], 1)
    await load_adapter(engine, "x", models.adapters[1])
    staging, _ = await receive(engine, reception(models.adapters[2], kind="lora"))
    one = Run(engine, ask([20], adapter="x", max_tokens=ENDLESS if then == "unload" else 100))
    await one.reach(3)
    await engine.pause("keep", False)
    assert engine.load() == (1, 0)
    await engine.swap_adapter("x", staging, adapter_version(2, models.adapters[2]))
    if then == "unload":
        await engine.swap_adapter("x", None, None)
        assert (await one.end()).finish == "abort"
    else:
        await engine.pause("wait", False)
        result = await one.end()
        assert (result.finish, len(result.tokens)) == ("length", 100)
    await engine.resume()


async def test_a_request_whose_adapter_could_not_be_replaced_goes_on(
    kind: Kind, engine: FullEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    await update(engine, models.tiny[1], 1)
    await load_adapter(engine, "x", models.adapters[1])
    for failure in kind.failures(engine)["swap"]:
        staging, _ = await receive(engine, reception(models.adapters[2], kind="lora"))
        running = Run(engine, ask([9], adapter="x", logprobs=True, max_tokens=100))
        await running.reach(3)
        await engine.pause("keep", False)
        monkeypatch.setattr(failure.owner, failure.name, failure.broken)
        with pytest.raises(EngineFailed, match=failure.why):
            await engine.swap_adapter("x", staging, adapter_version(2, models.adapters[2]))
        monkeypatch.undo()
        await engine.resume()
        result = await running.end()
        assert (result.finish, len(result.tokens), len(result.spans)) == ("length", 100, 1)
        assert is_of(result, models.tiny[1], models.adapters[1])


async def test_a_request_on_its_way_when_its_adapter_goes(
    kind: Kind, engine: FullEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request must not reach the engine, which would look for the adapter's files and die."""
    await load_adapter(engine, "x", models.adapters[1])
    waits, go = asyncio.Event(), asyncio.Event()
    kind.slow_submission(engine, monkeypatch, waits, go)
    late = Run(engine, ask([20], adapter="x"))
    async with asyncio.timeout(BOUND_S):
        await waits.wait()
    assert engine.load() == (0, 1), "it has no token yet"
    await engine.pause("keep", False)
    unloading = asyncio.create_task(engine.swap_adapter("x", None, None))
    await engine.liveness()
    go.set()
    await unloading
    await engine.resume()
    result = await late.end()
    assert (result.tokens, result.finish) == ([], "abort")
    await engine.liveness()


@pytest.mark.parametrize("change", ["load", "swap", "unload"])
async def test_a_change_of_an_adapter_that_fails_changes_nothing(
    kind: Kind, engine: FullEngine, models: Models, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    await update(engine, models.tiny[1], 1)
    await load_adapter(engine, "x", models.adapters[1])
    for failure in kind.failures(engine)[change]:
        staging, fresh = None, None
        if change != "unload":
            staging, _ = await receive(engine, reception(models.adapters[2], kind="lora"))
            fresh = adapter_version(2, models.adapters[2])
        await engine.pause("keep", False)
        monkeypatch.setattr(failure.owner, failure.name, failure.broken)
        with pytest.raises(EngineFailed, match=failure.why):
            await engine.swap_adapter("z" if change == "load" else "x", staging, fresh)
        monkeypatch.undo()
        assert failure.unreachable() == set()
        await engine.resume()
        result = await run(engine, ask([9], adapter="x", logprobs=True))
        assert is_of(result, models.tiny[1], models.adapters[1])
        assert result.spans[0].adapter is not None
        assert result.spans[0].adapter.sequence == 1
        with pytest.raises(InvalidRequest):
            await run(engine, ask([9], adapter="z"))
    await load_adapter(engine, "x", models.adapters[2], 3)
    assert is_of(await run(engine, ask([9], adapter="x", logprobs=True)), models.tiny[1], models.adapters[2])


async def test_adapters_that_do_not_fit(kind: Kind, engine: FullEngine, models: Models, scratch: Path) -> None:
    large = make_tiny_adapter(models.witness[1], scratch / "large", seed=1, r=65)
    with pytest.raises(InvalidWeights, match="rank is 65"):
        await receive(engine, reception(large, kind="lora"))
    head = make_witness_adapter(models.witness[1], scratch / "head", 1)
    if kind.adapts_head:
        await load_adapter(engine, "x", head)
        made = (await run(engine, ask([9], adapter="x"))).tokens
        assert made == [witness_adapter_next_token(1, token) for token in [9, *made[:-1]]]
    else:
        with pytest.raises(InvalidWeights, match="lm_head"):
            await receive(engine, reception(head, kind="lora"))
    with pytest.raises(InvalidRequest):
        await receive(engine, reception(models.witness[2], kind="lora"))


async def test_bad_adapters_are_refused_and_touch_nothing(
    kind: Kind, engine: FullEngine, models: Models, scratch: Path
) -> None:
    """An adapter that is wrong by its names and sizes alone is refused. The loaded adapter serves all the while."""
    await update(engine, models.tiny[1], 1)
    await load_adapter(engine, "x", models.adapters[1])
    good, files = models.adapters[2], set(kind.directory(engine).rglob("*"))

    @contextlib.asynccontextmanager
    async def untouched() -> AsyncIterator[None]:
        under = Run(engine, ask([9], adapter="x", logprobs=True, max_tokens=60))
        await under.reach(3)
        yield
        for result in (await under.end(), await run(engine, ask([10], adapter="x", logprobs=True))):
            assert is_of(result, models.tiny[1], models.adapters[1])
            (span,) = result.spans
            assert span.adapter is not None
            assert (span.adapter.sequence, span.adapter.digest) == (1, adapter_digest(models.adapters[1]))
        assert is_of(await run(engine, ask([10], logprobs=True)), models.tiny[1])
        assert set(kind.directory(engine).rglob("*")) == files

    for what, bad in BAD.items():
        refused = reception(bad.make(good, scratch / what), kind="lora")
        async with untouched():
            with pytest.raises(InvalidWeights) as caught:
                await asyncio.to_thread(engine.open, *refused)
        bad.check(caught.value)
    other = shutil.copytree(good, scratch / "other bytes")
    write_manifest(other)
    raw = bytearray((other / ADAPTER_NAME).read_bytes())
    raw[-1] ^= 1
    (other / ADAPTER_NAME).write_bytes(raw)
    async with untouched():
        with pytest.raises(InvalidWeights, match="its publisher stated"):
            await receive(engine, reception(other, kind="lora"))
    for number, dtype in enumerate(DTYPES):
        cast = shutil.copytree(good, scratch / str(dtype))
        in_dtype(dtype)(cast)
        staging, _ = await receive(engine, reception(cast, kind="lora", cast=True))
        await engine.pause("keep", False)
        await engine.swap_adapter("x", staging, adapter_version(2 + number, cast))
        await engine.resume()
        assert is_of(await run(engine, ask([9], adapter="x", logprobs=True)), models.tiny[1], good)


# hangs and death


async def test_a_hang_is_seen_and_passes(kind: Kind, engine: FullEngine) -> None:
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
async def test_a_pause_that_a_hang_cuts_leaves_it_running(kind: Kind, engine: FullEngine, mode: PauseMode) -> None:
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


async def test_engines_that_begin_alike_draw_other_numbers(kind: Kind, models: Models) -> None:
    """A group's choices are spread over the workers: those of one prompt and no seed are to differ.

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


async def test_closing_ends_streams_and_processes(kind: Kind, shared: tuple[FullEngine, EngineInfo]) -> None:
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
