"""The weights that a trainer's own export function yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.publish.sources.base import NamedTensors, Names, Taken
from rl_plane.publish.sources.names import check_specs, engine_name
from rl_plane.publish.sources.torch_tensors import (
    device_of,
    is_tensor,
    sent_spec,
    stated_collective,
    whole_tensors,
)
from rl_plane.transports.packing import Tensor, check_readable

if TYPE_CHECKING:
    import torch


class ExportSource:
    """The tensors of `export()`, an iterator of (name, tensor), such as Megatron's export to HF names.

    Every rank calls `export` once for each version, and again if that version is sent once more. Without `specs` it is
    called once more before the first version, to learn names, shapes and dtypes.
    """

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
        """`specs`: names, dtypes and shapes as they are sent, after `dtype` and `names`. `collective`: True if the
        export gathers among ranks; it must be given where the trainer has several."""
        self._export = export
        self._specs = list(specs) if specs is not None else None
        self._device = "cpu"
        self._dtype = dtype
        self._names = names
        self.collective = stated_collective(collective)

    def take(self) -> Taken:
        if self._specs is None:
            self._specs = check_specs(self._described())
        return Taken(self._specs, self._whole(), device=self._device)

    def _described(self) -> Iterator[tuple[str, TensorSpec]]:
        for name, tensor in self._renamed():
            if isinstance(tensor, HostTensor):
                yield name, tensor.spec
                continue
            if not is_tensor(tensor):
                raise InvalidRequest(
                    f"{name!r} is a {type(tensor).__name__}", field="source", fix="give torch tensors"
                )
            self._device = device_of(tensor)
            # Ranks other than 0 may yield meta tensors.
            if not self.collective or self._device != "meta":
                check_readable(name, tensor)
            yield name, sent_spec(name, tensor, self._dtype)

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._renamed():
            if isinstance(tensor, HostTensor):
                yield name, tensor
            else:
                yield from whole_tensors([(name, tensor)], self._dtype)

    def _renamed(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._export():
            sent = engine_name(name, self._names)
            if sent is not None:
                yield sent, tensor
