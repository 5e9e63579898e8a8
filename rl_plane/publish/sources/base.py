"""The contract of a source: the named tensors of one version, in a fixed order, one whole tensor at a time.

    ModuleSource     an nn.Module: plain, DDP, FSDP2 (DTensor), FSDP1, DeepSpeed ZeRO-3
    StateDictSource  a mapping of name to tensor, or a function that makes one; DTensors are gathered
    ExportSource     a function that returns an iterator of (name, tensor), such as Megatron's export
    AdapterSource    a PEFT adapter of a model, sharded as the model is
    DirectorySource  a checkpoint or a PEFT directory; it needs no torch

Gathering is collective: for each version every rank calls `take` and uses up the iterator, in the same order. By
`tensors` rank 0 alone gets tensors that it may keep. By `owned` each rank gets the tensors that it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.packing import Tensor

if TYPE_CHECKING:
    import torch

Names = Mapping[str, str] | Callable[[str], str | None] | None
"""Maps the trainer's tensor names to the engine's. A mapping leaves other names unchanged; a function leaves out a
tensor by returning None."""
NamedTensors = Iterable[tuple[str, Any]]


class GatherParts(Protocol):
    """Gathers the parts of one tensor among the trainer's ranks."""

    rank: int
    """This rank."""

    def gather(self, part: torch.Tensor, slot_bytes: int, owner: int) -> torch.Tensor | None:
        """On the owner the parts of all ranks one after another, each `slot_bytes` long; None on other ranks."""


OwnedTensors = Callable[[Mapping[str, int], GatherParts], Iterator[tuple[str, Tensor]]]
"""`(owners, gather)`: takes part in each gathering, and yields the tensors that this rank owns, in the order of the
specs."""


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
    shared: frozenset[str] = frozenset()
    """Names of tensors that lie in parts on all of the trainer's ranks, so that any rank can own them."""
    owned: OwnedTensors | None = None
    """Gathers the tensors that this rank owns. None: the source gathers on rank 0 only."""


def drain(tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Uses up the iterator, so that this rank takes part in every gathering."""
    for _ in tensors:
        pass


class WeightSource(Protocol):
    """A source of the weights of each version."""

    collective: bool
    """True if every rank of the trainer must take part, on the thread that runs its other collectives."""
    adapter: bool
    """True for a LoRA adapter, False for base weights."""

    def take(self) -> Taken:
        """The weights as they are now. Cheap: nothing is gathered before the iterator is used."""
