"""The `vllm` engine on a CPU: real vLLM, started once, against a plain transformers model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.engines("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::(torch|vllm|transformers|multiprocessing)"),  # theirs, not ours
]

from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, PlaneError, Unsupported  # noqa: E402
from rl_plane.versions import TensorSpec  # noqa: E402
from tests.engine_runs import (  # noqa: E402
    BOUND_S,
    Run,
    adapter_version,
    ask,
    load_adapter,
    receive,
    reception,
    run,
    update,
    version,
    witnessed,
)
from worker.engines.base import EngineInfo, EngineOptions  # noqa: E402
from worker.engines.vllm import VllmEngine, build  # noqa: E402
from worker.staging import model_digest  # noqa: E402
from worker.tiny_adapter import make_tiny_adapter  # noqa: E402
from worker.tiny_model import VOCAB_SIZE, make_tiny_model, make_witness_model  # noqa: E402
from worker.transports.checkpoint import write_manifest  # noqa: E402

ARGUMENTS = {
    "kv_cache_memory_bytes": str(32 << 20),
    "max_model_len": "512",
    "max_lora_rank": "8",
    "max_loras": "2",
}


@dataclasses.dataclass
class Models:
    root: Path
    tiny: Path
    witness: dict[int, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("vllm-models")
    return Models(
        root,
        make_tiny_model(root / "tiny", seed=1, dtype="bfloat16"),
        {seed: make_witness_model(root / f"witness-{seed}", seed, dtype="bfloat16") for seed in (1, 2)},
    )


def options(models: Models, **extra: str) -> EngineOptions:
    return EngineOptions(models.witness[1], extra=ARGUMENTS | extra, weight_roots=(models.root,))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(models: Models) -> AsyncIterator[tuple[VllmEngine, EngineInfo]]:
    engine = VllmEngine(options(models))
    info = await engine.start()
    yield engine, info
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: tuple[VllmEngine, EngineInfo], models: Models) -> AsyncIterator[VllmEngine]:
    """At witness 1, without adapters, running."""
    engine, _ = shared
    await engine.liveness()
    if engine._state.base is None or engine._state.base.digest != model_digest(models.witness[1]):
        await update(engine, models.witness[1], 0)
    engine.set_version(version(0, models.witness[1]))
    yield engine
    async with asyncio.timeout(BOUND_S):
        await engine.pause("abort", False)
        for name in list(engine._loras):
            await engine.swap_adapter(name, None, None)
        await engine.resume()


# what it is


async def test_what_it_says_of_itself(shared: tuple[VllmEngine, EngineInfo], models: Models) -> None:
    engine, info = shared
    assert (info.engine, info.dtype, info.device, info.world_size) == ("vllm", "bfloat16", "cpu", 1)
    assert (info.vocab_size, info.max_model_len) == (VOCAB_SIZE, 512)
    assert "filesystem" in info.transports
    assert set(info.capabilities) == {"release_memory", "resume_memory"}
    assert engine.weight_spec()["lm_head.weight"] == TensorSpec("BF16", (VOCAB_SIZE, 128))
    for memory in (engine.release_memory, engine.resume_memory):
        with pytest.raises(Unsupported, match="CPU"):
            await memory(["weights"])
    await engine.liveness()


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"nonsense": "1"}, "engine_arg.nonsense"),
        ({"max_model_len": "many"}, "engine_arg.max_model_len"),
        ({"enforce_eager": "perhaps"}, "engine_arg.enforce_eager"),
        ({"worker_extension_cls": "x"}, "engine_arg.worker_extension_cls"),
    ],
)
async def test_arguments_are_vllms_own(models: Models, extra: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(EngineOptions(models.tiny, extra=extra))
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


# generation


async def test_greedy_tokens_logprobs_and_text(engine: VllmEngine) -> None:
    request = ask([7], logprobs=True)
    result = await run(engine, request)
    assert result.tokens == witnessed(1, 7, 16)
    assert all(value > -0.5 for value in result.logprobs)  # a wide gap
    assert (result.finish, len(result.logprobs)) == ("length", 16)
    assert result.deltas[0].prompt_token_ids == [7]
    assert all(delta.prompt_token_ids is None for delta in result.deltas[1:])
    assert [(span.sequence, span.start, span.end) for span in result.spans] == [(0, 0, 16)]
    assert result.deltas[0].spans
    assert not any(delta.spans for delta in result.deltas[1:-1])
    assert result.text == engine._tokenizer.decode(result.tokens, skip_special_tokens=True)


async def test_stop_tokens_end_it_and_come_back(engine: VllmEngine) -> None:
    chain = witnessed(1, 7, 8)
    result = await run(engine, ask([7], stop_token_ids=[chain[4]]))
    assert (result.tokens, result.finish) == (chain[:5], "stop")


async def test_seeds_and_sampling(engine: VllmEngine, models: Models) -> None:
    await update(engine, models.tiny, 5)
    sampled = [await run(engine, ask([5, 6], temperature=1.0, seed=seed)) for seed in (3, 3, 4)]
    assert sampled[0].tokens == sampled[1].tokens != sampled[2].tokens
    narrow = await run(engine, ask([5, 6], temperature=1.0, top_k=1))
    assert narrow.tokens == (await run(engine, ask([5, 6]))).tokens


async def test_logprobs_are_the_models_own(engine: VllmEngine, models: Models) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(models.tiny, dtype="auto", local_files_only=True).eval()
    await update(engine, models.tiny, 5)
    prompt = [5, 9, 400, 31]
    for temperature in (0.0, 0.5):
        result = await run(engine, ask(prompt, logprobs=True, temperature=temperature, seed=1))
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + result.tokens])).logits[0, len(prompt) - 1 : -1].float()
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(result.tokens)[:, None])[:, 0]
        assert result.logprobs == pytest.approx(expected.tolist(), abs=0.02)


async def test_bad_requests_do_not_reach_the_engine(engine: VllmEngine) -> None:
    for field, request in (
        ("prompt_token_ids", ask([VOCAB_SIZE])),
        ("stop_token_ids", ask([1], stop_token_ids=[VOCAB_SIZE])),
        ("max_tokens", ask([1], max_tokens=512)),
        ("model", ask([1], adapter="never")),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await run(engine, request)
        assert caught.value.facts["field"] == field
    assert (await run(engine, ask([3]))).tokens == witnessed(1, 3, 16)
    assert engine.load() == (0, 0)


@pytest.mark.parametrize(
    "extreme",
    [
        {"seed": (1 << 63) - 1, "temperature": 1.0},
        {"seed": 0, "temperature": 1.0},
        {"temperature": 1e-9},
        {"temperature": 1e30},
        {"temperature": 5e-324},
        {"temperature": 1.0, "top_p": 1e-300},
        {"temperature": 1.0, "top_k": 1 << 40},
        {"temperature": 1.0, "top_k": VOCAB_SIZE + 1, "top_p": 0.5},
        {"stop_token_ids": list(range(VOCAB_SIZE)) * 2},
        {"max_tokens": 511},
        {"max_tokens": 1, "logprobs": True},
    ],
)
async def test_extremes_do_not_hurt_the_engine(engine: VllmEngine, extreme: dict[str, Any]) -> None:
    try:
        result = await run(engine, ask([7], **extreme))
        assert result.tokens
    except InvalidRequest as refused:
        assert refused.facts["field"]  # noqa: PT017
    assert (await run(engine, ask([3]))).tokens == witnessed(1, 3, 16)


async def test_more_requests_than_the_engine_takes_at_once(engine: VllmEngine) -> None:
    runs = [Run(engine, ask([token], max_tokens=4)) for token in range(400)]
    for token, one in enumerate(runs):
        assert (await one.end()).tokens == witnessed(1, token, 4)


async def test_aborting_and_leaving(engine: VllmEngine) -> None:
    runs = [Run(engine, ask([20], max_tokens=400)) for _ in range(3)]
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


async def test_keep_freezes_and_goes_on(engine: VllmEngine) -> None:
    one = Run(engine, ask([20], max_tokens=300))
    await one.reach(10)
    await engine.pause("keep", False)
    await engine.pause("keep", False)
    held = len(one.result.tokens)
    late = Run(engine, ask([21]))
    await engine.liveness()
    assert held <= len(one.result.tokens) <= held + 1  # what was on its way
    await engine.resume()
    await engine.resume()
    assert (await one.end()).tokens == witnessed(1, 20, 300)
    assert (await late.end()).tokens == witnessed(1, 21, 16)


async def test_wait_drains(engine: VllmEngine) -> None:
    one = Run(engine, ask([20], max_tokens=100))
    await one.reach(1)
    await engine.pause("wait", False)
    assert len((await one.end()).tokens) == 100
    late = Run(engine, ask([21]))
    await engine.liveness()
    assert late.result.tokens == []
    await engine.resume()
    assert len((await late.end()).tokens) == 16


async def test_a_wait_that_is_cancelled_leaves_it_running(engine: VllmEngine) -> None:
    one = Run(engine, ask([20], max_tokens=400))
    await one.reach(1)
    waiting = asyncio.create_task(engine.pause("wait", False))
    await engine.liveness()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len((await run(engine, ask([21]))).tokens) == 16
    assert len((await one.end()).tokens) == 400


async def test_abort_ends_all(engine: VllmEngine) -> None:
    one = Run(engine, ask([20], max_tokens=400))
    await one.reach(5)
    await engine.pause("abort", False)
    result = await one.end()
    assert result.finish == "abort"
    assert result.tokens == witnessed(1, 20, len(result.tokens))
    await engine.resume()


async def test_flushing(engine: VllmEngine) -> None:
    assert await engine.flush_cache() is True
    one = Run(engine, ask([20], max_tokens=400))
    await one.reach(5)
    assert await engine.flush_cache() is False
    assert await engine.pause("keep", True) is True
    await engine.resume()
    assert (await one.end()).tokens == witnessed(1, 20, 400)


# weights


async def test_swaps(engine: VllmEngine, models: Models) -> None:
    for sequence, seed in ((1, 2), (2, 1), (3, 2)):
        await update(engine, models.witness[seed], sequence)
        result = await run(engine, ask([9]))
        assert result.tokens == witnessed(seed, 9, 16)
        assert [(span.sequence, span.digest) for span in result.spans] == [
            (sequence, model_digest(models.witness[seed]))
        ]


async def test_a_swap_under_a_stream(engine: VllmEngine, models: Models) -> None:
    one = Run(engine, ask([20], max_tokens=200))
    staging, _ = await receive(engine, reception(models.witness[2]))
    await one.reach(20)
    await engine.pause("keep", False)
    await engine.swap(staging, version(1, models.witness[2]))
    await engine.resume()
    result = await one.end()
    assert [span.sequence for span in result.spans] == [0, 1]
    before = 20
    for span in result.spans:
        made = result.tokens[span.start : span.end]
        assert made == witnessed(1 + span.sequence, before, len(made))
        before = made[-1]
    # The prefix that was made under the old weights is not found any more.
    prompt = [20, *result.tokens]
    assert (await run(engine, ask(prompt))).tokens == witnessed(2, prompt[-1], 16)


async def test_generation_goes_on_while_weights_are_received(engine: VllmEngine, models: Models) -> None:
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


async def test_bad_checkpoints_change_nothing(engine: VllmEngine, models: Models, tmp_path: Path) -> None:
    import torch
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
    save_file({key: tensor.to(torch.float32) for key, tensor in good.items()}, wide / "model.safetensors")
    staging, _ = await receive(engine, reception(wide, cast=True))
    await engine.pause("keep", False)
    await engine.swap(staging, version(1, models.witness[2]))
    await engine.resume()
    assert (await run(engine, ask([9]))).tokens == witnessed(2, 9, 16)


async def test_overwriting_in_place(engine: VllmEngine, models: Models) -> None:
    one = Run(engine, ask([20], max_tokens=200))
    await one.reach(10)
    with pytest.raises(EngineFailed, match="paused"):
        await receive(engine, reception(models.witness[2], in_place=True))
    await engine.pause("keep", False)
    _, reply = await receive(engine, reception(models.witness[2], in_place=True))
    assert reply["digest"] == model_digest(models.witness[2])
    engine.set_version(version(1, models.witness[2]))
    assert await engine.flush_cache() is True
    await engine.resume()
    result = await one.end()
    assert [span.sequence for span in result.spans] == [0, 1]
    assert (await run(engine, ask([9]))).tokens == witnessed(2, 9, 16)


async def test_an_overwrite_that_fails_can_be_healed(engine: VllmEngine, models: Models) -> None:
    await engine.pause("keep", False)
    what = reception(models.witness[2], in_place=True, digest="blake3:" + "0" * 64)
    with pytest.raises(InvalidWeights, match="the bytes make"):
        await receive(engine, what)
    assert engine._state.base is None
    cut = shutil.copytree(models.witness[2], models.root / "cut")
    write_manifest(cut)
    raw = bytearray((cut / "model.safetensors").read_bytes())
    raw[len(raw) // 2] ^= 1
    (cut / "model.safetensors").write_bytes(raw)
    with pytest.raises(InvalidWeights, match="its publisher stated"):  # in the middle
        await receive(engine, reception(cut, in_place=True))
    await receive(engine, reception(models.witness[2], in_place=True))
    engine.set_version(version(1, models.witness[2]))
    await engine.flush_cache()
    await engine.resume()
    assert (await run(engine, ask([9]))).tokens == witnessed(2, 9, 16)


async def test_checks_see_every_change(engine: VllmEngine, models: Models) -> None:
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
        assert len(compared["mismatches"]) == 1, name
    await update(engine, models.witness[1], 2)
    assert await engine.check_weights("checksum") == [before]
    await engine.pause("keep", False)
    await engine.check_weights("reset_tensors")
    (compared,) = await engine.check_weights("compare")
    assert not compared["match"]
    await engine.resume()
    assert (await run(engine, ask([9]))).spans == []
    await update(engine, models.witness[1], 3)
    assert await engine.check_weights("checksum") == [before]
    assert (await run(engine, ask([9]))).tokens == witnessed(1, 9, 16)


# adapters


@pytest.fixture(scope="module")
def adapters(models: Models) -> dict[int, Path]:
    return {
        seed: make_tiny_adapter(models.witness[1], models.root / f"lora-{seed}", seed=seed, r=4)
        for seed in (1, 2, 3)
    }


Expected = Callable[[Path, Path, list[int], list[int]], list[float]]


@pytest.fixture(scope="module")
def expected() -> Expected:
    """The logprobs of tokens by a model with an adapter, as PEFT has them."""
    import torch
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft")

    def logprobs(model: Path, adapter: Path, prompt: list[int], tokens: list[int]) -> list[float]:
        base = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
        adapted = peft.PeftModel.from_pretrained(base, adapter).eval()
        with torch.no_grad():
            logits = adapted(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        found: list[float] = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        return found

    return logprobs


async def test_adapters_load_swap_and_unload(
    engine: VllmEngine, models: Models, adapters: dict[int, Path], expected: Expected
) -> None:
    prompt = [5, 17, 300]
    bare = await run(engine, ask(prompt, logprobs=True))
    for sequence, seed in ((1, 1), (2, 2)):
        await load_adapter(engine, "x", adapters[seed], sequence)
        result = await run(engine, ask(prompt, adapter="x", logprobs=True))
        reference = expected(models.witness[1], adapters[seed], prompt, result.tokens)
        assert result.logprobs == pytest.approx(reference, abs=0.05)
        (span,) = result.spans
        assert span.adapter is not None
        assert (span.sequence, span.adapter.sequence) == (0, sequence)
    again = await run(engine, ask(prompt, logprobs=True))
    assert (again.tokens, again.spans[0].adapter) == (bare.tokens, None)
    await load_adapter(engine, "y", adapters[3])
    # New base weights keep the adapters.
    await update(engine, models.witness[2], 1)
    result = await run(engine, ask(prompt, adapter="x", logprobs=True))
    reference = expected(models.witness[2], adapters[2], prompt, result.tokens)
    assert result.logprobs == pytest.approx(reference, abs=0.05)
    assert result.spans[0].sequence == 1
    assert result.spans[0].adapter is not None
    await engine.pause("keep", False)
    staging, _ = await receive(engine, reception(adapters[1], kind="lora"))
    with pytest.raises(InvalidRequest, match="no place"):
        await engine.swap_adapter("z", staging, adapter_version(1, adapters[1]))
    await engine.swap_adapter("x", None, None)
    await engine.swap_adapter("x", None, None)
    await engine.resume()
    with pytest.raises(InvalidRequest):
        await run(engine, ask(prompt, adapter="x"))
    assert (await run(engine, ask(prompt, adapter="y"))).finish == "length"


async def test_an_adapter_that_goes_ends_its_requests(engine: VllmEngine, adapters: dict[int, Path]) -> None:
    await load_adapter(engine, "x", adapters[1])
    mine, other = Run(engine, ask([20], adapter="x", max_tokens=400)), Run(engine, ask([20], max_tokens=400))
    await mine.reach(3)
    await other.reach(3)
    await engine.pause("keep", False)
    await engine.swap_adapter("x", None, None)
    await engine.resume()
    assert (await mine.end()).finish == "abort"
    assert (await other.end()).tokens == witnessed(1, 20, 400)


async def test_a_request_on_its_way_when_its_adapter_goes(
    engine: VllmEngine, adapters: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not reach the engine, which would look for the adapter's files, and die of it."""
    await load_adapter(engine, "x", adapters[1])
    await engine.pause("keep", False)
    waits, go = asyncio.Event(), asyncio.Event()
    real = engine._llm.add_request

    async def slow(*arguments: Any, **more: Any) -> Any:
        waits.set()
        await go.wait()
        return await real(*arguments, **more)

    monkeypatch.setattr(engine._llm, "add_request", slow)
    late = Run(engine, ask([20], adapter="x"))
    await waits.wait()
    unloading = asyncio.create_task(engine.swap_adapter("x", None, None))
    await engine.liveness()
    assert not unloading.done()
    go.set()
    await unloading
    await engine.resume()
    assert (await late.end()).finish == "abort"
    await engine.liveness()


