"""Aborts, pauses, death and new weights of the `hf` engine, on tiny models."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_plane.errors import EngineDied, EngineFailed, InvalidWeights, PlaneError
from rl_plane.protocol.versions import HostTensor
from rl_plane.weights.checkpoint import write_manifest
from tests.support.engine_runs import receive, reception
from tests.support.hf_engines import Start, start
from tests.support.hf_runs import (
    BOUND_S,
    Models,
    Run,
    ask,
    checkpoint,
    hold,
    models,
    plain,
    plain_logprobs,
    prompt_of,
    run,
    stage,
    version,
    witnessed,
)
from tests.support.reference import logprobs_over_kv
from worker.engines.common.checkpoint_spec import saved_specs
from worker.engines.common.torch_weights import ModelWeights
from worker.receive.staging import TIE_FIX, check_specs, model_digest
from worker.testing.tiny_model import make_tiny_model

__all__ = ["models", "plain", "start"]

pytestmark = pytest.mark.slow


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


async def test_a_full_cache_evicts_and_continues_requests_and_aborts_leave_no_request_stuck(
    start: Start, models: Models
) -> None:
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
        while not scheduler.block_new_requests:  # noqa: ASYNC110  requests are evicted without an event
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


async def test_a_keep_pause_freezes_between_two_tokens_and_a_resume_continues(
    start: Start, models: Models
) -> None:
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


async def test_a_cancelled_wait_freezes_again_and_a_resume_during_a_wait_counts(
    start: Start, models: Models
) -> None:
    engine = await start(models.witness[1])
    one = Run(engine, ask([7], max_tokens=2000))
    await one.reach(1)
    await engine.pause("keep", clear_cache=False)
    held = Run(engine, ask([8]))
    # From `keep`, a wait continues the frozen requests; if it is cancelled, they freeze again.
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
    waiting = asyncio.create_task(engine.pause("wait", clear_cache=False))
    await engine.liveness()
    await engine.resume()
    async with asyncio.timeout(BOUND_S):
        await waiting
    assert not one.has_ended
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


async def test_running_requests_keep_their_kv_where_the_update_says_so(
    start: Start, models: Models, tmp_path: Path
) -> None:
    engine = await start(models.tiny)
    engine.set_version(version(0))
    paths = [models.tiny, make_tiny_model(tmp_path / "other", seed=2)]
    prompt = prompt_of(1, 30)
    running = Run(engine, ask(prompt, max_tokens=200, logprobs=True))
    for sequence, keeps in ((1, True), (2, True), (3, False), (4, True)):
        await running.reach(len(running.result.tokens) + 5)
        staged = await stage(engine, paths[sequence % 2])
        await engine.pause("keep", clear_cache=False)
        await engine.swap(staged, version(sequence), keep_kv=keeps)
        await engine.resume()
    result = await running.end()
    told = [(span.sequence, span.kv_version and span.kv_version.sequence) for span in result.spans]
    assert told == [(0, None), (1, 0), (2, 0), (3, None), (4, 3)]
    parts = [result.tokens[span.start : span.end] for span in result.spans]
    made = [result.logprobs[span.start : span.end] for span in result.spans]
    third = [*prompt, *itertools.chain(*parts[:4])]
    for logprobs, over in (
        (made[2], logprobs_over_kv([*paths, paths[0]], [[*prompt, *parts[0]], *parts[1:3]])),
        (made[3], logprobs_over_kv([paths[1]], [third])[-len(parts[3]) :]),
        (made[4], logprobs_over_kv([paths[1], paths[0]], [third, parts[4]])),
    ):
        assert logprobs == pytest.approx(over, abs=1e-4)


async def test_after_a_swap_a_prompt_is_computed_again(start: Start, models: Models, plain: Any) -> None:
    """The KV of a prompt decides the logprobs: with one block of the old weights they would be far off."""
    engine = await start(models.witness[1], page_size=4)
    engine.set_version(version(0))
    prompt = prompt_of(1, 30)
    old = Run(engine, ask(prompt, max_tokens=200, logprobs=True))
    await old.reach(20)
    staged = await stage(engine, models.tiny)
    await engine.pause("keep", clear_cache=False)
    assert await engine.swap(staged, version(1), keep_kv=True) is True
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
    assert dict(engine.receiver.weight_spec()) == {key: tensor.spec for key, tensor in good.items()}
    assert engine.holder.tied_tensors() == {}

    def check(tensors: dict[str, HostTensor], cast: bool = False) -> None:
        check_specs(engine.receiver.weight_spec(), {}, {key: tensor.spec for key, tensor in tensors.items()}, cast)

    check(good)
    with pytest.raises(InvalidWeights, match=name):
        check({key: tensor for key, tensor in good.items() if key != name})
    with pytest.raises(InvalidWeights):
        check({**good, "more.weight": good[name]})
    with pytest.raises(InvalidWeights):
        check({**good, name: good["model.norm.weight"]})
    half = dict(checkpoint(models.tiny, torch.bfloat16))
    with pytest.raises(InvalidWeights, match="BF16"):
        check(half)
    check(half, cast=True)
    for wrong in (
        {key: tensor for key, tensor in good.items() if key != name},
        {**good, "more.weight": good[name]},
        {**good, name: good["model.norm.weight"]},
    ):  # the engine checks again what the receiver should have refused
        with pytest.raises(InvalidWeights):
            hold(engine, iter(wrong.items()))
    with pytest.raises(EngineFailed, match="cancelled"):
        engine.holder.stage(iter(good.items()), lambda: True)

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
    await engine.swap(hold(engine, iter(half.items())), version(2))
    assert await engine.check_weights("checksum") != before
    spare = hold(engine, iter(good.items()))
    await asyncio.to_thread(engine.receiver.discard, spare)
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
    assert set(compared["mismatches"]) == set(engine.receiver.weight_spec())
    await engine.liveness()
    await engine.swap(await stage(engine, models.tiny), version(1))
    assert await engine.check_weights("compare") == [{"rank": 0, "match": True, "mismatches": []}]


@pytest.mark.parametrize("in_place", [False, True])
async def test_tied_tensors_are_accepted_only_if_they_are_equal(
    start: Start, tmp_path: Path, in_place: bool
) -> None:
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
    assert head in engine.receiver.weight_spec()


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
    assert dict(weights.weight_spec()) == {key: tensor.spec for key, tensor in checkpoint(tmp_path / "2")}
    assert weights.tied_tensors() == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert not torch.allclose(one(ids).logits, two(ids).logits)
        weights.load(weights.stage(checkpoint(tmp_path / "2"), lambda: False))
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
    types = {name: spec.dtype for name, spec in weights.weight_spec().items() if spec.dtype != "BF16"}
    assert types == {bias: "F32"}
    assert weights.stage(checkpoint(file.parent), lambda: False).keys() == exact.keys()
    wide = {name: tensor.to(torch.float32) for name, tensor in exact.items()}
    save_file(wide, file, metadata={"format": "pt"})
    weights.load(weights.stage(checkpoint(file.parent), lambda: False))
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
    assert weights.tied_tensors() == {head: embedding}
    assert weights.weight_spec().keys() == tensors.keys()
