"""Tests the checks between transport and engine: specs, digests, staging."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights
from rl_plane.protocol.hashers import PARALLEL_HASH_BYTES
from rl_plane.protocol.versions import DigestAlgorithm, HostTensor, TensorSpec, tensors_digest
from rl_plane.transports.base import Delivery, TransportContext, WeightTransport
from rl_plane.transports.checkpoint_delivery import CheckpointDelivery
from rl_plane.transports.filesystem.receiver import FilesystemTransport
from rl_plane.weights import checkpoint
from rl_plane.weights.checkpoint import open_published, write_manifest
from rl_plane.weights.hashed_copy import is_same_memory
from rl_plane.weights.safetensors_file import READ_BYTES, write_safetensors
from tests.support.receive_requests import named_request
from worker.engines.base import EngineOptions
from worker.engines.fake.adapter import FakeEngine, FakeWeights, make_fake_model
from worker.engines.fake.holder import FakeHolder
from worker.receive import staging
from worker.receive.staging import (
    OWN_TIE_FIX,
    TIE_FIX,
    DigestingStream,
    check_specs,
    model_digest,
    not_fitting,
    receive,
)
from worker.receive.staging_area import StagingArea
from worker.receive.weight_holder import TensorStream
from worker.receive.weight_receiver import Receiver

F32, BF16, I64 = TensorSpec("F32", (2, 3)), TensorSpec("BF16", (2, 3)), TensorSpec("I64", (2, 3))
from tests.support.staging_runs import NO_DIGEST, NONE, Engine, Memory, hexed, two, write  # noqa: E402


def run(engine: Engine, delivery: Memory, expected: str | None = None, cancelled: bool = False) -> str:
    _, digest = receive(
        engine,
        delivery,
        cast=False,
        expected_digest=expected,
        cancelled=lambda: cancelled,
        area=StagingArea.for_specs(delivery.specs),
    )
    return digest


# specs


def test_equal_specs_fit() -> None:
    check_specs({"a": F32}, NONE, {"a": F32}, False)
    check_specs({}, NONE, {}, False)


def test_tied_names_may_be_there_or_not() -> None:
    for offered in ({"a": F32}, {"a": F32, "tied": F32}):
        check_specs({"a": F32}, {"tied": "a"}, offered, False)
        check_specs({"a": F32, "tied": F32}, {"tied": "a"}, offered, False)
        check_specs({"a": BF16}, {"tied": "a"}, offered, True)
    with pytest.raises(InvalidWeights, match="shape"):
        check_specs({"tied": TensorSpec("F32", (1,))}, {"tied": "a"}, {"tied": F32}, False)
    with pytest.raises(InvalidWeights, match="1 missing"):
        check_specs({"a": F32}, {"tied": "a"}, {"tied": F32}, False)


@pytest.mark.parametrize("other", [BF16, TensorSpec("F32", (3, 2)), TensorSpec("I8", (3, 3))])
def test_a_tied_name_comes_as_what_it_is_tied_to(other: TensorSpec) -> None:
    with pytest.raises(InvalidWeights, match="to 'a', but they differ") as caught:
        check_specs({"a": F32}, {"tied": "a"}, {"a": F32, "tied": other}, True)
    assert (caught.value.facts["field"], caught.value.facts["fix"]) == ("tied", TIE_FIX)
    assert not_fitting(caught.value), "no peer has it otherwise"


def test_all_that_is_wrong_is_said_in_bounds() -> None:
    wanted = {f"m{i:03}": F32 for i in range(100)} | {"shape": F32, "dtype": F32}
    offered = {f"x{i}": F32 for i in range(3)} | {"shape": TensorSpec("F32", (3, 2)), "dtype": I64}
    with pytest.raises(InvalidWeights) as caught:
        check_specs(wanted, NONE, offered, True)
    message = caught.value.message
    assert "100 missing ('m000', 'm001', 'm002', 'm003', 'm004', …)" in message
    assert "3 unknown to the model ('x0', 'x1', 'x2')" in message
    assert "'shape' is [3, 2], the model has [2, 3]" in message
    assert "'dtype' is I64, the model has F32" in message
    assert caught.value.facts["missing"]["count"] == 100
    assert len(caught.value.facts["missing"]["names"]) == 5
    assert caught.value.facts["field"] == "transport"
    long = {"n" * 10_000: F32}
    with pytest.raises(InvalidWeights) as caught:
        check_specs({}, NONE, long, False)
    assert len(json.dumps(caught.value.to_wire())) < 2000


def test_other_dtypes_fit_only_with_cast() -> None:
    with pytest.raises(InvalidWeights, match="F32, the model has BF16") as caught:
        check_specs({"a": BF16}, NONE, {"a": F32}, False)
    assert caught.value.facts["field"] == "cast"
    assert "cast: true" in caught.value.facts["fix"]
    check_specs({"a": BF16}, NONE, {"a": F32}, True)
    check_specs({"a": F32}, NONE, {"a": BF16}, True)


@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("other", ["I64", "U8", "BOOL", "F8_E4M3", "F8_E5M2"])
def test_dtypes_that_cast_does_not_convert_are_refused(cast: bool, other: str) -> None:
    spec = TensorSpec(other, (2, 3))
    for wanted, offered in ((F32, spec), (spec, F32)):
        with pytest.raises(InvalidWeights) as caught:
            check_specs({"a": wanted}, NONE, {"a": offered}, cast)
        assert caught.value.facts["field"] == "transport"
        assert "cast" not in caught.value.facts["fix"]


def test_cast_is_not_the_fix_when_more_is_wrong() -> None:
    with pytest.raises(InvalidWeights) as caught:
        check_specs({"a": BF16, "b": F32}, NONE, {"a": F32}, False)
    assert caught.value.facts["field"] == "transport"


# the stream


def test_a_stream_passes_all_on_and_knows_the_digest() -> None:
    delivery = two()
    stream = DigestingStream(delivery)
    assert stream.digest is None
    assert [(name, bytes(tensor.data)) for name, tensor in stream] == [("a", b"aaaa"), ("b", b"bb")]
    assert stream.digest == stream.finish() == delivery.true_digest()


def test_the_digest_does_not_depend_on_the_order() -> None:
    forth, back = two(), two()
    back.sent.reverse()
    assert run(Engine(forth), forth) == run(Engine(back), back)


@pytest.mark.parametrize("algorithm", ["xxh3", "blake3"])
def test_large_tensors_hash_the_same(algorithm: DigestAlgorithm) -> None:
    delivery = Memory({"a": bytes(3 * PARALLEL_HASH_BYTES)})
    wanted = delivery.true_digest(algorithm)
    assert run(Engine(delivery), delivery, wanted) == wanted


@pytest.mark.parametrize(
    ("expected", "stated", "asked", "found"),
    [
        (None, None, None, "xxh3"),
        (None, None, "blake3", "blake3"),
        (None, "blake3", "xxh3", "blake3"),
        (None, "xxh3", "blake3", "xxh3"),
        ("blake3", "xxh3", "xxh3", "blake3"),
        ("xxh3", "blake3", "blake3", "xxh3"),
    ],
)
@pytest.mark.parametrize("stated_by", ["digest", "tensor_digests"])
def test_a_version_is_hashed_as_its_digest_says(
    expected: DigestAlgorithm | None,
    stated: DigestAlgorithm | None,
    asked: DigestAlgorithm | None,
    found: DigestAlgorithm,
    stated_by: str,
) -> None:
    """The first that is there decides: the expected digest, those of the delivery, the request's algorithm."""
    delivery = two()
    if stated is not None:
        true = delivery.true_digest(stated) if stated_by == "digest" else delivery.true_digests(stated)
        setattr(delivery, stated_by, true)
    wanted = delivery.true_digest(expected) if expected else None
    stream = DigestingStream(delivery, expected_digest=wanted, algorithm=asked)
    digests = {name: tensor.digest for name, tensor in stream}
    assert stream.finish() == delivery.true_digest(found)
    assert digests == delivery.true_digests(found)
    assert delivery.algorithm == found


