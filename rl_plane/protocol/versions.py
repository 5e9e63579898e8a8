"""Weight versions, and the digest of a set of tensors. No torch, no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import TypedDict

DigestAlgorithm = Literal["xxh3", "blake3"]
"""The hash of a digest, and the prefix of a version's digest: XXH3-128 or BLAKE3.

XXH3 finds each corruption, at the speed of memory. But an attacker can make other bytes that have the same digest.
BLAKE3 takes several times as long, and excludes that."""

DEFAULT_ALGORITHM: DigestAlgorithm = "xxh3"
HEX_DIGITS: dict[DigestAlgorithm, int] = {"xxh3": 32, "blake3": 64}
"""The length of a digest in hex. It tells the algorithm of a tensor's digest, which has no prefix."""

DIGEST_PATTERN = "(" + "|".join(f"{name}:[0-9a-f]{{{digits}}}" for name, digits in HEX_DIGITS.items()) + ")"
"""A version's digest, as a regular expression."""

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element of each dtype, by its safetensors name."""

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
    digest: str  # "xxh3:<hex>" or "blake3:<hex>", see tensors_digest

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


def tensor_digest(data: memoryview, algorithm: DigestAlgorithm = DEFAULT_ALGORITHM) -> str:
    """The hash of a tensor's raw bytes, hex."""
    from rl_plane.protocol.hashers import hex_digest

    return hex_digest(data, algorithm)


def algorithm_of(digest: str) -> DigestAlgorithm:
    """The algorithm of a version's digest, by its prefix, or of a tensor's digest, by its length.

    Raises ValueError if it is neither."""
    for name, digits in HEX_DIGITS.items():
        if len(digest.removeprefix(f"{name}:")) == digits:
            return name
    raise ValueError(f"{digest[:80]!r} is no digest")


def tensors_digest(tensors: Iterable[tuple[str, TensorSpec, str]], adapter_config: bytes | None = None) -> str:
    """The digest of a version, from `(name, spec, tensor_digest)` in any order.

    It is of the algorithm of the tensors' digests, and of the default one without tensors. It is the hash of the sorted
    lines `name dtype shape digest`, shape as `2x3` (empty for a scalar). The config of an adapter is a part of the
    adapter, so it adds a line, as if it were a tensor of bytes.

    Raises ValueError for digests of two algorithms.
    """
    from rl_plane.protocol.hashers import hex_digest

    lines = list(tensors)
    algorithms = {algorithm_of(digest) for _, _, digest in lines} or {DEFAULT_ALGORITHM}
    if len(algorithms) > 1:
        raise ValueError("the digests of the tensors are of two algorithms")
    algorithm = algorithms.pop()
    if adapter_config is not None:
        config = TensorSpec("U8", (len(adapter_config),))
        lines.append((ADAPTER_CONFIG_NAME, config, hex_digest(adapter_config, algorithm)))
    text = "\n".join(
        sorted(f"{name} {spec.dtype} {'x'.join(map(str, spec.shape))} {digest}" for name, spec, digest in lines)
    )
    return f"{algorithm}:{hex_digest(text.encode(), algorithm)}"
