"""Reads the CUDA IPC handles that vLLM's `ipc` engine and SkyRL's colocated trainer send, as plain values.

They come as the base64 of a pickle, which is read by `pickle_reader`, and never opened:

| sent by | `ipc_handles_pickled` | beside it |
|---|---|---|
| vLLM | for each tensor `{GPU's UUID: arguments}` | |
| vLLM, packed | `{GPU's UUID: arguments}` of one buffer, for each call the same | `tensor_sizes` in bytes |
| SkyRL | `{GPU's UUID: (rebuild_cuda_tensor, arguments)}` of one buffer | `sizes` in elements |

The arguments are those of torch's `rebuild_cuda_tensor`. Each worker opens the memory on its own GPU.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from pydantic import Field

from frontend.dialects.common.shared_tensor import REDUCTIONS, STORAGES, TENSORS, SharedTensor, gpu_tensor
from frontend.server.large_bodies import LongText
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.shared_tensors import MAX_COPIES
from rl_plane.protocol.update_requests import MAX_PART_MEMORIES, MAX_PART_TENSORS, PART_DTYPES
from rl_plane.protocol.versions import TensorSpec
from rl_plane.protocol.vllm_bodies import VllmInfo, parse_part
from rl_plane.weights.pickle_reader import (
    MAX_PICKLE_BYTES,
    Budget,
    Name,
    UnreadablePickle,
    kind_of,
    read_pickle,
)
from rl_plane.weights.pickled_torch import DTYPES, SIZE

FIELD = "ipc_handles_pickled"
PART_BYTES = 300_000
"""The bytes of handles in one message to a worker. Tensors that have handles of their own go in several messages."""
HANDLE_BYTES = 700
"""The most bytes that one handle takes in a message."""
FIX = "send the handles as vLLM's ipc engine or SkyRL's trainer does"

_REBUILD = Name(REDUCTIONS, "rebuild_cuda_tensor")
_NAMES: Mapping[tuple[str, str], Any] = {
    **DTYPES,
    **{(one.module, one.name): one for one in (SIZE, _REBUILD, *STORAGES, *TENSORS)},
}


class HandlesInfo(VllmInfo):
    """`update_info` with CUDA IPC handles"""

    names: list[str] = Field(max_length=MAX_PART_TENSORS)
    dtype_names: list[str]
    shapes: list[list[int]]
    ipc_handles_pickled: str | LongText
    tensor_sizes: list[int] | None = None
    """The bytes of each tensor in vLLM's packed buffer."""
    sizes: list[int] | None = None
    """The elements of each tensor in SkyRL's packed buffer."""


def has_handles(info: Mapping[str, Any]) -> bool:
    return FIELD in info or "ipc_handles" in info


