"""Writes the pickles of SGLang's serializer opcode by opcode, without torch, right ones and wrong ones."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_REDUCTIONS = "torch.multiprocessing.reductions"
PROTOCOL = b"\x80\x04"


def pickled(value: bytes, *, bare: bool = False) -> bytes:
    """A whole pickle of a value's opcodes. `bare`: only the opcodes."""
    return value if bare else PROTOCOL + value + b"."


def plain(value: Any) -> bytes:
    """The opcodes of plain values."""
    out: bytes = pickle.dumps(value, 4)[2:-1]
    out = out[9:] if out[:1] == b"\x95" else out  # the frame
    return out.replace(b"\x94", b"") if not isinstance(value, bytes | str) else out.removesuffix(b"\x94")


def named(module: str, name: str) -> bytes:
    return plain(module) + plain(name) + b"\x93"


def call(module: str, name: str, arguments: Any, *, bare: bool = False) -> bytes:
    """A call. `arguments`: opcodes of each, plain values, or with `bare` the opcodes of the whole."""
    if bare:
        return named(module, name) + bytes(arguments) + b"R"
    items = [one if isinstance(one, _Opcodes) else plain(one) for one in arguments]
    return named(module, name) + b"(" + b"".join(items) + b"tR"


class _Opcodes(bytes):
    pass


def _tuple(*items: bytes) -> _Opcodes:
    return _Opcodes(b"(" + b"".join(items) + b"t")


def instance(module: str, name: str, state: Mapping[str, bytes]) -> bytes:
    items = b"".join(plain(key) + value for key, value in state.items())
    return named(module, name) + b")\x81}(" + items + b"ub"


def shape(sides: Sequence[int]) -> _Opcodes:
    return _Opcodes(call("torch", "Size", [_tuple(*map(plain, sides))]))


def _strides(sides: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for side in reversed(sides):
        strides.append(step)
        step *= max(side, 1)
    return strides[::-1]


def cpu_tensor(
    sides: Sequence[int],
    dtype: str,
    nbytes: int,
    *,
    strides: Sequence[int] | None = None,
    offset: int = 0,
    number: int = 1,
    handle: bytes | None = None,
    of: tuple[str, str] = ("torch", "Tensor"),
) -> bytes:
    handle = f"/torch_7_11_{number}".encode() if handle is None else handle
    storage = call(
        _REDUCTIONS,
        "rebuild_storage_filename",
        [_Opcodes(named("torch.storage", "UntypedStorage")), b"/tmp/torch-shm-dir-x/manager.sock", handle, nbytes],
    )
    typed = call(_REDUCTIONS, "rebuild_typed_storage", [_Opcodes(storage), _Opcodes(named("torch", dtype))])
    found = _strides(sides) if strides is None else strides
    metadata = _tuple(plain(offset), shape(sides), _tuple(*map(plain, found)), plain(False))
    return call(_REDUCTIONS, "rebuild_tensor", [_Opcodes(named(*of)), _Opcodes(typed), metadata])


def cuda_tensor(
    sides: Sequence[int], dtype: str, device: str | int, *, counted: int = 3, patched: str | None = None
) -> bytes:
    """`patched`: the module whose `_rebuild_cuda_tensor_modified` the trainer has put in the place of torch's."""
    name = (_REDUCTIONS, "rebuild_cuda_tensor")
    if patched:
        name = (patched, "_rebuild_cuda_tensor_modified")
    return call(
        *name,
        [
            _Opcodes(named("torch", "Tensor")),
            shape(sides),
            _tuple(*map(plain, _strides(sides))),
            0,
            _Opcodes(named("torch.storage", "TypedStorage")),
            _Opcodes(named("torch", dtype)),
            device,
            b"\x01" * 66,
            4096,
            512,
            False,
            b"/torch_7_11_1",
            counted,
            b"\x02" * 64,
            True,
        ],
    )


def listed(tensors: Sequence[tuple[str, bytes]]) -> bytes:
    return pickled(_list([plain(name) + tensor + b"\x86" for name, tensor in tensors]))


def _list(items: Sequence[bytes]) -> bytes:
    """A list of pickled values, appended a thousand at a time as `pickle` does."""
    parts = [items[first : first + 1000] for first in range(0, len(items), 1000)] or [[]]
    return b"]" + b"".join(b"(" + b"".join(part) + b"e" for part in parts)


def of_ranks(tensors: Sequence[tuple[str, Sequence[bytes]]]) -> bytes:
    """A list of (name, LocalSerializedTensor)."""
    found = []
    for name, ranks in tensors:
        whole = [one if one.startswith(b"\x80") else pickled(one) for one in ranks]
        values = _list([b"B" + struct.pack("<I", len(one)) + one for one in whole])
        local = "sglang.srt.model_executor.model_runner_components.weight_updater", "LocalSerializedTensor"
        found.append((name, instance(*local, {"values": values})))
    return listed(found)


def bucket(
    tensors: Sequence[tuple[str, str, Sequence[int], int, int]],
    nbytes: int,
    module: str = "sglang.srt.weight_sync.tensor_bucket",
) -> bytes:
    """A flattened bucket of `(name, dtype, shape, start_idx, end_idx)`. `module`: of its `FlattenedTensorMetadata`."""
    items = [
        instance(
            module,
            "FlattenedTensorMetadata",
            {
                "name": plain(name),
                "shape": shape(sides),
                "dtype": named("torch", dtype),
                "start_idx": plain(start),
                "end_idx": plain(end),
                "numel": plain(end - start),
            },
        )
        for name, dtype, sides, start, end in tensors
    ]
    metadata = b"](" + b"".join(items) + b"e"
    whole = cpu_tensor((nbytes,), "uint8", nbytes)
    return pickled(b"}(" + plain("flattened_tensor") + whole + plain("metadata") + metadata + b"u")
