"""The weights of one rank, inside SGLang's scheduler process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_plane.errors import EngineFailed, InvalidWeights, Unsupported
from rl_plane.versions import TensorSpec
from worker.engines.checkpoint_spec import LinearModules, checkpoint_spec, linear_modules
from worker.engines.hf_weights import NAME_OF_DTYPE, StagedTensors, host_copies
from worker.engines.lora import LoraConfig, lora_spec, parse_lora, target_modules
from worker.engines.sglang_args import NO_LORA
from worker.engines.sglang_plugin import lora_reference
from worker.engines.weight_checks import WeightChecks, write_noise
from worker.reception import Cancelled, TensorStream


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    lora: LoraConfig
    tensors: dict[str, torch.Tensor]


class SglangHolder:
    """A WeightHolder. `stage` and its like run on the agent's thread; `swap` and what changes the engine on the
    scheduler's, between two steps."""

    def __init__(self, model: Path, scheduler: Any) -> None:
        self._scheduler = scheduler
        runner = scheduler.tp_worker.model_runner
        self._dtype = NAME_OF_DTYPE[runner.model_config.dtype]
        self._spec = checkpoint_spec(model, self._dtype)
        self._linear: LinearModules | None = None
        self._model_directory = model
        self._lora = runner.lora_manager if runner.server_args.enable_lora else None
        self._lock = threading.Lock()
        self.checks = WeightChecks(
            {name: tensor.detach() for name, tensor in runner.model.state_dict().items()}, self._lock
        )

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self._spec.tensors

    def optional_tensors(self) -> frozenset[str]:
        return self._spec.optional

    def stage(self, tensors: TensorStream, cast: bool, cancelled: Cancelled) -> StagedTensors:
        return StagedTensors(dict(self._copies(tensors, cast, cancelled)))

    def overwrite(self, tensors: TensorStream, cast: bool, cancelled: Cancelled) -> None:
        """Beside the scheduler's thread, which makes no step while it is paused."""
        self._load(self._copies(tensors, cast, cancelled))

    def swap(self, staged: StagedTensors) -> None:
        assert staged.tensors is not None, "taken once"
        self._load(staged.tensors.items())

    def reset(self) -> None:
        with self._lock:
            write_noise(self._scheduler.tp_worker.model_runner.model.named_parameters())

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        return self._adapter(config)[1]

    def stage_adapter(
        self, config: Mapping[str, Any], tensors: TensorStream, cast: bool, cancelled: Cancelled
    ) -> StagedAdapter:
        lora, spec = self._adapter(config)
        return StagedAdapter(lora, dict(host_copies(tensors, spec, frozenset(), cast, cancelled)))

    def put_adapter(self, staged: StagedAdapter, name: str, lora_id: str) -> None:
        reference = lora_reference(name, lora_id)
        config = _sglang_config(staged.lora).hf_config
        result = self._manager().load_lora_adapter_from_tensors(reference, staged.tensors, config)
        if not result.success:
            self._manager().unload_lora_adapter(reference)  # what it had taken before it failed
            raise EngineFailed(f"SGLang did not take the adapter: {result.error_message}")

    def remove_adapter(self, name: str, lora_id: str) -> None:
        reference = lora_reference(name, lora_id)
        result = self._manager().unload_lora_adapter(reference)
        if not result.success:
            raise EngineFailed(f"SGLang did not remove the adapter: {result.error_message}")

    def _manager(self) -> Any:
        if self._lora is None:
            raise Unsupported(f"this SGLang has no LoRA: {NO_LORA}")
        return self._lora

    def _adapter(self, config: Mapping[str, Any]) -> tuple[LoraConfig, dict[str, TensorSpec]]:
        manager = self._manager()
        lora = parse_lora(config)
        if lora.r > manager.max_lora_rank:
            raise InvalidWeights(
                f"the adapter's rank is {lora.r}, this engine takes {manager.max_lora_rank}",
                field="adapter_config.r",
                fix="start it with a larger --engine-arg max_lora_rank",
            )
        if not manager.memory_pool.can_support(_sglang_config(lora)):
            raise InvalidWeights(
                f"the adapter changes {sorted(lora.targets)}, of which this engine does not take all",
                field="adapter_config.target_modules",
                fix="start it with all of them in --engine-arg lora_target_modules",
            )
        if self._linear is None:
            self._linear = linear_modules(self._model_directory)
        modules = target_modules(lora, self._linear.shapes, self._linear.others)
        if "lm_head" in modules and manager.lora_backend.name == "torch_native":
            raise InvalidWeights(
                "adapter_config.json: target_modules names 'lm_head', where SGLang's LoRA for CPUs gives a request the "
                "adapter of another one in its batch",
                field="adapter_config.target_modules",
                fix="target other modules, or run on a GPU",
            )
        return lora, lora_spec(lora, modules, self._linear.shapes, dict.fromkeys(modules, self._dtype))

    def _copies(
        self, tensors: TensorStream, cast: bool, cancelled: Cancelled
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return host_copies(tensors, self._spec.tensors, self._spec.optional, cast, cancelled)

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What raises in the middle leaves weights of no version."""
        runners = self._scheduler.weight_updater._select_runners()
        if len(runners) != 1:
            raise Unsupported("SGLang holds more than one model: a draft's weights can't be updated")
        updater = runners[0][1].weight_updater
        model = runners[0][1].model
        with self._lock, torch.no_grad():
            if model_device(model).type == "cuda":
                torch.cuda.synchronize()  # no step may still be running
            updater.begin_weight_update()
            try:
                model.load_weights(iter(tensors))
            finally:
                updater.end_weight_update(run_post_load=False)


def _sglang_config(lora: LoraConfig) -> Any:
    from sglang.srt.lora.lora_config import LoRAConfig

    return LoRAConfig.from_dict(
        {
            "peft_type": "LORA",
            "r": lora.r,
            "lora_alpha": lora.scaling * lora.r,  # SGLang takes alpha / r for the scaling, of rslora too
            "target_modules": sorted(lora.targets),
        }
    )


def model_device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device
