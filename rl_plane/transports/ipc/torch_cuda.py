"""Torch's CUDA calls that CUDA IPC needs, in one object. NOT yet run on a GPU.

It uses the private calls of `torch.multiprocessing.reductions`. The tests on machines without a GPU pass an object of
their own, which answers from memory of the host.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rl_plane.transports.trainer_memory import SHM

if TYPE_CHECKING:
    import torch

Share = tuple[bytes, int, int, bytes, int, bytes, bool]
"""A share of an allocation: memory, nbytes, offset, counter, counter_offset, event, event_sync (see `Handle`)."""


class TorchCuda:
    """Makes torch's calls on the GPUs that this process sees. A GPU is named by its UUID."""

    @cached_property
    def uuids(self) -> list[str]:
        """The UUID of each GPU, in the order of their numbers."""
        import torch

        return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]

    def uuid_of(self, device: str) -> str | None:
        """The UUID of a device such as `cuda` or `cuda:1`; None if it is not a GPU."""
        if not device.startswith("cuda"):
            return None
        import torch

        return self.uuids[torch.device(device).index or 0]

    def device_of(self, uuid: str) -> torch.device:
        import torch

        return torch.device("cuda", self.uuids.index(uuid))

    def is_on(self, device: str, tensor: torch.Tensor) -> bool:
        """True if the tensor is on this device."""
        return str(tensor.device) == device

    def synchronize(self, uuid: str) -> None:
        """Waits until all work that was queued on this GPU has ended."""
        import torch

        torch.cuda.synchronize(self.device_of(uuid))

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory to which a GPU copies fast."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a uint8 tensor with a storage of its own over the same memory.

        torch keeps its notes of a share until the storage is freed, and a trainer's weights never are. torch allows
        the call only on the thread's current GPU.
        """
        import torch

        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        with torch.cuda.device_of(whole):
            made: torch.Tensor = torch.from_dlpack(whole)
        return made

    def share(self, storage: torch.UntypedStorage) -> Share:
        """Shares an allocation with one receiver."""
        share: Share = storage._share_cuda_()[1:]
        return share

    def open(self, uuid: str, share: Share) -> torch.UntypedStorage:
        """Opens a share of another process. torch releases the share when the storage is freed."""
        import torch

        made: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(self.device_of(uuid).index, *share)
        return made

    def bytes_left(self, storage: torch.UntypedStorage) -> int | None:
        """The bytes from the start of an opened storage to the end of its allocation. None: CUDA does not tell."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        try:
            address_range = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
        except (OSError, AttributeError):
            return None
        if address_range(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(storage.data_ptr())):
            return None
        return int(base.value + size.value - storage.data_ptr())

    def is_counted(self, counter: bytes) -> bool:
        """True if the process that made a share is on this machine and lives, so its count can be lowered."""
        name = counter.decode()
        return (SHM / name[1:]).is_file() and Path("/proc", name.split("_")[1]).exists()

    def release(self, counter: bytes, counter_offset: int) -> None:
        """Releases a share that was not opened."""
        import torch

        torch.UntypedStorage._release_ipc_counter(counter, counter_offset, device=None)

    def collect(self) -> None:
        """Frees the memory of shares that were released."""
        import torch

        torch.cuda.ipc_collect()

    def empty_cache(self) -> None:
        """Gives free memory back to the GPU."""
        import torch

        torch.cuda.empty_cache()


TORCH_CUDA = TorchCuda()
"""The GPUs of this process."""
