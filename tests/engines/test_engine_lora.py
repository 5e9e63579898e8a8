"""LoRA adapters of real vLLM and real SGLang on a CPU, against a plain transformers model with PEFT."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights
from rl_plane.weights.checkpoint import ADAPTER_NAME, write_manifest
from tests.support.bad_adapters import BAD, DTYPES, in_dtype
from tests.support.engine_kinds import Kind, OffersMemory
from tests.support.engine_models import LOGPROBS, Models, is_of, kind, models
from tests.support.engine_runs import (
    BOUND_S,
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
    witnessed,
)
from tests.support.reference import logprobs_of
from tests.support.shared_engine import ENDLESS, engine, info, prompt_of, scratch, shared
from worker.receive.staging import adapter_digest
from worker.testing.tiny_adapter import make_tiny_adapter, make_witness_adapter, witness_adapter_next_token

__all__ = ["engine", "info", "kind", "models", "scratch", "shared"]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::(torch|vllm|sglang|transformers|multiprocessing)"),  # theirs, not ours
]


# adapters


async def test_adapters_load_swap_and_unload(kind: Kind, engine: OffersMemory, models: Models) -> None:
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
    # New base weights keep the adapters, also if an update writes them in place.
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
async def test_an_adapter_of_a_part_of_a_fused_layer_is_applied(
    engine: OffersMemory, models: Models, scratch: Path, target: str
) -> None:
    """Engines have the query, the key and the value in one layer."""
    await update(engine, models.tiny[1], 1)
    path = make_tiny_adapter(models.tiny[1], scratch / "part", seed=3, targets=(target,), std=0.3)
    await load_adapter(engine, "x", path)
    result = await run(engine, ask(prompt_of(1, 12), adapter="x", logprobs=True))
    assert is_of(result, models.tiny[1], path)
    assert not is_of(result, models.tiny[1])


async def test_an_adapter_keeps_its_weights_when_another_one_of_its_size_comes(
    engine: OffersMemory, models: Models, scratch: Path
) -> None:
    """The host agent uses the memory in which the first one came for the second one. An engine may copy an adapter to
    where it computes only when a request wants it."""
    await update(engine, models.tiny[1], 1)
    paths = {name: make_tiny_adapter(models.tiny[1], scratch / name, seed) for seed, name in enumerate("xy", 3)}
    for name, path in paths.items():
        await load_adapter(engine, name, path)
    for name, path in paths.items():
        result = await run(engine, ask(prompt_of(1, 12), adapter=name, logprobs=True))
        assert is_of(result, models.tiny[1], path), name


async def test_only_the_ranks_of_adapted_modules_count(
    engine: OffersMemory, models: Models, scratch: Path
) -> None:
    """`r` is larger than the engine takes, and `rank_pattern` has another rank for every module."""
    await update(engine, models.tiny[1], 1)
    ranks = {"q_proj": 4, "layers.0.mlp.down_proj": 6, "layers.1.mlp.down_proj": 2}
    path = make_tiny_adapter(
        models.tiny[1], scratch / "ranks", 3, r=65, targets=("q_proj", "down_proj"), std=0.05, ranks=ranks
    )
    await load_adapter(engine, "x", path)
    result = await run(engine, ask(prompt_of(1, 12), adapter="x", logprobs=True))
    assert is_of(result, models.tiny[1], path)
    assert not is_of(result, models.tiny[1])


async def test_an_adapter_that_goes_ends_its_requests(engine: OffersMemory, models: Models) -> None:
    await load_adapter(engine, "x", models.adapters[1])
    mine = Run(engine, ask([20], adapter="x", max_tokens=ENDLESS))
    other = Run(engine, ask([20], max_tokens=300))
    await mine.reach(3)
    await other.reach(3)
    await unload_adapter(engine, "x")
    assert (await mine.end()).finish == "abort"
    assert (await other.end()).tokens == witnessed(1, 20, 300)


async def test_an_adapter_that_goes_ends_what_waits_for_it(engine: OffersMemory, models: Models) -> None:
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


async def test_a_request_of_a_replaced_adapter_survives_a_reset_of_the_weights(
    engine: OffersMemory, models: Models
) -> None:
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


async def test_requests_continue_with_a_replaced_adapter(engine: OffersMemory, models: Models) -> None:
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
async def test_a_frozen_request_survives_the_swap_of_its_adapter_and_a_second_call_in_one_pause(
    engine: OffersMemory, models: Models, then: str
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


async def test_a_request_continues_if_its_adapter_could_not_be_replaced(
    kind: Kind, engine: OffersMemory, models: Models
) -> None:
    await update(engine, models.tiny[1], 1)
    await load_adapter(engine, "x", models.adapters[1])
    for failure in kind.failures(engine)["swap"]:
        staging, _ = await receive(engine, reception(models.adapters[2], kind="lora"))
        running = Run(engine, ask([9], adapter="x", logprobs=True, max_tokens=100))
        await running.reach(3)
        await engine.pause("keep", False)
        with failure.happening(), pytest.raises(EngineFailed, match=failure.why):
            await engine.swap_adapter("x", staging, adapter_version(2, models.adapters[2]))
        await engine.resume()
        result = await running.end()
        assert (result.finish, len(result.tokens), len(result.spans)) == ("length", 100, 1)
        assert is_of(result, models.tiny[1], models.adapters[1])


async def test_a_request_is_aborted_if_its_adapter_goes_before_it_starts(
    kind: Kind, engine: OffersMemory, models: Models, monkeypatch: pytest.MonkeyPatch
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
    kind: Kind, engine: OffersMemory, models: Models, change: Any
) -> None:
    await update(engine, models.tiny[1], 1)
    await load_adapter(engine, "x", models.adapters[1])
    for failure in kind.failures(engine)[change]:
        staging, fresh = None, None
        if change != "unload":
            staging, _ = await receive(engine, reception(models.adapters[2], kind="lora"))
            fresh = adapter_version(2, models.adapters[2])
        await engine.pause("keep", False)
        with failure.happening(), pytest.raises(EngineFailed, match=failure.why):
            await engine.swap_adapter("z" if change == "load" else "x", staging, fresh)
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


async def test_adapters_that_the_engine_can_not_apply_are_refused(
    kind: Kind, engine: OffersMemory, models: Models, scratch: Path
) -> None:
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
    kind: Kind, engine: OffersMemory, models: Models, scratch: Path
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
                await asyncio.to_thread(engine.receiver.open, *refused)
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
