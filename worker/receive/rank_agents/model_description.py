"""The description of a model that a rank gives, and that the worker passes to the host agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plane.protocol.versions import TensorSpec


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model that several ranks hold together."""

    tensors: Mapping[str, TensorSpec]
    """Every tensor that a full checkpoint must have."""
    tied: Mapping[str, str]
    """The names that a checkpoint may also have → the tensor to which each is tied."""
    devices: tuple[str, ...]
    """The device of each rank of this host, in torch's notation."""
    first: int = 0
    """The number of the first rank of this host. The others follow."""

    @property
    def ranks(self) -> int:
        return len(self.devices)

    def to_wire(self) -> dict[str, Any]:
        return {
            "tensors": specs_to_wire(self.tensors),
            "tied": dict(self.tied),
            "devices": list(self.devices),
            "first": self.first,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> ModelDescription:
        return cls(specs_from_wire(wire["tensors"]), wire["tied"], tuple(wire["devices"]), wire["first"])


def specs_to_wire(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    return {name: [spec.dtype, list(spec.shape)] for name, spec in specs.items()}


def specs_from_wire(wire: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in wire.items()}
