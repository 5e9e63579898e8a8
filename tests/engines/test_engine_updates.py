"""Pauses and new base weights of real vLLM and real SGLang on a CPU, against a plain transformers model."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights
from rl_plane.protocol.generation import GATHER_S
from rl_plane.weights.checkpoint import write_manifest
from tests.support.engine_kinds import BATCH_TOKENS, Kind, OffersMemory
from tests.support.engine_models import LOGPROBS, Models, is_of, kind, models
from tests.support.engine_runs import (
    BOUND_S,
    Run,
    ask,
    receive,
    reception,
    run,
    update,
    version,
    witnessed,
)
from tests.support.reference import logprobs_of, logprobs_over_kv, prompt_logprobs
from tests.support.shared_engine import ENDLESS, engine, info, prompt_of, scratch, shared
from worker.engines.base import EngineInfo, PauseMode
from worker.engines.common.finite_logits import NOT_FINITE
from worker.receive.staging import model_digest
from worker.testing.tiny_model import VOCAB_SIZE

__all__ = ["engine", "info", "kind", "models", "scratch", "shared"]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::(torch|vllm|sglang|transformers|multiprocessing)"),  # theirs, not ours
]


@pytest.fixture
def offers_memory(shared: tuple[OffersMemory, EngineInfo]) -> Iterator[None]:
    """Makes the shared engine take calls that release memory."""
    engine, _ = shared
    engine.offers_memory = True
    yield
    engine.offers_memory = False


POLL_S = 0.02
"""Twice the unit in which the system counts CPU time."""
STILL = 25
"""Readings of a CPU time that stands still: half a second, in which a rank that polls gets a core on a busy machine."""
CACHED_TOKENS = 300
"""A prompt of two full blocks of vLLM's prefix cache on a CPU, which has 128 tokens in a block."""


# pause


async def test_a_keep_pause_freezes_requests_and_a_resume_continues_them(engine: OffersMemory) -> None:
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


async def test_a_paused_engine_needs_no_core(engine: OffersMemory, kind: Kind) -> None:
    """The CPU time of its ranks stands still while a request is frozen: the trainer that has paused it needs the
    cores."""
    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(10)
    await engine.pause("keep", False)
    ranks = [psutil.Process(pid) for pid in kind.rank_pids(engine)]

    async def still() -> None:
        before, same = None, 0
        while same < STILL:
            used = [rank.cpu_times()[:2] for rank in ranks]
            before, same = used, same + 1 if used == before else 0
            await asyncio.sleep(POLL_S)

    await asyncio.wait_for(still(), BOUND_S)
    await engine.resume()
    assert (await one.end()).tokens == witnessed(1, 20, 300)


async def test_wait_drains(engine: OffersMemory) -> None:
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
    engine: OffersMemory, models: Models, offers_memory: None, meanwhile: str
) -> None:
    """This also holds after the engine lost its KV cache. Requests that came after `keep` are not drained."""
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
    await asyncio.to_thread(engine.receiver.discard, staging)
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
async def test_a_wait_that_is_cancelled_leaves_it_as_it_was(engine: OffersMemory, before: str) -> None:
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


async def waited_for(engine: OffersMemory) -> tuple[Run, Run, asyncio.Task[bool]]:
    """Returns a request that was frozen and continues, a request that came meanwhile, and the `wait` for the first."""
    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(1)
    await engine.pause("keep", True)
    late = Run(engine, ask([21]))
    waiting = asyncio.create_task(engine.pause("wait", False))
    await one.reach(len(one.result.tokens) + 5)
    return one, late, waiting


@pytest.mark.parametrize("then", ["abort", "keep", "wait"])
async def test_each_kind_of_pause_works_after_a_cancelled_wait(engine: OffersMemory, then: PauseMode) -> None:
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


async def test_a_resume_ends_a_wait(engine: OffersMemory) -> None:
    """The wait returns when the requests that ran before have ended."""
    one, late, waiting = await waited_for(engine)
    await engine.resume()
    assert (await late.end()).tokens == witnessed(1, 21, 16)
    assert (await one.end()).tokens == witnessed(1, 20, 300)
    async with asyncio.timeout(BOUND_S):
        await waiting
    await engine.resume()


