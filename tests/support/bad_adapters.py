"""Bad adapters that a trainer may publish by mistake, and the error that each must give."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rl_plane.errors import InvalidWeights, PlaneError
from rl_plane.protocol.versions import ADAPTER_CONFIG_NAME
from rl_plane.weights.checkpoint import ADAPTER_NAME

_MODULE = "base_model.model.model.layers.1.mlp.down_proj"
_A, _B = f"{_MODULE}.lora_A.weight", f"{_MODULE}.lora_B.weight"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Bad:
    spoil: Callable[[Path], None]
    """Turns a good adapter's directory into this one."""
    field: str
    says: str
    """In the message."""

    def check(self, error: PlaneError) -> None:
        assert isinstance(error, InvalidWeights)
        assert error.facts["field"] == self.field
        assert error.facts["fix"]
        assert self.says in error.message

    def make(self, good: Path, path: Path) -> Path:
        shutil.copytree(good, path)
        self.spoil(path)
        return path


def _cut(size: int) -> Callable[[Path], None]:
    """Cuts the file to `size` bytes, or by so many if it is negative, as a broken copy would."""

    def spoil(path: Path) -> None:
        file = path / ADAPTER_NAME
        os.truncate(file, size if size >= 0 else file.stat().st_size + size)

    return spoil


def _tensors(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        save_file(change(load_file(path / ADAPTER_NAME)), path / ADAPTER_NAME)

    return spoil


def _config(change: Callable[[str], str]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        file = path / ADAPTER_CONFIG_NAME
        file.write_text(change(file.read_text()))

    return spoil


def _without(key: str) -> Callable[[str], str]:
    return lambda text: json.dumps({name: value for name, value in json.loads(text).items() if name != key})


DTYPES = (torch.float32, torch.float16)
"""Types that an update may allow for a model in bfloat16."""


def in_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    return _tensors(lambda every: {name: tensor.to(dtype) for name, tensor in every.items()})


BAD = {
    "truncated": Bad(_cut(-64), "transport.path", "truncated"),
    "truncated in its header": Bad(_cut(100), "transport.path", "truncated"),
    "empty": Bad(_cut(0), "transport.path", "truncated"),
    "a lora_B is missing": Bad(
        _tensors(lambda every: {name: tensor for name, tensor in every.items() if name != _B}),
        "transport",
        f"1 missing ('{_B}')",
    ),
    "a lora_A is too narrow": Bad(
        _tensors(lambda every: every | {_A: every[_A][:, :-1].clone()}),
        "transport",
        f"1 of another shape ('{_A}'",
    ),
    "a lora_A is of another rank": Bad(
        _tensors(lambda every: every | {_A: every[_A][:-1].clone()}), "transport", f"1 of another shape ('{_A}'"
    ),
    "a module too many": Bad(
        _tensors(lambda every: every | {_A.replace("down_proj", "other"): every[_A].clone()}),
        "transport",
        "1 unknown to the model",
    ),
    **{f"in {dtype}": Bad(in_dtype(dtype), "cast", "of another dtype") for dtype in DTYPES},
    "in whole numbers": Bad(in_dtype(torch.int16), "transport", "of another dtype"),
    "a config that is cut": Bad(
        _config(lambda text: text[: len(text) // 2]), "transport.path", f"{ADAPTER_CONFIG_NAME!r} can't be read"
    ),
    "a config without r": Bad(_config(_without("r")), "adapter_config.r", f"{ADAPTER_CONFIG_NAME}: r is "),
    "a config of another rank": Bad(
        _config(lambda text: json.dumps(json.loads(text) | {"r": 1})), "transport", "of another shape"
    ),
}
"""Their numbers are all good ones."""
