"""Checks of the weights that an engine serves: a checksum, a snapshot to compare with, and noise over them."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from xxhash import xxh3_64

from rl_plane.errors import InvalidRequest
from worker.engines.capabilities import WHOLE, CheckScope

NOISE_STD = 0.5
"""Standard deviation of the noise that `reset` writes: far from trained and from freshly made weights."""


class TensorChecks:
    """Checks the live tensors of one rank. `tensors()` returns them anew at each check, since a load may replace them.
    A writer holds `lock`, so that no check sees half of a write."""

    def __init__(self, tensors: Callable[[], Mapping[str, torch.Tensor]], lock: threading.Lock) -> None:
        self._tensors = tensors
        self._lock = lock
        self._snapshot: dict[str, torch.Tensor] | None = None

    def row(self, action: str, scope: CheckScope = WHOLE) -> dict[str, Any]:
        """The row of a `check_weights` reply for this rank."""
        if action == "checksum":
            return self.checksum(scope)
        if action == "snapshot":
            self.snapshot()
            return {}
        mismatches = [name for name in self.compare() if scope.covers(name)]
        return {"match": not mismatches, "mismatches": mismatches}

    def checksum(self, scope: CheckScope = WHOLE) -> dict[str, Any]:
        """`checksum`: BLAKE3 over the names and bytes of all tensors. `checksums`: the XXH3 of each one's bytes."""
        from blake3 import blake3

        digest, each = blake3(), {}
        with self._lock:
            for name, tensor in self._now():
                if not scope.covers(name):
                    continue
                content = _bytes(tensor).numpy()
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
                digest.update(content)
                if scope.per_tensor:
                    each[name] = xxh3_64(content).hexdigest()
        return {"checksum": f"blake3:{digest.hexdigest()}", **({"checksums": each} if scope.per_tensor else {})}

    def snapshot(self) -> None:
        with self._lock:
            self._snapshot = {name: tensor.clone() for name, tensor in self._now()}

    def compare(self) -> list[str]:
        """Names of tensors whose bytes differ from the snapshot's, or that exist on one side only."""
        with self._lock:
            kept = self._snapshot
            if kept is None:
                raise InvalidRequest("there is no snapshot to compare with", field="action", fix="take a snapshot")
            # Bytes, because NaN differs from itself.
            same = {
                name: name in kept and torch.equal(_bytes(now), _bytes(kept[name])) for name, now in self._now()
            }
            return sorted(name for name in kept.keys() | same.keys() if not same.get(name))

    def _now(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in sorted(self._tensors().items()):
            yield name, tensor.cpu()


def noise(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Noise for the tensor of this name. Every rank makes the same noise for one name: ranks that disagree would wait
    for each other."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * NOISE_STD


def write_noise(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Writes noise over every floating point tensor. The caller holds the lock, and no step runs."""
    with torch.no_grad():
        for name, tensor in tensors:
            if tensor.is_floating_point():
                tensor.copy_(noise(name, tensor.shape))


def _bytes(tensor: Any) -> torch.Tensor:
    raw: torch.Tensor = tensor.contiguous().reshape(-1).view(torch.uint8)
    return raw
