"""The layout `tensors` of `ipc`: receivers read the trainer's own tensors in place, each by a handle of its own.

The tensors are not packed, and need no buffers. In host memory they are tensors that torch shares
(`module.share_memory()`), sent as read-only descriptors of unnamed memory. On a GPU they are shares of the tensors'
allocations (`cuda_buffers`). Tensors of one module are announced together.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.ipc.cuda_buffers import Handle, collect, copied_to, release, share
from rl_plane.transports.ipc.torch_cuda import TorchCuda
from rl_plane.transports.ipc.wire import BUFFERS, close_all
from rl_plane.transports.packing import Tensor, spec_of
from rl_plane.weights.manifest import Manifest, PackedBucket, aligned

if TYPE_CHECKING:
    import torch

MAX_TOGETHER = 32
"""The most tensors of one bucket. Each needs a descriptor, and a user may have as many under way as a process may open:
by default 1024, enough for two buckets for each of sixteen ranks."""


def module_of(name: str) -> str:
    """The module of a tensor, whose tensors an engine may fuse: of `model.layers.0.self_attn.q_proj.weight` it is
    `model.layers.0.self_attn`."""
    return name.rsplit(".", 2)[0] if name.count(".") > 1 else ""


def pack_modules(tensors: Iterable[tuple[str, TensorSpec]], bucket_bytes: int) -> tuple[PackedBucket, ...]:
    """Groups tensors into buckets in the order given, with whole modules in a bucket if they fit."""
    groups: list[list[tuple[str, TensorSpec]]] = []
    room = 0
    for _, module in itertools.groupby(tensors, lambda one: module_of(one[0])):
        members = list(module)
        whole = sum(aligned(spec) for _, spec in members)
        if not groups or whole > room or len(groups[-1]) + len(members) > MAX_TOGETHER:
            groups.append([])
            room = bucket_bytes
        for one in members:
            if groups[-1] and (aligned(one[1]) > room or len(groups[-1]) == MAX_TOGETHER):
                groups.append([])
                room = bucket_bytes
            groups[-1].append(one)
            room -= aligned(one[1])
    return tuple(map(PackedBucket.of, groups))


class LentTensors:
    """The tensors of one version that can be read in place: a bucket is lent if all of its tensors can."""

    def __init__(
        self,
        manifest: Manifest,
        tensors: Mapping[str, Tensor],
        device: str | None,
        cuda: TorchCuda,
    ) -> None:
        """`device`: the GPU from which tensors are read; None for host memory."""
        fits = _is_shared if device is None else partial(cuda.is_on, device)
        self.device = device
        self._cuda = cuda
        self._tensors: dict[int, list[torch.Tensor]] = {}
        """For each lent bucket, its tensors that are not empty."""
        self._there: dict[tuple[int, str], list[torch.Tensor]] = {}
        """For each (bucket, GPU), the tensors that are shared there, as uint8."""
        for number, bucket in enumerate(manifest.buckets):
            filled = [placed for placed in bucket.tensors if placed.spec.nbytes]
            own: list[torch.Tensor] = []
            for placed in filled:
                tensor = tensors.get(placed.name)
                if tensor is None or isinstance(tensor, HostTensor):
                    continue
                if tensor.is_contiguous() and spec_of(tensor) == placed.spec and fits(tensor):
                    own.append(tensor)
            if len(own) == len(filled) <= MAX_TOGETHER:
                self._tensors[number] = own

    @property
    def lent(self) -> Collection[int]:
        """The numbers of the lent buckets."""
        return self._tensors.keys()

    def opened(self, number: int) -> tuple[list[int], list[int]]:
        """The start of each tensor in its memory, and read-only descriptors of the memory, which the caller must
        close."""
        starts, opened = [], list[int]()
        try:
            for tensor in self._tensors[number]:
                shared = tensor.untyped_storage()._share_fd_cpu_()[0]
                opened.append(os.open(f"/proc/self/fd/{shared}", os.O_RDONLY | os.O_CLOEXEC))
                starts.append(_start(tensor))
        except BaseException:
            close_all(opened)
            raise
        return starts, opened

    def shared(self, number: int, uuid: str) -> tuple[list[int], list[Handle]]:
        """The start of each tensor in its share, and shares for one receiver on its own GPU.

        If that is another GPU, they are shares of copies. All copies have ended when this returns.
        """
        assert self.device is not None
        at = self._cuda.uuid_of(self.device)
        assert at is not None, "it is a GPU"
        for key in [key for key in self._there if key[0] <= number - BUFFERS]:
            del self._there[key]  # all receivers have taken it
        tensors, home = self._tensors[number], uuid == at
        if (number, uuid) not in self._there:
            self._there[number, uuid] = [
                self._cuda.alias(one) if home else copied_to(self._cuda, uuid, one) for one in tensors
            ]
        handles: list[Handle] = []
        try:
            for one in self._there[number, uuid]:
                handles.append(share(self._cuda, one))
        except BaseException:
            release(self._cuda, handles)  # no receiver knows them
            raise
        for gpu in sorted({at, uuid}):
            self._cuda.synchronize(gpu)
        return [_start(one) if home else 0 for one in tensors], handles

    def close(self) -> None:
        """Frees the copies and shares."""
        self._there.clear()
        if self.device is not None:
            collect(self._cuda)


def _start(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset() * tensor.element_size())


def _is_shared(tensor: torch.Tensor) -> bool:
    """True if torch shares the tensor's memory by a descriptor. With names a killed process would leave files."""
    import torch

    by_descriptor = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
    if not by_descriptor or tensor.device.type != "cpu" or not tensor.is_shared():
        return False
    # The tensor is shared already, so nothing moves.
    descriptor, nbytes = tensor.untyped_storage()._share_fd_cpu_()
    return bool(descriptor >= 0 and os.fstat(descriptor).st_size >= nbytes)
