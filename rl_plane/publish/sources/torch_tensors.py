"""Torch tensors of a trainer: their specs, and how each is gathered whole."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import TensorSpec
from rl_plane.publish.sources import fsdp1
from rl_plane.publish.sources.base import GatherParts, NamedTensors, Names, Taken
from rl_plane.publish.sources.fsdp1 import UnitParameter, is_fsdp1
from rl_plane.publish.sources.names import check_specs, engine_name, without_wrappers
from rl_plane.transports.packing import check_readable, spec_from

if TYPE_CHECKING:
    import torch


def stated_collective(collective: bool | None) -> bool:
    """Checks what the trainer says of a function: True if every rank must call it.

    If rank 0 alone called a function that gathers, it would block, or meet another collective.
    """
    torch = sys.modules.get("torch")
    several = (
        torch is not None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
    if collective is None and several:
        raise InvalidRequest(
            "it is unknown whether this function gathers among the trainer's ranks",
            field="collective",
            fix="give ExportSource or StateDictSource, with collective=True if every rank has to call it, else False",
        )
    return bool(collective)


def take_state(
    state: Mapping[str, Any], dtype: torch.dtype | None, names: Names, adapter_config: bytes | None = None
) -> Taken:
    """Returns the tensors of a state dict. It gathers each tensor when the caller asks for it. Tied weights occur
    once."""
    sent: list[tuple[str, Any]] = []
    specs: list[tuple[str, TensorSpec]] = []
    seen: set[Any] = set()
    for name, tensor in state.items():
        if not is_tensor(tensor):
            continue  # `_extra_state` may be any object
        new_name = engine_name(name, names)
        if new_name is None:
            continue
        check_readable(name, tensor)
        identity = _identity(tensor)
        if identity in seen:
            continue
        seen.add(identity)
        sent.append((new_name, tensor))
        specs.append((new_name, sent_spec(name, tensor, dtype)))
    taken = Taken(check_specs(specs), whole_tensors(sent, dtype), adapter_config, device=device_of(sent[0][1]))
    shared = frozenset(name for name, tensor in sent if is_on_all_ranks(tensor))
    if not shared or adapter_config is not None:  # an adapter is small
        return taken
    return replace(taken, shared=shared, owned=partial(owned_tensors, sent, dtype))


def take_held(state: Mapping[str, Any], dtype: torch.dtype | None, names: Names) -> Taken:
    """`take_state` for tensors that the trainer keeps from one version to the next: those can be read in place."""
    taken = take_state(state, dtype, names)
    renamed = ((engine_name(name, names), tensor) for name, tensor in state.items() if _is_plain(tensor, dtype))
    sent = dict(taken.specs)
    held = {name: tensor.detach() for name, tensor in renamed if name in sent}
    return replace(taken, held=held)


def _is_plain(tensor: Any, dtype: torch.dtype | None) -> bool:
    """True if the tensor lies in memory exactly as it is sent."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not _is_zero3(tensor)
        and tensor.device.type in ("cpu", "cuda")
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.dtype == _dtype_of(tensor, dtype)
    )


def whole_tensors(tensors: NamedTensors, dtype: torch.dtype | None) -> Iterator[tuple[str, Any]]:
    """Yields each tensor whole. It is gathered when it is asked for, and released when the next one is.

    On ranks other than 0 a tensor may be None.
    """
    for unit, those in groupby(tensors, lambda one: getattr(one[1], "unit", None)):
        with nullcontext() if unit is None else unit.gathered():
            yield from _each_whole(those, dtype)


def _each_whole(tensors: NamedTensors, dtype: torch.dtype | None) -> Iterator[tuple[str, Any]]:
    for name, tensor in tensors:
        if isinstance(tensor, UnitParameter):
            yield name, _converted(tensor.whole(), dtype)
        elif _is_zero3(tensor):
            import deepspeed

            with deepspeed.zero.GatheredParameters([tensor]):
                yield name, _converted(tensor, dtype)
        elif hasattr(tensor, "full_tensor"):
            part = _converted(tensor, dtype)  # convert before gathering: fewer bytes travel
            mesh_type = part.device_mesh.device_type
            if part.device.type != mesh_type:  # CPU offload: the ranks' group moves no CPU tensors
                part = part.to(mesh_type)
            yield name, part.full_tensor()
        elif hasattr(tensor, "local_shards"):
            yield name, _converted(_gathered_shards(tensor), dtype)
        else:
            yield name, _converted(tensor, dtype)