@pytest.mark.parametrize("algorithm", ["xxh3", "blake3"])
def test_stated_digests_are_checked_by_their_own_algorithm(algorithm: DigestAlgorithm) -> None:
    for stated in ("digest", "tensor_digests"):
        delivery, other = two(), Memory({"a": b"aaaa", "b": b"BB"})
        wrong = other.true_digest(algorithm) if stated == "digest" else other.true_digests(algorithm)
        setattr(delivery, stated, wrong)
        with pytest.raises(InvalidWeights, match="is wanted" if stated == "digest" else "its publisher stated"):
            run(Engine(delivery), delivery)


@pytest.mark.parametrize("expected", ["xxh3", "blake3"])
def test_wrong_bytes_have_no_expected_digest_whatever_the_delivery_states(expected: DigestAlgorithm) -> None:
    """The delivery states digests of its wrong bytes, by the other algorithm."""
    delivery = Memory({"a": b"aaaa", "b": b"BB"})
    other: DigestAlgorithm = "blake3" if expected == "xxh3" else "xxh3"
    delivery.digest, delivery.tensor_digests = delivery.true_digest(other), delivery.true_digests(other)
    with pytest.raises(InvalidWeights, match="the bytes make"):
        run(Engine(delivery), delivery, two().true_digest(expected))


