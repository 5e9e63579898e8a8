"""The digests of tensors and versions, by both algorithms."""

from __future__ import annotations

import re

import pytest
from blake3 import blake3
from xxhash import xxh3_128

from rl_plane.protocol.hashers import hex_digest, new_hasher
from rl_plane.protocol.versions import (
    DIGEST_PATTERN,
    DigestAlgorithm,
    TensorSpec,
    algorithm_of,
    tensor_digest,
    tensors_digest,
)

BYTES = b"bytes of a tensor" * 100_000
BOTH: tuple[DigestAlgorithm, ...] = ("xxh3", "blake3")


def hexed(data: bytes, algorithm: DigestAlgorithm) -> str:
    return str((blake3 if algorithm == "blake3" else xxh3_128)(data).hexdigest())


@pytest.mark.parametrize("algorithm", BOTH)
def test_a_tensors_digest_is_the_hash_of_its_bytes(algorithm: DigestAlgorithm) -> None:
    expected = hexed(BYTES, algorithm)
    assert tensor_digest(memoryview(BYTES), algorithm) == hex_digest(BYTES, algorithm) == expected
    hasher = new_hasher(algorithm)
    for at in range(0, len(BYTES), 1000):
        hasher.update(memoryview(BYTES)[at : at + 1000])
    assert hasher.hexdigest() == expected
    assert algorithm_of(expected) == algorithm


def test_the_default_is_xxh3() -> None:
    assert tensor_digest(memoryview(BYTES)) == hexed(BYTES, "xxh3")
    assert tensors_digest([]) == "xxh3:" + hexed(b"", "xxh3")


@pytest.mark.parametrize("algorithm", BOTH)
def test_a_versions_digest_covers_names_dtypes_shapes_bytes_and_config(algorithm: DigestAlgorithm) -> None:
    a, b = hexed(b"a", algorithm), hexed(b"b", algorithm)
    lines = [("b", TensorSpec("U8", ()), b), ("a", TensorSpec("BF16", (2, 3)), a)]
    text = f"a BF16 2x3 {a}\nb U8  {b}"
    assert (
        tensors_digest(lines)
        == tensors_digest(reversed(lines))
        == f"{algorithm}:" + hexed(text.encode(), algorithm)
    )
    config = f"adapter_config.json U8 2 {hexed(b'{}', algorithm)}"
    assert tensors_digest(lines, b"{}") == f"{algorithm}:" + hexed(
        "\n".join(sorted([*text.split("\n"), config])).encode(), algorithm
    )
    found = tensors_digest(lines)
    assert re.fullmatch(DIGEST_PATTERN, found)
    assert algorithm_of(found) == algorithm


def test_a_version_is_of_one_algorithm() -> None:
    mixed = [(name, TensorSpec("U8", (1,)), hexed(b"a", name)) for name in BOTH]
    with pytest.raises(ValueError, match="two algorithms"):
        tensors_digest(mixed)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0" * 31,
        "0" * 33,
        "xxh3:",
        "xxh3:" + "0" * 64,
        "blake3:" + "0" * 32,
        "md5:" + "0" * 32,
        "blake3:" + "0" * 65,
    ],
)
def test_a_text_that_is_no_digest_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no digest"):
        algorithm_of(text)
    assert not re.fullmatch(DIGEST_PATTERN, text)
