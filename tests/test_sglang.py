"""The `sglang` engine on a CPU: real SGLang, started once, against plain transformers models."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.engines("sglang"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::(torch|sglang|transformers|multiprocessing)"),  # theirs, not ours
]

from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, Unsupported  # noqa: E402
from rl_plane.versions import TensorSpec  # noqa: E402
from tests.engine_runs import (  # noqa: E402
    Result,
    Run,
    adapter_version,
    ask,
    load_adapter,
    receive,
    reception,
    run,
    unload_adapter,
    update,
    version,
    witnessed,
)
from worker.engines.base import EngineInfo, EngineOptions  # noqa: E402
from worker.engines.sglang import SglangEngine, build  # noqa: E402
from worker.engines.sglang_streams import Stream  # noqa: E402
from worker.engines.spans import Label  # noqa: E402
from worker.staging import model_digest  # noqa: E402
from worker.tiny_adapter import make_tiny_adapter, make_witness_adapter  # noqa: E402
from worker.tiny_model import VOCAB_SIZE, make_tiny_model, make_witness_model  # noqa: E402

DEATH_S = 2.0
"""How soon a death must be noticed."""

LOGPROBS = 0.02
"""Two forwards in bfloat16, batched in other ways, agree to this."""


@dataclasses.dataclass
class Models:
    root: Path
    tiny: dict[int, Path]
    witness: dict[int, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("sglang-models")
    return Models(
        root,
        {seed: make_tiny_model(root / f"tiny-{seed}", seed, "bfloat16") for seed in (1, 2)},
        {seed: make_witness_model(root / f"witness-{seed}", seed, "bfloat16") for seed in (1, 2)},
    )


def options(models: Models, **extra: str) -> EngineOptions:
    return EngineOptions(
        models.witness[1], device="cpu", extra={"max_lora_rank": "64"} | extra, weight_roots=(models.root,)
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(models: Models) -> AsyncIterator[tuple[SglangEngine, EngineInfo]]:
    engine = SglangEngine(options(models))
    info = await engine.start()
    yield engine, info
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: tuple[SglangEngine, EngineInfo], models: Models) -> AsyncIterator[SglangEngine]:
    """At witness 1, without adapters, running."""
    engine, _ = shared
    if engine._version is None or engine._version.digest != model_digest(models.witness[1]):
        await update(engine, models.witness[1], 0)
    engine.set_version(version(0, models.witness[1]))
    yield engine
    await engine.pause("abort", False)
    for name in list(engine._adapters):
        await engine.swap_adapter(name, None, None)
    await engine.resume()


Plain = Callable[[Path, list[int], list[int]], tuple[list[float], float]]


@pytest.fixture(scope="module")
def plain() -> Plain:
    """The logprobs of tokens by the same weights in a module that no engine has touched; and by how much the worst of
    them was less likely than the likeliest token."""
    from transformers import AutoModelForCausalLM

    loaded: dict[Path, Any] = {}

    def forward(model: Path, prompt: list[int], tokens: list[int]) -> tuple[list[float], float]:
        if model not in loaded:
            found = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
            loaded[model] = found.eval()
        with torch.no_grad():
            logits = loaded[model](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        made = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return made.tolist(), float((torch.log_softmax(logits, -1).max(1).values - made).max())

    return forward


def prompt_of(seed: int, length: int) -> list[int]:
    return [random.Random(f"{seed} {length}").randrange(3, VOCAB_SIZE) for _ in range(length)]


# what it is


async def test_what_it_says_of_itself(shared: tuple[SglangEngine, EngineInfo]) -> None:
    engine, info = shared
    assert (info.engine, info.dtype, info.device, info.world_size) == ("sglang", "bfloat16", "cpu", 1)
    assert info.vocab_size == VOCAB_SIZE
    assert "filesystem" in info.transports
    assert set(info.capabilities) == {"release_memory", "resume_memory"}
    assert engine.weight_spec()["lm_head.weight"] == TensorSpec("BF16", (VOCAB_SIZE, 128))
    for memory in (engine.release_memory, engine.resume_memory):
        with pytest.raises(Unsupported, match="GPU"):
            await memory(["weights"])
    await engine.liveness()


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"nonsense": "1"}, "engine_arg.nonsense"),
        ({"tp_size": "two"}, "engine_arg.tp_size"),
        ({"disable_radix_cache": "perhaps"}, "engine_arg.disable_radix_cache"),
        ({"attention_backend": "by_hand"}, "engine_arg.attention_backend"),
        ({"skip_tokenizer_init": "false"}, "engine_arg.skip_tokenizer_init"),
    ],
)
async def test_arguments_are_sglangs_own(models: Models, extra: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(EngineOptions(models.tiny[1], extra=extra))
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


# generation


async def test_greedy_tokens_are_those_of_a_plain_forward_before_and_after_swaps(
    engine: SglangEngine, models: Models, plain: Plain
) -> None:
    prompts = [prompt_of(seed, 3 + 11 * seed) for seed in range(4)]
    made = []
    for sequence, seed in ((1, 1), (2, 2), (3, 1)):
        await update(engine, models.tiny[seed], sequence)
        results = await asyncio.gather(*(run(engine, ask(prompt, logprobs=True)) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            expected, gap = plain(models.tiny[seed], prompt, result.tokens)
            assert gap <= LOGPROBS
            assert result.logprobs == pytest.approx(expected, abs=LOGPROBS)
            assert [(span.sequence, span.start, span.end) for span in result.spans] == [(sequence, 0, 16)]
        made.append([result.tokens for result in results])
    assert made[0] == made[2] != made[1]


async def test_deltas_text_and_stops(engine: SglangEngine) -> None:
    chain = witnessed(1, 7, 16)
    result = await run(engine, ask([7], logprobs=True))
    assert (result.tokens, result.finish, len(result.logprobs)) == (chain, "length", 16)
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


async def test_seeds_whatever_else_runs(engine: SglangEngine, models: Models, plain: Plain) -> None:
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
    expected, _ = plain(models.tiny[1], prompt, alone.tokens)
    assert alone.logprobs == pytest.approx(expected, abs=LOGPROBS)
    narrow = await run(engine, ask(prompt, temperature=1.0, top_k=1))
    assert narrow.tokens == (await run(engine, ask(prompt))).tokens


async def test_bad_requests_do_not_reach_the_engine(
    engine: SglangEngine, shared: tuple[SglangEngine, EngineInfo]
) -> None:
    length = shared[1].max_model_len
    for field, request in (
        ("prompt_token_ids", ask([VOCAB_SIZE])),
        ("stop_token_ids", ask([1], stop_token_ids=[VOCAB_SIZE])),
        ("max_tokens", ask([1], max_tokens=length)),
        ("model", ask([1], adapter="never")),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await run(engine, request)
        assert caught.value.facts["field"] == field
    assert len((await run(engine, ask(prompt_of(1, length - 1), max_tokens=1))).tokens) == 1
    assert (await run(engine, ask([3]))).tokens == witnessed(1, 3, 16)
    assert engine.load() == (0, 0)


@pytest.mark.parametrize(
    "extreme",
    [
        {"seed": (1 << 63) - 1, "temperature": 1.0},
        {"seed": 0, "temperature": 1.0},
        {"temperature": 1e-9},
        {"temperature": 1e300},
        {"temperature": 5e-324},
        {"temperature": 1.0, "top_p": 1e-300},
        {"temperature": 1.0, "top_k": 1 << 40},
        {"temperature": 1.0, "top_k": VOCAB_SIZE + 1, "top_p": 0.5},
        {"stop_token_ids": list(range(VOCAB_SIZE)) * 2},
        {"max_tokens": 1, "logprobs": True},
    ],
)
async def test_extremes_do_not_hurt_the_engine(engine: SglangEngine, extreme: dict[str, Any]) -> None:
    assert (await run(engine, ask([7], **extreme))).tokens
    assert (await run(engine, ask([3]))).tokens == witnessed(1, 3, 16)


async def test_more_requests_than_the_engine_takes_at_once(engine: SglangEngine) -> None:
    runs = [Run(engine, ask([token], max_tokens=40)) for token in range(1, 401)]
    for token, one in enumerate(runs, 1):
        assert (await one.end()).tokens == witnessed(1, token, 40)


async def test_aborting_and_leaving(engine: SglangEngine) -> None:
    runs = [Run(engine, ask([20], max_tokens=2000)) for _ in range(3)]
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


async def test_what_an_abort_repeats_is_not_taken_again() -> None:
    stream = Stream(ask([1], logprobs=True), [1], frozenset())

    def out(ids: list[int], count: int, finish: Any = None) -> dict[str, Any]:
        meta = {"completion_tokens": count, "finish_reason": finish}
        return {"output_ids": ids, "meta_info": meta | {"output_token_logprobs": [(0.0, each) for each in ids]}}

    label = Label(None)
    assert not stream.take(out([5, 6], 2), "a", label)
    assert stream.take(out([6], 2, {"type": "abort"}), "a", label)
    stream.take(out([7], 3), "a", label)
    piece, failure = await stream.next()
    assert (piece.token_ids, piece.finish_reason, failure) == ([5, 6], "abort", None)


# pause


async def test_keep_freezes_and_goes_on(engine: SglangEngine) -> None:
    one = Run(engine, ask([20], max_tokens=400))
    await one.reach(10)
    await engine.pause("keep", False)
    await engine.pause("keep", False)
    held = list(one.result.tokens)
    late = Run(engine, ask([21]))
    for _ in range(3):
        await engine.liveness()
    assert one.result.tokens == held
    assert engine.load() == (1, 1)
    assert await engine.flush_cache() is True  # it is computed anew
    await engine.resume()
    await engine.resume()
    assert (await one.end()).tokens == witnessed(1, 20, 400)
    assert (await late.end()).tokens == witnessed(1, 21, 16)


async def test_wait_drains(engine: SglangEngine) -> None:
    one = Run(engine, ask([20], max_tokens=200))
    await one.reach(1)
    assert await engine.pause("wait", True) is True
    assert len((await one.end()).tokens) == 200
    late = Run(engine, ask([21]))
    await engine.liveness()
    assert late.result.tokens == []
    await engine.resume()
    assert len((await late.end()).tokens) == 16


async def test_wait_drains_what_was_frozen(engine: SglangEngine) -> None:
    one = Run(engine, ask([20], max_tokens=200))
    await one.reach(1)
    await engine.pause("keep", False)
    await engine.pause("wait", False)
    assert (await one.end()).tokens == witnessed(1, 20, 200)
    await engine.resume()


@pytest.mark.parametrize("frozen", [False, True])
async def test_a_wait_that_is_cancelled_leaves_it_as_it_was(engine: SglangEngine, frozen: bool) -> None:
    one = Run(engine, ask([20], max_tokens=2000))
    await one.reach(1)
    if frozen:
        await engine.pause("keep", False)
    waiting = asyncio.create_task(engine.pause("wait", False))
    await one.reach(len(one.result.tokens) + 5)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if frozen:
        await engine.liveness()
        held = len(one.result.tokens)
        await engine.liveness()
        assert len(one.result.tokens) == held < 2000
        await engine.resume()
    assert len((await run(engine, ask([21]))).tokens) == 16
    assert len((await one.end()).tokens) == 2000


async def test_abort_ends_all_at_once(engine: SglangEngine) -> None:
    one = Run(engine, ask([20], max_tokens=2000))
    await one.reach(5)
    assert await engine.pause("abort", True) is True
    result = await one.end()
    assert result.finish == "abort"
    assert result.tokens == witnessed(1, 20, len(result.tokens))
    await engine.resume()


async def test_a_frozen_request_can_be_aborted(engine: SglangEngine) -> None:
    one, other = (Run(engine, ask([20], max_tokens=500)) for _ in range(2))
    await one.reach(5)
    await other.reach(5)
    await engine.pause("keep", False)
    assert await engine.abort([one.request.id]) == 1
    assert (await one.end()).finish == "abort"
    await engine.resume()
    assert (await other.end()).tokens == witnessed(1, 20, 500)


async def test_flushing(engine: SglangEngine) -> None:
    assert await engine.flush_cache() is True
    one = Run(engine, ask([20], max_tokens=2000))
    await one.reach(5)
    assert await engine.flush_cache() is False
    assert await engine.pause("keep", True) is True
    await engine.resume()
    await engine.abort(None)
    assert (await one.end()).finish == "abort"


# weights


async def test_a_swap_under_streams(engine: SglangEngine, models: Models) -> None:
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
            made = result.tokens[span.start : span.end]
            assert made == witnessed(1 + span.sequence, before, len(made))
            before = made[-1]
    result = await late.end()
    assert (result.tokens, result.spans[0].sequence) == (witnessed(2, 9, 16), 1)


async def test_no_request_uses_older_kv(engine: SglangEngine, models: Models, plain: Plain) -> None:
    """By logprobs: a stale prefix would move them by far more than the bound."""
    await update(engine, models.tiny[1], 1)
    prompt = prompt_of(5, 60)
    await run(engine, ask(prompt))
    running = Run(engine, ask([*prompt, 7], max_tokens=600, logprobs=True))
    await running.reach(5)
    await update(engine, models.tiny[2], 2)
    result = await run(engine, ask(prompt, logprobs=True))
    assert result.logprobs == pytest.approx(plain(models.tiny[2], prompt, result.tokens)[0], abs=LOGPROBS)
    result = await running.end()
    assert [span.sequence for span in result.spans] == [1, 2]
    for span in result.spans:
        before = [*prompt, 7, *result.tokens[: span.start]]
        expected, _ = plain(models.tiny[span.sequence], before, result.tokens[span.start : span.end])
        assert result.logprobs[span.start : span.end] == pytest.approx(expected, abs=LOGPROBS)


async def test_generation_goes_on_while_weights_are_received(engine: SglangEngine, models: Models) -> None:
    one = Run(engine, ask([20], max_tokens=450))
    await one.reach(5)
    for _ in range(3):
        staging, _ = await receive(engine, reception(models.witness[2]))
        await engine.discard(staging)
    await engine.discard("never")
    assert (await one.end()).tokens == witnessed(1, 20, 450)
    with pytest.raises(EngineFailed, match="paused"):
        await engine.swap(staging, version(1, models.witness[2]))
    await engine.pause("keep", False)
    with pytest.raises(EngineFailed, match="discarded"):
        await engine.swap(staging, version(1, models.witness[2]))
    await engine.resume()
    assert (await run(engine, ask([9]))).spans[0].sequence == 0


async def test_bad_checkpoints_change_nothing(engine: SglangEngine, models: Models, tmp_path: Path) -> None:
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
        path = models.root / f"bad-{what.replace(' ', '-')}"
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        with pytest.raises(InvalidWeights, match=what):
            await receive(engine, reception(path))
    truncated = models.root / "truncated"
    truncated.mkdir()
    whole = (models.witness[2] / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(InvalidWeights, match="truncated"):
        await receive(engine, reception(truncated))
    with pytest.raises(InvalidWeights, match="is wanted"):
        await receive(engine, reception(models.witness[2], digest="blake3:" + "0" * 64))
    for path in (models.root / "absent", tmp_path):
        with pytest.raises(InvalidRequest):
            await receive(engine, reception(path))
    assert (await run(engine, ask([9]))).tokens == witnessed(1, 9, 16)
    wide = models.root / "wide"
    wide.mkdir()
    save_file({key: tensor.float() for key, tensor in good.items()}, wide / "model.safetensors")
    staging, _ = await receive(engine, reception(wide, cast=True))
    await engine.pause("keep", False)
    await engine.swap(staging, version(1, models.witness[2]))
    await engine.resume()
    assert (await run(engine, ask([9]))).tokens == witnessed(2, 9, 16)


async def test_overwriting_in_place(engine: SglangEngine, models: Models) -> None:
    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(10)
    await engine.pause("keep", False)
    _, reply = await receive(engine, reception(models.witness[2], in_place=True))
    assert reply["digest"] == model_digest(models.witness[2])
    engine.set_version(version(1, models.witness[2]))
    assert await engine.flush_cache() is True
    await engine.resume()
    assert [span.sequence for span in (await one.end()).spans] == [0, 1]
    assert (await run(engine, ask([9]))).tokens == witnessed(2, 9, 16)


async def test_an_overwrite_that_fails_can_be_healed(engine: SglangEngine, models: Models) -> None:
    await engine.pause("keep", False)
    wrong = reception(models.witness[2], in_place=True, digest="blake3:" + "0" * 64)
    with pytest.raises(InvalidWeights, match="the bytes make"):
        await receive(engine, wrong)
    what = reception(models.witness[2], in_place=True)
    await asyncio.to_thread(engine.open, what)
    with pytest.raises(EngineFailed, match="cancelled"):
        await asyncio.to_thread(engine.receive, what.staging, lambda: True)
    await engine.resume()
    assert (await run(engine, ask([9]))).spans == []
    await engine.pause("keep", False)
    await receive(engine, reception(models.witness[2], in_place=True))
    engine.set_version(version(1, models.witness[2]))
    assert await engine.flush_cache() is True
    await engine.resume()
    assert (await run(engine, ask([9]))).tokens == witnessed(2, 9, 16)


async def test_checks_see_every_change(engine: SglangEngine, models: Models) -> None:
    from safetensors.torch import load_file, save_file

    (before,) = await engine.check_weights("checksum")
    assert (await engine.check_weights("snapshot")) == [{"rank": 0}]
    assert (await engine.check_weights("compare")) == [{"rank": 0, "match": True, "mismatches": []}]
    seen = {before["checksum"]}
    tensors = load_file(models.witness[1] / "model.safetensors")
    for name in tensors:  # one element of each
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[name].view(-1)[-1] += 1.0
        path = models.root / f"one-{name}"
        path.mkdir()
        save_file(changed, path / "model.safetensors")
        await update(engine, path, 1)
        (row,) = await engine.check_weights("checksum")
        assert row["checksum"] not in seen, name
        seen.add(row["checksum"])
        (compared,) = await engine.check_weights("compare")
        assert compared["mismatches"], name
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


@pytest.fixture(scope="module")
def adapters(models: Models) -> dict[int, Path]:
    """Of ranks and scalings of their own."""
    made = {}
    for seed, rank in ((1, 4), (2, 8)):
        path = make_tiny_adapter(models.tiny[1], models.root / f"adapter-{seed}", seed, r=rank)
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": seed == 2}))
        made[seed] = path
    return made


Adapted = Callable[[Path, Path | None, Result], bool]


@pytest.fixture(scope="module")
def is_of(models: Models) -> Adapted:
    """Did this base with this adapter, as PEFT has them, make these tokens, with these logprobs?"""
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft")
    loaded: dict[tuple[Path, Path | None], Any] = {}

    def is_of(base: Path, adapter: Path | None, result: Result) -> bool:
        if (base, adapter) not in loaded:
            model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
            loaded[base, adapter] = (
                model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
            ).eval()
        prompt = result.deltas[0].prompt_token_ids
        assert prompt is not None
        with torch.no_grad():
            logits = loaded[base, adapter](torch.tensor([prompt + result.tokens])).logits[0].float()
        every = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        made = every.gather(1, torch.tensor(result.tokens)[:, None])[:, 0]
        gap = float((every.max(1).values - made).max())
        return gap < LOGPROBS and result.logprobs == pytest.approx(made.tolist(), abs=2 * LOGPROBS)

    return is_of


async def test_adapters_load_swap_and_unload(
    engine: SglangEngine, models: Models, adapters: dict[int, Path], is_of: Adapted
) -> None:
    await update(engine, models.tiny[1], 1)

    async def says(name: str | None, seed: int = 1) -> Result:
        return await run(engine, ask(prompt_of(seed, 12), adapter=name, logprobs=True))

    for sequence, seed in ((2, 1), (3, 2)):
        await load_adapter(engine, "x", adapters[seed], sequence)
        result = await says("x")
        assert is_of(models.tiny[1], adapters[seed], result)
        assert not is_of(models.tiny[1], None, result)
        (span,) = result.spans
        assert span.adapter is not None
        assert (span.sequence, span.adapter.sequence) == (1, sequence)
        assert is_of(models.tiny[1], None, await says(None))
    # In one batch.
    await load_adapter(engine, "y", adapters[1])
    asked = [(name, seed) for seed in range(4) for name in ("x", "y", None)]
    await engine.pause("keep", False)
    together = [asyncio.create_task(says(name, seed)) for name, seed in asked]
    await engine.resume()
    of: dict[str | None, Path | None] = {"x": adapters[2], "y": adapters[1], None: None}
    for (name, _), result in zip(asked, await asyncio.gather(*together), strict=True):
        assert is_of(models.tiny[1], of[name], result), name
    # New base weights keep the adapters.
    await update(engine, models.tiny[2], 4)
    assert is_of(models.tiny[2], adapters[2], await says("x"))
    assert is_of(models.tiny[2], None, await says(None))
    for _ in range(2):
        await unload_adapter(engine, "x")
    with pytest.raises(InvalidRequest):
        await says("x")
    assert is_of(models.tiny[2], adapters[1], await says("y"))


async def test_an_adapter_that_goes_ends_its_requests(engine: SglangEngine, adapters: dict[int, Path]) -> None:
    await load_adapter(engine, "x", adapters[1])
    mine = Run(engine, ask([20], adapter="x", max_tokens=2000))
    other = Run(engine, ask([20], max_tokens=400))
    await mine.reach(3)
    await other.reach(3)
    await unload_adapter(engine, "x")
    assert (await mine.end()).finish == "abort"
    assert (await other.end()).tokens == witnessed(1, 20, 400)


async def test_a_swap_of_an_adapter_that_fails_changes_nothing(
    engine: SglangEngine,
    models: Models,
    adapters: dict[int, Path],
    is_of: Adapted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await update(engine, models.tiny[1], 1)
    await load_adapter(engine, "x", adapters[1])
    process, really = engine._process, engine._process.call

    def failing(what: str) -> None:
        async def call(op: str, **arguments: str) -> None:
            if op == what:
                monkeypatch.undo()
                raise EngineFailed(f"no {op}")
            await really(op, **arguments)

        monkeypatch.setattr(process, "call", call)

    for what in ("put_adapter", "remove_adapter"):
        staging, _ = await receive(engine, reception(adapters[2], kind="lora"))
        await engine.pause("keep", False)
        failing(what)
        with pytest.raises(EngineFailed, match=what):
            await engine.swap_adapter("x", staging, adapter_version(2, adapters[2]))
        await engine.resume()
        result = await run(engine, ask([9], adapter="x", logprobs=True))
        assert is_of(models.tiny[1], adapters[1], result)
        assert result.spans[0].adapter is not None
        assert result.spans[0].adapter.sequence == 1
    await load_adapter(engine, "x", adapters[2], 3)
    assert is_of(models.tiny[1], adapters[2], await run(engine, ask([9], adapter="x", logprobs=True)))


async def test_adapters_that_do_not_fit(engine: SglangEngine, models: Models) -> None:
    large = make_tiny_adapter(models.witness[1], models.root / "large", seed=1, r=65)
    with pytest.raises(InvalidWeights, match="rank is 65"):
        await receive(engine, reception(large, kind="lora"))
    head = make_witness_adapter(models.witness[1], models.root / "head", 1)
    with pytest.raises(InvalidWeights, match="lm_head"):
        await receive(engine, reception(head, kind="lora"))
    with pytest.raises(InvalidRequest):
        await receive(engine, reception(models.witness[2], kind="lora"))


# death


async def test_a_hang_is_seen_and_passes(engine: SglangEngine) -> None:
    one = Run(engine, ask([20], max_tokens=400))
    await one.reach(3)
    for pid in pids_of(engine):
        os.kill(pid, signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await engine.liveness()
    for pid in pids_of(engine):
        os.kill(pid, signal.SIGCONT)
    await engine.liveness()
    assert (await one.end()).tokens == witnessed(1, 20, 400)
    assert await engine.pause("abort", True) is True
    await engine.resume()


async def test_two_ranks_then_one_is_killed(
    models: Models, adapters: dict[int, Path], is_of: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TP 2, every rank answers; SIGKILL of one ends all, soon, and leaves nothing."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
    engine = SglangEngine(options(models, tp_size="2"))
    try:
        assert (await engine.start()).world_size == 2
        engine.set_version(version(0, models.witness[1]))
        assert (await run(engine, ask([9]))).tokens == witnessed(1, 9, 16)
        await update(engine, models.witness[2], 1)
        assert (await run(engine, ask([9]))).tokens == witnessed(2, 9, 16)
        rows = await engine.check_weights("checksum")
        assert [row["rank"] for row in rows] == [0, 1]
        assert rows[0]["checksum"] != rows[1]["checksum"]
        assert await asyncio.to_thread(engine.init_transport, {"backend": "filesystem"}) == [
            {"rank": 0},
            {"rank": 1},
        ]
        await update(engine, models.tiny[1], 2)
        await load_adapter(engine, "x", adapters[2])
        assert is_of(models.tiny[1], adapters[2], await run(engine, ask([9], adapter="x", logprobs=True)))
        with pytest.raises(InvalidWeights):
            await receive(engine, reception(models.tiny[1], digest="blake3:" + "0" * 64))
        await engine.check_weights("reset_tensors")
        assert len((await run(engine, ask([9]))).tokens) == 16
        await killed(engine, pids_of(engine)[1])
    finally:
        await engine.close()


def pids_of(engine: SglangEngine) -> list[int]:
    assert engine._process._watch is not None
    return sorted(engine._process._watch._descriptors)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def killed(engine: SglangEngine, pid: int) -> None:
    pids, directory = pids_of(engine), engine._process._directory
    assert directory is not None
    stream = Run(engine, ask([20], max_tokens=4000))
    await stream.reach(2)
    draining = asyncio.create_task(engine.pause("wait", False))
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(DEATH_S):
        with pytest.raises(EngineFailed):
            await draining
        with pytest.raises(EngineFailed):
            await stream.end()
        with pytest.raises(EngineFailed):
            await engine.liveness()
    for refused in (engine.flush_cache(), engine.pause("keep", False), run(engine, ask([1]))):
        with pytest.raises(EngineFailed):
            await refused
    await engine.close()
    assert all(map(gone, pids))
    assert not directory.exists()


async def test_a_model_that_does_not_load_is_an_error(models: Models) -> None:
    """Where SGLang would end this process."""
    broken = models.root / "broken"
    broken.mkdir()
    for file in models.tiny[1].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    engine = SglangEngine(EngineOptions(broken, device="cpu"))
    with pytest.raises(EngineFailed, match="did not start"):
        await engine.start()
    assert engine._process._watch is None


async def test_the_shared_engine_is_killed(shared: tuple[SglangEngine, EngineInfo]) -> None:
    """The last one: its other process, the detokenizer."""
    engine, _ = shared
    await killed(engine, pids_of(engine)[-1])


async def test_modes_for_gpus_are_refused_on_a_cpu(models: Models) -> None:
    given = options(models)
    for mode in (dataclasses.replace(given, deterministic=True), dataclasses.replace(given, memory_saver=True)):
        with pytest.raises(InvalidRequest, match="GPU"):
            SglangEngine(mode)
