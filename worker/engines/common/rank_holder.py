"""The weights of one rank, inside an engine's own process: the part that vLLM and SGLang share.

A rank receives nothing itself. It maps what the host agent has staged, and loads it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import EngineFailed, InvalidWeights
from rl_plane.protocol.versions import TensorSpec
from worker.engines.capabilities import CheckScope
from worker.engines.common.adapter_patterns import check_patterns_end
from worker.engines.common.checkpoint_spec import LinearModules, checkpoint_spec, linear_modules
from worker.engines.common.lora import LoraConfig, lora_spec, parse_lora, target_modules
from worker.engines.common.torch_weights import NAME_OF_DTYPE, await_copies, host_copies
from worker.engines.common.weight_checks import TensorChecks
from worker.receive.rank_agents.agent_server import Method
from worker.receive.rank_agents.host_areas import staged_weights, windows
from worker.receive.rank_agents.model_description import specs_to_wire
from worker.receive.staging_area import MappedArea
from worker.receive.weight_holder import Staged, TensorStream


class RankHolder(ABC):
    """Holds the part of the model that one rank has. `swap` runs on the engine's own thread, between two steps; the
    methods of its agent run on the agent's threads."""

    checks: TensorChecks
    """The checks of this rank's live tensors. A subclass sets it."""

    def __init__(
        self, model: Path, dtype: torch.dtype, device: torch.device, dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """`device`: where this rank has its part of the model. `dtypes`: the types of the engine's own tensors, by
        their names in the engine or the checkpoint."""
        self._device = device
        self._model_directory = model
        self._dtype = NAME_OF_DTYPE[dtype]
        types = {name: NAME_OF_DTYPE[one] for name, one in dtypes.items() if one in NAME_OF_DTYPE}
        self.spec = checkpoint_spec(model, self._dtype, types)
        """The tensors that a checkpoint must have and may have."""
        self._linear: LinearModules | None = None
        self._lock = threading.Lock()
        """Held while weights are written."""
        self._staged: dict[str, MappedArea] = {}
        """Mapped base weights, by staging name."""
        self._taken: MappedArea | None = None
        """The weights of the next swap."""
        self._adapters: dict[str, Staged] = {}
        """Adapters that are ready to be loaded, by staging name."""

    @abstractmethod
    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads tensors into the model, within `_writing`. If it raises, the weights belong to no version. A
        caller can load other weights over them."""

    @abstractmethod
    def _make_adapter(self, lora: LoraConfig, modules: list[str], tensors: dict[str, torch.Tensor]) -> Staged:
        """Makes what the engine needs of an adapter. Its modules may differ in rank and scaling."""

    @abstractmethod
    def _max_rank(self) -> int:
        """The largest rank of an adapter. Raises Unsupported if LoRA is off."""

    def agent_methods(self, directory: Path, rank: int) -> dict[str, Method]:
        """The methods of this rank's agent. `directory`: where the host agent listens."""

        def describe(_: Mapping[str, Any], __: Cancelled) -> dict[str, Any]:
            tensors = specs_to_wire(self.spec.tensors)
            return {"tensors": tensors, "tied": dict(self.spec.tied), "device": str(self._device)}

        def stage(body: Mapping[str, Any], _: Cancelled) -> None:
            self._staged[body["staging"]] = staged_weights(directory, body["staging"])[0]

        def take(body: Mapping[str, Any], _: Cancelled) -> None:
            staged = self._staged.pop(body["staging"], None)
            if staged is None:
                raise EngineFailed(f"nothing is staged as {body['staging']!r}: it was swapped or discarded before")
            self.take(staged)

        def stage_adapter(body: Mapping[str, Any], cancelled: Cancelled) -> None:
            area, config = staged_weights(directory, body["staging"])
            assert config is not None, "an adapter"
            self._adapters[body["staging"]] = self.stage_adapter(config, area.tensors.items(), cancelled)

        def overwrite(body: Mapping[str, Any], cancelled: Cancelled) -> None:
            self.overwrite(windows(directory, rank, cancelled), cancelled)

        def discard(body: Mapping[str, Any], _: Cancelled) -> None:
            self._taken = None  # another rank may have failed to take it
            self._staged.pop(body["staging"], None)
            self._adapters.pop(body["staging"], None)

        return {
            "ping": lambda body, cancelled: None,
            "check": lambda body, cancelled: self.checks.row(body["action"], CheckScope(**body["scope"])),
            "describe": describe,
            "adapter_spec": lambda body, cancelled: specs_to_wire(self.adapter_spec(body["config"])),
            "stage": stage,
            "take": take,
            "stage_adapter": stage_adapter,
            "overwrite": overwrite,
            "discard": discard,
        }

    def take_adapter(self, staging: str) -> Staged:
        """Returns an adapter that is ready to be loaded. It belongs to the caller from now on."""
        staged = self._adapters.pop(staging, None)
        if staged is None:
            raise EngineFailed(f"no adapter is staged as {staging!r}")
        return staged

    def overwrite(self, tensors: TensorStream, cancelled: Cancelled) -> None:
        """Loads tensors as they come. Runs beside the engine's thread, which makes no step while the engine is
        paused."""
        self._write(self._torch_tensors(tensors, cancelled))

    def take(self, weights: MappedArea) -> None:
        """Takes the weights that the next `swap` loads."""
        self._taken = weights

    def swap(self) -> bool:
        """Loads the weights that were taken. Returns whether the engine has copied all of them: then the host agent may
        use their memory again."""
        taken, self._taken = self._taken, None
        if taken is None:
            raise EngineFailed("no weights were taken for this swap")
        self._write(self._torch_tensors(taken.tensors.items(), never))
        return taken.released()

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with self._writing():
            self._load(tensors)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Surrounds a write. The engine's steps have CUDA streams of their own, which do not wait for copies: no step
        runs when this begins, and all is written when it ends. It also selects the rank's own GPU, since an agent's
        thread starts on the first one."""
        on_gpu = self._device.type == "cuda"
        with self._lock, torch.no_grad(), torch.cuda.device(self._device) if on_gpu else nullcontext():
            try:
                await_copies(self._device)
                yield
            finally:
                await_copies(self._device)

    def _torch_tensors(self, tensors: TensorStream, cancelled: Cancelled) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors without those of tied names, in the model's dtypes: cast, or in the mapped memory."""
        return host_copies(tensors, self.spec.tensors, self.spec.tied, cancelled, self.spec.own)

    def stage_adapter(self, config: Mapping[str, Any], tensors: TensorStream, cancelled: Cancelled) -> Staged:
        """`config`: the adapter's PEFT config."""
        lora, modules, spec = self._adapter(config)
        return self._make_adapter(lora, modules, dict(host_copies(tensors, spec, frozenset(), cancelled)))

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        return self._adapter(config)[2]

    def _adapter(self, config: Mapping[str, Any]) -> tuple[LoraConfig, list[str], dict[str, TensorSpec]]:
        """Returns what the config asks for, the modules that it changes, and the tensors that it must have."""
        most = self._max_rank()
        lora = parse_lora(config)
        linear = self._linear_modules()
        check_patterns_end(config, linear.shapes)
        modules = target_modules(lora, linear.shapes, linear.others)
        rank = max(map(lora.rank_of, modules))
        if rank > most:
            raise InvalidWeights(
                f"the adapter's rank is {rank}, this engine takes {most}",
                field="adapter_config.rank_pattern" if rank != lora.r else "adapter_config.r",
                fix="start it with a larger --engine-arg max_lora_rank",
            )
        self._check_targets(replace(lora, r=rank), modules)  # `r` may be of no module
        return lora, modules, lora_spec(lora, modules, linear.shapes, dict.fromkeys(modules, self._dtype))

    def _linear_modules(self) -> LinearModules:
        if self._linear is None:
            self._linear = linear_modules(self._model_directory)
        return self._linear

    @abstractmethod
    def _check_targets(self, lora: LoraConfig, modules: list[str]) -> None:
        """Raises InvalidWeights if the engine has no LoRA for one of the modules. `lora.r`: the largest rank of these
        modules."""
