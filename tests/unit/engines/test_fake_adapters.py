"""LoRA adapters in the fake engine, and weights that are overwritten in place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_plane.errors import EngineFailed, InvalidRequest
from rl_plane.protocol.relay import RelayPlan
from rl_plane.protocol.versions import HostTensor, WeightVersion
from rl_plane.transports.base import Delivery, RelayingTransport, TransportContext
from rl_plane.transports.filesystem.receiver import FilesystemTransport
from rl_plane.weights.checkpoint import Kind
from tests.support.fake_runs import (
    BOUND_S,
    PROMPT,
    Reader,
    ask,
    drain,
    receive,
    reception,
    stage,
    started,
    tokens,
    until,
    version,
)
from worker.engines.base import EngineOptions
from worker.engines.fake.adapter import FakeEngine, fake_logprob, fake_token, make_fake_adapter, make_fake_model
from worker.receive.staging import adapter_digest, model_digest


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_fake_model(tmp_path / "base", 0)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return make_fake_model(tmp_path / "new", 1)


@pytest.fixture
def loras(base: Path, tmp_path: Path) -> list[Path]:
    return [make_fake_adapter(tmp_path / f"lora-{seed}", seed, base) for seed in range(3)]


def adapter_version(sequence: int, directory: Path) -> WeightVersion:
    return WeightVersion("run", sequence, f"lora_{sequence}", adapter_digest(directory))


def staged_adapter(engine: FakeEngine, directory: Path) -> str:
    return receive(engine, reception(directory, kind="lora"))[0]


async def load_adapter(engine: FakeEngine, name: str, directory: Path, sequence: int) -> None:
    staged = staged_adapter(engine, directory)
    await engine.pause("keep", False)
    assert await engine.swap_adapter(name, staged, adapter_version(sequence, directory)) is True
    await engine.resume()


def test_a_fake_adapter_depends_on_its_seed_and_its_rank(base: Path, loras: list[Path], tmp_path: Path) -> None:
    again = make_fake_adapter(tmp_path / "again", 1, base)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (again / name).read_bytes() == (loras[1] / name).read_bytes()
    assert len({adapter_digest(path) for path in loras}) == 3
    wide = make_fake_adapter(tmp_path / "wide", 1, base, r=4)
    assert (wide / "adapter_model.safetensors").stat().st_size > 2 * 4 * (2 * 256)


async def test_tokens_depend_on_the_adapter_too(base: Path, loras: list[Path]) -> None:
    engine = await started(base)
    digest, adapter = model_digest(base), adapter_digest(loras[0])
    before = tokens(await drain(engine.generate(ask())))
    await load_adapter(engine, "x", loras[0], 3)
    deltas = await drain(engine.generate(ask(adapter="x", max_tokens=8, logprobs=True)))
    expected = [fake_token(digest, PROMPT, i, adapter_digest=adapter) for i in range(8)]
    assert tokens(deltas) == expected != before[:8]
    assert [delta.logprobs for delta in deltas] == [
        [fake_logprob(digest, PROMPT, i, adapter_digest=adapter)] for i in range(8)
    ]
    (span,) = deltas[-1].spans
    assert (span.sequence, span.digest, span.start, span.end) == (0, digest, 0, 8)
    assert span.adapter is not None
    assert span.adapter.model_dump() == {"name": "x", "version": "lora_3", "sequence": 3, "digest": adapter}
    bare = await drain(engine.generate(ask()))
    assert tokens(bare) == before
    assert bare[-1].spans[0].adapter is None


async def test_an_adapter_and_the_base_change_under_a_stream(base: Path, new: Path, loras: list[Path]) -> None:
    engine = await started(base)
    await load_adapter(engine, "x", loras[0], 1)
    await load_adapter(engine, "other", loras[2], 1)
    reader = Reader(engine, max_tokens=12, adapter="x")
    await until(lambda: len(reader.deltas) == 4)
    await load_adapter(engine, "x", loras[1], 2)
    await until(lambda: len(reader.deltas) >= 8)
    await engine.pause("keep", False)
    made = len(reader.deltas)
    await engine.swap(stage(engine, new), version(1, new))
    await engine.resume()
    last = await reader.end()
    assert [(span.sequence, span.adapter.sequence if span.adapter else None) for span in last.spans] == [
        (0, 1),
        (0, 2),
        (1, 2),
    ]
    assert [(span.start, span.end) for span in last.spans] == [(0, 4), (4, made), (made, 12)]
    versions = [
        (span.digest or "", span.adapter.digest if span.adapter else None)
        for span in last.spans
        for _ in range(span.start, span.end)
    ]
    assert tokens(reader.deltas) == [
        fake_token(digest, PROMPT, i, adapter_digest=adapter) for i, (digest, adapter) in enumerate(versions)
    ]
    assert versions[-1] == (model_digest(new), adapter_digest(loras[1]))


async def test_an_unloaded_adapter_ends_its_requests_only(base: Path, loras: list[Path]) -> None:
    engine = await started(base)
    await load_adapter(engine, "x", loras[0], 1)
    await load_adapter(engine, "y", loras[1], 1)
    gone, kept, bare = (Reader(engine, f"r-{name}", max_tokens=30, adapter=name) for name in ("x", "y", None))
    await until(lambda: all(len(reader.deltas) >= 3 for reader in (gone, kept, bare)))
    await engine.pause("keep", False)
    waiting = Reader(engine, "waiting", adapter="x")
    await until(lambda: engine.load() == (3, 1))
    await engine.swap_adapter("x", None, None)
    last, unbegun = await gone.end(), await waiting.end()
    assert (last.finish_reason, last.spans[0].end) == ("abort", len(tokens(gone.deltas)))
    assert (unbegun.finish_reason, unbegun.token_ids, unbegun.spans) == ("abort", [], [])
    await engine.swap_adapter("x", None, None)  # gone already
    await engine.resume()
    assert [(await reader.end()).finish_reason for reader in (kept, bare)] == ["length", "length"]
    for name in ("x", "never"):
        with pytest.raises(InvalidRequest) as caught:
            await drain(engine.generate(ask(adapter=name)))
        assert caught.value.facts["field"] == "model"


async def test_adapter_swaps_that_are_refused_change_nothing(base: Path, loras: list[Path]) -> None:
    engine = await started(base)
    await load_adapter(engine, "x", loras[0], 1)
    held = tokens(await drain(engine.generate(ask(adapter="x"))))
    version_1 = adapter_version(2, loras[1])
    with pytest.raises(EngineFailed, match="paused"):
        await engine.swap_adapter("x", staged_adapter(engine, loras[1]), version_1)
    await engine.pause("keep", False)
    engine.config.fail_swap = True
    for name in ("x", "fresh"):
        for what in (staged_adapter(engine, loras[1]), None):
            with pytest.raises(EngineFailed, match="fail_swap"):
                await engine.swap_adapter(name, what, version_1)
    engine.config.fail_swap = False
    with pytest.raises(EngineFailed, match="is no adapter"):
        await engine.swap_adapter("x", stage(engine, base), version_1)
    with pytest.raises(EngineFailed, match="is an adapter"):
        await engine.swap(staged_adapter(engine, loras[1]), version(1, base))
    staged = staged_adapter(engine, loras[1])
    await asyncio.to_thread(engine.receiver.discard, staged)
    with pytest.raises(EngineFailed, match="discarded"):
        await engine.swap_adapter("x", staged, version_1)
    await engine.resume()
    deltas = await drain(engine.generate(ask(adapter="x")))
    assert tokens(deltas) == held
    assert [span.adapter.sequence for span in deltas[-1].spans if span.adapter] == [1]
    with pytest.raises(InvalidRequest):
        await drain(engine.generate(ask(adapter="fresh")))


class SlowOffer(FilesystemTransport, RelayingTransport):
    """A transport whose offer takes long, for example because it registers the memory of a large model."""

    def __init__(self, root: Path) -> None:
        super().__init__(TransportContext((root,)))
        self.begun, self.go_on = threading.Event(), threading.Event()

    def offer(self, tensors: Mapping[str, HostTensor], adapter_config: bytes | None = None) -> Mapping[str, Any]:
        self.begun.set()
        assert self.go_on.wait(BOUND_S)
        return {"backend": "filesystem"}

    def withdraw(self, transport: Mapping[str, Any]) -> None: ...

    def relay_address(self) -> tuple[str, int]:
        raise AssertionError("no update is relayed")

    def open_relayed(self, request: Mapping[str, Any], kind: Kind, plan: RelayPlan) -> Delivery:
        raise AssertionError("no update is relayed")

    def end_relay(self) -> None: ...


async def test_an_adapter_is_swapped_while_the_copy_is_being_offered(
    base: Path, new: Path, loras: list[Path]
) -> None:
    slow = SlowOffer(base.parent)
    engine = FakeEngine(EngineOptions(base), {"filesystem": slow})
    await engine.start()
    staged, _ = receive(engine, reception(new, keep=True))
    await engine.pause("keep", False)
    await engine.swap(staged, version(1, new))
    adapter = staged_adapter(engine, loras[0])
    offering = asyncio.create_task(asyncio.to_thread(engine.receiver.offer))
    await asyncio.to_thread(slow.begun.wait, BOUND_S)
    try:
        await engine.swap_adapter("x", adapter, adapter_version(1, loras[0]))
        assert not offering.done(), "it is still being offered"
        assert engine.receiver.cached_digest() == model_digest(new)
    finally:
        slow.go_on.set()
    assert await offering == [{"digest": model_digest(new), "transport": {"backend": "filesystem"}}]


async def test_an_adapter_is_relabelled(base: Path, loras: list[Path]) -> None:
    engine = await started(base)
    await load_adapter(engine, "x", loras[0], 1)
    engine.set_adapter_version("x", adapter_version(7, loras[0]))
    deltas = await drain(engine.generate(ask(adapter="x", max_tokens=1)))
    assert [span.adapter.sequence for span in deltas[-1].spans if span.adapter] == [7]
    with pytest.raises(InvalidRequest):
        engine.set_adapter_version("y", adapter_version(7, loras[0]))


async def test_adapters_and_base_weights_are_apart(base: Path, loras: list[Path]) -> None:
    engine = await started(base)
    before = engine.receiver.weight_spec(), await engine.check_weights("checksum")
    await load_adapter(engine, "x", loras[0], 1)
    assert (engine.receiver.weight_spec(), await engine.check_weights("checksum")) == before


# overwriting


def write_over(engine: FakeEngine, directory: Path, cancelled: Callable[[], bool] = lambda: False) -> str:
    return receive(engine, reception(directory, in_place=True), cancelled)[1]["digest"]


@pytest.mark.parametrize("hold_bytes", ["true", "false"])
async def test_weights_too_large_to_stage_overwrite_the_served_weights(
    base: Path, new: Path, hold_bytes: str
) -> None:
    engine = await started(base, staging_bytes="4095", hold_bytes=hold_bytes)
    reader = Reader(engine, max_tokens=40)
    await until(lambda: len(reader.deltas) == 4)
    with pytest.raises(EngineFailed, match="4095 bytes"):
        stage(engine, new)
    with pytest.raises(EngineFailed, match="paused"):
        write_over(engine, new)
    await engine.pause("keep", False)
    await engine.check_weights("snapshot")
    assert write_over(engine, new) == model_digest(new)
    engine.set_version(version(1, new))
    (row,) = await engine.check_weights("compare")
    assert len(row["mismatches"]) == 4  # the snapshot is still of the old ones
    await engine.resume()
    last = await reader.end()
    digests = [model_digest(base)] * 4 + [model_digest(new)] * 36
    assert tokens(reader.deltas) == [fake_token(digest, PROMPT, i) for i, digest in enumerate(digests)]
    assert [(span.sequence, span.start, span.end) for span in last.spans] == [(0, 0, 4), (1, 4, 40)]


async def test_weights_that_just_fit_are_staged(base: Path, new: Path) -> None:
    engine = await started(base, staging_bytes="4096")
    assert stage(engine, new)


async def test_a_failed_overwrite_leaves_a_mixture_of_no_version(base: Path, new: Path) -> None:
    engine = await started(base, fail_overwrite="true")
    await engine.pause("keep", False)
    await engine.check_weights("snapshot")
    with pytest.raises(EngineFailed, match="fail_overwrite"):
        write_over(engine, new)
    (row,) = await engine.check_weights("compare")
    assert len(row["mismatches"]) == 1
    await engine.resume()
    deltas = await drain(engine.generate(ask()))
    assert all(delta.spans == [] for delta in deltas)
    digests = (model_digest(base), model_digest(new))
    assert tokens(deltas) not in [[fake_token(digest, PROMPT, i) for i in range(16)] for digest in digests]
    engine.config.fail_overwrite = False
    await engine.pause("keep", False)
    assert write_over(engine, new) == model_digest(new)
    engine.set_version(version(2, new))
    await engine.resume()
    deltas = await drain(engine.generate(ask()))
    assert tokens(deltas) == [fake_token(model_digest(new), PROMPT, i) for i in range(16)]
    assert [span.sequence for span in deltas[-1].spans] == [2]


async def test_a_cancelled_overwrite_is_a_failed_one(base: Path, new: Path) -> None:
    engine = await started(base)
    await engine.pause("keep", False)
    answers = iter([False, False, True, True, True])
    with pytest.raises(EngineFailed, match="cancelled"):
        write_over(engine, new, lambda: next(answers))
    await engine.resume()
    deltas = await drain(engine.generate(ask(max_tokens=1)))
    assert deltas[-1].spans == []
