"""The contract of what holds the model: the seam inside the process that has the weights.

The receiving half of a transport runs where the model is: in the worker itself for an engine in this process, in each
rank's process for an engine that has its own. A `ReceiveRequest` goes there; a `Receiver` there brings the tensors by
a transport and gives them to the engine's `WeightHolder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from rl_plane.protocol.versions import HostTensor, TensorSpec

TensorStream = Iterable[tuple[str, HostTensor]]
Cancelled = Callable[[], bool]


class Staged(Protocol):
    """Complete, verified weights in host memory, made by a holder's `stage`."""


@runtime_checkable
class KeepableStaged(Staged, Protocol):
    """May be swapped in more than once."""

    def host_tensors(self) -> Mapping[str, HostTensor]:
        """Its own memory, writable, by checkpoint name."""


class WeightHolder(Protocol):
    """Holds the model of one rank. Called on a thread, one call at a time."""

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        """Every tensor that a full checkpoint must hold, by its checkpoint name."""

    def tied_tensors(self) -> Mapping[str, str]:
        """Names that a checkpoint may also hold → the tensor of `weight_spec` to which the model ties each: what comes
        under both is the same."""

    def stage(self, tensors: TensorStream, cast: bool, cancelled: Cancelled) -> Staged:
        """Copies tensors into host memory, ready to swap, while generation goes on; names, shapes and dtypes have been
        checked. Ends early with an EngineFailed when `cancelled()`."""

    def overwrite(self, tensors: TensorStream, cast: bool, cancelled: Cancelled) -> None:
        """Writes the tensors over the served weights as they come. The engine is paused; when this raises, its
        weights are of no version."""

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        """Every tensor that an adapter of this PEFT config (`adapter_config.json`) must hold, by its name in
        `adapter_model.safetensors`; the dtypes are those of the engine. InvalidWeights for a config that this model
        or engine can't take."""

    def stage_adapter(
        self, config: Mapping[str, Any], tensors: TensorStream, cast: bool, cancelled: Cancelled
    ) -> Staged:
        """Like `stage`, of an adapter."""
