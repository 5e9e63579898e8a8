"""Staged adapters, and weights that overwrite the served ones: checks and digests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from rl_plane.errors import EngineFailed, InvalidWeights
from rl_plane.protocol.versions import DigestAlgorithm, TensorSpec, tensors_digest
from rl_plane.transports.base import TransportContext
from rl_plane.transports.filesystem.receiver import FilesystemTransport
from rl_plane.weights.checkpoint import write_manifest
from worker.engines.base import EngineOptions
from worker.engines.fake.adapter import FakeAdapter, FakeEngine, make_fake_adapter, make_fake_model
from worker.engines.fake.holder import FakeHolder
from worker.receive.staging import (
    adapter_digest,
    receive,
)
from worker.receive.staging_area import StagingArea

F32, BF16, I64 = TensorSpec("F32", (2, 3)), TensorSpec("BF16", (2, 3)), TensorSpec("I64", (2, 3))
from tests.support.staging_runs import CONFIG, NO_DIGEST, Engine, Memory, hexed, two, write  # noqa: E402

BOTH: tuple[DigestAlgorithm, ...] = ("xxh3", "blake3")


class MemoryAdapter(Memory):
    def __init__(self, tensors: Mapping[str, bytes], raw: bytes = CONFIG) -> None:
        super().__init__(tensors)
        self.adapter_config_raw = raw

    def true_digest(self, algorithm: DigestAlgorithm = "xxh3") -> str:
        lines = [(name, tensor.spec, hexed(bytes(tensor.data), algorithm)) for name, tensor in self.sent]
        raw = self.adapter_config_raw
        assert raw is not None
        return tensors_digest(
            [*lines, ("adapter_config.json", TensorSpec("U8", (len(raw),)), hexed(raw, algorithm))]
        )


def run_adapter(engine: Engine, delivery: Memory, expected: str | None = None) -> str:
    _, digest = receive(
        engine,
        delivery,
        kind="lora",
        cast=False,
        expected_digest=expected,
        cancelled=lambda: False,
        area=StagingArea.for_specs(delivery.specs),
    )
    return digest


def adapter_of_two(raw: bytes = CONFIG) -> MemoryAdapter:
    return MemoryAdapter({"a": b"aaaa", "b": b"bb"}, raw)


def test_an_adapters_digest_covers_its_config() -> None:
    delivery = adapter_of_two()
    digest = run_adapter(Engine(delivery), delivery)
    assert digest == delivery.true_digest() != two().true_digest()
    assert delivery.closed == 1
    spaced = adapter_of_two(CONFIG.replace(b" ", b"  "))  # the same to a parser
    other = run_adapter(Engine(spaced), spaced)
    assert other == spaced.true_digest() != digest
    for algorithm in BOTH:
        again = adapter_of_two()
        with pytest.raises(InvalidWeights, match="is wanted"):
            run_adapter(Engine(again), again, spaced.true_digest(algorithm))
        assert again.closed == 1
        again = adapter_of_two()
        assert run_adapter(Engine(again), again, again.true_digest(algorithm)) == again.true_digest(algorithm)


def test_an_adapter_that_does_not_fit_is_not_read() -> None:
    delivery = adapter_of_two()
    engine = Engine(delivery)
    engine.wanted["c"] = F32
    with pytest.raises(InvalidWeights, match="1 missing") as caught:
        run_adapter(engine, delivery)
    assert "PEFT" in caught.value.facts["fix"]
    base = two()
    with pytest.raises(InvalidWeights, match="not an adapter"):
        run_adapter(Engine(base), base)
    for refused in (delivery, base):
        assert (refused.taken, refused.closed) == (0, 1)


def test_an_engine_that_does_not_read_a_whole_adapter_has_failed() -> None:
    delivery = adapter_of_two()
    with pytest.raises(EngineFailed, match="took 1 of 2"):
        run_adapter(Engine(delivery, take=lambda tensors: next(iter(tensors))), delivery)
    assert delivery.closed == 1


async def test_an_adapter_from_files_is_staged_with_its_digest(tmp_path: Path) -> None:
    base = make_fake_model(tmp_path / "base", 1)
    path = make_fake_adapter(tmp_path / "adapter", 1, base)
    engine = FakeEngine(EngineOptions(base))
    await engine.start()
    digest = adapter_digest(path)
    for stated in (None, digest):
        if stated is not None:
            assert write_manifest(path)["digest"] == digest
        delivery = FilesystemTransport(TransportContext((tmp_path,))).open(
            {"backend": "filesystem", "path": str(path)}, "lora"
        )
        assert delivery.digest == stated
        staged, found = receive(
            FakeHolder(engine),
            delivery,
            kind="lora",
            cast=False,
            expected_digest=digest,
            cancelled=lambda: False,
            area=StagingArea.for_specs(delivery.specs),
        )
        assert found == digest
        assert isinstance(staged, FakeAdapter)
        assert staged.digest == digest
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 9}))
    assert adapter_digest(path) != digest
    await engine.close()


def test_overwriting_gives_the_digest() -> None:
    delivery = two()
    engine = Engine(delivery)
    assert write(engine, delivery, delivery.true_digest()) == delivery.true_digest()
    assert (engine.begun, delivery.closed) == (True, 1)


def test_weights_that_are_known_to_be_wrong_do_not_touch_the_engine() -> None:
    unfit, lying = two(), two()
    lying.digest = lying.true_digest()
    engines = [Engine(unfit), Engine(lying)]
    engines[0].wanted["c"] = F32
    with pytest.raises(InvalidWeights, match="1 missing"):
        write(engines[0], unfit)
    with pytest.raises(InvalidWeights, match="the delivery states"):
        write(engines[1], lying, NO_DIGEST)
    for engine, delivery in zip(engines, (unfit, lying), strict=True):
        assert (engine.begun, delivery.taken, delivery.closed) == (False, 0, 1)


def test_a_digest_found_wrong_at_the_end_fails_the_overwrite() -> None:
    delivery = two()
    engine = Engine(delivery)
    with pytest.raises(InvalidWeights, match="the bytes make"):
        write(engine, delivery, NO_DIGEST)
    assert (engine.begun, delivery.taken, delivery.closed) == (True, 2, 1)


def test_a_stated_tensor_is_checked_before_it_is_written() -> None:
    delivery = two()
    delivery.tensor_digests = {"a": hexed(b"aaaa"), "b": hexed(b"other")}
    written: list[str] = []
    engine = Engine(delivery, take=lambda tensors: written.extend(name for name, _ in tensors))
    with pytest.raises(InvalidWeights, match="its publisher stated"):
        write(engine, delivery)
    assert written == ["a"]
    assert delivery.closed == 1


def test_an_engine_that_overwrites_only_a_part_has_failed() -> None:
    delivery = two()
    with pytest.raises(EngineFailed, match="took 1 of 2"):
        write(Engine(delivery, take=lambda tensors: next(iter(tensors))), delivery)
    assert delivery.closed == 1
