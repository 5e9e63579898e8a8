"""Stand-ins for CUDA IPC between processes: a GPU's memory is a file in /dev/shm. They show nothing about CUDA itself.

Torch's names, counts and arguments are the real ones: a share is counted in a file of the trainer, 1 when it is made
and 0 when it was released, and can be opened once.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plane.transports.ipc.torch_cuda import Share, TorchCuda
from rl_plane.transports.trainer_memory import SHM

if TYPE_CHECKING:
    import torch

EVENT = bytes(64)
HANDLE_BYTES = 66
COUNTERS = 10_000
_INT = struct.Struct("<i")


def _counted(counter: bytes, offset: int, add: int) -> int:
    """Adds to a count, and returns it."""
    with open(SHM / counter.decode()[1:], "r+b") as file, mmap.mmap(file.fileno(), 0) as counts:
        (count,) = _INT.unpack_from(counts, offset * _INT.size)
        _INT.pack_into(counts, offset * _INT.size, count + add)
        return int(count) + add


class SharedHostCuda(TorchCuda):
    """A process on one GPU."""

    def __init__(self, gpu: str) -> None:
        self.uuids = [gpu]

    def uuid_of(self, device: str) -> str:
        return self.uuids[0]

    def device_of(self, uuid: str) -> torch.device:
        import torch

        assert uuid in self.uuids
        return torch.device("cpu")

    def synchronize(self, uuid: str) -> None:
        pass

    def open(self, uuid: str, share: Share) -> torch.UntypedStorage:
        import torch

        handle, _, _, counter, offset, _, _ = share
        path = SHM / handle.rstrip(b"\0").decode()
        if not path.exists():
            raise RuntimeError("CUDA error: invalid resource handle")
        assert _counted(counter, offset, 0) == 1, "a share is opened once"
        storage = torch.from_file(
            str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8
        ).untyped_storage()
        weakref.finalize(storage, self.release, counter, offset)
        return storage

    def bytes_left(self, storage: torch.UntypedStorage) -> int:
        return int(storage.nbytes())

    def release(self, counter: bytes, counter_offset: int) -> None:
        _counted(counter, counter_offset, -1)

    def collect(self) -> None:
        pass


def put_into_worker(gpu: str) -> None:
    """Puts the worker of this process on a GPU."""
    from rl_plane.transports.ipc.receiver import IpcTransport

    IpcTransport.__init__.__defaults__ = (SharedHostCuda(gpu),)


WORKER_PATCH = "from tests.support.shared_host_cuda import put_into_worker; put_into_worker({gpu!r})"


class SharedMemory:
    """The memory of the GPUs of a trainer, and the shares of it."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._counter = f"torch_{os.getpid()}_7_1"
        self._files: dict[int, Path] = {}
        """The file of each tensor that was made here, by the address of its memory."""
        self._tensors: list[Any] = []
        self._made: list[Path] = [SHM / self._counter]
        self._made[0].write_bytes(bytes(COUNTERS * _INT.size))
        self._shares = itertools.count()

    def empty(self, nbytes: int) -> Any:
        """A tensor of bytes on a GPU."""
        import torch

        path = SHM / f"rlp_gpu_{os.getpid()}_{next(self._numbers)}"
        path.write_bytes(bytes(nbytes))
        self._made.append(path)
        tensor = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        self._files[tensor.data_ptr()] = path
        self._tensors.append(tensor)
        return tensor

    def reduce_tensor(self, tensor: Any) -> tuple[Any, tuple[Any, ...]]:
        """Shares a tensor, as torch's function of this name does. A tensor outside a GPU is copied there first."""
        import torch
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        if tensor.data_ptr() not in self._files:
            there = self.empty(max(tensor.nbytes, 1))[: tensor.nbytes]
            there.copy_(tensor.detach().reshape(-1).view(torch.uint8))
            path, nbytes = self._files[there.data_ptr()], tensor.nbytes
        else:
            path, nbytes = self._files[tensor.data_ptr()], tensor.nbytes
        number = next(self._shares)
        _counted(b"/" + self._counter.encode(), number, 1)
        return rebuild_cuda_tensor, (
            torch.Tensor,
            tensor.size(),
            tensor.stride(),
            0,
            torch.storage.TypedStorage,
            tensor.dtype,
            0,
            path.name.encode().ljust(HANDLE_BYTES, b"\0"),
            nbytes,
            0,
            False,
            b"/" + self._counter.encode(),
            number,
            EVENT,
            True,
        )

    def again(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """A further share of the same memory, for another process."""
        number = next(self._shares)
        _counted(b"/" + self._counter.encode(), number, 1)
        return (*arguments[:12], number, *arguments[13:])

    def held(self) -> list[int]:
        """The counts that are not 0: torch would keep their memory."""
        data = (SHM / self._counter).read_bytes()
        return [one for (one,) in _INT.iter_unpack(data) if one]

    def close(self) -> None:
        for one in self._made:
            one.unlink(missing_ok=True)