class Late(Memory):
    """States its digest by BLAKE3, after its last tensor."""

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        yield from super().tensors(cancelled)
        self.digest = self.true_digest("blake3")


def test_a_digest_that_comes_last_is_compared_or_refused() -> None:
    def made(algorithm: DigestAlgorithm | None, expected: str | None = None) -> str:
        delivery = Late({"a": b"aaaa", "b": b"bb"})
        stream = DigestingStream(delivery, expected_digest=expected, algorithm=algorithm)
        list(stream)
        return stream.finish()

    assert made("blake3") == two().true_digest("blake3")
    assert made(None, two().true_digest()) == two().true_digest()
    with pytest.raises(InvalidWeights, match="hashed by xxh3, and then came the digest blake3:") as caught:
        made(None)
    assert caught.value.facts["fix"] == "name it before the weights come: digest_algorithm blake3"


def test_right_stated_digests_are_accepted() -> None:
    delivery = two()
    delivery.digest = delivery.true_digest()
    delivery.tensor_digests = {"a": hexed(b"aaaa"), "b": hexed(b"bb")}
    assert run(Engine(delivery), delivery, delivery.digest) == delivery.digest
    assert delivery.closed == 1


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda d: d.sent.append(d.sent[0]), "'a' arrived twice"),
        (lambda d: d.sent.append(("z", d.sent[0][1])), "'z' arrived, but was not announced"),
        (lambda d: d.sent.pop(), r"1 of the announced tensors did not arrive \('b'\)"),
        (lambda d: d.sent.clear(), r"2 of the announced"),
        (
            lambda d: d.sent.__setitem__(0, ("a", HostTensor(TensorSpec("I8", (4,)), memoryview(b"aaaa")))),
            "arrived as",
        ),
        (lambda d: d.sent.__setitem__(0, ("a", HostTensor(d.specs["a"], memoryview(b"aaa")))), "3 bytes, not 4"),
        (lambda d: d.sent.__setitem__(0, ("a", HostTensor(d.specs["a"], memoryview(b"aaaaa")))), "5 bytes, not 4"),
        (lambda d: setattr(d, "tensor_digests", {"a": hexed(b"aaaa"), "b": hexed(b"BB")}), "'b' has digest"),
        (lambda d: setattr(d, "tensor_digests", {"a": hexed(b"aaaa")}), "'b' has digest"),
        (lambda d: setattr(d, "digest", NO_DIGEST), f"{NO_DIGEST} is wanted"),
        (lambda d: setattr(d, "digest", "blake3:00"), "states the version digest 'blake3:00', which is none"),
        (lambda d: setattr(d, "tensor_digests", {"a": hexed(b"aaaa"), "b": "00"}), "that are none, or of two"),
        (lambda d: setattr(d, "tensor_digests", {"a": hexed(b"aaaa"), "b": hexed(b"bb", "blake3")}), "of two"),
    ],
)
def test_a_delivery_that_lies_is_refused_and_closed(lie: Callable[[Memory], None], message: str) -> None:
    delivery = two()
    engine = Engine(delivery)
    lie(delivery)
    with pytest.raises(InvalidWeights, match=message) as caught:
        run(engine, delivery)
    assert caught.value.facts["field"] == "transport"
    assert caught.value.facts["fix"]
    assert delivery.closed == 1


