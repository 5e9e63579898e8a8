"""The weights of one rank, inside vLLM's worker process."""

from __future__ import annotations

import shutil
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rl_plane.errors import EngineFailed, InvalidWeights, Unsupported
from worker.engines.common.even_ranks import with_even_ranks
from worker.engines.common.lora import SWITCH_ON, LoraConfig
from worker.engines.common.rank_holder import RankHolder
from worker.engines.common.torch_weights import DTYPE_OF_NAME
from worker.engines.common.weight_checks import TensorChecks, noise
from worker.engines.vllm.adapter_files import write_adapter

IDENTITY_ROWS = 256
"""Rows of a packed layer's weights that are read at once."""


class VllmStagedAdapter:
    """An adapter's files in the engine's private directory: vLLM reads adapters from files. Only the first rank of a
    host has files. They are deleted with this object, unless they are taken."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._remove = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True) if path else None

    def take(self, path: Path) -> None:
        """Moves the files, which belong to the caller from now on."""
        if self._path is not None and self._remove is not None:
            self._path.rename(path)
            self._remove.detach()


class VllmHolder(RankHolder):
    """The weights of one rank."""

    def __init__(
        self, model: Path, directory: Path, runner: Any, writes: bool, loaded: Mapping[str, torch.dtype]
    ) -> None:
        """`writes`: this rank writes the files of adapters, for all ranks of its host. `loaded`: the types in which
        vLLM has put the tensors of the checkpoint, as its load has shown."""
        _check_reloads(runner.get_model())
        dtypes = {name: tensor.dtype for name, tensor in runner.model.state_dict().items()}
        super().__init__(model, runner.model_config.dtype, runner.device, {**dtypes, **loaded})
        self._directory = directory
        self._runner = runner
        self._writes = writes
        self._staged_adapters = 0
        self.checks = VllmChecks(runner.model, self._lock)

    def reset(self) -> None:
        """Writes noise over every tensor."""
        self._write(self._noise())

    def _noise(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in self.spec.tensors.items():
            yield name, noise(name, spec.shape).to(DTYPE_OF_NAME[spec.dtype])

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        try:
            self._runner.reload_weights(weights_iterator=tensors)
        except BaseException:
            # Layers wait for the rest of their tensors. The next load must find them as at the start.
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self._runner.get_model(), self._runner.model_config)
            # A half-loaded layer has whatever the memory held. A NaN would get into the KV cache, and from there into
            # requests after good weights.
            self._runner.reload_weights(weights_iterator=self._noise())
            raise

    # adapters

    def _make_adapter(
        self, lora: LoraConfig, modules: list[str], tensors: dict[str, torch.Tensor]
    ) -> VllmStagedAdapter:
        if not self._writes:
            return VllmStagedAdapter(None)  # all ranks of a host read the same files
        lora, tensors = with_even_ranks(lora, modules, tensors)
        self._staged_adapters += 1
        path = self._directory / f"staged-adapter-{self._staged_adapters}"
        staged = VllmStagedAdapter(path)
        write_adapter(path, lora, modules, tensors)
        return staged

    def path_of_adapter(self, files: str) -> Path:
        """Returns the directory of an adapter's files on this host. Every host has it under the same name."""
        return self._directory / files

    def keep_adapter(self, staging: str, files: str) -> None:
        """Keeps a staged adapter's files under this name, until `drop_adapter`."""
        staged = self.take_adapter(staging)
        assert isinstance(staged, VllmStagedAdapter), "the holder's own"
        staged.take(self.path_of_adapter(files))

    def drop_adapter(self, files: str) -> None:
        if self._writes:
            shutil.rmtree(self.path_of_adapter(files), ignore_errors=True)

    def _max_rank(self) -> int:
        limits = self._runner.lora_config
        if not limits:
            raise Unsupported("this vLLM has no LoRA", field="target.kind", fix=SWITCH_ON)
        return int(limits.max_lora_rank)

    def _check_targets(self, lora: LoraConfig, modules: list[str]) -> None:
        taken = self._adaptable()
        refused = [name for name in modules if name.rpartition(".")[2] not in taken]
        if refused:
            raise InvalidWeights(
                f"adapter_config.json: target_modules names {refused[0]!r}, to which vLLM takes no LoRA",
                field="adapter_config.target_modules",
                fix=f"target {', '.join(sorted(taken))} only",
            )

    def _adaptable(self) -> set[str]:
        """The last parts of the names of modules that take adapters: vLLM has wrapped them. A stage of a pipeline does
        not have the output layer, which its own stage checks."""
        from vllm.model_executor.models.utils import PPMissingLayer

        manager = self._runner.lora_manager._adapter_manager
        modules = self._runner.get_model().named_modules()
        absent = {name for name, module in modules if isinstance(module, PPMissingLayer)}
        there = {name.rpartition(".")[2] for name in manager.modules}
        elsewhere = {name.rpartition(".")[2] for name in absent}.intersection(manager.supported_lora_modules)
        packed = manager.packed_modules_mapping
        return {name for module in there | elsewhere for name in packed.get(module, [module])}


def _check_reloads(model: Any) -> None:
    """Raises Unsupported if vLLM derives data from the whole model's weights after the first load, and not after later
    ones."""
    if hasattr(model, "process_weights_after_loading"):
        raise Unsupported(
            f"vLLM derives weights of {type(model).__name__} at its start, and does not derive them again after an "
            "update",
            field="model",
            fix="serve this model with another engine",
        )


class VllmChecks(TensorChecks):
    """Checks that also read packed layers. On a CPU, vLLM packs the weights of linear layers and drops the tensors:
    what the layer makes of the unit vectors is then its weights, element by element."""

    def __init__(self, model: Any, lock: threading.Lock) -> None:
        super().__init__(model.state_dict, lock)
        self._model = model

    def _now(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in sorted(self._tensors().items()):
            module = self._model.get_submodule(name.rpartition(".")[0])
            if tensor.numel():
                yield name, tensor.cpu()
            elif hasattr(module, "cpu_linear"):
                yield name, _unpacked(module)
            else:
                raise EngineFailed(f"vLLM keeps {name} in a form that can't be checked")


def _unpacked(module: Any) -> torch.Tensor:
    """A packed layer's weights, [inputs, outputs]."""
    inputs = next(
        getattr(module, name)
        for name in ("input_size_per_partition", "input_size", "embedding_dim")
        if hasattr(module, name)
    )
    unit = torch.eye(inputs, dtype=module.weight.dtype)
    with torch.inference_mode():
        return torch.cat([module.cpu_linear(rows, module.weight, None) for rows in unit.split(IDENTITY_ROWS)])
