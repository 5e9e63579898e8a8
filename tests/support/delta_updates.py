"""Helpers of `tests/fleet/test_delta_fleet.py` and of other tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_plane.protocol.versions import DTYPE_BYTES, TensorSpec
from rl_plane.weights import delta_codec
from rl_plane.weights.checkpoint import open_checkpoint
from rl_plane.weights.safetensors_file import write_safetensors
from tests.conftest import Plane
from tests.support.fleet_updates import update_of
from worker.receive.staging import model_digest


def tensors_in(directory: Path) -> dict[str, tuple[TensorSpec, bytes]]:
    checkpoint = open_checkpoint(directory)
    try:
        return {name: (tensor.spec, bytes(tensor.data)) for name, tensor in checkpoint.tensors()}
    finally:
        checkpoint.close()


def delta_dir(plane: Plane, old: Path, new: Path) -> Path:
    blobs = {}
    after = tensors_in(new)
    for name, (spec, data) in tensors_in(old).items():
        blob = delta_codec.encode(data, after[name][1], DTYPE_BYTES[spec.dtype])
        if blob is not None:
            blobs[name] = (TensorSpec("U8", (len(blob),)), blob)
    path = plane.tmp / "weights" / f"{old.name}-{new.name}"
    path.mkdir(exist_ok=True)
    write_safetensors(path / "model.safetensors", blobs)
    return path


def partial_dir(plane: Plane, old: Path, new: Path) -> Path:
    """The tensors of `new` that `old` has with other bytes."""
    before, after = tensors_in(old), tensors_in(new)
    path = plane.tmp / "weights" / f"{old.name}-{new.name}-partial"
    path.mkdir(exist_ok=True)
    changed = {name: tensor for name, tensor in after.items() if tensor != before[name]}
    write_safetensors(path / "model.safetensors", changed)
    return path


def by_partial(plane: Plane, old: Path, new: Path, label: str, **more: Any) -> dict[str, Any]:
    body = update_of(partial_dir(plane, old, new), label)
    return {**body, "encoding": "partial", "base": model_digest(old), "digest": model_digest(new), **more}


def by_delta(plane: Plane, old: Path, new: Path, label: str, **more: Any) -> dict[str, Any]:
    body = update_of(delta_dir(plane, old, new), label)
    return {**body, "encoding": "delta", "base": model_digest(old), "digest": model_digest(new), **more}