def test_the_engine_never_sees_a_wrong_tensor() -> None:
    delivery = two()
    delivery.tensor_digests = {"a": "0" * 32, "b": "0" * 32}
    seen: list[str] = []
    engine = Engine(delivery, lambda stream: seen.extend(name for name, _ in stream))
    with pytest.raises(InvalidWeights):
        run(engine, delivery)
    assert seen == []


def test_another_digest_than_expected_names_both() -> None:
    delivery = two()
    wanted = NO_DIGEST
    with pytest.raises(InvalidWeights) as caught:
        run(Engine(delivery), delivery, wanted)
    assert caught.value.facts["digest"] == delivery.true_digest()
    assert caught.value.facts["expected_digest"] == wanted
    assert wanted in caught.value.message
    assert delivery.true_digest() in caught.value.message


def test_a_stated_digest_that_is_not_the_expected_one_costs_no_byte() -> None:
    delivery = two()
    delivery.digest = delivery.true_digest()
    with pytest.raises(InvalidWeights, match="states version digest"):
        run(Engine(delivery), delivery, NO_DIGEST)
    assert (delivery.taken, delivery.closed) == (0, 1)


# receive


@pytest.mark.parametrize("in_place", [False, True])
def test_tied_tensors_must_be_equal(in_place: bool) -> None:
    def send(delivery: Memory, digest: str | None = None) -> str:
        engine = Engine(delivery)
        del engine.wanted["tied"]
        engine.tied = {"tied": "a"}
        return write(engine, delivery, digest) if in_place else run(engine, delivery, digest)

    same = Memory({"tied": b"aaaa", "b": b"bb", "a": b"aaaa"})
    assert send(same) == same.true_digest()
    for stated in (False, True):
        broken = Memory({"tied": b"bbbb", "a": b"aaaa"})
        if stated:
            broken.tensor_digests = {"tied": hexed(b"bbbb"), "a": hexed(b"aaaa")}
        with pytest.raises(InvalidWeights, match="to 'a', but they differ") as caught:
            send(broken, broken.true_digest())
        assert (caught.value.facts["field"], caught.value.facts["fix"]) == ("tied", TIE_FIX)
        assert (broken.taken, broken.closed) == (0 if stated else 2, 1)
    with pytest.raises(InvalidWeights, match="the bytes make") as caught:  # they were changed on their way
        send(Memory({"tied": b"bbbb", "a": b"aaaa"}), same.true_digest())
    assert not not_fitting(caught.value)


def test_wrong_specs_cost_no_byte() -> None:
    delivery = two()
    engine = Engine(delivery)
    engine.wanted["c"] = F32
    with pytest.raises(InvalidWeights, match="1 missing"):
        run(engine, delivery)
    assert (delivery.taken, delivery.closed) == (0, 1)


