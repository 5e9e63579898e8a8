"""Measures how fast a delta of bf16 weights is made and applied, beside a plain read of all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.stored import plain_read
from rl_plane.weights import delta_codec
from rl_plane.weights.read_ahead import host_memory

TENSOR_BYTES = 64 << 20
"""A large layer's: each is encoded by itself."""
CHANGED = 0.01
"""The share of changed elements, anywhere in the model: what a step of reinforcement learning changes (arXiv
2602.03839)."""
WIDTH = 2


@dataclass(slots=True)
class DeltaTimes:
    """Seconds, a number for each round."""

    nbytes: int
    share: float = 0.0
    """The delta's share of the full version's bytes."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """`plain`: a read of the full version from the page cache, into memory that was used before, as the delta's is.
    `encode`, `apply`: of the delta."""

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds.setdefault(what, []).append(time.perf_counter() - start)


def measure_deltas(scratch: Path, nbytes: int, rounds: int) -> DeltaTimes:
    times = DeltaTimes(nbytes)
    source = np.random.default_rng(0)
    old, new, path = host_memory(nbytes), host_memory(nbytes), scratch / "full"
    places = [slice(start, min(start + TENSOR_BYTES, nbytes)) for start in range(0, nbytes, TENSOR_BYTES)]
    for place in places:
        values = source.integers(0, 1 << 16, (place.stop - place.start) // WIDTH, dtype=np.uint16)
        old[place] = values.data.cast("B")
        values[source.random(len(values), dtype=np.float32) < CHANGED] ^= 1
        new[place] = values.data.cast("B")
    path.write_bytes(old)
    read = host_memory(nbytes)
    for number in range(-1, rounds):  # the first one warms caches
        round_ = DeltaTimes(nbytes)
        with round_.timed("plain"):
            plain_read(path, read)
        with round_.timed("encode"), ThreadPoolExecutor(delta_codec.THREADS) as threads:
            blobs = [delta_codec.encode(old[place], new[place], WIDTH, threads) or b"" for place in places]
        with round_.timed("apply"):
            for blob, place in zip(blobs, places, strict=True):
                delta_codec.apply(blob, old[place], WIDTH)
        assert old == new, "bit-exact"
        for blob, place in zip(blobs, places, strict=True):
            delta_codec.apply(blob, old[place], WIDTH)  # and back
        times.share = sum(map(len, blobs)) / nbytes
        if number >= 0:
            for what, (seconds,) in round_.seconds.items():
                times.seconds.setdefault(what, []).append(seconds)
    path.unlink()
    return times