async def test_a_swap_of_an_adapter_that_fails_changes_nothing(
    engine: VllmEngine, models: Models, adapters: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [5, 17, 300]
    await load_adapter(engine, "x", adapters[1])
    before = await run(engine, ask(prompt, adapter="x", logprobs=True))
    llm = engine._llm

    async def fail(**_: Any) -> bool:
        raise RuntimeError("no flush")

    for name in ("x", "fresh"):
        monkeypatch.setattr(llm, "reset_prefix_cache", fail)
        with pytest.raises(EngineFailed, match="no flush"):
            await load_adapter(engine, name, adapters[2], 2)
        monkeypatch.undo()
    staging, _ = await receive(engine, reception(adapters[2], kind="lora"))
    await engine.pause("keep", False)
    real_add = llm.add_lora

    async def broken(lora: Any) -> bool:
        if lora.lora_path != engine._loras["x"].path:
            os.unlink(os.path.join(lora.lora_path, "adapter_model.safetensors"))
        return bool(await real_add(lora))

    monkeypatch.setattr(llm, "add_lora", broken)
    with pytest.raises(EngineFailed):
        await engine.swap_adapter("x", staging, adapter_version(2, adapters[2]))
    monkeypatch.undo()

    async def stays(number: int) -> bool:
        return False

    monkeypatch.setattr(llm, "remove_lora", stays)
    with pytest.raises(EngineFailed, match="loaded still"):
        await engine.swap_adapter("x", None, None)
    monkeypatch.undo()
    await engine.resume()
    after = await run(engine, ask(prompt, adapter="x", logprobs=True))
    assert after.tokens == before.tokens
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-3)
    assert after.spans[0].adapter is not None
    assert after.spans[0].adapter.sequence == 1
    with pytest.raises(InvalidRequest):
        await run(engine, ask(prompt, adapter="fresh"))


