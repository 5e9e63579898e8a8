"""The weights of one rank, inside SGLang's scheduler process."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_plane.errors import EngineFailed, InvalidWeights, Unsupported
from worker.engines.common.even_ranks import with_even_ranks
from worker.engines.common.lora import SWITCH_ON, LoraConfig, lora_spec
from worker.engines.common.rank_holder import RankHolder
from worker.engines.common.torch_weights import DTYPE_OF_NAME
from worker.engines.common.weight_checks import TensorChecks, write_noise
from worker.engines.sglang.limits import check_updates
from worker.engines.sglang.lora_references import lora_reference


@dataclass(frozen=True, slots=True)
class SglangStagedAdapter:
    lora: LoraConfig
    tensors: dict[str, torch.Tensor]


class SglangHolder(RankHolder):
    """The weights of one rank, and its loaded adapters."""

    def __init__(self, model: Path, scheduler: Any) -> None:
        runner = scheduler.tp_worker.model_runner
        dtypes = {name: tensor.dtype for name, tensor in runner.model.state_dict().items()}
        super().__init__(model, runner.model_config.dtype, model_device(runner.model), dtypes)
        self._scheduler = scheduler
        self._lora = runner.lora_manager if runner.server_args.enable_lora else None
        self._aside: dict[str, list[Any]] = {}
        """Adapter → its entries in SGLang's tables, while it is removed here and perhaps not in every rank."""
        self.checks = TensorChecks(runner.model.state_dict, self._lock)

    def check_updates(self) -> None:
        """Raises Unsupported if this rank can't take new weights."""
        check_updates(self._scheduler.tp_worker.model_runner)

    def reset(self) -> None:
        with self._writing():
            write_noise(self._scheduler.tp_worker.model_runner.model.named_parameters())

    def _make_adapter(
        self, lora: LoraConfig, modules: list[str], tensors: dict[str, torch.Tensor]
    ) -> SglangStagedAdapter:
        lora, tensors = with_even_ranks(lora, modules, tensors)
        # SGLang refers to them until the adapter is removed. The host agent uses the mapped memory for the next one.
        own = {name: tensor.clone() for name, tensor in tensors.items()}
        return SglangStagedAdapter(lora, self._nothing_beside(lora, modules) | own)

    def _nothing_beside(self, lora: LoraConfig, modules: list[str]) -> dict[str, torch.Tensor]:
        """Zeros for the modules that SGLang joins with these in one layer. It takes an adapter of a whole layer only,
        and ends itself at a request for another one."""
        linear = self._linear_modules().shapes
        layers = {_layer_of(name) for name in modules}
        beside = [name for name in linear if name not in modules and _layer_of(name) in layers]
        spec = lora_spec(lora, beside, linear, dict.fromkeys(beside, self._dtype))
        return {name: torch.zeros(each.shape, dtype=DTYPE_OF_NAME[each.dtype]) for name, each in spec.items()}

    def put_adapter(self, staged: SglangStagedAdapter, name: str, lora_id: str) -> None:
        reference = lora_reference(name, lora_id)
        config = _sglang_config(staged.lora).hf_config
        result = self._manager().load_lora_adapter_from_tensors(reference, staged.tensors, config)
        if not result.success:
            self._manager().unload_lora_adapter(reference)  # it may have taken a part
            raise EngineFailed(f"SGLang did not take the adapter: {result.error_message}")

    def remove_adapter(self, lora_id: str) -> None:
        """Removes the adapter from SGLang. Its entries stay here, to be put back or forgotten."""
        tables = self._tables()
        if all(lora_id in table for table in tables):  # an earlier call removed it otherwise
            self._aside[lora_id] = [table[lora_id] for table in tables]
        result = self._manager().unload_lora_adapter(lora_reference(lora_id, lora_id))
        if not result.success:
            raise EngineFailed(f"SGLang did not remove the adapter: {result.error_message}")

    def put_back_adapter(self, lora_id: str) -> None:
        """Restores the adapter under its id, since KV that it made is known by that id. A rank that has not removed it
        removes it first: then all ranks load it at the next step that wants it, into the same slot."""
        self.remove_adapter(lora_id)
        if lora_id not in self._aside:
            raise EngineFailed("the adapter is not here any more")
        for table, entry in zip(self._tables(), self._aside.pop(lora_id), strict=True):
            table[lora_id] = entry

    def forget_adapter(self, lora_id: str) -> None:
        """Drops the adapter, loaded or removed."""
        if any(lora_id in table for table in self._tables()):
            self.remove_adapter(lora_id)
        self._aside.pop(lora_id, None)

    def _tables(self) -> tuple[dict[str, Any], ...]:
        manager = self._manager()
        return manager.configs, manager.loras, manager.lora_refs

    def _manager(self) -> Any:
        if self._lora is None:
            raise Unsupported("this SGLang has no LoRA", field="target.kind", fix=SWITCH_ON)
        return self._lora

    def _max_rank(self) -> int:
        return int(self._manager().max_lora_rank)

    def _check_targets(self, lora: LoraConfig, modules: list[str]) -> None:
        manager = self._manager()
        if not manager.memory_pool.can_support(_sglang_config(lora)):
            raise InvalidWeights(
                f"the adapter changes {sorted(lora.targets)}, of which this engine does not take all",
                field="adapter_config.target_modules",
                fix="start it with all of them in --engine-arg lora_target_modules",
            )
        if "lm_head" in modules and manager.lora_backend.name == "torch_native":
            raise InvalidWeights(
                "adapter_config.json: target_modules names 'lm_head', where SGLang's LoRA for CPUs gives a request the "
                "adapter of another one in its batch",
                field="adapter_config.target_modules",
                fix="target other modules, or run on a GPU",
            )

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        runners = self._scheduler.weight_updater._select_runners()
        if len(runners) != 1:
            raise Unsupported(
                "SGLang holds more than one model: a draft's weights can't be updated",
                field="target.kind",
                fix="start it without speculative decoding",
            )
        runner = runners[0][1]
        check_updates(runner)
        runner.weight_updater.begin_weight_update()
        try:
            runner.model.load_weights(iter(tensors))
        finally:
            runner.weight_updater.end_weight_update(run_post_load=False)


def _layer_of(module: str) -> tuple[str, str]:
    """The layer of SGLang that holds this module, perhaps joined with others: query, key and value are one layer."""
    from sglang.srt.lora.utils import get_normalized_target_modules

    parent, _, name = module.rpartition(".")
    (layer,) = get_normalized_target_modules([name])
    return parent, layer


def _sglang_config(lora: LoraConfig) -> Any:
    from sglang.srt.lora.lora_config import LoRAConfig

    return LoRAConfig.from_dict(
        {
            "peft_type": "LORA",
            "r": lora.r,
            # SGLang scales by alpha / r, with rslora too. An adapter with patterns has none any more when it is loaded.
            "lora_alpha": lora.alpha * (math.sqrt(lora.r) if lora.rslora else 1.0),
            "target_modules": sorted(lora.targets),
        }
    )


def model_device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device
