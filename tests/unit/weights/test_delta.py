"""Deltas: how the change of a tensor is encoded, and what an update by them says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest

from rl_plane.errors import InvalidRequest, InvalidWeights
from rl_plane.protocol.update_requests import UpdateWeights
from rl_plane.protocol.validation import parse_body
from rl_plane.weights import delta_codec


def changed(old: bytes, at: Iterable[int], width: int) -> bytes:
    """Each of these elements gets another value."""
    data = bytearray(old)
    for index in at:
        data[index * width + index % width] ^= 1 + index % 255
    return bytes(data)


@pytest.mark.parametrize("width", sorted(delta_codec.WIDTHS))
@pytest.mark.parametrize("elements", [1, 7, 8, 1000, delta_codec.REACH * 3 + 5])
def test_a_delta_brings_the_new_version_and_again_the_old_one(width: int, elements: int) -> None:
    source = random.Random(f"{width} {elements}")
    old = source.randbytes(elements * width)
    last = elements - 1
    for at in ([0], [last], {0, last}, range(elements), source.sample(range(elements), -(-elements // 100))):
        new = changed(old, at, width)
        blob = delta_codec.encode(old, new, width)
        assert blob is not None
        assert len(blob) <= delta_codec.max_nbytes(len(old), width)
        buffer = bytearray(old)
        delta_codec.apply(blob, buffer, width)
        assert buffer == new
        delta_codec.apply(blob, buffer, width)
        assert buffer == old


def test_a_delta_restores_changes_at_any_distance() -> None:
    part = delta_codec.PART_WORDS * delta_codec.WORD // 2
    reaches = (
        delta_codec.REACH - 1,
        delta_codec.REACH,
        delta_codec.REACH + 1,
        2 * delta_codec.REACH,
        5 * delta_codec.REACH + 3,
    )
    for gap in (1, *reaches, part - 1, part, part + delta_codec.REACH, 2 * part + 7):
        for at in ([gap], [0, gap], [3, 3 + gap, 4 + gap, 4 + 2 * gap]):
            old = bytes(2 * (at[-1] + 2))
            new = changed(old, at, 2)
            buffer = bytearray(old)
            delta_codec.apply(delta_codec.encode(old, new, 2) or b"", buffer, 2)
            assert buffer == new


def test_large_tensors_are_compared_by_threads() -> None:
    elements = delta_codec.PARALLEL_BYTES // 2 + 3
    source = np.random.default_rng(1)
    old = source.integers(0, 1 << 16, elements, dtype=np.uint16)
    new = old.copy()
    at = source.choice(elements, elements // 100, replace=False)
    new[at] ^= source.integers(1, 1 << 16, len(at), dtype=np.uint16)
    with ThreadPoolExecutor() as threads:
        blob = delta_codec.encode(old.data.cast("B"), new.data.cast("B"), 2, threads)
    assert blob is not None
    assert blob == delta_codec.encode(old.data.cast("B"), new.data.cast("B"), 2)
    assert len(blob) <= 0.03 * old.nbytes
    delta_codec.apply(blob, old.data.cast("B"), 2)
    assert np.array_equal(old, new)


def test_memory_may_begin_anywhere_and_be_read_only() -> None:
    old = random.Random(7).randbytes(4097)
    new = changed(old, [1, 600, 4096], 1)
    for start in (0, 1, 3):
        before, after = memoryview(old)[start:], memoryview(bytearray(new))[start:]
        buffer = bytearray(before)
        delta_codec.apply(delta_codec.encode(before, after, 1) or b"", buffer, 1)
        assert buffer == after


def test_equal_data_gives_no_delta() -> None:
    assert delta_codec.encode(b"same", b"same", 2) is None
    assert delta_codec.encode(b"", b"", 8) is None
    buffer = bytearray(b"same")
    delta_codec.apply(delta_codec.nothing(4, 2), buffer, 2)
    assert buffer == b"same"


@cache
def good() -> bytes:
    return delta_codec.encode(bytes(400), changed(bytes(400), [3, 50, 199], 2), 2) or b""


@pytest.mark.parametrize(
    "blob",
    [
        lambda: b"",
        lambda: good()[:23],
        lambda: good()[:-1],
        lambda: good() + b"\0",
        lambda: b"XLD1" + good()[4:],
        lambda: good()[:4] + b"\4" + good()[5:],
        lambda: good()[:8] + (201).to_bytes(8, "little") + good()[16:],
        lambda: good()[:16] + (4).to_bytes(8, "little") + good()[24:],
        lambda: good()[:16] + (1 << 63).to_bytes(8, "little") + good()[24:],
        lambda: good()[:24] + b"\xff\xff" + good()[26:],
        lambda: delta_codec.nothing(398, 2),
        lambda: delta_codec.nothing(400, 1),
    ],
)
def test_a_blob_that_is_no_delta_of_the_tensor_changes_nothing(blob: Callable[[], bytes]) -> None:
    buffer = bytearray(400)
    with pytest.raises(InvalidWeights, match="the delta of 'w'"):
        delta_codec.apply(blob(), buffer, 2, "w")
    assert buffer == bytes(400)


def test_random_bytes_end_in_an_error_or_are_taken_back() -> None:
    """No delta touches anything beyond the tensor, and applying a delta twice restores the tensor."""
    source = random.Random(5)
    for _ in range(2000):
        blob = bytearray(good())
        for _ in range(source.randint(1, 6)):
            blob[source.randrange(len(blob))] = source.randrange(256)
        buffer = bytearray(400)
        try:
            delta_codec.apply(blob, buffer, 2)
        except InvalidWeights:
            assert buffer == bytes(400)
        else:
            delta_codec.apply(blob, buffer, 2)
            assert buffer == bytes(400)


DIGEST = "blake3:" + "ab" * 32
DELTA = {"transport": {"backend": "ipc"}, "encoding": "delta", "base": DIGEST, "digest": DIGEST}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"base": None}, "base"),
        ({"digest": None}, "digest"),
        ({"encoding": "full"}, "base"),
        ({"cast": True}, "cast"),
        ({"policy": {"staging": "none"}}, "policy.staging"),
        ({"target": {"kind": "lora", "op": "load", "name": "a"}}, "encoding"),
    ],
)
def test_a_request_that_is_no_delta_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    parse_body(UpdateWeights, DELTA)
    with pytest.raises(InvalidRequest) as caught:
        parse_body(UpdateWeights, {**DELTA, **change})
    assert caught.value.facts["field"] == field
