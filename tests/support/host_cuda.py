"""A stand-in for torch's CUDA calls on memory of this process. It shows nothing about CUDA itself."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_plane.transports.ipc.torch_cuda import Share, TorchCuda

if TYPE_CHECKING:
    import torch

GPUS = ("GPU-here", "GPU-there")
EVENT = bytes(64)


def at_call(number: int, error: Exception) -> Callable[[], None]:
    """Returns a hook for `HostCuda.before` that raises the error in the call with this number, counted from 0."""
    calls = itertools.count()

    def hook() -> None:
        if next(calls) == number:
            raise type(error)(*error.args)  # a new one, whose traceback ends with it

    return hook


class HostCuda(TorchCuda):
    """Answers as the GPUs `gpus` would, and counts shares as torch does: 1 when made, 0 when released."""

    def __init__(self, gpus: tuple[str, ...] = GPUS) -> None:
        self.uuids = list(gpus)
        self.calls: list[str] = []
        """The names of the calls, in their order."""
        self.before: dict[str, Callable[[], None]] = {}
        """A function for each name that runs before each call of it, and may raise an error."""
        self.shared: list[torch.UntypedStorage] = []
        """The storages that were shared."""
        self.cut_off = 0
        """The bytes that an allocation is shorter than the storage that a share claims."""
        self.sender_lives = True
        self._counts: dict[int, int] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @property
    def held(self) -> list[int]:
        """The shares whose memory torch would never free."""
        return [number for number, count in self._counts.items() if count]

    def _called(self, name: str) -> None:
        hook = self.before.get(name)
        if hook is not None:
            hook()
        self.calls.append(name)

    def device_of(self, uuid: str) -> torch.device:
        import torch

        assert uuid in self.uuids
        return torch.device("cpu")

    def is_on(self, device: str, tensor: torch.Tensor) -> bool:
        return device == "cuda:0"

    def synchronize(self, uuid: str) -> None:
        self._called("synchronize")

    def pinned(self, nbytes: int) -> torch.Tensor:
        self._called("pinned")
        return super().pinned(nbytes)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        self._called("alias")
        return super().alias(tensor)

    def share(self, storage: torch.UntypedStorage) -> Share:
        self._called("share")
        with self._lock:
            number = next(self._numbers)
            self._counts[number] = 1
            self.shared.append(storage)
        return b"memory", storage.nbytes(), 0, b"/torch_%d_1_1" % os.getpid(), number, EVENT, True

    def open(self, uuid: str, share: Share) -> torch.UntypedStorage:
        import torch

        self._called("open")
        assert uuid in self.uuids
        memory, nbytes, offset, counter, number, event, event_sync = share
        assert (memory, offset, event, event_sync) == (b"memory", 0, EVENT, True)
        assert self._counts[number] == 1, "the share is not released"
        shared: Any = torch.empty(0, dtype=torch.uint8).set_(self.shared[number])
        assert shared.nbytes == nbytes
        storage: torch.UntypedStorage = torch.from_numpy(shared.numpy()).untyped_storage()
        weakref.finalize(storage, self.release, counter, number)
        return storage

    def bytes_left(self, storage: torch.UntypedStorage) -> int:
        return int(storage.nbytes()) - self.cut_off

    def is_counted(self, counter: bytes) -> bool:
        return self.sender_lives

    def release(self, counter: bytes, counter_offset: int) -> None:
        self._called("release")
        with self._lock:
            self._counts[counter_offset] -= 1

    def collect(self) -> None:
        self._called("collect")

    def empty_cache(self) -> None:
        self._called("empty")