def is_on_all_ranks(tensor: Any) -> bool:
    """True if each rank of the trainer has a part of the tensor: by FSDP2, or by ZeRO-3."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    if _is_zero3(tensor):
        group = getattr(tensor, "ds_process_group", None)
        return group is not None and dist.get_world_size(group) == dist.get_world_size()
    if hasattr(tensor, "full_tensor"):
        return bool(tensor.device_mesh.size() == dist.get_world_size())
    return False


def owned_tensors(
    tensors: NamedTensors, dtype: torch.dtype | None, owners: Mapping[str, int], gather: GatherParts
) -> Iterator[tuple[str, Any]]:
    """Yields each tensor that this rank owns, whole, and takes part in the gathering of all others."""
    for name, tensor in tensors:
        owner, parts = owners[name], _even_parts(tensor)
        if parts is not None:
            whole = parts.gathered(dtype, gather, owner)
            if whole is not None:
                yield name, whole
            del whole  # before the next one is gathered
        else:  # every rank gathers it, and only the owner keeps it
            for pair in _each_whole([(name, tensor)], dtype):
                if owner == gather.rank:
                    yield pair


@dataclass(frozen=True, slots=True)
class _EvenParts:
    """A tensor of which each rank has the next part along one dimension. The last parts may be shorter, or empty."""

    part: Any
    """This rank's part, with that dimension first."""
    shape: tuple[int, ...]
    """The shape of the whole, with that dimension first."""
    longest: int
    """The number of elements of the longest part."""
    dim: int = 0

    def gathered(self, dtype: torch.dtype | None, gather: GatherParts, owner: int) -> Any:
        """The whole tensor on its owner; None elsewhere."""
        import torch

        part = _converted(self.part, dtype)  # convert before gathering: fewer bytes travel
        data = part.contiguous().reshape(-1).view(torch.uint8)
        parts = gather.gather(data, self.longest * part.element_size(), owner)
        if parts is None:
            return None
        whole = parts.view(part.dtype)[: math.prod(self.shape)]
        return whole.reshape(self.shape).movedim(0, self.dim)


def _even_parts(tensor: Any) -> _EvenParts | None:
    """Describes the even parts of a tensor, one for each rank in its order. None: it lies in another way."""
    import torch.distributed as dist

    if not is_on_all_ranks(tensor):
        return None
    ranks = list(range(dist.get_world_size()))
    if _is_zero3(tensor):
        part = tensor.ds_tensor
        # A parameter may be whole already, and a part may be quantised, or on a disk.
        whole, there = tensor.ds_status.name != "NOT_AVAILABLE", part.status.name == "AVAILABLE"
        if whole or not there or part.dtype != tensor.dtype:
            return None
        if dist.get_process_group_ranks(tensor.ds_process_group) != ranks:
            return None
        return _EvenParts(part, tuple(tensor.ds_shape), part.numel())
    mesh, placement = tensor.device_mesh, tensor.placements[0]
    if mesh.ndim != 1 or mesh.mesh.tolist() != ranks or type(placement).__name__ != "Shard":
        return None
    dim, shape = placement.dim % tensor.dim(), list(tensor.shape)
    shape.insert(0, shape.pop(dim))
    rows = -(-shape[0] // len(ranks))
    return _EvenParts(tensor.to_local().movedim(dim, 0), tuple(shape), rows * math.prod(shape[1:]), dim)


def _gathered_shards(tensor: Any) -> Any:
    """Gathers a ShardedTensor of FSDP1 on rank 0; None elsewhere. Only rank 0's replica takes part (HYBRID_SHARD)."""
    import torch
    import torch.distributed as dist

    if 0 not in dist.get_process_group_ranks(tensor._process_group):
        return None
    size = tensor.size()
    device = "cpu" if dist.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())
    whole = torch.empty(size, dtype=tensor.dtype, device=device) if dist.get_rank() == 0 else None
    tensor.gather(dst=0, out=whole)
    return whole


def named_parameters(module: Any) -> Mapping[str, Any]:
    """Parameters and buffers as `state_dict()` names them, without wrappers' parts; nothing is copied or gathered."""
    if is_fsdp1(module):
        return {without_wrappers(name): tensor for name, tensor in fsdp1.named_parameters(module)}
    # `keep_vars` keeps the parameters themselves: DeepSpeed marks a ZeRO-3 parameter by attributes.
    return {without_wrappers(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}


def is_gathered(tensor: Any) -> bool:
    """True if the tensor must be gathered among ranks."""
    return _is_zero3(tensor) or hasattr(tensor, "full_tensor") or hasattr(tensor, "local_shards")


def _is_zero3(tensor: Any) -> bool:
    return hasattr(tensor, "ds_id")


def is_tensor(value: Any) -> bool:
    """True for a tensor, sharded or not."""
    import torch

    return isinstance(value, (torch.Tensor, UnitParameter)) or hasattr(value, "local_shards")


def _identity(tensor: Any) -> Any:
    """A key that is equal for tied weights, and the same on every rank."""
    import torch

    if _is_zero3(tensor) or isinstance(tensor, UnitParameter) or hasattr(tensor, "local_shards"):
        return id(tensor)
    if hasattr(tensor, "full_tensor"):
        if isinstance(tensor, torch.nn.Parameter):
            return id(tensor)
        tensor = tensor.to_local()
    # Take the storage's address: the data's address is 0 on a rank that has no part of the tensor.
    storage = tensor.untyped_storage().data_ptr()
    if not storage:
        return id(tensor)
    return storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def device_of(tensor: Any) -> str:
    """The device to which `whole_tensors` brings a tensor. A mesh names only the kind of device, so add this rank's."""
    import torch

    device, mesh = torch.device(tensor.device), getattr(tensor, "device_mesh", None)
    if mesh is not None and mesh.device_type != device.type:  # CPU offload
        device = torch.device(mesh.device_type)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return str(device)


def sent_spec(name: str, tensor: Any, dtype: torch.dtype | None) -> TensorSpec:
    """The dtype and shape in which the whole tensor is sent."""
    shape = tuple(tensor.ds_shape if _is_zero3(tensor) else tensor.size())
    return spec_from(name, _dtype_of(tensor, dtype), shape)


def _dtype_of(tensor: Any, dtype: torch.dtype | None) -> Any:
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def _converted(tensor: Any, dtype: torch.dtype | None) -> Any:
    return None if tensor is None else tensor.detach().to(_dtype_of(tensor, dtype))
