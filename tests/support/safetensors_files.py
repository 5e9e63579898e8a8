"""Helpers of `tests/transports/test_filesystem_transport.py` and of other tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_plane._util.tasks import never
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.base import Delivery
from rl_plane.transports.filesystem.receiver import FilesystemTransport
from rl_plane.weights.checkpoint import (
    INDEX_NAME,
    SINGLE_NAME,
)
from rl_plane.weights.safetensors_file import write_safetensors

Tensors = dict[str, tuple[TensorSpec, bytes]]

A = (TensorSpec("F32", (2, 3)), bytes(range(24)))

B = (TensorSpec("BF16", (4,)), b"abcdefgh")

SCALAR = (TensorSpec("I64", ()), b"12345678")


def request(path: Any, **extra: Any) -> dict[str, Any]:
    return {"backend": "filesystem", "path": path if not isinstance(path, Path) else str(path), **extra}


def single(directory: Path, tensors: Tensors | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / SINGLE_NAME, tensors or {"a": A, "b": B})
    return directory


def sharded(directory: Path, weight_map: dict[str, Any] | None = None, **shards: Tensors) -> Path:
    """Shards `name.safetensors`, and an index, by default of what they hold."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        write_safetensors(directory / f"{name}.safetensors", tensors)
    index = {tensor: f"{name}.safetensors" for name, tensors in shards.items() for tensor in tensors}
    (directory / INDEX_NAME).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": index if weight_map is None else weight_map})
    )
    return directory


def read(delivery: Delivery) -> Tensors:
    try:
        return {name: (tensor.spec, bytes(tensor.data)) for name, tensor in delivery.tensors(never)}
    finally:
        delivery.close()


def refusal(
    transport: FilesystemTransport, path: Any, kind: type[InvalidRequest] = InvalidRequest
) -> InvalidRequest:
    """The typed refusal of `path`, which names the field and a fix."""
    with pytest.raises(InvalidRequest) as caught:
        transport.open(request(path), "base").close()
    assert type(caught.value) is kind
    assert caught.value.facts["field"] == "transport.path"
    assert caught.value.facts["fix"]
    return caught.value
