"""The layout `tensors` of the `ipc` transport: the trainer's own tensors, each by a handle of its own, where they lie.

They are not packed, and need no buffers. In host memory these are tensors that torch shares (`module.share_memory()`),
handed over as read-only descriptors of memory that has no name any more; on a GPU, shares of the allocations in which
they lie (`ipc_cuda`). Tensors of one module are announced together.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.ipc.cuda_buffers import (
    Handle,
    alias,
    collect,
    copied_to,
    given_up,
    share,
    synchronize,
    uuid_of,
)
from rl_plane.transports.ipc.wire import BUFFERS, close_all
from rl_plane.transports.packing import Tensor, spec_of
from rl_plane.weights.manifest import ALIGN_BYTES, Bucket, Manifest

if TYPE_CHECKING:
    import torch

MAX_TOGETHER = 32
"""Tensors of one bucket. Each is a descriptor, of which a user may have as many on their way as a process may open: by
default 1024, which is room for the two buckets that each of sixteen ranks is told of."""


def module_of(name: str) -> str:
    """`model.layers.0.self_attn` of `model.layers.0.self_attn.q_proj.weight`: what an engine may fuse is in it."""
    return name.rsplit(".", 2)[0] if name.count(".") > 1 else ""


def pack_modules(
    tensors: Iterable[tuple[str, TensorSpec]], bucket_bytes: int, together: int = MAX_TOGETHER
) -> tuple[Bucket, ...]:
    """In the order given, whole modules in each bucket, as far as one fits."""
    groups: list[list[tuple[str, TensorSpec]]] = []
    room = 0
    for _, module in itertools.groupby(tensors, lambda one: module_of(one[0])):
        members = list(module)
        whole = sum(map(_size, members))
        if not groups or whole > room or len(groups[-1]) + len(members) > together:
            groups.append([])
            room = bucket_bytes
        for one in members:
            if groups[-1] and (_size(one) > room or len(groups[-1]) == together):
                groups.append([])
                room = bucket_bytes
            groups[-1].append(one)
            room -= _size(one)
    return tuple(map(Bucket.of, groups))


def _size(one: tuple[str, TensorSpec]) -> int:
    return -(-one[1].nbytes // ALIGN_BYTES) * ALIGN_BYTES


class OwnTensors:
    """Of one version: those buckets all of whose tensors can be read where they are."""

    def __init__(self, manifest: Manifest, tensors: Mapping[str, Tensor], device: str | None = None) -> None:
        """`device`: the GPU whose memory is read; None: the host's."""
        fits = _is_shared if device is None else partial(_is_on, device)
        self.device = device
        self._tensors: dict[int, list[torch.Tensor]] = {}
        """Of each such bucket, those that have any bytes."""
        self._there: dict[tuple[int, str], list[torch.Tensor]] = {}
        """Of a bucket on a GPU, as uint8: what is shared."""
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
        return self._tensors.keys()

    def opened(self, number: int) -> tuple[list[int], list[int]]:
        """Where each tensor begins in its memory, and these memories: the caller's descriptors, for reading only."""
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
        """Likewise shares, for one receiver, on its own GPU; if that is another one, of copies there. Everything is
        there when this returns."""
        assert self.device is not None
        at = uuid_of(self.device)
        assert at is not None, "it is a GPU"
        for key in [key for key in self._there if key[0] <= number - BUFFERS]:
            del self._there[key]  # all have taken it
        tensors, home = self._tensors[number], uuid == at
        if (number, uuid) not in self._there:
            self._there[number, uuid] = [alias(one) if home else copied_to(uuid, one) for one in tensors]
        handles: list[Handle] = []
        try:
            for one in self._there[number, uuid]:
                handles.append(share(one))
        except BaseException:
            given_up(handles)  # nobody is told of them
            raise
        synchronize(at, uuid)
        return [_start(one) if home else 0 for one in tensors], handles

    def close(self) -> None:
        self._there.clear()
        if self.device is not None:
            collect()


def _start(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset() * tensor.element_size())


def _is_on(device: str, tensor: torch.Tensor) -> bool:
    return str(tensor.device) == device


def _is_shared(tensor: torch.Tensor) -> bool:
    """In memory that torch shares by a descriptor? Where it shares by names, a process that is killed leaves them."""
    import torch

    by_descriptor = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
    if not by_descriptor or tensor.device.type != "cpu" or not tensor.is_shared():
        return False
    descriptor, nbytes = tensor.untyped_storage()._share_fd_cpu_()  # moves nothing: it is shared
    return bool(descriptor >= 0 and os.fstat(descriptor).st_size >= nbytes)


def read_memory(descriptor: int, start: int, place: memoryview) -> None:
    """What a trainer's descriptor gives, for a receiver: it may become shorter while it is read. ValueError then, and
    for what is no memory or file."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise ValueError("a descriptor of no memory")
    done = 0
    while done < place.nbytes:
        read = os.preadv(descriptor, [place[done:]], start + done)
        if not read:
            raise ValueError(f"memory that ends after {start + done} bytes, within a tensor")
        done += read
