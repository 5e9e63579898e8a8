"""Host memory that an IpcSender shares with its receivers."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

from rl_plane._util.forks import not_for_children
from rl_plane.errors import Unavailable
from rl_plane.transports.ipc.wire import BUFFERS, F_SEAL_FUTURE_WRITE, buffer_bytes, buffer_count
from rl_plane.weights.manifest import Manifest


class HostBuffers:
    """Buffers in memory that receivers map. They outlast an update, since touching new memory takes longer than
    copying."""

    def __init__(self) -> None:
        self._made: list[SealedMemory] = []
        self._sizes: list[int] = []

    def fit(self, manifest: Manifest) -> HostBuffers:
        """Makes the buffers long enough for the manifest, and returns them."""
        nbytes, count = buffer_bytes(manifest), buffer_count(manifest)
        if len(self._made) < count or self.nbytes < nbytes:
            self._made.clear()  # first, to make room in memory
            self._made = [SealedMemory(nbytes) for _ in range(count)]
        self._sizes = [bucket.nbytes for bucket in manifest.buckets]
        return self

    @property
    def nbytes(self) -> int:
        return self._made[0].nbytes

    @property
    def descriptors(self) -> list[int]:
        return [one.descriptor for one in self._made[: min(BUFFERS, len(self._sizes))]]

    def place(self, number: int) -> memoryview:
        return memoryview(self._made[number % BUFFERS].map)[: self._sizes[number]]


class SealedMemory:
    """Unnamed memory of a fixed size that only this process may write. It is freed with this object and all its
    maps."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            self.descriptor = os.memfd_create("rl-plane-ipc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, self.descriptor)
            not_for_children.add(self)
            # Without this a write ends the process when memory is full.
            os.posix_fallocate(self.descriptor, 0, nbytes)
            self.map = mmap.mmap(self.descriptor, nbytes)
        except OSError as error:
            raise Unavailable(f"no {nbytes} bytes of shared memory: {error}", fix="use smaller buckets") from error
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        self.map.madvise(mmap.MADV_DONTFORK)

    def fileno(self) -> int:
        return self.descriptor
