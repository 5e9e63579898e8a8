"""The place of a tensor that a trainer shares, from the values that torch's pickles have for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from rl_plane.protocol.shared_tensors import GpuMemory, NamedMemory
from rl_plane.protocol.versions import DTYPE_BYTES, MAX_RANK, TensorSpec
from rl_plane.weights.pickle_reader import Name, UnreadablePickle, kind_of
from rl_plane.weights.pickled_torch import MAX_SIDE, Dtype, Size, ints

REDUCTIONS = "torch.multiprocessing.reductions"
GPU_ARGUMENTS = 15
"""The arguments of `rebuild_cuda_tensor`."""
DEVICE = 6
"""The argument with the trainer's GPU."""
STORAGE = Name("torch.storage", "UntypedStorage")
STORAGES = (STORAGE, Name("torch.storage", "TypedStorage"))
TENSORS = (Name("torch", "Tensor"), Name("torch.nn.parameter", "Parameter"))


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor in memory that its trainer shares."""

    spec: TensorSpec
    memory: NamedMemory | GpuMemory | None
    """It is None for an empty tensor, which has no memory."""
    start: int
    """The offset of its first element in the memory, in bytes."""
    strides: tuple[int, ...] | None
    """Elements between neighbours of each axis. None: it is contiguous."""


def check_class(of: Any) -> None:
    """Raises UnreadablePickle unless it is the class of a tensor."""
    if of not in TENSORS:
        raise UnreadablePickle(f"a tensor of the class {kind_of(of)}")


def tensor_in(
    dtype: Dtype, size: Any, strides: Any, offset: Any, memory: NamedMemory | GpuMemory | None
) -> SharedTensor:
    """Checks that a tensor lies within its memory."""
    if type(size) is not Size or not ints(strides, MAX_RANK) or len(strides) != len(size.sides):
        raise UnreadablePickle("a tensor whose strides do not fit its shape")
    if type(offset) is not int or not all(0 <= one < MAX_SIDE for one in (offset, *strides)):
        raise UnreadablePickle("a tensor with a negative or endless stride or offset")
    spec, width = TensorSpec(dtype.name, size.sides), DTYPE_BYTES[dtype.name]
    if spec.nbytes == 0:
        return SharedTensor(spec, None, 0, None)
    last = offset + sum((side - 1) * stride for side, stride in zip(size.sides, strides, strict=True))
    if memory is None or (last + 1) * width > memory.nbytes:
        raise UnreadablePickle("a tensor that does not lie within its memory")
    packed = is_contiguous(size.sides, strides)
    return SharedTensor(spec, memory, offset * width, None if packed else tuple(strides))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements lie side by side in row-major order. The stride of an axis with one element is free."""
    axes = [(side, stride) for side, stride in zip(shape, strides, strict=True) if side != 1]
    inner = not axes or axes[-1][1] == 1
    return inner and all(outer[1] == after[0] * after[1] for outer, after in pairwise(axes))


def gpu_tensor(arguments: Any, gpu: str | None) -> SharedTensor:
    """Reads the arguments of `rebuild_cuda_tensor`.

    Args:
        arguments: the arguments. The trainer's number of its GPU is not used, because it may mean another one here.
        gpu: the UUID of the GPU. None: it is the argument in the place of that number.

    Raises:
        UnreadablePickle: the arguments are not those of a tensor that torch has shared.
    """
    if type(arguments) is not tuple or len(arguments) != GPU_ARGUMENTS:
        raise UnreadablePickle(f"{kind_of(arguments)} instead of the {GPU_ARGUMENTS} values of a CUDA tensor")
    of, size, strides, offset, storage, dtype, device, handle, nbytes, start, grad, *counted = arguments
    check_class(of)
    if storage not in STORAGES or type(dtype) is not Dtype or type(grad) is not bool:
        raise UnreadablePickle("a CUDA tensor of an unknown storage")
    counter, counter_offset, event, event_sync = counted
    if nbytes == 0 and type(nbytes) is int:
        return tensor_in(dtype, size, strides, offset, None)
    if not all(type(one) is bytes for one in (handle, counter, event)):
        raise UnreadablePickle("a CUDA tensor without its handles")
    try:
        memory = GpuMemory(
            gpu=device if gpu is None else gpu,
            memory=handle.hex(),
            nbytes=nbytes,
            offset=start,
            counter=counter.decode("ascii"),
            counter_offset=counter_offset,
            event=event.hex(),
            event_sync=event_sync,
        )
    except (UnicodeDecodeError, ValidationError):
        raise UnreadablePickle("a CUDA tensor whose handles are not torch's") from None
    return tensor_in(dtype, size, strides, offset, memory)
