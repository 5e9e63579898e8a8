"""Reads the messages of checkpoint-engine's parameter server: pickles, of which nothing is run.

The server of each GPU sends to the socket of that GPU, and waits for an answer to each message. An empty answer means
done, a text is an error:

    (rebuild_cuda_tensor, arguments)                 the handle of a buffer of bytes
    [{name, dtype, shape, offset}, …]                tensors that are in the buffer now; as often as needed
    None                                             the handle shall be released
    None                                             the end
    RuntimeError(text)                               in place of any message but the first: another worker has failed
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plane.protocol.versions import TensorSpec, checked_name
from rl_plane.weights.pickle_reader import Budget, Name, UnreadablePickle, kind_of, read_pickle
from rl_plane.weights.pickled_torch import DTYPES, MAX_SIDE, SIZE, Dtype, Size, ints

ADDRESS = re.compile(r"ipc://@checkpoint-engine-[0-9A-Za-z-]{1,64}-\d{1,10}\.sock")
"""A socket of this machine, as the parameter server names it."""
MAX_TENSORS = 1 << 16
"""The most tensors of one message."""
_REDUCTIONS = "torch.multiprocessing.reductions"
_KEYS = ["dtype", "name", "offset", "shape"]


@dataclass(frozen=True, slots=True)
class Failure:
    """The trainer's side has failed."""

    why: str


@dataclass(frozen=True, slots=True)
class BufferHandle:
    """torch's share of the buffer."""

    nbytes: int
    wire: list[Any]
    """The seven values of `cuda_buffers.Handle`."""
    start: int


def _failure(arguments: tuple[Any, ...]) -> Failure:
    if len(arguments) > 1 or any(type(one) is not str for one in arguments):
        raise UnreadablePickle("an error without a text")
    return Failure(arguments[0][:300] if arguments else "")


_REBUILD = Name(_REDUCTIONS, "rebuild_cuda_tensor")
_TENSOR = Name("torch", "Tensor")
_STORAGE = Name("torch.storage", "TypedStorage")
_ERRORS = [Name("builtins", name, _failure) for name in ("RuntimeError", "Exception", "ValueError")]
_NAMES: Mapping[tuple[str, str], Any] = {
    **DTYPES,
    **{(one.module, one.name): one for one in (SIZE, _REBUILD, _TENSOR, _STORAGE, *_ERRORS)},
}


def read_handle(data: bytes) -> BufferHandle | Failure:
    """Reads the first message. Raises UnreadablePickle for anything else."""
    value = read_pickle(data, _NAMES, {}, Budget())
    if type(value) is Failure:
        return value
    if type(value) is not tuple or len(value) != 2 or value[0] is not _REBUILD or type(value[1]) is not tuple:
        raise UnreadablePickle(f"{kind_of(value)} instead of the handle of a buffer")
    arguments = value[1]
    if len(arguments) != 15:
        raise UnreadablePickle(f"a handle of {len(arguments)} values instead of 15")
    of, size, strides, offset, storage, dtype, _, handle, nbytes, start, grad, *counted = arguments
    one_axis = type(size) is Size and len(size.sides) == 1 and strides == (1,)
    if of is not _TENSOR or storage is not _STORAGE or dtype is not DTYPES["torch", "uint8"] or grad is not False:
        raise UnreadablePickle("a handle of something else than a buffer of bytes")
    if not one_axis or type(offset) is not int or type(nbytes) is not int:
        raise UnreadablePickle("a buffer with more than one axis")
    if not 0 <= offset <= nbytes - size.sides[0]:
        raise UnreadablePickle("a buffer that does not lie within its memory")
    return BufferHandle(size.sides[0], [handle, nbytes, start, *counted], offset)


def read_tensors(data: bytes, room: int) -> dict[str, tuple[TensorSpec, int]] | Failure | None:
    """Reads a further message: each tensor's name, and its offset in a buffer of `room` bytes. Raises
    UnreadablePickle for anything else."""
    value = read_pickle(data, _NAMES, {}, Budget())
    if value is None or type(value) is Failure:
        return value
    if type(value) is not list or not value or len(value) > MAX_TENSORS:
        raise UnreadablePickle(f"{kind_of(value)} instead of a list of tensors")
    found: dict[str, tuple[TensorSpec, int]] = {}
    for one in value:
        if type(one) is not dict or sorted(map(str, one)) != _KEYS:
            raise UnreadablePickle(f"{kind_of(one)} instead of name, dtype, shape and offset")
        name, dtype, shape, offset = one["name"], one["dtype"], one["shape"], one["offset"]
        sides = shape.sides if type(shape) is Size else shape
        if type(name) is not str or not checked_name(name) or name in found:
            raise UnreadablePickle("a name that no tensor can have, or has already")
        if type(dtype) is not Dtype or not ints(sides, 16) or not all(0 <= side < MAX_SIDE for side in sides):
            raise UnreadablePickle(f"{name} with a dtype or shape that no weight can have")
        spec = TensorSpec(dtype.name, tuple(sides))
        if type(offset) is not int or not 0 <= offset <= room - spec.nbytes:
            raise UnreadablePickle(f"{name} outside of the buffer")
        found[name] = (spec, offset)
    return found
