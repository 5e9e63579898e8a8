"""What a weight version is, and how a set of tensors gets its digest. No torch, no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypedDict

DIGEST_PREFIX = "blake3:"

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element of each dtype, by its safetensors name."""

PARALLEL_HASH_BYTES = 1 << 20
"""From this size on a tensor is hashed on all cores, for milliseconds; below, threads cost more than they save."""

MAX_NAME_CHARS = 512
"""Checkpoint names are dotted module paths; the longest known ones have some 120 characters."""

MAX_RANK = 16
"""No weight has more than 6 axes; a bound keeps a shape's product cheap to check."""

ADAPTER_CONFIG_NAME = "adapter_config.json"


def checked_name(name: str) -> bool:
    """May a tensor have this name? White space would make the lines of a version's digest ambiguous."""
    return 0 < len(name) <= MAX_NAME_CHARS and name.isprintable() and " " not in name


class VersionReply(TypedDict):
    """A version on the wire."""

    run: str
    sequence: int
    label: str
    digest: str


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Which weights. Equal versions have equal digests; `sequence` orders them within a `run`."""

    run: str
    sequence: int
    label: str
    digest: str  # "blake3:<hex>", see tensors_digest

    def to_wire(self) -> VersionReply:
        return VersionReply(run=self.run, sequence=self.sequence, label=self.label, digest=self.digest)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> WeightVersion:
        return cls(str(wire["run"]), int(wire["sequence"]), str(wire["label"]), str(wire["digest"]))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its bytes."""

    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = DTYPE_BYTES[self.dtype]
        for side in self.shape:
            count *= side
        return count


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor in host memory, described by plain values: no framework owns it."""

    spec: TensorSpec
    data: memoryview  # spec.nbytes raw little-endian bytes, row-major
    owned: bool = False
    """Nobody else uses this memory: whoever takes the tensor may keep it. Else it is only lent."""
    digest: str | None = None
    """Of `data`, where it was made of the same memory just now, as `tensor_digest` makes it; None: not yet."""


def tensor_digest(data: memoryview) -> str:
    """BLAKE3 of a tensor's raw bytes, hex."""
    from blake3 import blake3

    threads = blake3.AUTO if data.nbytes >= PARALLEL_HASH_BYTES else 1
    return str(blake3(data, max_threads=threads).hexdigest())


def tensors_digest(tensors: Iterable[tuple[str, TensorSpec, str]]) -> str:
    """The digest of a version, from `(name, spec, tensor_digest)` in any order.

    BLAKE3 over the sorted lines `name dtype shape digest`, shape as `2x3` (empty for a scalar).
    """
    from blake3 import blake3

    lines = sorted(
        f"{name} {spec.dtype} {'x'.join(map(str, spec.shape))} {digest}" for name, spec, digest in tensors
    )
    return DIGEST_PREFIX + blake3("\n".join(lines).encode()).hexdigest()


def config_line(raw: bytes) -> tuple[str, TensorSpec, str]:
    """What an adapter's config adds to its version's digest (see `tensors_digest`): it says what the tensors mean."""
    from blake3 import blake3

    return ADAPTER_CONFIG_NAME, TensorSpec("U8", (len(raw),)), str(blake3(raw).hexdigest())
