"""LoRA adapters in a transformers model, by PEFT's layers around the adapted ones. One adapter or none is active.

Only `stage` imports PEFT, on the worker's thread: a worker without adapters does not need it.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rl_plane.errors import EngineFailed
from rl_plane.protocol.versions import TensorSpec
from worker.engines.common.lora import LoraConfig, lora_spec, parse_lora, target_modules
from worker.engines.common.torch_weights import NAME_OF_DTYPE, host_copies
from worker.receive.weight_holder import TensorStream

NO_PEFT = "peft is not installed here: install rl-plane[hf]"


def have_peft() -> bool:
    return importlib.util.find_spec("peft") is not None


@dataclass(slots=True)
class HfStagedAdapter:
    """An adapter in host memory, in the model's dtypes. `tensors` is None once it is used or discarded."""

    lora: LoraConfig
    modules: list[str]
    tensors: dict[str, torch.Tensor] | None


class ModelAdapters:
    """The adapters of one model. Any thread may call `spec` and `stage`; the rest runs between two steps."""

    def __init__(self, model: Any) -> None:
        """Call it before the model has adapters: PEFT's layers change the names of modules."""
        self._model = model
        linear = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
        self._linear = {name: (module.in_features, module.out_features) for name, module in linear.items()}
        self._dtypes = {name: NAME_OF_DTYPE[module.weight.dtype] for name, module in linear.items()}
        self._others = frozenset(
            name
            for name, module in model.named_modules()
            if name not in linear and next(module.parameters(recurse=False), None) is not None
        )
        self._names: dict[str, str] = {}  # our name → PEFT's, which has no dot and is never used again
        self._fresh = (f"adapter{number}" for number in itertools.count())
        # All of PEFT's layers read this one list: changing it changes the adapter without a walk over the model.
        self._active: list[str] = []

    def spec(self, config: Mapping[str, Any]) -> dict[str, TensorSpec]:
        lora = parse_lora(config)
        return self._spec_of(lora, target_modules(lora, self._linear, self._others))

    def _spec_of(self, lora: LoraConfig, modules: list[str]) -> dict[str, TensorSpec]:
        return lora_spec(lora, modules, self._linear, self._dtypes)

    def stage(
        self, config: Mapping[str, Any], tensors: TensorStream, cast: bool, cancelled: Callable[[], bool]
    ) -> HfStagedAdapter:
        import peft  # noqa: F401

        lora = parse_lora(config)
        modules = target_modules(lora, self._linear, self._others)
        spec = self._spec_of(lora, modules)
        return HfStagedAdapter(lora, modules, dict(host_copies(tensors, spec, frozenset(), cast, cancelled)))

    def put(self, name: str, staged: HfStagedAdapter) -> None:
        """Loads the adapter beside the one of this name, and then deletes the old one."""
        if staged.tensors is None:
            raise EngineFailed("this adapter was used or discarded before")
        fresh = next(self._fresh)
        try:
            self._load(fresh, staged, staged.tensors)
        except BaseException:
            self._delete(fresh)
            raise
        staged.tensors = None
        old = self._names.get(name)
        self._names[name] = fresh
        self._take_layers()
        if old is not None:
            self._delete(old)

    def remove(self, name: str) -> None:
        old = self._names.pop(name, None)
        if old is not None:
            self._delete(old)

    def activate(self, name: str | None) -> None:
        """Sets the adapter of the steps that follow. None: the base model alone."""
        self._active[:] = [] if name is None else [self._names[name]]

    def _load(self, fresh: str, staged: HfStagedAdapter, tensors: dict[str, torch.Tensor]) -> None:
        import peft

        config = peft.LoraConfig(
            r=staged.lora.r,
            lora_alpha=staged.lora.alpha,
            use_rslora=staged.lora.rslora,
            target_modules=staged.modules,
            inference_mode=True,
        )
        try:
            # On the meta device, then filled by assignment: no random numbers, and no cast to float32.
            peft.inject_adapter_in_model(config, self._model, fresh, low_cpu_mem_usage=True)
            result = peft.set_peft_model_state_dict(self._model, tensors, fresh, low_cpu_mem_usage=True)
        finally:
            # PEFT leaves its config on the model, and warns of it the next time.
            if "peft_config" in vars(self._model):
                del self._model.peft_config
        missing = [key for key in result.missing_keys if f".{fresh}." in key]
        if missing or result.unexpected_keys:
            raise EngineFailed(
                f"PEFT did not take the adapter as a whole: {[*missing, *result.unexpected_keys][:3]}"
            )
        self._model.eval()
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def _layers(self) -> list[Any]:
        from peft.tuners.lora import LoraLayer

        return [module for module in self._model.modules() if isinstance(module, LoraLayer)]

    def _delete(self, name: str) -> None:
        self._take_layers()  # PEFT would activate another in the place of an active one
        for layer in self._layers():
            layer.delete_adapter(name)

    def _take_layers(self) -> None:
        self._active.clear()
        for layer in self._layers():
            layer._active_adapter = self._active
