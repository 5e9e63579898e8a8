"""CUDA IPC: buckets that stay on a GPU until a receiver on this machine reads them. NOT yet run on a GPU.

It uses torch's own calls (`torch_cuda`); ints, bytes and bools cross between processes.

For each share torch counts in a file in /dev/shm whether it was opened and released, and frees the memory when the
count is 0. So each receiver gets shares of its own. If a receiver dies, the sender counts for it. The file is removed
with the update; receivers remove the file of a trainer that was killed.
"""

from __future__ import annotations

import re
import select
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from rl_plane.errors import Unavailable
from rl_plane.transports.ipc.torch_cuda import TorchCuda
from rl_plane.transports.ipc.wire import BUFFERS
from rl_plane.transports.trainer_memory import SHM
from rl_plane.weights.manifest import ALIGN_BYTES, Manifest

if TYPE_CHECKING:
    import torch

MAX_HANDLE_BYTES = 1024
"""The longest handle. cudaMalloc's have 66 bytes; those of expandable segments grow with the memory. Two must fit into
a packet."""

EVENT_BYTES = 64
COUNTERS = 10_000
"""The counters in one file of torch. A counter beyond its end would be in another owner's memory."""

COUNTER_FILE = re.compile(rb"/torch_(\d{1,10})_\d{1,20}_\d{1,20}")
"""The name of a file of counters, with the id of the process that made it."""

TRAINER_ENDS_S = 1.0
"""Seconds to wait for the end of a killed process, which closes its sockets a moment earlier."""


class Handle(NamedTuple):
    """The handle of a buffer: torch's share of it, without the sender's own device number."""

    memory: bytes
    nbytes: int
    offset: int
    """The offset of the buffer in the allocation that `memory` opens."""
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool

    def to_wire(self) -> list[Any]:
        return list(self)

    @classmethod
    def from_wire(cls, wire: Any, needed: int, start: int | None = None) -> Self:
        """Parses a handle from another process. Raises ValueError unless it is a handle of `needed` bytes, or with
        `start` of at least so many from there on. Only its owner can ask CUDA for the real size of the allocation."""
        types = (bytes, int, int, bytes, int, bytes, bool)
        if not isinstance(wire, list) or [type(one) for one in wire] != list(types):
            raise ValueError("a handle without torch's seven values")
        handle = cls(*wire)
        if not 0 < len(handle.memory) <= MAX_HANDLE_BYTES or len(handle.event) not in (0, EVENT_BYTES):
            raise ValueError("a handle whose length is not CUDA's")
        fits = handle.nbytes == needed if start is None else 0 <= start <= handle.nbytes - needed
        if not fits or not 0 <= handle.offset < 1 << 62 or handle.offset % ALIGN_BYTES:
            raise ValueError(f"a handle of {handle.nbytes} bytes at {handle.offset}, not of {needed}")
        if not COUNTER_FILE.fullmatch(handle.counter) or not 0 <= handle.counter_offset < COUNTERS:
            raise ValueError("a handle whose counter is not torch's")
        return handle


def seen(cuda: TorchCuda, uuid: Any) -> str:
    """Returns the UUID if this process sees the GPU, else raises ValueError."""
    if not isinstance(uuid, str) or uuid not in cuda.uuids:
        raise ValueError(
            f"the trainer does not see the GPU {str(uuid)[:100]}: let CUDA_VISIBLE_DEVICES of the trainer name "
            "those of the engines too, or use another transport"
        )
    return uuid


class GpuBuffers:
    """A sender's buffers for one update: two on the GPU of the weights, and two on each other GPU that has receivers.

    The latter are filled by copies from GPU to GPU.
    """

    def __init__(self, manifest: Manifest, nbytes: int, device: str, cuda: TorchCuda) -> None:
        self.nbytes = nbytes
        self._cuda = cuda
        home = cuda.uuid_of(device)
        assert home is not None, "it is a GPU"
        self._home = home
        self._sizes = [bucket.nbytes for bucket in manifest.buckets]
        self._buffers: dict[str, list[torch.Tensor]] = {}
        self._shared: list[Handle] = []
        self._made(home)

    def _made(self, uuid: str) -> list[torch.Tensor]:
        import torch

        if uuid not in self._buffers:
            try:
                self._buffers[uuid] = [
                    torch.empty(self.nbytes, dtype=torch.uint8, device=self._cuda.device_of(uuid))
                    for _ in range(BUFFERS)
                ]
            except torch.OutOfMemoryError as error:
                raise Unavailable(
                    f"no {BUFFERS} × {self.nbytes} bytes on {uuid}", fix="use smaller buckets"
                ) from error
        return self._buffers[uuid]

    def place(self, number: int) -> torch.Tensor:
        return self._buffers[self._home][number % BUFFERS][: self._sizes[number]]

    def filled(self, number: int) -> None:
        """Copies a packed bucket to the other GPUs, and waits for all copies, since another process would not wait."""
        for uuid, buffers in self._buffers.items():
            if uuid != self._home:
                buffers[number % BUFFERS][: self._sizes[number]].copy_(self.place(number))
        for uuid in self._buffers:
            self._cuda.synchronize(uuid)

    def shared(self, uuid: str) -> list[Handle]:
        """Shares of the buffers for one receiver, on its own GPU."""
        buffers = self._buffers.get(uuid)
        if buffers is None:
            buffers = self._made(uuid)
            for there, here in zip(buffers, self._buffers[self._home], strict=True):
                there.copy_(here)  # buckets that other receivers know already
            self._cuda.synchronize(uuid)
        handles: list[Handle] = []
        try:
            for buffer in buffers:
                handles.append(share(self._cuda, buffer))
        except BaseException:
            release(self._cuda, handles)  # no receiver knows them
            raise
        return handles

    def close(self) -> None:
        self._buffers.clear()
        collect(self._cuda)


