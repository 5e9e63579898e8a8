"""Bytes that are copied and hashed in one pass."""

from __future__ import annotations

import random
import sys

import pytest

from rl_plane.protocol.versions import DigestAlgorithm, tensor_digest
from rl_plane.weights import hashed_copy
from rl_plane.weights.hashed_copy import PIECE_BYTES, copy, copy_hashed, is_same_memory

SIZES = (0, 1, 63, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7)


@pytest.fixture(params=["numpy", "no numpy"])
def numpy_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no numpy":
        monkeypatch.setattr(hashed_copy, "numpy", None)
    elif "numpy" not in sys.modules:
        pytest.skip("numpy is not installed")


@pytest.mark.parametrize("algorithm", ["xxh3", "blake3"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_the_copy_has_the_bytes_and_their_digest(
    nbytes: int, algorithm: DigestAlgorithm, numpy_or_not: None
) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    whole = memoryview(bytearray(nbytes + 2))
    place = whole[1 : nbytes + 1]
    assert copy_hashed(place, memoryview(data), algorithm) == tensor_digest(memoryview(data), algorithm)
    assert bytes(whole) == b"\0" + data + b"\0"
    copy(place, memoryview(bytes(nbytes)))
    assert not any(whole)


@pytest.mark.parametrize("algorithm", ["xxh3", "blake3"])
def test_the_digest_is_of_the_copy(algorithm: DigestAlgorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source changes as soon as it is copied."""
    real, data = hashed_copy.copy, memoryview(bytearray(3 * PIECE_BYTES))

    def then_change(place: memoryview, piece: memoryview) -> None:
        real(place, piece)
        piece[0] ^= 1

    monkeypatch.setattr(hashed_copy, "copy", then_change)
    place = memoryview(bytearray(len(data)))
    assert copy_hashed(place, data, algorithm) == tensor_digest(place, algorithm)
    assert place != data


def test_memory_is_the_same_by_its_address() -> None:
    memory = memoryview(bytearray(8))
    assert is_same_memory(memory, memory[:4])
    assert not is_same_memory(memory, memory[1:])
    assert not is_same_memory(memory, memoryview(bytearray(8)))
    assert not is_same_memory(memory[:0], memory[:0])
    assert not is_same_memory(memory, memory.toreadonly())
