"""The contract between a receiver and the engine that holds the model, inside one process.

The receiving half of a transport runs where the model is: in the worker's own process, or in each rank's process. A
`Receiver` there takes a `ReceiveRequest`, brings the tensors by a transport, and gives them to the engine's
`WeightHolder`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import Unsupported
from rl_plane.protocol.versions import HostTensor, TensorSpec

TensorStream = Iterable[tuple[str, HostTensor]]
"""Tensors by checkpoint name, each valid until the next one is asked for, unless it is `owned`."""


Staged = Any
"""Complete and verified weights in host memory, in the form that the engine's swap takes."""


class WeightHolder(Protocol):
    """Holds the model of one rank. The receiver calls it on a thread, one call at a time.

    A subclass without tied tensors and without adapters implements the abstract methods only."""

    @abstractmethod
    def weight_spec(self) -> Mapping[str, TensorSpec]:
        """Returns every tensor that a full checkpoint must have, by its checkpoint name."""

    def tied_tensors(self) -> Mapping[str, str]:
        """Returns the names that a checkpoint may also have → the tensor of `weight_spec` to which each is tied. The
        bytes of both must be equal."""
        return {}

    @abstractmethod
    def stage(self, tensors: TensorStream, cancelled: Cancelled) -> Staged:
        """Prepares the swap while generation continues, and reads the stream to its end. Raises EngineFailed when
        `cancelled()`.

        The receiver checks the name, the shape and the dtype of each tensor before the stream yields it. If the update
        allows a cast, a dtype may differ from the one in `weight_spec`. The stream raises at its end if a tensor is
        missing, or if the digest is wrong.

        Each tensor lies in the staging area, and stays there for as long as the holder refers to its `data`: no copy is
        needed. A delta may change the bytes after the swap."""

    @abstractmethod
    def overwrite(self, tensors: TensorStream, cancelled: Cancelled) -> None:
        """Writes the tensors over the served weights as they come. The engine is paused. When this raises, its weights
        are of no version."""

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        """Returns every tensor that an adapter with this PEFT config (`adapter_config.json`) must have, by its name in
        `adapter_model.safetensors`, with the engine's dtypes. InvalidWeights for a config that this model or engine
        can't take."""
        raise _no_lora()

    def stage_adapter(self, config: Mapping[str, Any], tensors: TensorStream, cancelled: Cancelled) -> Staged:
        """Does the same as `stage` for an adapter."""
        raise _no_lora()


def _no_lora() -> Unsupported:
    return Unsupported("this engine has no LoRA", field="target.kind", fix="publish base weights")
