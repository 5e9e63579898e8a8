"""The parameters of a model that FSDP1 (`FullyShardedDataParallel`) has sharded, gathered unit by unit.

FSDP1 holds the parameters of a unit as one flat tensor, and gathers them together. Its own state dicts gather every
unit, and copy this rank's part of each, before the first tensor is used. So this module reads a unit's parameters from
its handle, which has no public name in torch, and gathers the unit by `summon_full_params` when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rl_plane.errors import InvalidRequest


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """An FSDP1 module with parameters of its own."""

    module: Any
    root: Any
    """The outermost FSDP1 module around it."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Makes the unit's parameters whole on rank 0, within the context. Collective."""
        if (
            self.root._is_root is None
        ):  # before the first forward FSDP1 takes the first summoned module as the root
            with _summoned(self.root):
                pass
        with _summoned(self.module):
            yield


@dataclass(frozen=True, slots=True, eq=False)
class UnitParameter:
    """A parameter of a unit, described like a tensor before the unit is gathered."""

    unit: Unit
    owner: Any
    """The module that has the parameter as its `attribute`."""
    attribute: str
    shape: tuple[int, ...]
    dtype: Any
    device: Any

    def size(self) -> tuple[int, ...]:
        return self.shape

    def whole(self) -> Any:
        """The parameter on rank 0 while its unit is gathered; None on other ranks."""
        import torch.distributed as dist

        return getattr(self.owner, self.attribute) if dist.get_rank() == 0 else None


def is_fsdp1(module: Any) -> bool:
    """True if FSDP1 has sharded a part of the module."""
    return any(map(_is_unit, module.modules()))


def named_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a state dict has, with FSDP1's own parts in the names.

    First the parameters of each unit (tied ones once), then the parameters that FSDP1 ignores, and persistent
    buffers.
    """
    roots: list[tuple[str, Any]] = []
    sharded: set[int] = set()
    for path, part in module.named_modules():
        if not _is_unit(part):
            continue
        if not any(f"{path}.".startswith(above) for above, _ in roots):
            roots.append((f"{path}." if path else "", part))
        if part._handle is None:
            continue
        root = next(root for above, root in roots if f"{path}.".startswith(above))
        unit, flat = Unit(part, root), part._handle.flat_param
        if any(flat._param_extensions):
            raise InvalidRequest(
                "FSDP1 has sharded a DTensor, as with tensor parallelism",
                field="source",
                fix="shard it by FSDP2, or give a state dict that FSDP1 has gathered",
            )
        for info, shape, name in zip(flat._param_infos, flat._shapes, flat._fqns, strict=True):
            parameter = UnitParameter(
                unit, info.module, info.param_name, tuple(shape), flat.dtype, part.compute_device
            )
            yield f"{path}.{name}" if path else name, parameter
        # With `use_orig_params` the modules' parameters, tied ones too, are views of the flat tensor.
        infos = (*flat._param_infos, *flat._shared_param_infos)
        sharded.add(id(flat))
        sharded.update(id(getattr(info.module, info.param_name, None)) for info in infos)
    for name, one in module.named_parameters():
        if id(one) not in sharded:
            yield name, one
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield (full := f"{path}.{name}" if path else name), _as_it_was(full, buffer, roots)


def _as_it_was(name: str, buffer: Any, roots: list[tuple[str, Any]]) -> Any:
    """The buffer in its own dtype. Mixed precision casts it in place, at the first step or when a unit is first
    gathered."""
    for above, root in roots:
        if name.startswith(above) and root.mixed_precision.buffer_dtype is not None:
            known = root._buffer_name_to_orig_dtype
            return buffer.to(known.get(_clean(name.removeprefix(above)), buffer.dtype), copy=True)
    return buffer


def _clean(name: str) -> str:
    """The name by which FSDP1 knows a buffer."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def _summoned(module: Any) -> Any:
    return type(module).summon_full_params(module, recurse=False, writeback=False, rank0_only=True)


def _is_unit(module: Any) -> bool:
    return type(module).__name__ == "FullyShardedDataParallel"
