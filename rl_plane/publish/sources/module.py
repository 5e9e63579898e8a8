"""The weights of a torch module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_plane.errors import InvalidRequest
from rl_plane.publish.sources.base import Names, Taken
from rl_plane.publish.sources.fsdp1 import is_fsdp1
from rl_plane.publish.sources.names import PEFT_PREFIX
from rl_plane.publish.sources.torch_tensors import is_gathered, named_parameters, take_held

if TYPE_CHECKING:
    import torch

WRAPPER_CLASSES = ("DistributedDataParallel", "DeepSpeedEngine")
"""Classes that hold the model as their attribute `module`."""


class ModuleSource:
    """The parameters and persistent buffers of a module, under the names of its `state_dict()`.

    Tied weights are sent once, under the first of their names. For a model with PEFT's layers `names` must map or leave
    out each of its names.
    """

    adapter = False

    def __init__(self, module: torch.nn.Module, *, dtype: torch.dtype | None = None, names: Names = None) -> None:
        """`dtype`: floating tensors are converted to it, for example to the engine's bfloat16."""
        self._module = unwrapped_model(module)
        if names is None and hasattr(self._module, "peft_config"):
            raise InvalidRequest(
                "PEFT's layers replace some layers of this model, under names that no engine knows",
                field="names",
                fix="for the adapter give AdapterSource; for the base names=rl_plane.publish.peft_base_name",
            )
        self._dtype = dtype
        self._names = names
        self.collective = is_sharded(self._module)
        self._trained: set[str] = set()
        """The names of the parameters that had `requires_grad` at one of the versions so far."""

    @property
    def module(self) -> torch.nn.Module:
        """The model itself, without the wrapper of DDP or DeepSpeed."""
        return self._module

    def take(self) -> Taken:
        return take_held(self._parameters(), self._dtype, self._names)

    def take_trainable(self) -> Taken:
        """The parameters that are trained now, or were trained before an earlier version: they may have changed."""
        if is_fsdp1(self._module):
            raise InvalidRequest(
                "FSDP1 joins parameters, and does not tell which of them are trained",
                field="trainable_only",
                fix="use FSDP2, or leave trainable_only out and use encoding='partial'",
            )
        state = {name: tensor for name, tensor in self._parameters().items() if name in self._trained}
        if not state:
            raise InvalidRequest(
                "no parameter of the module has requires_grad",
                field="trainable_only",
                fix="set requires_grad before the optimizer is made, or leave trainable_only out",
            )
        return take_held(state, self._dtype, self._names)

    def _parameters(self) -> Mapping[str, Any]:
        state = named_parameters(self._module)
        self._trained |= {name for name, one in state.items() if getattr(one, "requires_grad", False)}
        return state


def peft_base_name(name: str) -> str | None:
    """The base model's own name of a weight beneath PEFT's layers; None for a weight of the adapter.

    For `names` of a ModuleSource. It does not cover adapters with `modules_to_save`.
    """
    return None if ".lora_" in name else name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")


def unwrapped_model(module: Any) -> Any:
    """The model within DDP, DeepSpeed and torch.compile, in whatever order they wrap it."""
    while True:
        # Read `_modules`: a PEFT model answers a request for the attribute with the attribute of its base model.
        parts = getattr(module, "_modules", None) or {}
        if "_orig_mod" in parts:
            module = parts["_orig_mod"]
        elif type(module).__name__ in WRAPPER_CLASSES:
            module = module.module
        else:
            return module


def is_sharded(module: Any) -> bool:
    """True if the module's parameters must be gathered among ranks."""
    # The parameters of FSDP2's modules are whole after a forward; `state_dict()` shards them again.
    return is_fsdp1(module) or any(map(_is_fsdp2, module.modules())) or any(map(is_gathered, module.parameters()))


def _is_fsdp2(module: Any) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
