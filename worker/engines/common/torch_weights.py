"""The weights of a transformers model under their checkpoint names: which must come, staging, swapping and checking
them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, InvalidWeights, Unsupported
from rl_plane.protocol.versions import DTYPE_BYTES, HostTensor, TensorSpec, WeightVersion
from rl_plane.transports.packing import names_of_dtypes
from rl_plane.weights.read_ahead import host_memory
from worker.engines.common.weight_checks import TensorChecks, write_noise
from worker.receive.weight_holder import TensorStream, WeightHolder

NAME_OF_DTYPE = names_of_dtypes()
DTYPE_OF_NAME = {name: dtype for dtype, name in NAME_OF_DTYPE.items()}


StagedTensors = dict[str, torch.Tensor]
"""Staged weights by checkpoint name, in the model's dtypes: in the staging area, or cast."""


class ModelWeights(WeightHolder):
    """The live weights of a transformers model."""

    def __init__(
        self,
        model: Any,
        saved: Mapping[str, TensorSpec] = MappingProxyType({}),
        before_overwrite: Callable[[], None] = lambda: None,
    ) -> None:
        """`saved`: the tensors of the checkpoint that the model was loaded from. `before_overwrite` says that the
        weights are of no version from here on."""
        self.version: WeightVersion | None = None
        """The version of the live weights. None: they are of no version."""
        self._model = model
        self._before_overwrite = before_overwrite
        # Taken once: adapters change the names of parameters, and leave the parameters as they are.
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        targets = _checkpoint_views(model)
        ties = {_saved_name(model, name, targets): of for name, of in model.all_tied_weights_keys.items()}
        self.targets = {name: view for name, view in targets.items() if name not in ties}
        """Checkpoint name → the part of the live model that the tensor fills."""
        # One tensor has both names: its memory tells the checkpoint's name of the other one.
        at = {view.data_ptr(): name for name, view in self.targets.items()}
        self._tied = {name: at.get(targets[name].data_ptr(), of) for name, of in ties.items() if name in targets}
        own = {name: NAME_OF_DTYPE[view.dtype] for name, view in self.targets.items()}
        dtype = NAME_OF_DTYPE[model.dtype]
        # A tensor that the checkpoint has in the model's dtype is taken in it, whatever type the model keeps.
        as_saved = {name for name, spec in saved.items() if spec.dtype == dtype and own.get(name, dtype) != dtype}
        self._spec = {
            name: TensorSpec(dtype if name in as_saved else own[name], tuple(view.shape))
            for name, view in self.targets.items()
        }
        self._own = {name: own[name] for name in as_saved}
        self._lock = threading.Lock()
        self.checks = TensorChecks(lambda: state, self._lock)

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self._spec

    def tied_tensors(self) -> Mapping[str, str]:
        return self._tied

    def stage(self, tensors: TensorStream, cancelled: Cancelled) -> StagedTensors:
        return dict(host_copies(tensors, self._spec, self._tied, cancelled, self._own))

    def overwrite(self, tensors: TensorStream, cancelled: Cancelled) -> None:
        """Loads tensors one after the other as they arrive. If it raises, the weights are a mixture."""
        self._before_overwrite()
        with self._lock, torch.no_grad():
            for name, tensor in host_copies(tensors, self._spec, self._tied, cancelled, self._own):
                self.targets[name].copy_(tensor)
            await_copies(self._model.device)

    def load(self, staged: StagedTensors, names: Collection[str] | None = None) -> None:
        """Copies staged weights into the live ones, so that tied weights and views stay what they are. No step may run.
        `names`: the tensors that differ from the live ones. None: all of them may."""
        with self._lock, torch.no_grad():
            for name in staged if names is None else names:
                self.targets[name].copy_(staged[name])
            await_copies(self._model.device)

    def reset(self) -> None:
        """Writes noise over every floating point tensor. No step may run."""
        with self._lock:
            write_noise(self.targets.items())
            await_copies(self._model.device)


