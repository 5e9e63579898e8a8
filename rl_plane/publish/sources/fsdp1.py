"""What FSDP1 (`FullyShardedDataParallel`) has sharded, taken unit by unit.

It holds the parameters of a unit as one flat tensor and gathers them together. Its own state dicts gather every unit,
and copy this rank's part of all, before anybody asks for a tensor. So what a unit has is read from its handle (torch
has no public name for that), and the unit is gathered by `summon_full_params` when its turn comes.
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
    """The outermost one around it."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Whole on rank 0 meanwhile. Collective."""
        if (
            self.root._is_root is None
        ):  # nothing has run yet, and the first one that is summoned counts as the root
            with _summoned(self.root):
                pass
        with _summoned(self.module):
            yield


@dataclass(frozen=True, slots=True, eq=False)
class UnitParameter:
    """Described as a tensor is, before its unit is gathered."""

    unit: Unit
    owner: Any
    """The module that has it as `attribute`."""
    attribute: str
    shape: tuple[int, ...]
    dtype: Any
    device: Any

    def size(self) -> tuple[int, ...]:
        return self.shape

    def whole(self) -> Any:
        """While its unit is gathered: the parameter on rank 0, None elsewhere."""
        import torch.distributed as dist

        return getattr(self.owner, self.attribute) if dist.get_rank() == 0 else None


def is_fsdp1(module: Any) -> bool:
    return any(map(_is_unit, module.modules()))


def named_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """As a state dict has them, with FSDP1's own parts in the names: each unit's, once if tied, then what FSDP1
    was told to ignore, and the persistent buffers."""
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
                "FSDP1 has sharded what is a DTensor already, as with tensor parallelism",
                field="source",
                fix="shard it by FSDP2, or give a state dict that FSDP1 has gathered",
            )
        for info, shape, name in zip(flat._param_infos, flat._shapes, flat._fqns, strict=True):
            parameter = UnitParameter(
                unit, info.module, info.param_name, tuple(shape), flat.dtype, part.compute_device
            )
            yield f"{path}.{name}" if path else name, parameter
        # With `use_orig_params` modules show views of the flat one, those that are tied too.
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
    """Mixed precision casts a buffer in its place, at the first step, or when the first unit is gathered."""
    for above, root in roots:
        if name.startswith(above) and root.mixed_precision.buffer_dtype is not None:
            known = root._buffer_name_to_orig_dtype
            return buffer.to(known.get(_clean(name.removeprefix(above)), buffer.dtype), copy=True)
    return buffer


def _clean(name: str) -> str:
    """As FSDP1 knows it."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def _summoned(module: Any) -> Any:
    return type(module).summon_full_params(module, recurse=False, writeback=False, rank0_only=True)


def _is_unit(module: Any) -> bool:
    return type(module).__name__ == "FullyShardedDataParallel"
