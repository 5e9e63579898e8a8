"""A trainer in a process of its own that broadcasts as prime-rl's `weight_broadcast.type = "nccl"` does, byte for byte,
over a stand-in for NCCL. Its group is vLLM's StatelessProcessGroup."""

from __future__ import annotations

import base64
import os
import pickle
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.broadcast_trainer import HOST
from tests.support.commanded_process import CommandedProcess, serve

if TYPE_CHECKING:
    from tests.conftest import Plane

LAYER = re.compile(r"model\.layers\.(\d+)\.")


class PrimeRlTrainer(CommandedProcess):
    """The handle of a trainer's process."""

    def __init__(self, plane: Plane) -> None:
        super().__init__(plane, "tests.support.prime_rl_trainer", imports="vllm")


def state_dicts(tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tensors in prime-rl's order: all that are in no layer, then layer by layer."""
    found: dict[int, dict[str, Any]] = {-1: {}}
    for name, tensor in tensors.items():
        layer = LAYER.match(name)
        found.setdefault(int(layer[1]) if layer else -1, {})[name] = tensor
    return [found[number] for number in sorted(found)]


def by_dtype(state_dict: Mapping[str, Any]) -> dict[Any, list[tuple[str, Any]]]:
    found: dict[Any, list[tuple[str, Any]]] = {}
    for name, tensor in state_dict.items():
        found.setdefault(tensor.dtype, []).append((name, tensor))
    return found


def description(state_dict: Mapping[str, Any]) -> bytes:
    """The pickle that prime-rl sends before the tensors."""
    return pickle.dumps(
        {
            dtype: [(name, tensor.shape, tensor.numel()) for name, tensor in some]
            for dtype, some in by_dtype(state_dict).items()
        }
    )


class _Trainer:
    def __init__(self) -> None:
        self._communicator: Any = None
        self._left: int | None = None

    def form(self, argument: dict[str, Any]) -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        from tests.support.nccl_over_gloo import PyNcclOverGloo

        group = StatelessProcessGroup.create(
            host=HOST,
            port=argument["port"],
            rank=0,
            world_size=argument["world_size"],
            store_timeout=argument["timeout_s"],
        )
        self._communicator = PyNcclOverGloo(group, "cpu")

    def send(self, argument: dict[str, Any]) -> None:
        """Sends a checkpoint.

        Args (in `argument`):
            directory: the checkpoint.
            dtype: torch's name of the dtype in which its tensors are sent. Absent: their own.
            description: a pickle in base64 that is sent in place of the first description.
            without: the name of a tensor that is not sent.
            broadcasts: the process kills itself after so many broadcasts.
        """
        import torch
        from safetensors.torch import load_file

        self._left = argument.get("broadcasts")
        tensors = load_file(Path(argument["directory"]) / "model.safetensors")
        tensors.pop(argument.get("without", ""), None)
        if "dtype" in argument:
            tensors = {name: one.to(getattr(torch, argument["dtype"])) for name, one in tensors.items()}
        parts = state_dicts(tensors)
        self._number(len(parts))
        for part in parts:
            stated = base64.b64decode(argument.pop("description", "")) or description(part)
            self._number(len(stated))
            self._broadcast(torch.ByteTensor(list(stated)))
            for some in by_dtype(part).values():
                self._broadcast(torch.cat([tensor.flatten() for _, tensor in some]))

    def number(self, number: int) -> None:
        """Sends one number, as the number of state dicts."""
        self._number(number)

    def _number(self, number: int) -> None:
        import torch

        self._broadcast(torch.tensor([number], dtype=torch.long))

    def _broadcast(self, tensor: Any) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._communicator.broadcast(tensor, src=0)
        self._left = None if self._left is None else self._left - 1


def _serve() -> None:
    trainer = _Trainer()
    serve(lambda what, argument: getattr(trainer, what)(argument))


if __name__ == "__main__":
    _serve()
