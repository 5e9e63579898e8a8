"""Manifests, packing and deliveries of packed buckets: what every transport of buckets rests on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3
from xxhash import xxh3_128

from rl_plane.errors import InvalidRequest, InvalidWeights
from rl_plane.protocol.versions import DigestAlgorithm, HostTensor, TensorSpec, tensors_digest
from rl_plane.transports.packed_delivery import PackedDelivery
from rl_plane.transports.packing import fill
from rl_plane.weights.manifest import ALIGN_BYTES, Manifest, PackedBucket, pack

SPECS = {
    "a": TensorSpec("BF16", (3, 5)),
    "b": TensorSpec("F32", ()),
    "empty": TensorSpec("F32", (0, 4)),
    "large": TensorSpec("U8", (1000,)),
    "c": TensorSpec("I64", (2,)),
}
CONFIG = b'{"r": 4, "lora_alpha": 8}'


def tensors() -> dict[str, HostTensor]:
    chance = random.Random(1)
    return {name: HostTensor(spec, memoryview(chance.randbytes(spec.nbytes))) for name, spec in SPECS.items()}


def manifest(bucket_bytes: int = 128, **fields: Any) -> Manifest:
    return Manifest(pack(SPECS.items(), bucket_bytes), **fields)


def packed(made: Manifest, algorithm: DigestAlgorithm = "xxh3") -> tuple[list[memoryview], dict[str, str]]:
    buffers = [memoryview(bytearray(bucket.nbytes)) for bucket in made.buckets]
    digests: dict[str, str] = {}
    filled = fill(made, tensors().items(), buffers.__getitem__, digests, algorithm=algorithm)
    assert list(filled) == list(range(len(buffers)))
    return buffers, digests


@pytest.mark.parametrize("bucket_bytes", [1, 64, 128, 1024, 1 << 30])
@pytest.mark.parametrize(("algorithm", "hashed"), [("xxh3", xxh3_128), ("blake3", blake3)])
def test_the_packed_tensors_arrive_unchanged(
    algorithm: DigestAlgorithm, hashed: Callable[[memoryview], Any], bucket_bytes: int
) -> None:
    made = manifest(bucket_bytes)
    assert [placed.name for bucket in made.buckets for placed in bucket.tensors] == list(SPECS)
    for bucket in made.buckets:
        assert bucket.nbytes <= bucket_bytes or sum(placed.spec.nbytes > 0 for placed in bucket.tensors) == 1
        assert all(placed.offset % ALIGN_BYTES == 0 for placed in bucket.tensors)
    buffers, digests = packed(made, algorithm)
    delivery = PackedDelivery(made.digested(digests), iter(buffers), refetchable=False)
    arrived = {name: (tensor.spec, bytes(tensor.data)) for name, tensor in delivery.tensors()}
    assert arrived == {name: (tensor.spec, bytes(tensor.data)) for name, tensor in tensors().items()}
    expected = {name: hashed(tensor.data).hexdigest() for name, tensor in tensors().items()}
    assert digests == expected
    assert delivery.digest == tensors_digest((name, SPECS[name], expected[name]) for name in SPECS)
    assert delivery.digest.startswith(f"{algorithm}:")


def test_a_manifest_survives_its_wire_form() -> None:
    made = manifest(adapter_config=CONFIG)
    made = made.digested(packed(made)[1])
    again = Manifest.from_wire(json.loads(json.dumps(made.to_wire())))
    assert again == made
    lines = [(name, SPECS[name], (made.tensor_digests or {})[name]) for name in SPECS]
    assert again.digest == tensors_digest(lines, CONFIG)
    assert manifest().digest is None


def _edited(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda wire: {**wire, **changes}


@pytest.mark.parametrize(
    "edit",
    [
        lambda wire: [],
        lambda wire: {"buckets": wire["buckets"]},
        _edited(buckets=[]),
        _edited(buckets=[[]]),
        _edited(buckets=[[["a", "F32", [1]]], []]),
        _edited(buckets=["a"]),
        _edited(buckets=[["a"]]),
        _edited(buckets=[[["a b", "F32", [1]]]]),
        _edited(buckets=[[["a", "F33", [1]]]]),
        _edited(buckets=[[["a", "F32", [-1]]]]),
        _edited(buckets=[[["a", "F32", [True]]]]),
        _edited(buckets=[[["a", "F32", [1] * 17]]]),
        _edited(buckets=[[["a", "F32", [1 << 50]]]]),
        _edited(buckets=[[["a", "F32", [1]], ["a", "F32", [1]]]]),
        _edited(buckets=[[["a", "F32", [1]]]], tensor_digests={"a": "0"}),
        _edited(buckets=[[["a", "F32", [1]]]], tensor_digests={"b": "0" * 64}),
        _edited(buckets=[[["a", "F32", [1]]]], tensor_digests={"a": "0" * 48}),
        _edited(buckets=[[["a", "F32", [1]], ["b", "F32", [1]]]], tensor_digests={"a": "0" * 64, "b": "0" * 32}),
        _edited(adapter_config=1),
        _edited(adapter_config="x" * (1 << 21)),
    ],
)
def test_a_value_that_is_no_manifest_is_refused(edit: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(InvalidWeights) as caught:
        Manifest.from_wire(edit(manifest().to_wire()))
    assert caught.value.facts["field"] == "transport.manifest"


def test_buckets_that_are_not_the_manifests_are_refused() -> None:
    made = manifest()
    buffers, _ = packed(made)
    for wrong in (buffers[:-1], [*buffers, buffers[0]], [buffers[0][:-1], *buffers[1:]]):
        delivery = PackedDelivery(made, iter(wrong), refetchable=False)
        with pytest.raises(InvalidWeights, match="bucket"):
            list(delivery.tensors())
    with pytest.raises(InvalidWeights, match="config"):
        PackedDelivery(manifest(adapter_config=b"["), iter(buffers), refetchable=False)


def test_a_source_that_gives_other_tensors_than_it_announced_is_refused() -> None:
    made = Manifest((PackedBucket.of(SPECS.items()),))
    buffer = memoryview(bytearray(made.buckets[0].nbytes))
    right = list(tensors().items())
    for wrong in (right[:-1], right[::-1], [("a", right[1][1]), *right[1:]], [*right, ("more", right[0][1])]):
        with pytest.raises(InvalidRequest, match="expected"):
            list(fill(made, wrong, lambda _: buffer))


def test_torch_tensors_are_packed_bit_by_bit() -> None:
    import torch

    from rl_plane.transports.packing import spec_of

    chance = torch.Generator().manual_seed(3)
    given = {
        "half": torch.randn(7, 3, generator=chance).to(torch.bfloat16),
        "turned": torch.randn(4, 6, generator=chance).t(),
        "flag": torch.tensor([True, False]),
        "small": torch.randn(5, generator=chance).to(torch.float8_e4m3fn),
        "none": torch.empty(0, 3),
        "one": torch.tensor(2.5, dtype=torch.float64),
    }
    made = Manifest(pack(((name, spec_of(tensor)) for name, tensor in given.items()), 64))
    buffers = [memoryview(bytearray(bucket.nbytes)) for bucket in made.buckets]
    list(fill(made, given.items(), buffers.__getitem__))
    for name, tensor in PackedDelivery(made, iter(buffers), refetchable=False).tensors():
        raw = given[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert bytes(tensor.data) == raw, name
