"""Weight versions, and the digest of a set of tensors. No torch, no I/O."""

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
"""A tensor of at least this size is hashed on all cores. Below it threads cost more than they save."""

MAX_NAME_CHARS = 512
"""Checkpoint names are dotted module paths; the longest known ones have some 120 characters."""

MAX_RANK = 16
"""No weight has more than 6 axes. The bound keeps the product of a shape cheap."""

ADAPTER_CONFIG_NAME = "adapter_config.json"


def checked_name(name: str) -> bool:
    """Reports whether a tensor may have this name. White space would make the lines of a digest ambiguous."""
    return 0 < len(name) <= MAX_NAME_CHARS and name.isprintable() and " " not in name


class VersionReply(TypedDict):
    """A version on the wire."""

    run: str
    sequence: int
    label: str
    digest: str


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """The identity of weights. Equal versions have equal digests, and `sequence` orders them within a `run`."""

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
    """A tensor in host memory, described by plain values without a framework."""

    spec: TensorSpec
    data: memoryview  # spec.nbytes raw little-endian bytes, row-major
    owned: bool = False
    """Whether the receiver may keep the memory. False: it is lent, and its owner uses it again."""
    digest: str | None = None
    """The `tensor_digest` of `data`, if it was computed from the same memory. None: not yet."""


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
    """The line that an adapter's config adds to its version's digest (`tensors_digest`), because the config is a part
    of the adapter."""
    from blake3 import blake3

    return ADAPTER_CONFIG_NAME, TensorSpec("U8", (len(raw),)), str(blake3(raw).hexdigest())