def await_copies(device: torch.device) -> None:
    """Waits until all copies to this device are done. An engine's steps run on CUDA streams of their own, which do not
    wait for copies."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_copies(
    tensors: TensorStream,
    wanted: Mapping[str, TensorSpec],
    tied: Collection[str],
    cancelled: Callable[[], bool],
    own: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors in the dtypes of `wanted`, without the tensors of `tied` names.

    Each is a copy, unless it is `owned` and needs no cast: then it is the given memory. A tensor that must be cast gets
    the dtype that `own` has for its name, if it has one. The receiver has checked the tensors, in another process if
    the engine has ranks. This check of names, shapes and number is the last before the engine's memory. Raises
    InvalidWeights for a tensor that does not fit, and at the end for missing tensors."""
    left = set(wanted)
    for name, tensor in tensors:
        if cancelled():
            raise EngineFailed("staging was cancelled")
        if name in tied:
            continue  # the model has one tensor for both names
        spec = wanted.get(name)
        if spec is None or spec.shape != tensor.spec.shape:
            raise InvalidWeights(
                f"{name} {list(tensor.spec.shape)} does not fit the model", field=name, fix="send its weights"
            )
        left.discard(name)
        dtype = spec.dtype if tensor.spec.dtype == spec.dtype else own.get(name, spec.dtype)
        yield name, _kept(tensor).to(DTYPE_OF_NAME[dtype])
    if left:
        first = min(left)
        raise InvalidWeights(
            f"{len(left)} tensors are missing, {first} the first", field=first, fix="send them all"
        )


def _kept(tensor: HostTensor) -> torch.Tensor:
    """The tensor in memory that stays valid: its own memory, or a copy."""
    spec = tensor.spec
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=DTYPE_OF_NAME[spec.dtype])
    kept = np.frombuffer(tensor.data, dtype=np.uint8)
    if not tensor.owned or kept.ctypes.data % DTYPE_BYTES[spec.dtype]:
        # numpy takes read-only memory, and other threads run meanwhile. Memory of torch.empty would take longer to free
        # than the swap takes to copy, and it is freed while the engine is paused.
        copied = np.frombuffer(host_memory(spec.nbytes), dtype=np.uint8)
        np.copyto(copied, kept)
        kept = copied
    return torch.from_numpy(kept).view(DTYPE_OF_NAME[spec.dtype]).reshape(spec.shape)


def _saved_name(model: Any, name: str, saved: Collection[str]) -> str:
    """The checkpoint's name of one of the model's own parameters."""
    from transformers.core_model_loading import revert_weight_conversion

    if name in saved:
        return name
    state = {key: tensor for key, tensor in model.state_dict().items() if key == name}
    return next(iter(revert_weight_conversion(model, state)), name)


def _checkpoint_views(model: Any) -> dict[str, torch.Tensor]:
    """Maps each checkpoint name to the part of the live model that it fills.

    Most names are those of the state dict. If a model fuses or renames tensors (mixtures of experts), its library
    converts the state back to checkpoint form: it returns views of some live tensors, and copies of others. For the
    copies, the same conversion runs on tensors that hold their own element numbers, which tell the view.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    views = dict(revert_weight_conversion(model, dict(state)))
    at = {tensor.untyped_storage().data_ptr(): name for name, tensor in state.items()}
    covered = {at.get(view.untyped_storage().data_ptr()) for view in views.values()}
    fused = {name: tensor for name, tensor in state.items() if _storage_owner(at, tensor) not in covered}
    if not fused:
        return views
    counted, starts, total = {}, {}, 0
    for name, tensor in fused.items():
        if not tensor.is_contiguous():
            raise _not_as_saved(model, name)
        counted[name] = torch.arange(total, total + tensor.numel()).reshape(tensor.shape)
        starts[name] = total
        total += tensor.numel()
    for name, numbers in revert_weight_conversion(model, counted).items():
        first = int(numbers.flatten()[0])
        source = max((start, origin) for origin, start in starts.items() if start <= first)[1]
        stride = [
            int(numbers.select(axis, 1).flatten()[0]) - first if side > 1 else 1
            for axis, side in enumerate(numbers.shape)
        ]
        offset = first - starts[source]
        elements = counted[source].reshape(-1)
        try:
            found = torch.equal(elements.as_strided(numbers.shape, stride, offset), numbers)
        except RuntimeError:  # the strides lead out of the tensor
            found = False
        if not found:
            raise _not_as_saved(model, name)
        views[name] = fused[source].reshape(-1).as_strided(numbers.shape, stride, offset)
    return views


def _not_as_saved(model: Any, name: str) -> Unsupported:
    return Unsupported(
        f"{type(model).__name__} keeps {name} in a form that the hf engine can't update",
        field="model",
        fix="serve this model with another engine",
    )


def _storage_owner(at: Mapping[int, str], tensor: torch.Tensor) -> str:
    return at[tensor.untyped_storage().data_ptr()]