def test_the_digest_is_checked_if_the_engine_stops_at_the_last_tensor() -> None:
    def counting(stream: TensorStream) -> None:
        items = iter(stream)
        next(items), next(items)

    delivery = two()
    assert run(Engine(delivery, counting), delivery) == delivery.true_digest()
    delivery = two()
    with pytest.raises(InvalidWeights, match="is wanted"):
        run(Engine(delivery, counting), delivery, NO_DIGEST)
    assert delivery.closed == 1


def test_an_engine_that_stops_early_has_failed() -> None:
    delivery = two()
    with pytest.raises(EngineFailed, match="0 of 2"):
        run(Engine(delivery, lambda stream: None), delivery)
    assert delivery.closed == 1


def test_an_engine_that_swallows_the_error_has_failed() -> None:
    def swallow(stream: TensorStream) -> None:
        with pytest.raises(InvalidWeights):
            list(stream)

    delivery = two()
    with pytest.raises(EngineFailed, match="continued"):
        run(Engine(delivery, swallow), delivery, NO_DIGEST)


def test_an_engines_error_passes_and_the_delivery_is_closed() -> None:
    def fail(stream: TensorStream) -> None:
        next(iter(stream))
        raise EngineFailed("no memory")

    delivery = two()
    with pytest.raises(EngineFailed, match="no memory"):
        run(Engine(delivery, fail), delivery)
    assert delivery.closed == 1


def test_a_cancelled_receipt_closes_its_delivery() -> None:
    delivery = two()
    with pytest.raises(EngineFailed, match="cancelled"):
        run(Engine(delivery), delivery, cancelled=True)
    assert delivery.closed == 1
    answers = iter([False, False, True])  # at the very end, after the last tensor
    delivery = two()
    with pytest.raises(EngineFailed, match="cancelled"):
        receive(
            Engine(delivery),
            delivery,
            cast=False,
            expected_digest=None,
            cancelled=lambda: next(answers),
            area=StagingArea.for_specs(delivery.specs),
        )
    assert delivery.closed == 1


async def test_files_are_staged_in_an_engine_with_their_digest(tmp_path: Path) -> None:
    base, new = make_fake_model(tmp_path / "base", 1), make_fake_model(tmp_path / "new", 2)
    manifest = write_manifest(new)
    engine = FakeEngine(EngineOptions(base))
    await engine.start()
    delivery: Delivery = FilesystemTransport(TransportContext((tmp_path,))).open(
        {"backend": "filesystem", "path": str(new)}, "base"
    )
    staged, digest = receive(
        FakeHolder(engine),
        delivery,
        cast=False,
        expected_digest=manifest["digest"],
        cancelled=lambda: False,
        area=StagingArea.for_specs(delivery.specs),
    )
    assert digest == manifest["digest"] == model_digest(new)
    assert isinstance(staged, FakeWeights)
    assert staged.digest == digest
    await engine.close()


async def test_bytes_that_are_not_the_manifests_are_refused(tmp_path: Path) -> None:
    """Names, shapes and lengths are equal, so only the digest differs."""
    base, new = make_fake_model(tmp_path / "base", 1), make_fake_model(tmp_path / "new", 2)
    write_manifest(new)
    make_fake_model(new, 3)
    engine = FakeEngine(EngineOptions(base))
    await engine.start()
    delivery = FilesystemTransport(TransportContext((tmp_path,))).open(
        {"backend": "filesystem", "path": str(new)}, "base"
    )
    with pytest.raises(InvalidWeights, match="its publisher stated"):
        receive(
            FakeHolder(engine),
            delivery,
            cast=False,
            expected_digest=None,
            cancelled=lambda: False,
            area=StagingArea.for_specs(delivery.specs),
        )
    await engine.close()


