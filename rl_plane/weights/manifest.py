"""The manifest of a version: its tensors, packed into buckets. No I/O.

A bucket travels as one run of bytes: its tensors in the order of the manifest, each at the next multiple of
ALIGN_BYTES. So names, dtypes and shapes alone determine where each tensor is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from rl_plane.errors import InvalidWeights
from rl_plane.protocol.versions import (
    DTYPE_BYTES,
    MAX_NAME_CHARS,
    MAX_RANK,
    TensorSpec,
    algorithm_of,
    checked_name,
    tensors_digest,
)

CHANGED_FIX = "publish the weights again, and don't change them while they are read"
"""The fix of an error about bytes that have another digest than stated."""
ALIGN_BYTES = 64
"""The alignment of tensors in a bucket: a cache line, so every dtype can be read in place."""

DEFAULT_BUCKET_BYTES = 256 << 20
"""The default size of a bucket: its own cost does not count, and it is small beside a model."""

MAX_TENSORS = 1 << 18
"""The most tensors of a version: twice as many as the largest public checkpoints have."""

MAX_BUCKET_BYTES = 1 << 40

MAX_CONFIG_BYTES = 1 << 20
"""The longest config of an adapter. PEFT writes about 1,000 bytes."""

_HEX = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")


def are_digests(values: Iterable[Any]) -> bool:
    """Reports whether the values are digests of tensors, all of one algorithm. True for no values."""
    found = list(values)
    if not all(isinstance(value, str) and _HEX.fullmatch(value) for value in found):
        return False
    return len({algorithm_of(value) for value in found}) <= 1


def aligned(spec: TensorSpec) -> int:
    """The bytes that a tensor takes in a bucket, with the gap after it."""
    return -(-spec.nbytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of a tensor in its bucket."""

    name: str
    spec: TensorSpec
    offset: int


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """Tensors that travel as one run of bytes."""

    tensors: tuple[Placed, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, TensorSpec]]) -> PackedBucket:
        """The bucket of these tensors, in this order."""
        placed, end = [], 0
        for name, spec in tensors:
            placed.append(Placed(name, spec, end))
            end += aligned(spec)
        return cls(tuple(placed), end)


def pack(
    tensors: Iterable[tuple[str, TensorSpec]], bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> tuple[PackedBucket, ...]:
    """Groups tensors into buckets, in the order given. A tensor larger than `bucket_bytes` gets a bucket of its own."""
    groups: list[list[tuple[str, TensorSpec]]] = []
    room = 0
    for name, spec in tensors:
        size = aligned(spec)
        if not groups or size > room:
            groups.append([])
            room = bucket_bytes
        groups[-1].append((name, spec))
        room -= size
    return tuple(map(PackedBucket.of, groups))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors of one version, in the order in which they are sent."""

    buckets: tuple[PackedBucket, ...]
    adapter_config: bytes | None = None
    """The `adapter_config.json` of an adapter, as published; None for base weights."""
    tensor_digests: Mapping[str, str] | None = None
    """Tensor name to hex digest; None while the publisher has not read all tensors. All are of one algorithm."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {placed.name: placed.spec for bucket in self.buckets for placed in bucket.tensors}

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def digested(self, tensor_digests: Mapping[str, str]) -> Manifest:
        return replace(self, tensor_digests=dict(tensor_digests))

    @property
    def digest(self) -> str | None:
        """The version's digest, once all tensors were read; None before."""
        if self.tensor_digests is None:
            return None
        lines = [(name, spec, self.tensor_digests[name]) for name, spec in self.specs.items()]
        return tensors_digest(lines, self.adapter_config)

    def to_wire(self) -> dict[str, Any]:
        """The manifest as plain values, for msgpack or JSON."""
        return {
            "buckets": [
                [[one.name, one.spec.dtype, list(one.spec.shape)] for one in bucket.tensors]
                for bucket in self.buckets
            ],
            "adapter_config": None if self.adapter_config is None else self.adapter_config.decode(),
            "tensor_digests": None if self.tensor_digests is None else dict(self.tensor_digests),
        }

    @classmethod
    def from_wire(cls, wire: Any, field: str = "transport.manifest") -> Self:
        """Parses a manifest from another process. Raises InvalidWeights if it is not valid."""

        def refuse(what: str) -> InvalidWeights:
            return InvalidWeights(
                f"the manifest {what}", field=field, fix="make it with rl_plane.weights.manifest, as publishers do"
            )

        if not isinstance(wire, Mapping) or wire.keys() != {"buckets", "adapter_config", "tensor_digests"}:
            raise refuse("must have buckets, adapter_config and tensor_digests")
        groups, config, digests = wire["buckets"], wire["adapter_config"], wire["tensor_digests"]
        if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
            raise refuse("must have a list of lists of tensors as its buckets")
        if not 0 < sum(map(len, groups)) <= MAX_TENSORS or not all(groups):
            raise refuse(f"must name 1 to {MAX_TENSORS} tensors, and no empty bucket")
        seen: set[str] = set()
        buckets = []
        for group in groups:
            bucket = PackedBucket.of([_tensor(one, refuse) for one in group])
            if bucket.nbytes > MAX_BUCKET_BYTES:
                raise refuse(f"has a bucket of more than {MAX_BUCKET_BYTES} bytes")
            for placed in bucket.tensors:
                if placed.name in seen:
                    raise refuse(f"names {placed.name!r} twice")
                seen.add(placed.name)
            buckets.append(bucket)
        if config is not None and not (isinstance(config, str) and len(config.encode()) <= MAX_CONFIG_BYTES):
            raise refuse(f"must have a text of at most {MAX_CONFIG_BYTES} bytes as its adapter_config")
        if digests is not None and not (
            isinstance(digests, Mapping) and digests.keys() == seen and are_digests(digests.values())
        ):
            raise refuse("must have one hex digest for each tensor as its tensor_digests, all of one algorithm")
        return cls(
            tuple(buckets),
            None if config is None else config.encode(),
            None if digests is None else dict(digests),
        )


def _tensor(one: Any, refuse: Any) -> tuple[str, TensorSpec]:
    if not isinstance(one, list) or len(one) != 3:
        raise refuse("must describe each tensor as [name, dtype, shape]")
    name, dtype, shape = one
    if not isinstance(name, str) or not checked_name(name):
        raise refuse(
            f"has a name that no tensor may have: 1 to {MAX_NAME_CHARS} printable characters without white space"
        )
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise refuse(f"has {name!r} in a dtype that is none of {', '.join(sorted(DTYPE_BYTES))}")
    sizes = isinstance(shape, list) and all(type(side) is int and 0 <= side < 1 << 62 for side in shape)
    if not sizes or len(shape) > MAX_RANK:
        raise refuse(f"has {name!r} in a shape that is not at most {MAX_RANK} non-negative integers")
    return name, TensorSpec(dtype, tuple(shape))
