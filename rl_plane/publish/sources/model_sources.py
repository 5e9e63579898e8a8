"""Where weights come from: what a trainer holds, as named tensors in a fixed order, one whole tensor at a time.

    ModuleSource     an nn.Module: plain, DDP, FSDP2 (DTensor), FSDP1, DeepSpeed ZeRO-3
    StateDictSource  a mapping name → tensor, or what makes one; DTensors are gathered
    ExportSource     an iterator of (HF name, tensor), made anew for each version: Megatron exports
    AdapterSource    a PEFT adapter of a model, sharded like it
    DirectorySource  a checkpoint or a PEFT directory; needs no torch

Gathering is collective: in each version every rank calls `take` and uses the iterator up, in the same order. Only
rank 0 gets tensors that it may keep.
"""

from __future__ import annotations

import copy
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import ADAPTER_CONFIG_NAME, HostTensor, TensorSpec, checked_name
from rl_plane.publish.sources import fsdp1
from rl_plane.publish.sources.fsdp1 import UnitParameter, is_fsdp1
from rl_plane.transports.packing import Tensor, check_readable, spec_from
from rl_plane.weights.checkpoint import is_adapter, open_checkpoint

if TYPE_CHECKING:
    import torch

WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
"""What FSDP1, torch.compile and activation checkpointing put into names."""
PEFT = "base_model.model."
"""What PEFT puts before each name of an adapter."""
HOLDERS = ("DistributedDataParallel", "DeepSpeedEngine")
"""Classes that are not the model, but have it as `module`."""

Names = Mapping[str, str] | Callable[[str], str | None] | None
"""The trainer's name → the engine's. A mapping leaves other names as they are; a callable's None leaves one out."""
NamedTensors = Iterable[tuple[str, Any]]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Taken:
    """One version's tensors."""

    specs: Sequence[tuple[str, TensorSpec]]
    tensors: Iterator[tuple[str, Tensor]]
    """In the order of `specs`; a tensor is valid until the next one is asked for. On other ranks than 0 what is
    yielded is to be dropped."""
    adapter_config: bytes | None = None
    """Of an adapter: its `adapter_config.json`."""
    close: Callable[[], None] = _nothing
    device: str = "cpu"
    """Of the tensors that will come, as far as it is known."""
    held: Mapping[str, Tensor] = field(default_factory=dict)
    """Those that lie contiguous, and as they are sent, in the trainer's own memory, the host's or a GPU's, and stay."""


class Source(Protocol):
    collective: bool
    """Every rank of the trainer must take part, on the thread that does its other collectives."""
    adapter: bool
    """Is it a LoRA adapter, not base weights?"""

    def take(self) -> Taken:
        """The weights as they are now; cheap: nothing is gathered before the iterator is asked."""


def peft_base_name(name: str) -> str | None:
    """For `names` of a ModuleSource: what the model calls a weight beneath PEFT's layers, without them; None: it is an
    adapter's. Of adapters without `modules_to_save`."""
    return None if ".lora_" in name else name.removeprefix(PEFT).replace(".base_layer.", ".")


class ModuleSource:
    """The parameters and persistent buffers of a module, as `state_dict()` names them; tied weights come once, under
    the first of their names. Of a model with PEFT's layers `names` have to say which are sent, and how."""

    adapter = False

    def __init__(self, module: torch.nn.Module, *, dtype: torch.dtype | None = None, names: Names = None) -> None:
        """`dtype`: floating tensors are converted to it, such as the engine's bfloat16."""
        self._module = _model(module)
        if names is None and hasattr(self._module, "peft_config"):
            raise InvalidRequest(
                "in this model PEFT's layers stand in the place of its own, under names that no engine knows",
                field="names",
                fix="for its adapter give AdapterSource; for its base names=rl_plane.publish.peft_base_name",
            )
        self._dtype = dtype
        self._names = names
        self.collective = _is_sharded(self._module)

    @property
    def module(self) -> torch.nn.Module:
        """The model itself, without the wrapper of DDP or DeepSpeed."""
        return self._module

    def take(self) -> Taken:
        return _with_held(_named_parameters(self._module), self._dtype, self._names)


