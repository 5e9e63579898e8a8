"""What is to be received, and what holds the model: the seam inside the process that has the weights.

The receiving half of a transport runs where the model is: in the worker itself for an engine in this process, in each
rank's process for one that has its own. A `Reception` goes there, in plain values; a `Receiver` there brings the
tensors by a transport and gives them to the engine's `WeightHolder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from rl_plane.protocol.versions import HostTensor, TensorSpec

TensorStream = Iterable[tuple[str, HostTensor]]
Cancelled = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Link:
    """A version on the way from a full one to a delta's base."""

    digest: str
    transport: Mapping[str, Any]
    refetchable: bool


@dataclass(frozen=True, slots=True)
class Reception:
    """One version's tensors, to be received."""

    staging: str
    """Under which name they are staged: never used before in the life of the engine."""
    transport: Mapping[str, Any]
    """The `transport` object of the request, `backend` included."""
    kind: Literal["base", "lora"] = "base"
    cast: bool = False
    digest: str | None = None
    """The version's, where it is known."""
    in_place: bool = False
    """Over the served weights, which don't fit twice; then nothing is staged."""
    keep: bool = False
    """What is staged stays in host memory after the swap: see `Receiver.kept`."""
    base: str | None = None
    """Of a delta: the digest of the version that it changes."""
    before: Sequence[Link] = ()
    """Of a delta: the versions up to `base`, the full one first."""
    vocab_size: int | None = None
    max_model_len: int | None = None
    """The engine's, which a `canary.json` beside a checkpoint has to fit."""
    canary_file: bool = False
    """Reads that file. Else it may be broken."""

    def to_wire(self) -> dict[str, Any]:
        return {
            "staging": self.staging,
            "transport": dict(self.transport),
            "kind": self.kind,
            "cast": self.cast,
            "digest": self.digest,
            "in_place": self.in_place,
            "keep": self.keep,
            "base": self.base,
            "before": [asdict(link) for link in self.before],
            "canary_file": self.canary_file,
            "vocab_size": self.vocab_size,
            "max_model_len": self.max_model_len,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Reception:
        return cls(**{**wire, "before": [Link(**link) for link in wire["before"]]})


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
