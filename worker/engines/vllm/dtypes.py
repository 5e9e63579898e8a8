"""Finds the type in which vLLM keeps each tensor of a checkpoint, while it loads the model.

A parameter may have another name in vLLM, hold several tensors of the checkpoint, and have a type of its own: a router
computes in float32 in a bfloat16 model. Only the load itself shows which tensor goes where.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_seen: dict[str, torch.dtype | None] = {}
"""The tensors of the last load → their type. None: this rank has no copy of the tensor."""


def watch_loads() -> None:
    """Watches each load of a model in this process from now on."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    load, read = DefaultModelLoader.load_weights, DefaultModelLoader.get_all_weights
    watch = _CopyWatch()

    def load_weights(loader: Any, model: Any, model_config: Any) -> None:
        _seen.clear()
        with watch:
            load(loader, model, model_config)
        watch.names.clear()

    def get_all_weights(loader: Any, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read(loader, model_config, model):
            _seen[name] = None
            watch.names[tensor.untyped_storage().data_ptr()] = name
            yield name, tensor

    DefaultModelLoader.load_weights, DefaultModelLoader.get_all_weights = load_weights, get_all_weights


def dtypes_of_load() -> dict[str, torch.dtype]:
    """Checkpoint name → the type of the parameter that the last load copied the tensor to. A tensor on another pipeline
    stage has the type of the same tensor in a layer of this stage, if there is one."""
    of_kind = {_kind(name): dtype for name, dtype in _seen.items() if dtype is not None}
    found = {name: dtype or of_kind.get(_kind(name)) for name, dtype in _seen.items()}
    return {name: dtype for name, dtype in found.items() if dtype is not None}


def _kind(name: str) -> str:
    """The name without the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=\.)", ".N", name)


class _CopyWatch(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """Sees each copy of a tensor of the checkpoint, or of a view of it, into another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        """The address of a tensor's memory → its name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            name = self.names.get(args[1].untyped_storage().data_ptr())
            # The first copy only: other tensors may use the same memory later.
            if name is not None and _seen[name] is None:
                _seen[name] = args[0].dtype
        return func(*args, **(kwargs or {}))
