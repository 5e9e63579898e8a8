"""A trainer in a process of its own that sends tensors to SGLang's `/update_weights_from_tensor` as slime, miles, verl
and NeMo-RL do: by SGLang's own serializer, from memory that it shares. For tests."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import types
from dataclasses import make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frontend.dialects.sglang.serialized_tensors import NEMO_RL
from tests.support.commanded_process import CommandedProcess, serve

if TYPE_CHECKING:
    from tests.conftest import Plane


class SharingTrainer(CommandedProcess):
    """The handle of the trainer's process."""

    def __init__(self, plane: Plane, strategy: str = "file_system", imports: str = "sglang") -> None:
        super().__init__(plane, "tests.support.sharing_trainer", [strategy], imports=imports)

    async def shared(
        self, directory: Path, *, parts: int = 1, part: int = 0, how: str = "list", ranks: int = 1
    ) -> Any:
        """The elements of one call, in base64. The trainer keeps the tensors until `drop`.

        Args:
            directory: a checkpoint, or an adapter.
            parts: into how many calls its tensors are divided.
            part: the number of this call.
            how: `list`, `local` (a LocalSerializedTensor for each tensor), `bucket`, `transposed` (each matrix lies
                column by column in memory), `parameters`, `mapping` (of names to tensors, as for adapters), `nemo_rl`
                (a bucket as NeMo-RL makes it, which needs no SGLang).
            ranks: the number of elements.
        """
        return await self.do("shared", [str(directory), parts, part, how, ranks])

    async def drop(self) -> list[str]:
        """Frees the tensors. Returns the shared memory that this trainer still has."""
        names: list[str] = await self.do("drop")
        return names


class _Trainer:
    def __init__(self, strategy: str) -> None:
        import torch.multiprocessing

        torch.multiprocessing.set_sharing_strategy(strategy)
        self._kept: list[Any] = []

    def shared(self, argument: list[Any]) -> list[str]:
        from safetensors.torch import load_file

        directory, parts, part, how, ranks = argument
        (file,) = Path(directory).glob("*model.safetensors")
        tensors = load_file(file)
        named: list[tuple[str, Any]] = [(name, tensors[name]) for name in sorted(tensors)[part::parts]]
        return self._by_nemo_rl(named, ranks) if how == "nemo_rl" else self._by_sglang(named, how, ranks)

    def _by_nemo_rl(self, named: list[tuple[str, Any]], ranks: int) -> list[str]:
        """The bucket of NeMo-RL's `_flush_bucket`, whose classes are copies of SGLang's in a module of its own."""
        import base64
        import io
        from multiprocessing.reduction import ForkingPickler

        import torch

        metadata, flat, start = [], [], 0
        for name, one in named:
            flat.append(one.flatten().view(torch.uint8))
            end = start + flat[-1].numel()
            metadata.append(_nemo_rls_metadata()(name, one.shape, one.dtype, start, end, end - start))
            start = end
        value = {"flattened_tensor": torch.cat(flat), "metadata": metadata}
        self._kept.append(value)
        elements = []
        for _ in range(ranks):
            ForkingPickler(data := io.BytesIO()).dump(value)
            elements.append(base64.b64encode(data.getvalue()).decode())
        return elements

    def _by_sglang(self, named: list[tuple[str, Any]], how: str, ranks: int) -> list[str]:
        import torch
        from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        value: Any = named
        if how == "transposed":
            value = [(name, one.t().contiguous().t() if one.dim() == 2 else one) for name, one in named]
        if how == "mapping":
            value = dict(named)
        if how == "parameters":
            value = [(name, torch.nn.Parameter(one)) for name, one in named]
        if how == "local":
            values = [[MultiprocessingSerializer.serialize(one) for _ in range(ranks)] for _, one in named]
            value = [(name, LocalSerializedTensor(one)) for (name, _), one in zip(named, values, strict=True)]
        if how == "bucket":
            bucket = FlattenedTensorBucket(named_tensors=named)
            value = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        self._kept += [value, named]
        return [MultiprocessingSerializer.serialize(value, output_str=True) for _ in range(ranks)]

    def drop(self, argument: None) -> list[str]:
        import os

        self._kept.clear()
        return [one.name for one in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]


@functools.cache
def _nemo_rls_metadata() -> type[Any]:
    """NeMo-RL's `FlattenedTensorMetadata`, at the place that a pickle names."""
    fields = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")
    made = make_dataclass("FlattenedTensorMetadata", fields)
    made.__module__ = NEMO_RL
    whole = ""
    for part in NEMO_RL.split("."):
        whole = f"{whole}.{part}".lstrip(".")
        sys.modules[whole] = types.ModuleType(whole)
    vars(sys.modules[NEMO_RL])["FlattenedTensorMetadata"] = made
    return made


def _serve() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # the answers' own pipe
        trainer = _Trainer(*json.loads(sys.argv[1]))

    def do(what: str, argument: Any) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            return getattr(trainer, what)(argument)

    serve(do)


if __name__ == "__main__":
    _serve()
