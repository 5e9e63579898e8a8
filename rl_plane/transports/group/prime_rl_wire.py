"""Reads prime-rl's description of the tensors that it broadcasts next: a pickle, of which nothing is run.

prime-rl's trainer sends to every rank, each as one broadcast:

    the number of state dicts                          an int64
    for each state dict (the layers' and the rest's):
        the length of its description in bytes         an int64
        its description                                a pickle of {dtype: [(name, shape, number of elements), …]}
        for each dtype of the description              the elements of all its tensors, one after the other
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rl_plane.errors import InvalidWeights
from rl_plane.protocol.versions import TensorSpec, checked_name
from rl_plane.weights.pickle_reader import Budget, UnreadablePickle, kind_of, read_pickle
from rl_plane.weights.pickled_torch import DTYPES, SIZE, Dtype, Size

NUMBER_BYTES = 8
MAX_STATE_DICTS = 10_000
"""The most state dicts of one update. prime-rl sends one for each layer, and one for the rest."""
MAX_TENSORS = 1 << 16
"""The most tensors of one state dict. A layer with 512 experts has some 1600."""
FIX = "send the weights by prime-rl's own NCCL broadcast, in the checkpoint's format"

Described = list[list[tuple[str, TensorSpec]]]
"""The tensors of each broadcast, in their order."""

_NAMES: Mapping[tuple[str, str], Any] = {**DTYPES, (SIZE.module, SIZE.name): SIZE}


def read_number(data: memoryview, most: int, what: str) -> int:
    """Reads an int64 from 1 to `most`. Raises InvalidWeights for any other."""
    number = int.from_bytes(data, "little", signed=True)
    if not 0 < number <= most:
        raise refused(f"{number} as {what}, which is not 1 to {most}")
    return number


def read_description(data: memoryview) -> Described:
    """Reads the description of one state dict. Raises InvalidWeights for anything else, and runs nothing."""
    try:
        return _tensors(read_pickle(data, _NAMES, {}, Budget()))
    except UnreadablePickle as error:
        raise refused(f"a description with {error}") from None


def _tensors(value: Any) -> Described:
    if type(value) is not dict:
        raise UnreadablePickle(f"{kind_of(value)} instead of a dict")
    found: Described = []
    names = set[str]()
    for dtype, tensors in value.items():
        if type(dtype) is not Dtype or type(tensors) is not list or not tensors:
            raise UnreadablePickle(f"{kind_of(tensors)} for {kind_of(dtype)} instead of tensors for a dtype")
        if len(names) + len(tensors) > MAX_TENSORS:
            raise UnreadablePickle(f"more than {MAX_TENSORS} tensors")
        found.append([_tensor(one, dtype, names) for one in tensors])
    return found


def _tensor(value: Any, dtype: Dtype, names: set[str]) -> tuple[str, TensorSpec]:
    """Checks one tensor. `names`: those of the state dict so far, to which it adds its own."""
    if type(value) is not tuple or [type(one) for one in value] != [str, Size, int]:
        raise UnreadablePickle(f"{kind_of(value)} instead of (name, shape, number of elements)")
    name, size, count = value
    if not checked_name(name):
        raise UnreadablePickle("a name that no tensor can have")
    if name in names:
        raise UnreadablePickle(f"the tensor {name} twice")
    if count != math.prod(size.sides):
        raise UnreadablePickle(f"{count} elements of {name}, whose shape is {list(size.sides)}")
    names.add(name)
    return name, TensorSpec(dtype.name, size.sides)


def refused(what: str) -> InvalidWeights:
    """The error for what the trainer has broadcast."""
    return InvalidWeights(
        f"the trainer broadcast {what}. Nothing in it was run", field="transport.format", fix=FIX
    )