def collect(cuda: TorchCuda) -> None:
    """Frees memory that all receivers have released, and then torch's file of counters."""
    cuda.collect()
    cuda.empty_cache()


def share(cuda: TorchCuda, tensor: torch.Tensor) -> Handle:
    """Shares the allocation of a tensor with one receiver."""
    handle = Handle(*cuda.share(tensor.untyped_storage()))
    if len(handle.memory) > MAX_HANDLE_BYTES:
        release(cuda, [handle])
        raise ValueError("expandable segments make the handle too long: use smaller buckets, or turn them off")
    return handle


def copied_to(cuda: TorchCuda, uuid: str, tensor: torch.Tensor) -> torch.Tensor:
    import torch

    made = torch.empty(tensor.nbytes, dtype=torch.uint8, device=cuda.device_of(uuid))
    return made.copy_(tensor.detach().reshape(-1).view(torch.uint8))


def release(cuda: TorchCuda, handles: list[Handle]) -> None:
    """Releases shares for a receiver that never got them, or has died."""
    for handle in handles:
        cuda.release(handle.counter, handle.counter_offset)


def opened(cuda: TorchCuda, handles: list[Handle], uuid: str) -> list[torch.Tensor]:
    """Opens shares in a receiver. If one can't be opened, all are released."""
    import torch

    device = cuda.device_of(uuid)
    storages: list[torch.UntypedStorage] = []
    try:
        for one in handles:
            storages.append(cuda.open(uuid, one))
        return [torch.empty(0, dtype=torch.uint8, device=device).set_(one) for one in storages]
    except BaseException:
        never_opened = handles[len(storages) :]
        storages.clear()  # the error's traceback would hold them; torch releases the opened storages
        cuda.collect()
        release(cuda, never_opened)
        raise


def read_opened(
    cuda: TorchCuda, uuid: str, handles: list[Handle], starts: Sequence[int], places: Sequence[memoryview]
) -> None:
    """Copies tensors from their shares into host memory, and releases the shares. `starts`: where each begins."""
    import torch

    buffers = opened(cuda, handles, uuid)
    try:
        for number, place in enumerate(places):
            start = starts[number]
            into = torch.frombuffer(place, dtype=torch.uint8)
            into.copy_(buffers[number][start : start + place.nbytes])
        cuda.synchronize(uuid)
    finally:
        buffers.clear()
        cuda.collect()


class OpenBuckets:
    """A receiver's view of the buffers. It copies each bucket into host memory, where weights are checked and
    staged."""

    def __init__(self, handles: list[Handle], uuid: str, cuda: TorchCuda) -> None:
        self._cuda = cuda
        self._uuid = uuid
        self.buffers = opened(cuda, handles, uuid)
        try:
            self._host = cuda.pinned(handles[0].nbytes)
        except BaseException:
            self.close()
            raise

    def read(self, number: int, nbytes: int) -> memoryview:
        """Copies a bucket. The result is valid until the next call; the sender may reuse its buffer at once."""
        self._host[:nbytes].copy_(self.buffers[number % BUFFERS][:nbytes])
        self._cuda.synchronize(self._uuid)
        return memoryview(self._host.numpy())[:nbytes].toreadonly()

    def close(self) -> None:
        """Closes the buffers. Must happen before the last `taken`: CUDA wants memory closed before it is freed."""
        self.buffers.clear()
        self._cuda.collect()


def remove_counters(
    handles: list[Handle], pid: int, pidfd: int, *, shm: Path = SHM, ends_s: float = TRAINER_ENDS_S
) -> None:
    """Removes the files of counters of the trainer `pid` if it was killed: no other process would.

    The files are in the directory `shm`. A killed trainer has `ends_s` seconds to end.
    """
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    if not ended.poll(ends_s * 1000):
        return  # the trainer lives, and may use the files
    for name in {handle.counter for handle in handles}:
        match = COUNTER_FILE.fullmatch(name)
        if match is not None and int(match[1]) == pid:
            (shm / name.decode()[1:]).unlink(missing_ok=True)
