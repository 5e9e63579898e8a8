"""The staging area: one block of memory with the tensors of a version, exactly as they were published."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.weights.hashed_copy import address_of, copy, is_same_memory
from rl_plane.weights.read_ahead import host_memory

ALIGN_BYTES = 64
"""The alignment of a tensor's place: the length of a cache line, and a multiple of each dtype's size."""

MADV_POPULATE_READ = 22
"""Linux 5.14 and later: puts all pages into the map at once, before an engine stops to read them."""

STAT_BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system."""

Layout = Sequence[tuple[str, str, Sequence[int], int]]
"""`(name, dtype, shape, offset)` of each tensor, as plain values: another process finds the tensors by it."""


@dataclass(frozen=True, slots=True)
class _Room:
    offset: int
    nbytes: int


class StagingArea:
    """The memory of one version. A place that no tensor fills takes no memory.

    `shared`: the memory is a memfd, which other processes can map by `descriptor`. It has no name, so nothing is left
    of it when the last process that has it ends.
    """

    _descriptor: int | None = None

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        """Makes an area without places. Each tensor takes up to a multiple of ALIGN_BYTES."""
        self.nbytes = nbytes
        self._end = 0
        self._rooms: dict[str, _Room] = {}
        self._specs: dict[str, TensorSpec] = {}
        """The tensors whose places were asked for."""
        self._memory = memoryview(bytearray())
        if shared:
            self._descriptor = _sealed_memory(max(nbytes, 1))
            self._memory = _mapped(self._descriptor, max(nbytes, 1))
        elif nbytes:
            self._memory = _aligned(nbytes)

    @classmethod
    def for_specs(cls, specs: Mapping[str, TensorSpec], *, shared: bool = False) -> Self:
        """Makes an area with a place for each tensor."""
        area = cls(sum(map(room_bytes, specs.values())), shared=shared)
        area.lay_out(specs)
        return area

    def lay_out(self, specs: Mapping[str, TensorSpec]) -> None:
        """Replaces all places by a place for each tensor, which must fit."""
        self._end, self._rooms, self._specs = 0, {}, {}
        for name, spec in specs.items():
            if not self.add(name, spec):
                raise ValueError(f"{name} does not fit into {self.nbytes} bytes")

    def add(self, name: str, spec: TensorSpec) -> bool:
        """Adds a place after the last one. Returns False if the area is full."""
        if self._end + room_bytes(spec) > self.nbytes:
            return False
        self._rooms[name] = _Room(self._end, spec.nbytes)
        self._end += room_bytes(spec)
        return True

    def place(self, name: str, spec: TensorSpec | None = None) -> memoryview:
        """Returns the writable memory of one tensor, of exactly its bytes.

        `spec`: what comes, if the area was made for another tensor. It must not be larger than that tensor.
        """
        room = self._rooms[name]
        nbytes = room.nbytes if spec is None else spec.nbytes
        if nbytes > room.nbytes:
            raise ValueError(f"{name} has {nbytes} bytes, and room for {room.nbytes}")
        if spec is not None:
            self._specs[name] = spec
        return self._memory[room.offset : room.offset + nbytes]

    def find(self, name: str, spec: TensorSpec) -> memoryview | None:
        """Returns the place of a tensor that comes, or None if the area has none for it. See `Delivery.places`."""
        room = self._rooms.get(name)
        return None if room is None or spec.nbytes > room.nbytes else self.place(name, spec)

    def put(self, name: str, tensor: HostTensor) -> HostTensor:
        """Copies a tensor into its place, unless it lies there. Returns it with that memory."""
        place = self.place(name, tensor.spec)
        if not is_same_memory(tensor.data, place):
            copy(place, tensor.data)
        return HostTensor(tensor.spec, place, owned=True, digest=tensor.digest)

    def tensors(self) -> dict[str, HostTensor]:
        """The tensors that have come, writable."""
        return {name: HostTensor(spec, self.place(name, spec), owned=True) for name, spec in self._specs.items()}

    @property
    def layout(self) -> Layout:
        return [(name, spec.dtype, spec.shape, self._rooms[name].offset) for name, spec in self._specs.items()]

    @property
    def resident_bytes(self) -> int:
        """The memory that `close` gives back, in bytes. It is less than `nbytes` if tensors are smaller than their
        places."""
        if self._descriptor is None:
            return sum(map(room_bytes, self._specs.values()))
        return os.fstat(self._descriptor).st_blocks * STAT_BLOCK_BYTES

    @property
    def descriptor(self) -> int:
        """The descriptor of shared memory. ValueError after `close`, and for memory that is not shared."""
        if self._descriptor is None:
            raise ValueError("this area has no descriptor")
        return self._descriptor

    def close(self) -> None:
        """Gives the memory back. Tensors that are still in use keep it until they are gone."""
        self._memory = memoryview(bytearray())
        self._rooms, self._specs = {}, {}
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def room_bytes(spec: TensorSpec) -> int:
    """The bytes that a tensor takes in an area."""
    return -(-spec.nbytes // ALIGN_BYTES) * ALIGN_BYTES


class MappedArea:
    """A shared area of another process, for reading.

    A write changes this process's own copy of a page: an engine may change what it loads, and the area stays as it is.
    """

    def __init__(self, descriptor: int, layout: Layout) -> None:
        """Maps the memory. The descriptor stays open, and belongs to the caller."""
        nbytes = os.fstat(descriptor).st_size
        mapped = mmap.mmap(descriptor, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        with contextlib.suppress(OSError):  # an older kernel finds each page when it is read
            for start, end in _pages(layout):
                mapped.madvise(MADV_POPULATE_READ, start, end - start)
        memory = _whole(mapped, nbytes)
        self._map = weakref.ref(memory.obj)
        self.tensors: dict[str, HostTensor] = {}
        for name, dtype, shape, offset in layout:
            spec = TensorSpec(dtype, tuple(shape))
            self.tensors[name] = HostTensor(spec, memory[offset : offset + spec.nbytes], owned=True)

    def released(self) -> bool:
        """Drops the tensors. Returns whether nothing else in this process refers to the memory."""
        self.tensors = {}
        return self._map() is None


def _pages(layout: Layout) -> Iterator[tuple[int, int]]:
    """Yields the ranges of whole pages that hold the tensors. A page that holds none would get memory by being put into
    a map."""
    start = end = 0
    for _, dtype, shape, offset in sorted(layout, key=lambda row: row[3]):
        nbytes = TensorSpec(dtype, tuple(shape)).nbytes
        if not nbytes:
            continue
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if first > end:
            if end:
                yield start, end
            start = first
        end = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    if end:
        yield start, end


def _sealed_memory(nbytes: int) -> int:
    """Returns the descriptor of new memory. It can't shrink: reading beyond its end would kill a process."""
    descriptor = os.memfd_create("rl-plane-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(descriptor: int, nbytes: int) -> memoryview:
    return _whole(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE), nbytes)


def _whole(mapped: mmap.mmap, nbytes: int) -> memoryview:
    """A view of the map, which ends with its last view. A view of the map itself would forbid to close it."""
    whole = (ctypes.c_ubyte * nbytes).from_buffer(mapped)
    weakref.finalize(whole, _nothing, mapped).atexit = False
    return memoryview(whole).cast("B")


def _nothing(_: Any) -> None: ...


def _aligned(nbytes: int) -> memoryview:
    """Memory of this process. Small memory of Python begins at any multiple of 16."""
    memory = host_memory(nbytes + ALIGN_BYTES)
    skip = -address_of(memory) % ALIGN_BYTES
    return memory[skip : skip + nbytes]
