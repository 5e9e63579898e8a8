"""The weights of one rank, inside an engine's own process: the part that vLLM and SGLang share."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import InvalidWeights
from rl_plane.protocol.versions import TensorSpec
from worker.engines.common.checkpoint_spec import LinearModules, checkpoint_spec, linear_modules
from worker.engines.common.lora import LoraConfig, lora_spec, parse_lora, target_modules
from worker.engines.common.torch_weights import NAME_OF_DTYPE, StagedTensors, host_copies
from worker.receive.weight_holder import TensorStream


class RankHolder(ABC):
    """A WeightHolder without `stage_adapter`. `stage` and `overwrite` run on the agent's threads; `swap` runs on the
    engine's own thread, between two steps."""

    def __init__(
        self, model: Path, dtype: torch.dtype, device: torch.device, dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """`device`: where this rank has its part of the model. `dtypes`: the types of the engine's own tensors, by
        their names in the engine or the checkpoint."""
        self._device = device
        self._model_directory = model
        self._dtype = NAME_OF_DTYPE[dtype]
        types = {name: NAME_OF_DTYPE[one] for name, one in dtypes.items() if one in NAME_OF_DTYPE}
        self._spec = checkpoint_spec(model, self._dtype, types)
        self._linear: LinearModules | None = None
        self._lock = threading.Lock()
        """Held while weights are written."""

    @abstractmethod
    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads tensors into the model; runs within `_writing`. If it raises in the middle, the weights are of no
        version, and other weights can be loaded over them."""

    @abstractmethod
    def _max_rank(self) -> int:
        """The largest rank of an adapter. Raises Unsupported if LoRA is off."""

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self._spec.tensors

    def tied_tensors(self) -> Mapping[str, str]:
        return self._spec.tied

    def stage(self, tensors: TensorStream, cast: bool, cancelled: Cancelled) -> StagedTensors:
        return StagedTensors(dict(self._copies(tensors, cast, cancelled)))

    def overwrite(self, tensors: TensorStream, cast: bool, cancelled: Cancelled) -> None:
        """Runs beside the engine's thread, which makes no step while the engine is paused."""
        self._write(self._copies(tensors, cast, cancelled))

    def swap(self, staged: StagedTensors) -> None:
        self._write(staged.tensors.items())

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
                self._settle()
                yield
            finally:
                self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _copies(
        self, tensors: TensorStream, cast: bool, cancelled: Cancelled
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return host_copies(tensors, self._spec.tensors, self._spec.tied, cast, cancelled, self._spec.own)

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        return self._adapter(config)[2]

    def _adapter(self, config: Mapping[str, Any]) -> tuple[LoraConfig, list[str], dict[str, TensorSpec]]:
        """Returns what the config asks for, the modules that it changes, and the tensors that it must have."""
        most = self._max_rank()
        lora = parse_lora(config)
        if lora.r > most:
            raise InvalidWeights(
                f"the adapter's rank is {lora.r}, this engine takes {most}",
                field="adapter_config.r",
                fix="start it with a larger --engine-arg max_lora_rank",
            )
        linear = self._linear_modules()
        modules = target_modules(lora, linear.shapes, linear.others)
        self._check_targets(lora, modules)
        return lora, modules, lora_spec(lora, modules, linear.shapes, dict.fromkeys(modules, self._dtype))

    def _linear_modules(self) -> LinearModules:
        if self._linear is None:
            self._linear = linear_modules(self._model_directory)
        return self._linear

    @abstractmethod
    def _check_targets(self, lora: LoraConfig, modules: list[str]) -> None:
        """Raises InvalidWeights if the engine has no LoRA for one of the modules."""