async def test_adapters_that_do_not_fit(engine: VllmEngine, models: Models) -> None:
    large = make_tiny_adapter(models.witness[1], models.root / "large", seed=1, r=16)
    with pytest.raises(InvalidWeights, match="rank is 16"):
        await receive(engine, reception(large, kind="lora"))
    with pytest.raises(PlaneError):
        await receive(engine, reception(models.witness[2], kind="lora"))


# hangs and death


async def test_a_process_that_stands_still_and_goes_on(engine: VllmEngine) -> None:
    assert engine._watch is not None
    rank = max(engine._watch._descriptors)
    one = Run(engine, ask([20], max_tokens=400))
    await one.reach(2)
    os.kill(rank, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await engine.liveness()
    finally:
        os.kill(rank, signal.SIGCONT)
    await engine.liveness()
    assert (await one.end()).tokens == witnessed(1, 20, 400)


async def test_a_start_that_fails_leaves_nothing(models: Models) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    engine = VllmEngine(EngineOptions(models.tiny, extra={"kv_cache_memory_bytes": "1000"}))
    with pytest.raises(EngineFailed, match="did not start"):
        await engine.start()
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert [child for child in left if "VLLM" in child.name()] == []


async def test_two_ranks_then_a_child_is_killed(
    models: Models, adapters: dict[int, Path], expected: Expected
) -> None:
    """TP 2, every rank answers; SIGKILL of one ends all, soon, and leaves nothing."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks need two cores")
    engine = VllmEngine(options(models, tensor_parallel_size="2"))
    try:
        info = await engine.start()
        assert info.world_size == 2
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
        with pytest.raises(InvalidWeights):
            await receive(engine, reception(models.tiny, digest="blake3:" + "0" * 64))
        await load_adapter(engine, "x", adapters[1])
        adapted = await run(engine, ask([5, 17, 300], adapter="x", logprobs=True))
        reference = expected(models.witness[2], adapters[1], [5, 17, 300], adapted.tokens)
        assert adapted.logprobs == pytest.approx(reference, abs=0.05)
        await engine.pause("keep", False)
        await receive(engine, reception(models.witness[1], in_place=True))
        engine.set_version(version(2, models.witness[1]))
        await engine.resume()
        assert (await run(engine, ask([9]))).tokens == witnessed(1, 9, 16)
        adapted = await run(engine, ask([5, 17, 300], adapter="x", logprobs=True))
        reference = expected(models.witness[1], adapters[1], [5, 17, 300], adapted.tokens)
        assert adapted.logprobs == pytest.approx(reference, abs=0.05)
        await killed(engine)
    finally:
        await engine.close()


async def killed(engine: VllmEngine) -> None:
    assert engine._watch is not None
    assert engine._directory is not None
    directory, pids = engine._directory, list(engine._watch._descriptors)
    stream = Run(engine, ask([20], max_tokens=400))
    await stream.reach(2)
    os.kill(pids[-1], signal.SIGKILL)
    async with asyncio.timeout(2.0):
        with pytest.raises(EngineFailed):
            await stream._task
        with pytest.raises(EngineFailed):
            await engine.liveness()
    for refused in (engine.flush_cache(), engine.pause("keep", False), run(engine, ask([1]))):
        with pytest.raises(EngineFailed):
            await refused
    await engine.close()
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
    assert not directory.exists()


async def test_closing_ends_streams_and_processes(shared: tuple[VllmEngine, EngineInfo]) -> None:
    """The last one: it closes the shared engine."""
    engine, _ = shared
    assert engine._watch is not None
    pids = list(engine._watch._descriptors)
    stream = Run(engine, ask([20], max_tokens=400))
    await stream.reach(2)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineFailed):
        await stream.end()
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