class Silent(Memory):
    """A delivery whose sender never sends: only `cancelled` ends its wait."""

    def __init__(self) -> None:
        super().__init__({"a": b"aaaa"})
        self.waits = threading.Event()

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        self.waits.set()
        while not cancelled():
            time.sleep(0.01)
        raise EngineFailed("staging was cancelled")
        yield  # a generator, as the contract wants


class SilentTransport(WeightTransport):
    """A transport of a third party: it shares only the contract with the product's."""

    backend = "silent"

    def __init__(self, places: TransportContext) -> None:
        self.delivery = Silent()

    def init(self, config: Mapping[str, Any]) -> None:
        pass

    def destroy(self) -> None:
        pass

    def open(self, request: Mapping[str, Any], kind: str) -> Silent:
        return self.delivery


def test_a_third_partys_delivery_that_waits_for_bytes_is_cancelled() -> None:
    transport = SilentTransport(TransportContext())
    receiver = Receiver(Engine(transport.delivery), {"silent": transport})
    receiver.open(*named_request("s", {"backend": "silent"}))
    cancelled = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receiver.receive, "s", cancelled.is_set)
        assert transport.delivery.waits.wait(10)
        cancelled.set()
        with pytest.raises(EngineFailed, match="cancelled"):
            receiving.result(10)
    assert transport.delivery.closed


class Derived(CheckpointDelivery):
    """A third party's delivery, which claims of each tensor the digest that its publisher stated."""

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        assert self.tensor_digests is not None
        for name, tensor in super().tensors(cancelled):
            yield name, replace(tensor, digest=self.tensor_digests[name])


def test_a_derived_delivery_is_not_believed(tmp_path: Path) -> None:
    new = make_fake_model(tmp_path / "new", 2)
    write_manifest(new)
    make_fake_model(new, 3)
    delivery = Derived(*open_published(str(new), [tmp_path], "base"))
    try:
        with pytest.raises(InvalidWeights, match="its publisher stated"):
            list(DigestingStream(delivery, expected_digest=None))
    finally:
        delivery.close()


# places


class Placing(Memory):
    """Writes its first tensor where it shall go, and states a digest for it."""

    states: str | None = None

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        assert self.places is not None
        (name, tensor), *others = self.sent
        place = self.places(name, tensor.spec)
        assert place is not None
        place[:] = tensor.data
        yield name, HostTensor(tensor.spec, place, owned=True, digest=self.states)
        yield from others


@pytest.mark.parametrize("algorithm", ["xxh3", "blake3"])
@pytest.mark.parametrize("kind", [Memory, Placing])
def test_tensors_end_in_their_places(kind: type[Memory], algorithm: DigestAlgorithm) -> None:
    delivery = kind({"a": b"aaaa", "b": bytes(range(256)) * 8192, "none": b""})
    area = StagingArea.for_specs(delivery.specs)
    stream = DigestingStream(delivery, expected_digest=delivery.true_digest(algorithm), places=area.find)
    found = dict(stream)
    assert stream.finish() == delivery.true_digest(algorithm)
    for name, sent in delivery.sent:
        assert bytes(found[name].data) == bytes(sent.data) == bytes(area.place(name))
        assert found[name].owned
        assert found[name].digest == delivery.true_digests(algorithm)[name]
        assert is_same_memory(found[name].data, area.place(name)) or not sent.data.nbytes


def test_a_third_partys_digest_of_what_it_has_placed_is_not_believed() -> None:
    delivery = Placing({"a": b"aaXa", "b": b"bb"})
    delivery.tensor_digests = {"a": hexed(b"aaaa"), "b": hexed(b"bb")}
    delivery.states = hexed(b"aaaa")
    area = StagingArea.for_specs(delivery.specs)
    with pytest.raises(InvalidWeights, match="'a' has digest"):
        list(DigestingStream(delivery, places=area.find))


