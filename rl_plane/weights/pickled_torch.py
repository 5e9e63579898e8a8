"""The names of torch that a pickle of tensors has, for `pickle_reader`, and the plain values that stand for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_plane.protocol.update_requests import PART_DTYPES
from rl_plane.protocol.versions import MAX_RANK
from rl_plane.weights.pickle_reader import Key, Name, UnreadablePickle, kind_of

MAX_SIDE = 1 << 40
"""The longest side of a tensor. The bound keeps sums of sizes in 64 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Size:
    sides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Dtype(Key):
    name: str
    """Its safetensors name."""


def checked(what: str, arguments: tuple[Any, ...], *types: type) -> tuple[Any, ...]:
    """Returns values that have exactly these types. Raises UnreadablePickle for others."""
    if [type(one) for one in arguments] != list(types):
        given = ", ".join(kind_of(one) for one in arguments[:8])
        raise UnreadablePickle(f"{what} of {given or 'nothing'}")
    return arguments


def ints(value: Any, most: int) -> bool:
    return type(value) is tuple and len(value) <= most and all(type(one) is int for one in value)


def _size(arguments: tuple[Any, ...]) -> Size:
    (sides,) = checked("a shape", arguments, tuple)
    if not ints(sides, MAX_RANK) or not all(0 <= side < MAX_SIDE for side in sides):
        raise UnreadablePickle("a shape that no weight can have")
    return Size(sides)


SIZE = Name("torch", "Size", _size)
DTYPES = {("torch", name): Dtype(dtype) for name, dtype in PART_DTYPES.items()}
"""The name of a dtype in a pickle → its value."""