def read_parts(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The bodies of `receive_weights_part` that bring these tensors. Raises InvalidRequest for anything else."""
    if FIELD not in given:
        _refuse("ipc_handles can't come as JSON", "send ipc_handles_pickled, as vLLM's own client does")
    info = parse_part(HandlesInfo, given, "update_info")
    specs = _specs(info)
    try:
        handles = read_pickle(_decoded(info.ipc_handles_pickled), _NAMES, {}, Budget())
        if info.tensor_sizes is not None or info.sizes is not None:
            yield _packed(info, specs, handles)
        else:
            yield from _each(info, specs, handles)
    except UnreadablePickle as refused:
        _refuse(f"it has {refused}. Only handles of CUDA tensors are read, and nothing in them is run", FIX)


def _decoded(text: str | LongText) -> bytes:
    if len(text) > 2 * MAX_PICKLE_BYTES:
        raise UnreadablePickle(f"more than {MAX_PICKLE_BYTES} bytes")
    try:
        return base64.b64decode(text.data if isinstance(text, LongText) else text, validate=True)
    except ValueError:
        raise UnreadablePickle("something else than base64") from None


def _specs(info: HandlesInfo) -> list[TensorSpec]:
    for name in ("dtype_names", "shapes"):
        if len(getattr(info, name)) != len(info.names):
            _refuse(
                f"{len(info.names)} names and {len(getattr(info, name))} {name}", "give one for each name", name
            )
    unknown = [one for one in info.dtype_names if one.removeprefix("torch.") not in PART_DTYPES]
    if unknown:
        _refuse(
            f"the unknown dtype {unknown[0][:50]!r}", f"one of {', '.join(sorted(PART_DTYPES))}", "dtype_names"
        )
    if any(side < 0 for shape in info.shapes for side in shape):
        _refuse("a shape with a negative side", "give the sides of each tensor", "shapes")
    return [
        TensorSpec(PART_DTYPES[dtype.removeprefix("torch.")], tuple(shape))
        for dtype, shape in zip(info.dtype_names, info.shapes, strict=True)
    ]


def _copies(value: Any) -> list[SharedTensor]:
    """A tensor on each of several GPUs, from `{UUID: arguments}` or `{UUID: (rebuild_cuda_tensor, arguments)}`."""
    if type(value) is not dict or not 0 < len(value) <= MAX_COPIES:
        raise UnreadablePickle(f"{kind_of(value)} instead of a handle for each GPU")
    found = []
    for gpu, arguments in value.items():
        if type(gpu) is not str:
            raise UnreadablePickle(f"{kind_of(gpu)} instead of a GPU's UUID")
        if type(arguments) is tuple and len(arguments) == 2 and arguments[0] is _REBUILD:
            arguments = arguments[1]
        found.append(gpu_tensor(arguments, gpu))
    first = found[0]
    if any((one.spec, one.start, one.strides) != (first.spec, first.start, first.strides) for one in found):
        raise UnreadablePickle("a tensor that lies otherwise on one GPU than on another")
    return found


def _memory(copies: Sequence[SharedTensor], *, held: bool) -> dict[str, Any]:
    return {"copies": [one.memory.model_dump() for one in copies if one.memory is not None], "held": held}


def _packed(info: HandlesInfo, specs: Sequence[TensorSpec], handles: Any) -> dict[str, Any]:
    copies = _copies(handles)
    whole = copies[0]
    if len(whole.spec.shape) != 1 or whole.strides is not None:
        raise UnreadablePickle("a buffer that is not one contiguous tensor with one axis")
    of_vllm = info.tensor_sizes is not None
    sizes = [spec.nbytes if of_vllm else math.prod(spec.shape) for spec in specs]
    if sizes != (info.tensor_sizes if of_vllm else info.sizes):
        _refuse("sizes that are not those of the shapes", FIX, "tensor_sizes" if of_vllm else "sizes")
    if not of_vllm and any(spec.dtype != whole.spec.dtype for spec in specs):
        _refuse("a buffer of another dtype than its tensors", FIX, "dtype_names")
    if sum(spec.nbytes for spec in specs) > whole.spec.nbytes:
        _refuse(f"a buffer of {whole.spec.nbytes} bytes, which is too short for its tensors", FIX)
    places, start = [], whole.start
    for spec in specs:
        places.append({"memory": 0, "start": start} if spec.nbytes else None)
        start += spec.nbytes
    return _part(info, range(len(specs)), places, [_memory(copies, held=of_vllm)] if whole.spec.nbytes else [])


def _each(info: HandlesInfo, specs: Sequence[TensorSpec], handles: Any) -> Iterator[dict[str, Any]]:
    if type(handles) is not list or len(handles) != len(specs):
        raise UnreadablePickle(f"{kind_of(handles)} instead of handles for each of {len(specs)} tensors")
    places: list[dict[str, Any] | None] = []
    memories: list[dict[str, Any]] = []
    first, size = 0, 0
    for number, (spec, value) in enumerate(zip(specs, handles, strict=True)):
        copies = _copies(value)
        tensor = copies[0]
        if tensor.spec != spec:
            _refuse(f"{info.names[number][:100]!r} has handles of another shape or dtype", FIX, "shapes")
        more = HANDLE_BYTES * len(copies)
        if size + more > PART_BYTES or len(memories) == MAX_PART_MEMORIES:
            yield _part(info, range(first, number), places, memories)
            places, memories, first, size = [], [], number, 0
        size += more
        if tensor.memory is None:
            places.append(None)
            continue
        strides = None if tensor.strides is None else list(tensor.strides)
        places.append({"memory": len(memories), "start": tensor.start, "strides": strides})
        memories.append(_memory(copies, held=False))
    yield _part(info, range(first, len(specs)), places, memories)


def _part(
    info: HandlesInfo, numbers: range, places: list[dict[str, Any] | None], memories: list[dict[str, Any]]
) -> dict[str, Any]:
    some = slice(numbers.start, numbers.stop)
    return {
        "names": info.names[some],
        "dtypes": info.dtype_names[some],
        "shapes": info.shapes[some],
        "places": places,
        "memories": memories,
    }


def _refuse(what: str, fix: str, field: str = FIELD) -> NoReturn:
    raise InvalidRequest(what, field=f"update_info.{field}", fix=fix)