async def _goes_on_from_frozen(engine: OffersMemory, one: Run) -> None:
    """It stood still, with less than 300 tokens."""
    await engine.liveness()
    held = len(one.result.tokens)
    await engine.liveness()
    assert len(one.result.tokens) == held < 300
    await engine.resume()


async def test_a_pause_that_fails_leaves_it_as_it_was(
    engine: OffersMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_abort_ends_all_at_once(engine: OffersMemory) -> None:
    one = Run(engine, ask([20], max_tokens=ENDLESS))
    await one.reach(5)
    assert await engine.pause("abort", True) is True
    result = await one.end()
    assert result.finish == "abort"
    assert result.tokens == witnessed(1, 20, len(result.tokens))
    await engine.resume()


async def test_abort_ends_a_request_that_the_engine_does_not_have_yet(
    kind: Kind, engine: OffersMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may be checking the form of its text. It ends before the engine is resumed."""
    waits, go = asyncio.Event(), asyncio.Event()
    kind.slow_submission(engine, monkeypatch, waits, go)
    late = Run(engine, ask([20]))
    async with asyncio.timeout(BOUND_S):
        await waits.wait()
    pausing = asyncio.create_task(engine.pause("abort", False))
    await engine.liveness()
    go.set()
    await pausing
    result = await late.end()
    assert (result.tokens, result.finish) == ([], "abort")
    assert engine.load() == (0, 0)
    await engine.resume()


async def test_frozen_requests_outlast_a_release_of_memory(engine: OffersMemory, offers_memory: None) -> None:
    """Frozen requests generate nothing before `resume`, even when all memory is back. On a CPU no memory is freed."""
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


async def test_a_frozen_request_can_be_aborted(engine: OffersMemory) -> None:
    one, other = (Run(engine, ask([20], max_tokens=300)) for _ in range(2))
    await one.reach(5)
    await other.reach(5)
    await engine.pause("keep", False)
    assert await engine.abort([one.request.id]) == 1
    assert (await one.end()).finish == "abort"
    await engine.resume()
    assert (await other.end()).tokens == witnessed(1, 20, 300)


async def test_a_flush_succeeds_only_while_no_request_runs(engine: OffersMemory) -> None:
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


async def test_streams_continue_with_the_new_weights_after_a_swap(engine: OffersMemory, models: Models) -> None:
    """The second request gathers its tokens. They are handed on while it is paused, too."""
    gathers = (0.0, GATHER_S, 0.0)
    runs = [
        Run(engine, ask([20 + one], max_tokens=300, gather_s=gather_s)) for one, gather_s in enumerate(gathers)
    ]
    staging, _ = await receive(engine, reception(models.witness[2]))
    await runs[2].reach(20)
    await engine.pause("keep", False)
    await runs[1].reach(10)
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


async def test_no_request_uses_older_kv(engine: OffersMemory, models: Models) -> None:
    """The logprobs show it: a stale prefix would move them by far more than the bound."""
    await update(engine, models.tiny[1], 1)
    prompt = prompt_of(5, CACHED_TOKENS)
    await run(engine, ask(prompt))
    running = Run(engine, ask([*prompt, 7], max_tokens=300, logprobs=True, gather_s=GATHER_S))
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


async def test_running_requests_keep_their_kv_where_the_update_says_so(
    engine: OffersMemory, models: Models
) -> None:
    """The running request's logprobs are those over KV of both weights, and no other request's are."""
    await update(engine, models.tiny[1], 1)
    prompt = prompt_of(5, CACHED_TOKENS)
    running = Run(engine, ask(prompt, max_tokens=400, logprobs=True))
    await running.reach(5)
    staging, _ = await receive(engine, reception(models.tiny[2]))
    await engine.pause("keep", False)
    waits = Run(engine, ask([*prompt, *running.result.tokens[:3]], logprobs=True))
    await engine.liveness()  # it has come, before the new weights
    before = list(running.result.tokens)
    assert await engine.swap(staging, version(2, models.tiny[2]), keep_kv=True) is False
    (scores,) = await engine.score([prompt[:200]])
    assert scores == pytest.approx(prompt_logprobs(models.tiny[2], prompt[:200]), abs=LOGPROBS)
    await engine.resume()
    assert is_of(await waits.end(), models.tiny[2])
    assert is_of(await run(engine, ask(prompt, logprobs=True)), models.tiny[2])
    result = await running.end()
    assert [(span.sequence, span.end) for span in result.spans] == [(1, len(before)), (2, 400)]
    assert [span.kv_version and span.kv_version.sequence for span in result.spans] == [None, 1]
    later, made = result.tokens[len(before) :], result.logprobs[len(before) :]
    kept = logprobs_over_kv([models.tiny[1], models.tiny[2]], [[*prompt, *before], later])
    anew, _ = logprobs_of(models.tiny[2], [*prompt, *before], later)
    assert made == pytest.approx(kept, abs=LOGPROBS)
    assert made != pytest.approx(anew, abs=LOGPROBS), "the test can distinguish kept KV from new KV"


async def test_an_update_that_keeps_kv_works_with_every_pause_mode(engine: OffersMemory, models: Models) -> None:
    await update(engine, models.tiny[1], 1)
    prompt = prompt_of(7, CACHED_TOKENS)
    modes: tuple[PauseMode, ...] = ("wait", "abort", "keep")
    for sequence, mode in enumerate(modes, 2):
        running = Run(engine, ask(prompt, max_tokens=40))
        await running.reach(5)
        path = models.tiny[1 + (sequence + 1) % 2]
        staging, _ = await receive(engine, reception(path))
        await engine.pause(mode, False)
        waits = Run(engine, ask(prompt, logprobs=True))
        assert await engine.swap(staging, version(sequence, path), keep_kv=True) is False
        await engine.resume()
        assert (await running.end()).finish == ("abort" if mode == "abort" else "length")
        assert is_of(await waits.end(), path)
        assert is_of(await run(engine, ask(prompt, logprobs=True)), path), "no prefix of the old weights"


async def test_kept_kv_has_the_label_of_its_oldest_weights_until_it_is_computed_again(
    engine: OffersMemory, models: Models
) -> None:
    await update(engine, models.tiny[1], 1)
    running = Run(engine, ask(prompt_of(6, 20), max_tokens=480))
    for sequence, keeps in ((2, True), (3, True), (4, False), (5, True)):
        await running.reach(len(running.result.tokens) + 5)
        path = models.tiny[1 + sequence % 2]
        staging, _ = await receive(engine, reception(path))
        await engine.pause("keep", False)
        assert await engine.swap(staging, version(sequence, path), keep_kv=keeps) is not keeps
        await engine.resume()
    result = await running.end()
    kv = [(span.sequence, span.kv_version and span.kv_version.sequence) for span in result.spans]
    assert kv == [(1, None), (2, 1), (3, 1), (4, None), (5, 4)]


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
    kind: Kind, engine: OffersMemory, models: Models, scratch: Path
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
    engine: OffersMemory, models: Models, scratch: Path
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


async def test_an_engine_generates_while_it_receives_weights(engine: OffersMemory, models: Models) -> None:
    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(5)
    for _ in range(3):
        staging, _ = await receive(engine, reception(models.witness[2]))
        await asyncio.to_thread(engine.receiver.discard, staging)
    await asyncio.to_thread(engine.receiver.discard, "never")
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
    engine: OffersMemory, models: Models, scratch: Path, tmp_path: Path
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


async def test_weights_are_overwritten_in_place_only_while_paused(engine: OffersMemory, models: Models) -> None:
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


async def test_an_overwrite_that_fails_can_be_healed(engine: OffersMemory, models: Models, scratch: Path) -> None:
    await engine.pause("keep", False)
    wrong = reception(models.witness[2], in_place=True, digest="blake3:" + "0" * 64)
    with pytest.raises(InvalidWeights, match="the bytes make"):
        await receive(engine, wrong)
    what = reception(models.witness[2], in_place=True)
    await asyncio.to_thread(engine.receiver.open, *what)
    with pytest.raises(EngineFailed, match="cancelled"):
        await asyncio.to_thread(engine.receiver.receive, what.staging, lambda: True)
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


async def test_checks_see_every_change(engine: OffersMemory, models: Models, scratch: Path) -> None:
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
