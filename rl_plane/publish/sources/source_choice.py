"""Chooses the source that fits what a trainer gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plane.errors import InvalidRequest
from rl_plane.publish.sources.adapter import AdapterSource
from rl_plane.publish.sources.base import Names, WeightSource
from rl_plane.publish.sources.directory import DirectorySource
from rl_plane.publish.sources.export import ExportSource
from rl_plane.publish.sources.module import ModuleSource, unwrapped_model
from rl_plane.publish.sources.state_dict import StateDictSource

if TYPE_CHECKING:
    import torch


def as_source(weights: Any, *, dtype: torch.dtype | None = None, names: Names = None) -> WeightSource:
    """The source for these weights. A WeightSource is returned unchanged.

    Args:
        weights: a module, a PEFT model (its adapter `default`), a mapping of name to tensor, a function that returns an
            iterator of (name, tensor), a path, or a WeightSource.
        dtype: floating tensors are converted to it.
        names: see `Names`.

    Raises:
        InvalidRequest: no source takes such an object, or an option does not apply to it.
    """
    if hasattr(weights, "take") and hasattr(weights, "collective"):
        if dtype is not None or names is not None:
            raise InvalidRequest(
                "dtype and names belong to the source", field="dtype", fix="give them to the source"
            )
        return weights  # type: ignore[no-any-return]
    if isinstance(weights, (str, Path)):
        if dtype is not None or names is not None:
            raise InvalidRequest("a directory is sent as it is", field="dtype", fix="leave dtype and names out")
        return DirectorySource(weights)
    if isinstance(weights, Mapping):
        return StateDictSource(weights, dtype=dtype, names=names)
    if hasattr(weights, "state_dict"):
        if hasattr(unwrapped_model(weights), "peft_config"):
            if names is not None:
                raise InvalidRequest(
                    "an adapter keeps PEFT's names",
                    field="names",
                    fix="leave names out; for the base beneath it give ModuleSource(model, names=peft_base_name)",
                )
            return AdapterSource(weights, dtype=dtype)
        return ModuleSource(weights, dtype=dtype, names=names)
    if callable(weights):
        return ExportSource(weights, dtype=dtype, names=names)
    raise InvalidRequest(
        f"weights can't be taken from {type(weights).__name__}",
        field="source",
        fix="give a module, a state dict, a function that returns (name, tensor) pairs, a path, or a WeightSource",
    )
