"""The contract of a source: the named tensors of one version, in a fixed order, one whole tensor at a time.

    ModuleSource     an nn.Module: plain, DDP, FSDP2 (DTensor), FSDP1, DeepSpeed ZeRO-3
    StateDictSource  a mapping of name to tensor, or a function that makes one; DTensors are gathered
    ExportSource     a function that returns an iterator of (name, tensor), such as Megatron's export
    AdapterSource    a PEFT adapter of a model, sharded as the model is
    DirectorySource  a checkpoint or a PEFT directory; it needs no torch

Gathering is collective: for each version every rank calls `take` and uses up the iterator, in the same order. Only rank
0 gets tensors that it may keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.packing import Tensor

Names = Mapping[str, str] | Callable[[str], str | None] | None
"""Maps the trainer's tensor names to the engine's. A mapping leaves other names unchanged; a function leaves out a
tensor by returning None."""
NamedTensors = Iterable[tuple[str, Any]]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Taken:
    """The tensors of one version."""

    specs: Sequence[tuple[str, TensorSpec]]
    tensors: Iterator[tuple[str, Tensor]]
    """In the order of `specs`. A tensor is valid until the next one is asked for. Ranks other than 0 drop what they
    get."""
    adapter_config: bytes | None = None
    """The `adapter_config.json` of an adapter."""
    close: Callable[[], None] = _nothing
    device: str = "cpu"
    """The device of the tensors, as far as it is known before they are gathered."""
    held: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that lie contiguous in the trainer's own memory (host or GPU), exactly as they are sent, and stay
    there."""


class WeightSource(Protocol):
    """A source of the weights of each version."""

    collective: bool
    """True if every rank of the trainer must take part, on the thread that runs its other collectives."""
    adapter: bool
    """True for a LoRA adapter, False for base weights."""

    def take(self) -> Taken:
        """The weights as they are now. Cheap: nothing is gathered before the iterator is used."""