class StateDictSource:
    adapter = False

    def __init__(
        self,
        state: Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]],
        *,
        dtype: torch.dtype | None = None,
        names: Names = None,
        collective: bool | None = None,
    ) -> None:
        """`collective` None: as the tensors are. Where the trainer has several ranks a callable has to say it."""
        self._state = state
        self._dtype = dtype
        self._names = names
        if callable(state):
            self.collective = _said(collective)
            return
        if any(hasattr(tensor, "local_shards") for tensor in state.values()):
            raise InvalidRequest(
                "a sharded state dict of FSDP1 is a copy: the next version would be this one again",
                field="state",
                fix="give the module, or a function that makes the state dict, with collective=True",
            )
        self.collective = any(map(_is_gathered, state.values())) if collective is None else collective

    def take(self) -> Taken:
        if callable(self._state):  # it may make them anew each time
            return _taken(self._state(), self._dtype, self._names)
        return _with_held(self._state, self._dtype, self._names)


class ExportSource:
    """`export()` gives the iterator, on every rank, once for each version (again where that is sent once more, and once
    before the first one, to learn names, shapes and dtypes, unless `specs` says them)."""

    adapter = False

    def __init__(
        self,
        export: Callable[[], NamedTensors],
        *,
        specs: Sequence[tuple[str, TensorSpec]] | None = None,
        dtype: torch.dtype | None = None,
        names: Names = None,
        collective: bool | None = None,
    ) -> None:
        """`specs`: of what is sent, after `dtype` and `names`. `collective`: does the export gather among ranks? None,
        where the trainer has only one: no."""
        self._export = export
        self._specs = list(specs) if specs is not None else None
        self._device = "cpu"
        self._dtype = dtype
        self._names = names
        self.collective = _said(collective)

    def take(self) -> Taken:
        if self._specs is None:
            self._specs = _checked(self._described())
        return Taken(self._specs, self._whole(), device=self._device)

    def _described(self) -> Iterator[tuple[str, TensorSpec]]:
        for name, tensor in self._renamed():
            if isinstance(tensor, HostTensor):
                yield name, tensor.spec
                continue
            if not _is_tensor(tensor):
                raise InvalidRequest(
                    f"{name!r} is a {type(tensor).__name__}", field="source", fix="give torch tensors"
                )
            self._device = _device(tensor)
            if not self.collective or self._device != "meta":  # other ranks may give that for what rank 0 has
                check_readable(name, tensor)
            yield name, _spec(name, tensor, self._dtype)

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._renamed():
            if isinstance(tensor, HostTensor):
                yield name, tensor
            else:
                yield from _whole([(name, tensor)], self._dtype)

    def _renamed(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._export():
            sent = _renamed(name, self._names)
            if sent is not None:
                yield sent, tensor


class AdapterSource:
    """One adapter of a PEFT model: tensors and config as `save_pretrained` would write them."""

    adapter = True

    def __init__(
        self,
        model: torch.nn.Module,
        adapter_name: str = "default",
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._model: Any = _model(model)
        configs = getattr(self._model, "peft_config", None)
        if not isinstance(configs, Mapping) or adapter_name not in configs:
            known = ", ".join(map(repr, configs)) if isinstance(configs, Mapping) else "it is no PEFT model"
            raise InvalidRequest(
                f"the model has no adapter {adapter_name!r}", field="adapter_name", fix=f"it has: {known}"
            )
        self._adapter_name = adapter_name
        self._dtype = dtype
        self.collective = _is_sharded(self._model)

    def take(self) -> Taken:
        from peft import get_peft_model_state_dict

        if is_fsdp1(self._model):  # PEFT looks for its layers by names that FSDP1's modules don't have
            state = self._lora_of(_named_parameters(self._model))
        else:
            state = get_peft_model_state_dict(
                self._model,
                state_dict=self._model.state_dict(keep_vars=True),
                adapter_name=self._adapter_name,
                save_embedding_layers=False,
            )
            state = {_unwrapped(name): tensor for name, tensor in state.items()}
        # Where transformers has put the adapter into its own model (`add_adapter`), its names lack the wrapper's part.
        state = {PEFT + name.removeprefix(PEFT): tensor for name, tensor in state.items()}
        return _taken(state, self._dtype, None, self._config())

    def _lora_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`….lora_A.<adapter>.weight` as `….lora_A.weight`, as PEFT saves it."""
        pattern = re.compile(rf"(.*\.lora_\w+)\.{re.escape(self._adapter_name)}((?:\.weight|\.bias)?)")
        found = ((pattern.fullmatch(name), tensor) for name, tensor in state.items())
        return {match[1] + match[2]: tensor for match, tensor in found if match}

    def _config(self) -> bytes:
        config = copy.copy(self._model.peft_config[self._adapter_name])
        config.inference_mode = True
        with tempfile.TemporaryDirectory() as directory:
            config.save_pretrained(directory)
            return (Path(directory) / ADAPTER_CONFIG_NAME).read_bytes()


class DirectorySource:
    """A safetensors checkpoint (one file, or a directory with `model.safetensors` or an index), or a PEFT directory."""

    collective = False

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self.adapter = is_adapter(self._path)

    def take(self) -> Taken:
        checkpoint = open_checkpoint(self._path, field="path", kind="lora" if self.adapter else "base")
        config = checkpoint.config.raw if checkpoint.config is not None else None
        return Taken(list(checkpoint.specs.items()), checkpoint.tensors(), config, checkpoint.close)


def as_source(weights: Any, *, dtype: torch.dtype | None = None, names: Names = None) -> Source:
    """The source that fits: of a module, a PEFT model (its adapter `default`), a mapping, a callable that gives an
    iterator, or a path. A source stays as it is."""
    if hasattr(weights, "take") and hasattr(weights, "collective"):
        if dtype is not None or names is not None:
            raise InvalidRequest("dtype and names belong to the source", field="dtype", fix="give them to it")
        return weights  # type: ignore[no-any-return]
    if isinstance(weights, (str, Path)):
        if dtype is not None or names is not None:
            raise InvalidRequest("a directory is sent as it is", field="dtype", fix="leave dtype and names out")
        return DirectorySource(weights)
    if isinstance(weights, Mapping):
        return StateDictSource(weights, dtype=dtype, names=names)
    if hasattr(weights, "state_dict"):
        if hasattr(_model(weights), "peft_config"):
            if names is not None:
                raise InvalidRequest(
                    "an adapter keeps PEFT's names",
                    field="names",
                    fix="leave names out; for the base beneath it give ModuleSource(model, names=peft_base_name)",
                )
            return AdapterSource(weights, dtype=dtype)
        return ModuleSource(weights, dtype=dtype, names=names)
    if callable(weights):
        return ExportSource(weights, dtype=dtype, names=names)
    raise InvalidRequest(
        f"weights can't be taken from {type(weights).__name__}",
        field="source",
        fix="give a module, a state dict, a callable that gives (name, tensor), a path, or a Source",
    )


def _said(collective: bool | None) -> bool:
    """Of a callable. If rank 0 called alone what gathers, it would wait for the others, or meet another gathering."""
    torch = sys.modules.get("torch")
    several = (
        torch is not None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
    if collective is None and several:
        raise InvalidRequest(
            "of a function nobody can see whether it gathers among the trainer's ranks",
            field="collective",
            fix="give ExportSource or StateDictSource, with collective=True if every rank has to call it, else False",
        )
    return bool(collective)


# ---- tensors of torch ----


def _taken(
    state: Mapping[str, Any], dtype: torch.dtype | None, names: Names, adapter_config: bytes | None = None
) -> Taken:
    sent: list[tuple[str, Any]] = []
    specs: list[tuple[str, TensorSpec]] = []
    seen: set[Any] = set()
    for name, tensor in state.items():
        if not _is_tensor(tensor):
            continue  # `_extra_state` may be anything
        new_name = _renamed(name, names)
        if new_name is None:
            continue
        check_readable(name, tensor)
        identity = _identity(tensor)
        if identity in seen:
            continue
        seen.add(identity)
        sent.append((new_name, tensor))
        specs.append((new_name, _spec(name, tensor, dtype)))
    return Taken(_checked(specs), _whole(sent, dtype), adapter_config, device=_device(sent[0][1]))


def _with_held(state: Mapping[str, Any], dtype: torch.dtype | None, names: Names) -> Taken:
    """Of tensors that the trainer keeps from one version to the next."""
    taken = _taken(state, dtype, names)
    renamed = ((_renamed(name, names), tensor) for name, tensor in state.items() if _is_plain(tensor, dtype))
    sent = dict(taken.specs)
    held = {name: tensor.detach() for name, tensor in renamed if name in sent}
    return replace(taken, held=held)


def _is_plain(tensor: Any, dtype: torch.dtype | None) -> bool:
    """Does it lie there as it is sent?"""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not _is_zero3(tensor)
        and tensor.device.type in ("cpu", "cuda")
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.dtype == _dtype_of(tensor, dtype)
    )


def _whole(tensors: NamedTensors, dtype: torch.dtype | None) -> Iterator[tuple[str, Any]]:
    """Each gathered when it is asked for, and given up when the next one is. On other ranks than 0 it may be None."""
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
            part = _converted(tensor, dtype)  # before it is gathered: fewer bytes travel
            if (
                part.device.type != part.device_mesh.device_type
            ):  # CPU offload: the ranks' group has no CPU tensors
                part = part.to(part.device_mesh.device_type)
            yield name, part.full_tensor()
        elif hasattr(tensor, "local_shards"):
            yield name, _converted(_gathered_shards(tensor), dtype)
        else:
            yield name, _converted(tensor, dtype)


def _gathered_shards(tensor: Any) -> Any:
    """A ShardedTensor of FSDP1, whole on rank 0; None elsewhere. Rank 0's replica alone (HYBRID_SHARD) is gathered."""
    import torch
    import torch.distributed as dist

    if 0 not in dist.get_process_group_ranks(tensor._process_group):
        return None
    size = tensor.size()
    device = "cpu" if dist.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())
    whole = torch.empty(size, dtype=tensor.dtype, device=device) if dist.get_rank() == 0 else None
    tensor.gather(dst=0, out=whole)
    return whole


def _named_parameters(module: Any) -> Mapping[str, Any]:
    """`state_dict()` that copies and gathers nothing, without the names of wrappers."""
    if is_fsdp1(module):
        return {_unwrapped(name): tensor for name, tensor in fsdp1.named_parameters(module)}
    # The parameters themselves: those of ZeRO are known by their attributes.
    return {_unwrapped(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _model(module: Any) -> Any:
    """Without what is around the model, in whatever order: what torch.compile made, too."""
    while True:
        # A PEFT model would give its base model's, were it asked for the attribute.
        parts = getattr(module, "_modules", None) or {}
        if "_orig_mod" in parts:
            module = parts["_orig_mod"]
        elif type(module).__name__ in HOLDERS:
            module = module.module
        else:
            return module


def _is_sharded(module: Any) -> bool:
    # The parameters of FSDP2's modules are whole after a forward; `state_dict()` shards them again.
    return is_fsdp1(module) or any(map(_is_fsdp2, module.modules())) or any(map(_is_gathered, module.parameters()))


def _is_fsdp2(module: Any) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _is_gathered(tensor: Any) -> bool:
    return _is_zero3(tensor) or hasattr(tensor, "full_tensor") or hasattr(tensor, "local_shards")


def _is_zero3(tensor: Any) -> bool:
    return hasattr(tensor, "ds_id")


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, (torch.Tensor, UnitParameter)) or hasattr(value, "local_shards")


def _identity(tensor: Any) -> Any:
    """Equal for tied weights, and on every rank for the same ones."""
    import torch

    if _is_zero3(tensor) or isinstance(tensor, UnitParameter) or hasattr(tensor, "local_shards"):
        return id(tensor)
    if hasattr(tensor, "full_tensor"):
        if isinstance(tensor, torch.nn.Parameter):
            return id(tensor)
        tensor = tensor.to_local()
    # The storage's address: that of the data is 0 where a rank has no part of a tensor.
    storage = tensor.untyped_storage().data_ptr()
    if not storage:
        return id(tensor)
    return storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _device(tensor: Any) -> str:
    """Where `_whole` brings it: a mesh tells of which kind, and not which one of this rank's."""
    import torch

    device, mesh = torch.device(tensor.device), getattr(tensor, "device_mesh", None)
    if mesh is not None and mesh.device_type != device.type:  # CPU offload
        device = torch.device(mesh.device_type)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return str(device)


def _spec(name: str, tensor: Any, dtype: torch.dtype | None) -> TensorSpec:
    shape = tuple(tensor.ds_shape if _is_zero3(tensor) else tensor.size())
    return spec_from(name, _dtype_of(tensor, dtype), shape)


def _dtype_of(tensor: Any, dtype: torch.dtype | None) -> Any:
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def _converted(tensor: Any, dtype: torch.dtype | None) -> Any:
    return None if tensor is None else tensor.detach().to(_dtype_of(tensor, dtype))


# ---- names ----


def _renamed(name: str, names: Names) -> str | None:
    if names is None:
        if not isinstance(name, str):
            raise InvalidRequest(f"a tensor is called {name!r}", field="source", fix="give each a str as its name")
        return name
    new_name = names(name) if callable(names) else names.get(name, name)
    if new_name is not None and not isinstance(new_name, str):
        raise InvalidRequest(f"{name!r} becomes {new_name!r}", field="names", fix="map it to a str, or to None")
    return new_name


def _checked(specs: Iterable[tuple[str, TensorSpec]]) -> list[tuple[str, TensorSpec]]:
    found = dict[str, TensorSpec]()
    for name, spec in specs:
        if not checked_name(name):
            raise InvalidRequest(f"{name[:200]!r} is no name for a tensor", field="names", fix="map it to another")
        if name in found:
            raise InvalidRequest(f"two tensors are called {name!r}", field="names", fix="map each to its own name")
        found[name] = spec
    if not found:
        raise InvalidRequest("there are no tensors", field="source", fix="give weights, and names that keep some")
    return list(found.items())
