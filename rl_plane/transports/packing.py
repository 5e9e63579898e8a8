"""Packs tensors into buckets, one bucket at a time: the trainer's half of `rl_plane.weights.manifest`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Union

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import DEFAULT_ALGORITHM, DigestAlgorithm, HostTensor, TensorSpec, tensor_digest
from rl_plane.weights.hashed_copy import copy_hashed
from rl_plane.weights.manifest import Manifest

if TYPE_CHECKING:
    import torch

Tensor = Union["torch.Tensor", HostTensor]
Buffer = Union[memoryview, "torch.Tensor"]
"""The memory of a bucket's bytes: in host memory, or a uint8 tensor on a GPU."""
Named = Iterable[tuple[str, Tensor]]


def spec_of(tensor: Tensor, name: str = "") -> TensorSpec:
    """The dtype and shape of a tensor; for a DTensor those of the whole. `name` is for the error message."""
    if isinstance(tensor, HostTensor):
        return tensor.spec
    check_readable(name, tensor)
    return spec_from(name, tensor.dtype, tuple(tensor.shape))


def spec_from(name: str, dtype: Any, shape: tuple[int, ...]) -> TensorSpec:
    """The spec of a tensor of this torch dtype. Raises InvalidRequest for a dtype that can't be sent."""
    known = names_of_dtypes().get(dtype)
    if known is None:
        raise InvalidRequest(
            f"{name!r} is of {dtype}, which can't be sent", field="source", fix="convert it first"
        )
    return TensorSpec(known, shape)


def check_readable(name: str, tensor: Any) -> None:
    """Raises InvalidRequest unless the tensor (for a sharded one, this rank's part) has dense bytes in memory."""
    import torch
    from torch.nn.parameter import is_lazy

    if hasattr(tensor, "local_shards"):
        for shard in tensor.local_shards():
            check_readable(name, shard.tensor)
        return
    layout = getattr(tensor, "layout", torch.strided)
    if is_lazy(tensor):
        what, fix = "is not initialised yet", "run the module once"
    elif getattr(tensor, "is_meta", False):
        what, fix = "is on the meta device, without data", "load the weights first"
    elif layout != torch.strided:
        what, fix = f"is laid out as {layout}", "make it dense"
    else:
        return
    raise InvalidRequest(f"{name!r} {what}", field="source", fix=f"{fix}, or leave it out by names")


def copy_into(place: Buffer, tensor: Tensor) -> None:
    """Copies the tensor's raw bytes, row-major, into `place`, which has the same length."""
    if isinstance(tensor, HostTensor):
        if isinstance(place, memoryview):
            place[:] = tensor.data
        elif tensor.data.nbytes:
            import torch

            place.copy_(torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8))
    elif place.nbytes:
        import torch

        whole = torch.frombuffer(place, dtype=torch.uint8) if isinstance(place, memoryview) else place
        whole.view(tensor.dtype).copy_(tensor.detach().reshape(-1))


def _in_host_memory(tensor: Tensor) -> bool:
    """Reports whether `raw_bytes` makes no copy."""
    return isinstance(tensor, HostTensor) or (tensor.device.type == "cpu" and tensor.is_contiguous())


def copy_digested(place: memoryview, tensor: Tensor, algorithm: DigestAlgorithm) -> str:
    """Does the same as `copy_into`, and returns the digest of the copy."""
    if _in_host_memory(tensor):
        return copy_hashed(place, raw_bytes(tensor), algorithm)
    copy_into(place, tensor)
    return tensor_digest(place, algorithm)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, row-major: its own memory if that is contiguous and in host memory, else a copy."""
    if isinstance(tensor, HostTensor):
        return tensor.data

    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().reshape(-1).cpu()
    # Not by numpy(), after which torch does not resize the storage any more, as FSDP1 does.
    memory = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
    memory.tensor = flat  # it lives as long as its bytes are in use
    return memoryview(memory).cast("B")


def in_order(specs: Iterable[tuple[str, TensorSpec]], tensors: Named) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors, and raises InvalidRequest unless they are those of `specs`, in that order.

    Uses up the iterator: after the last tensor a source may take part in a collective for which other ranks wait.
    """
    source = iter(tensors)
    for name, spec in specs:
        found, tensor = next(source, (None, None))
        if tensor is None or found != name or spec_of(tensor, name) != spec:
            raise _other(repr(name), found)
        yield name, tensor
        del tensor  # its memory is free before the next one is gathered
    for more, _ in source:
        raise _other("nothing", more)


def _other(announced: str, found: str | None) -> InvalidRequest:
    same = ", with another dtype or shape" if announced == repr(found) else ""
    return InvalidRequest(
        f"expected {announced} next, but {found!r} came{same}",
        field="tensors",
        fix="give the same tensors in the same order each time",
    )


def fill(
    manifest: Manifest,
    tensors: Named,
    buffer: Callable[[int], Buffer],
    digests: dict[str, str] | None = None,
    lent: Collection[int] = (),
    algorithm: DigestAlgorithm = DEFAULT_ALGORITHM,
) -> Iterator[int]:
    """Packs the tensors into buckets, and yields each bucket's number once it is full.

    Args:
        manifest: the buckets. The tensors come in its order.
        tensors: name and tensor.
        buffer: returns the memory of a bucket.
        digests: takes the digest of each tensor. A tensor in host memory is hashed while it is packed, and another one
            after its bucket was yielded. None computes none.
        lent: numbers of buckets that receivers read in place. Their tensors are not packed. They are hashed after their
            bucket was yielded, while receivers read them.
        algorithm: that of the digests.
    """
    source = in_order(manifest.specs.items(), tensors)
    for number, bucket in enumerate(manifest.buckets):
        if number in lent:
            own = [next(source) for _ in bucket.tensors]
            yield number
            if digests is not None:
                digests.update((name, tensor_digest(raw_bytes(tensor), algorithm)) for name, tensor in own)
            continue
        data = buffer(number)
        places = {placed.name: data[placed.offset :][: placed.spec.nbytes] for placed in bucket.tensors}
        unhashed = []
        for name, place in places.items():
            tensor = next(source)[1]
            if digests is None:
                copy_into(place, tensor)
            elif isinstance(place, memoryview) and _in_host_memory(tensor):
                digests[name] = copy_hashed(place, raw_bytes(tensor), algorithm)
            else:
                copy_into(place, tensor)
                unhashed.append(name)
            del tensor  # before the next one is gathered
        yield number
        if digests is not None:
            digests.update((name, _hash(places[name], algorithm)) for name in unhashed)
    next(source, None)  # use up the source


def _hash(place: Buffer, algorithm: DigestAlgorithm) -> str:
    return tensor_digest(place if isinstance(place, memoryview) else memoryview(place.cpu().numpy()), algorithm)


def names_of_dtypes() -> dict[torch.dtype, str]:
    """The name of each torch dtype that can be sent."""
    import torch

    return {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
        torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
        torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    }  # fmt: skip