def test_a_tensor_without_a_place_stays_where_it_came() -> None:
    delivery = two()
    places: dict[str, memoryview] = {"b": memoryview(bytearray(2))}
    stream = DigestingStream(delivery, places=lambda name, spec: places.get(name))
    found = dict(stream)
    assert found["a"].data is delivery.sent[0][1].data
    assert (bytes(found["b"].data), bytes(places["b"])) == (b"bb", b"bb")
    assert stream.finish() == delivery.true_digest()


@pytest.mark.parametrize("algorithm", ["xxh3", "blake3"])
def test_files_are_read_into_their_places(
    tmp_path: Path, algorithm: DigestAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other memory is taken, and no byte is copied."""
    data = {"a": bytes(range(256)) * 8192, "b": b"bb", "none": b""}
    tensors = {name: (TensorSpec("U8", (len(one),)), one) for name, one in data.items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    manifest = write_manifest(tmp_path, algorithm)
    monkeypatch.setattr(checkpoint, "host_memory", None)
    monkeypatch.setattr(staging, "copy_hashed", None)
    delivery = CheckpointDelivery(*open_published(str(tmp_path), [tmp_path], "base"))
    area = StagingArea.for_specs(delivery.specs)
    with closing(delivery):
        stream = DigestingStream(delivery, places=area.find)
        found = {name: bytes(tensor.data) for name, tensor in stream}
    assert stream.finish() == manifest["digest"]
    assert found == data == {name: bytes(area.place(name)) for name in data}


# the digest of a model


def test_model_digest_is_of_the_bytes_not_of_the_files(tmp_path: Path) -> None:
    """A tensor of more bytes than are read at once has the same digest."""
    a = TensorSpec("U8", (READ_BYTES + 3,)), bytes(READ_BYTES) + b"end"
    b = TensorSpec("U8", (3,)), b"abc"
    (tmp_path / "whole").mkdir()
    write_safetensors(tmp_path / "whole" / "model.safetensors", {"a": a, "b": b})
    shards = tmp_path / "shards"
    shards.mkdir()
    write_safetensors(shards / "1.safetensors", {"b": b}, {"format": "pt"})
    write_safetensors(shards / "2.safetensors", {"a": a})
    index = {"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = tensors_digest([("a", a[0], hexed(a[1])), ("b", b[0], hexed(b[1]))])
    assert model_digest(tmp_path / "whole") == model_digest(shards) == expected
    (shards / "rl_plane_manifest.json").write_text("not read")
    assert model_digest(shards) == expected
    assert expected.startswith("xxh3:")


def test_model_digest_errors_name_the_model(tmp_path: Path, no_descriptor_leaks: None) -> None:
    for path, kind in ((tmp_path / "absent", InvalidRequest), (tmp_path, InvalidWeights)):
        with pytest.raises(kind) as caught:
            model_digest(path)
        assert caught.value.facts["field"] == "model"


@pytest.mark.parametrize("other", [(TensorSpec("F32", (2,)), b"87654321"), (TensorSpec("U8", (8,)), b"12345678")])
def test_a_models_digest_is_of_no_tie_that_it_breaks(tmp_path: Path, other: tuple[TensorSpec, bytes]) -> None:
    """The digests differ by the bytes alone, or by dtype and shape."""
    embedding = (TensorSpec("F32", (2,)), b"12345678")
    file = tmp_path / "model.safetensors"
    for tensors in ({"head": embedding, "embedding": embedding}, {"embedding": embedding}, {"head": other}):
        write_safetensors(file, tensors)
        assert model_digest(tmp_path, tied={"head": "embedding"}) == model_digest(tmp_path)
    write_safetensors(file, {"head": other, "embedding": embedding})
    with pytest.raises(InvalidWeights, match="ties 'head' to 'embedding', but they differ") as caught:
        model_digest(tmp_path, tied={"head": "embedding"})
    assert (caught.value.facts["field"], caught.value.facts["fix"]) == ("model", OWN_TIE_FIX)
