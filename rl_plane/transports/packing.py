"""Tensors into buckets: the trainer's half of `rl_plane.weights.manifest`. One bucket is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Union

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import HostTensor, TensorSpec, tensor_digest
from rl_plane.weights.manifest import Manifest

if TYPE_CHECKING:
    import torch

Tensor = Union["torch.Tensor", HostTensor]
Buffer = Union[memoryview, "torch.Tensor"]
"""Of a bucket's bytes: in host memory, or as uint8 on a GPU."""
Named = Iterable[tuple[str, Tensor]]


def spec_of(tensor: Tensor, name: str = "") -> TensorSpec:
    """Of a DTensor: the whole tensor's. `name`: for the error of one that can't be read."""
    if isinstance(tensor, HostTensor):
        return tensor.spec
    check_readable(name, tensor)
    return spec_from(name, tensor.dtype, tuple(tensor.shape))


def spec_from(name: str, dtype: Any, shape: tuple[int, ...]) -> TensorSpec:
    known = _dtypes().get(dtype)
    if known is None:
        raise InvalidRequest(
            f"{name!r} is of {dtype}, which can't be sent", field="source", fix="convert it first"
        )
    return TensorSpec(known, shape)


def check_readable(name: str, tensor: Any) -> None:
    """Are there bytes of it, one after another? Of a sharded one: of this rank's part."""
    import torch
    from torch.nn.parameter import is_lazy

    if hasattr(tensor, "local_shards"):  # what is asked of the others is asked of its shards
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
    """The tensor's raw bytes, row-major. `place` is as long."""
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


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, row-major: its own memory where that is possible."""
    if isinstance(tensor, HostTensor):
        return tensor.data
    import torch

    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().reshape(-1).cpu()
    return memoryview(flat.view(torch.uint8).numpy())


def in_order(specs: Iterable[tuple[str, TensorSpec]], tensors: Named) -> Iterator[tuple[str, Tensor]]:
    """The tensors, which must come as they were announced, and no more. They are used up: what a source does after the
    last one, other ranks do too, and wait for it there."""
    source = iter(tensors)
    for name, spec in specs:
        found, tensor = next(source, (None, None))
        if tensor is None or found != name or spec_of(tensor, name) != spec:
            raise _other(repr(name), found)
        yield name, tensor
    for more, _ in source:
        raise _other("nothing", more)


def _other(announced: str, found: str | None) -> InvalidRequest:
    return InvalidRequest(
        f"{announced} was announced next, and {found!r} came",
        field="tensors",
        fix="give the same tensors in the same order each time",
    )


def fill(
    manifest: Manifest,
    tensors: Named,
    buffer: Callable[[int], Buffer],
    digests: dict[str, str] | None = None,
    lent: Collection[int] = (),
) -> Iterator[int]:
    """Packs `tensors`, which come in the manifest's order, into `buffer(number)` for each bucket; yields the bucket's
    number once it is full. `digests` takes the digest of each tensor, made while the bucket is on its way: they are all
    there at the end; None: none are made. `lent`: buckets whose tensors are read where they are: they are hashed
    there, and not packed."""
    source = in_order(manifest.specs.items(), tensors)
    for number, bucket in enumerate(manifest.buckets):
        if number in lent:
            for placed in bucket.tensors:
                _, tensor = next(source)
                if digests is not None:
                    digests[placed.name] = tensor_digest(raw_bytes(tensor))
            yield number
            continue
        data = buffer(number)
        places = {placed.name: data[placed.offset :][: placed.spec.nbytes] for placed in bucket.tensors}
        for place in places.values():
            copy_into(place, next(source)[1])
        yield number
        if digests is not None:
            digests.update((name, _hash(place)) for name, place in places.items())
    next(source, None)  # to its end


def _hash(place: Buffer) -> str:
    return tensor_digest(place if isinstance(place, memoryview) else memoryview(place.cpu().numpy()))


def _dtypes() -> dict[Any, str]:
    import torch

    return {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
        torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
        torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    }  # fmt: skip
