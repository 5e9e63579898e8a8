"""Copies tensors that lie where a trainer's request says, part by part: in named shared memory, or on a GPU.

A request is `{backend: ipc, in_parts: true}`. Each part has `places` and `memories` (`rl_plane.protocol.
shared_tensors`). The memory is the trainer's, which keeps it unchanged until the part is answered. Memory on a GPU is
opened by torch's own calls (`torch_cuda`); this has NOT yet run on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, Unavailable, Unsupported
from rl_plane.protocol.shared_tensors import GpuCopies, GpuMemory, NamedMemory, TensorPlace
from rl_plane.protocol.update_requests import ReceivePart
from rl_plane.protocol.versions import DTYPE_BYTES, DigestAlgorithm, HostTensor, TensorSpec
from rl_plane.transports.announced_delivery import AnnouncedDelivery, Coming
from rl_plane.transports.ipc.cuda_buffers import Handle, opened, release
from rl_plane.transports.ipc.torch_cuda import TorchCuda
from rl_plane.transports.trainer_memory import HEADER_BYTES, opened_memory, read_memory
from rl_plane.weights.read_ahead import host_memory

AGAIN = "send the whole update again"

Read = Callable[[int, memoryview], str | None]
"""`(start, into)`: reads bytes of one memory from an offset on. Returns their hex digest, if it was computed."""


class PlacedDelivery(AnnouncedDelivery[ReceivePart]):
    """A delivery in which each part says where its tensors lie."""

    def __init__(self, cuda: TorchCuda, devices: Sequence[str] = ()) -> None:
        """`devices`: those of the ranks for which this process receives, in torch's notation."""
        super().__init__(AGAIN)
        self._cuda = cuda
        self._devices = devices
        self._held: dict[GpuMemory, list[Any]] = {}
        """Opened shares that the trainer fills again for each part, each in a list that is emptied to close it."""
        self._keeps = set[GpuMemory]()
        """The shares of the present part that stay open for the next one."""
        self._passed_over = set[GpuMemory]()
        """The shares for other ranks of this worker that were released."""
        self._closing = threading.Lock()

    def _source(self, part: ReceivePart) -> ReceivePart:
        if part.names and part.places is None:
            raise InvalidRequest(
                "this update comes by places, not by broadcasts",
                field="places",
                fix="say for each tensor where it lies",
            )
        for name, spec, place in _placed(part):
            _check_place(name, spec, place, part.memories)
        part = self._own_copies(part)
        for memory in part.memories:
            if isinstance(memory, NamedMemory):
                with opened_memory(memory):
                    pass
            elif isinstance(memory, GpuMemory):
                _check_gpu(self._cuda, memory)
        return part

    def _own_copies(self, part: ReceivePart) -> ReceivePart:
        """Chooses the copy on this worker's GPU. Those for its other ranks are released unread."""
        if not any(isinstance(one, GpuCopies) for one in part.memories):
            return part
        own = [uuid for device in self._devices if (uuid := self._cuda.uuid_of(device)) is not None]
        memories: list[NamedMemory | GpuMemory | GpuCopies] = []
        unused, held = list(part.unused), set[GpuMemory]()
        for one in part.memories:
            if not isinstance(one, GpuCopies):
                memories.append(one)
                continue
            mine = {copy.gpu: copy for copy in one.copies if copy.gpu in own}
            chosen = next((mine[uuid] for uuid in own if uuid in mine), None)
            if chosen is None:
                raise _no_copy(one, own)
            memories.append(chosen)
            held |= {*mine.values()} if one.held else set()
            unused += [copy for copy in mine.values() if copy is not chosen and copy not in self._passed_over]
            self._passed_over |= {copy for copy in mine.values() if copy is not chosen}
        self._keeps = held
        return part.model_copy(update={"memories": memories, "unused": unused})

    def _received(self, coming: Coming[ReceivePart]) -> Iterator[tuple[str, HostTensor]]:
        part = coming.source
        self._close_held(except_for={one for one in part.memories if isinstance(one, GpuMemory)})
        with ExitStack() as held:
            on_gpu = self._opened_on_gpu(part, held)
            number, read = -1, None
            with ExitStack() as last:
                for name, spec, place in _placed(part):
                    if self.cancelled() or coming.cancelled():
                        raise EngineFailed("staging was cancelled")
                    if place is not None and place.memory != number:
                        last.close()  # one at a time: a process may open 1024 files by default
                        number, memory = place.memory, part.memories[place.memory]
                        if isinstance(memory, NamedMemory):
                            read = _reader_of(last.enter_context(opened_memory(memory)), self.algorithm)
                        else:
                            read = on_gpu[number]
                    yield name, self._read(name, spec, place, read)

    def _read(self, name: str, spec: TensorSpec, place: TensorPlace | None, read: Read | None) -> HostTensor:
        into = self._memory_for(name, spec)
        if place is None or read is None:
            return HostTensor(spec, into, owned=True)
        digest = None
        try:
            if place.strides is None:
                digest = read(place.start, into)
            else:
                width = DTYPE_BYTES[spec.dtype]
                span = host_memory(_span(spec, place.strides) * width)
                read(place.start, span)
                _gather(span, spec, place.strides, into)
        except ValueError as error:
            raise InvalidWeights(f"{name} can't be read: {error}", field="places", fix=AGAIN) from error
        return HostTensor(spec, into, owned=True, digest=digest)

    def _opened_on_gpu(self, part: ReceivePart, held: ExitStack) -> dict[int, Read]:
        """Opens the shares of a part, each once. They are closed with `held`, and the unused ones are released."""
        release(self._cuda, [_handle(one) for one in part.unused])
        shares = {number: one for number, one in enumerate(part.memories) if isinstance(one, GpuMemory)}
        found: dict[int, Read] = {
            number: _gpu_reader(self._cuda, one.gpu, self._held[one], 0)
            for number, one in shares.items()
            if one in self._held
        }
        closed = {number: one for number, one in shares.items() if number not in found}
        for uuid in sorted({one.gpu for one in closed.values()}):
            on_one = {number: one for number, one in closed.items() if one.gpu == uuid}
            try:
                tensors = opened(self._cuda, [_handle(one) for one in on_one.values()], uuid)
            except Exception as error:  # CUDA's errors have no common base
                raise Unavailable(
                    f"the trainer's memory on {uuid} can't be opened: {str(error)[:300]}", fix=AGAIN
                ) from error
            held.callback(self._cuda.collect)
            held.callback(tensors.clear)
            # No variable has a tensor: the traceback of an error would keep its share open.
            lengths = [self._cuda.bytes_left(one.untyped_storage()) for one in tensors]
            for memory, left in zip(on_one.values(), lengths, strict=True):
                _check_allocation(memory, left)
            for at, (number, one) in enumerate(on_one.items()):
                if one in self._keeps:
                    self._held[one] = [tensors[at]]
                    found[number] = _gpu_reader(self._cuda, uuid, self._held[one], 0)
                else:
                    found[number] = _gpu_reader(self._cuda, uuid, tensors, at)
        return found

    def _close_held(self, except_for: Collection[GpuMemory] = ()) -> None:
        with self._closing:
            over = [one for one in self._held if one not in except_for]
            for one in over:
                self._held.pop(one).clear()
            if over:
                self._cuda.collect()

    def close(self) -> None:
        self.ended = True
        self._close_held()


def _placed(part: ReceivePart) -> Iterator[tuple[str, TensorSpec, TensorPlace | None]]:
    yield from zip(part.names, part.specs, part.places or (), strict=True)


def _check_place(name: str, spec: TensorSpec, place: TensorPlace | None, memories: Sequence[Any]) -> None:
    """Checks that a tensor lies within its memory. Raises InvalidRequest."""
    if place is None and spec.nbytes == 0:
        return
    if place is None or place.memory >= len(memories):
        raise _wrong(f"{name} lies in no memory of this part")
    strides = place.strides
    if strides is not None and (len(strides) != len(spec.shape) or any(not 0 <= one < 1 << 40 for one in strides)):
        raise _wrong(f"{name} has strides that do not fit its shape")
    nbytes = spec.nbytes if strides is None else _span(spec, strides) * DTYPE_BYTES[spec.dtype]
    if spec.nbytes and place.start + nbytes > memories[place.memory].nbytes:
        raise _wrong(f"{name} does not lie within its memory")


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(what, field="places", fix="describe the tensor as it is")


def _check_gpu(cuda: TorchCuda, memory: GpuMemory) -> None:
    """Raises Unsupported if this process does not see the GPU, InvalidRequest if the handles are not CUDA's."""
    if not cuda.uuids:
        raise Unsupported(
            "the tensors are on a GPU, and this worker's machine has no CUDA",
            field="memories",
            fix="send CPU tensors, or run the workers on the GPUs of the trainer",
        )
    if memory.gpu not in cuda.uuids:
        raise Unsupported(
            f"the tensors are on the GPU {memory.gpu}, which this worker does not see",
            field="memories",
            fix="let CUDA_VISIBLE_DEVICES of the worker name it, or send the weights another way",
        )
    try:
        _handle(memory)
    except ValueError as error:
        raise InvalidRequest(f"{error}", field="memories", fix="send the tensors again") from error
    if not cuda.is_counted(memory.counter.encode()):
        raise InvalidRequest(
            f"the process that shared {memory.counter} is not on this machine, or has ended",
            field="memories",
            fix="run trainer and workers on one machine, with one /dev/shm and one PID namespace, or send the weights "
            "another way",
        )


def _check_allocation(memory: GpuMemory, left: int | None) -> None:
    """Raises InvalidRequest if a share says that it is longer than its allocation, of which `left` bytes are left."""
    if left is not None and left < memory.nbytes:
        raise InvalidRequest(
            f"a share of {memory.nbytes} bytes on {memory.gpu} has {left} bytes to the end of its allocation",
            field="memories",
            fix="share the tensor as torch does",
        )


def _no_copy(memory: GpuCopies, own: Sequence[str]) -> Unsupported:
    there = ", ".join(one.gpu for one in memory.copies[:8])
    return Unsupported(
        f"the tensors are on {there}, and this worker's model is on {', '.join(own) or 'no GPU'}",
        field="memories",
        fix="run a rank of the trainer on each GPU of the fleet, or send the weights another way",
    )


def _handle(memory: GpuMemory) -> Handle:
    wire = [
        bytes.fromhex(memory.memory),
        memory.nbytes,
        memory.offset,
        memory.counter.encode(),
        memory.counter_offset,
        bytes.fromhex(memory.event),
        memory.event_sync,
    ]
    return Handle.from_wire(wire, memory.nbytes)


def _reader_of(descriptor: int, algorithm: DigestAlgorithm) -> Read:
    def read(start: int, into: memoryview) -> str:
        # Not mapped: if the trainer made the memory shorter, a read of a map would kill this process.
        return read_memory(descriptor, HEADER_BYTES + start, into, algorithm)

    return read


def _gpu_reader(cuda: TorchCuda, uuid: str, tensors: Sequence[Any], at: int) -> Read:
    def read(start: int, into: memoryview) -> None:
        import torch

        torch.frombuffer(into, dtype=torch.uint8).copy_(tensors[at][start : start + into.nbytes])
        cuda.synchronize(uuid)

    return read


def _span(spec: TensorSpec, strides: Sequence[int]) -> int:
    """The elements from the first one to the last one in memory."""
    if spec.nbytes == 0:
        return 0
    return 1 + sum((side - 1) * stride for side, stride in zip(spec.shape, strides, strict=True))


def _gather(span: memoryview, spec: TensorSpec, strides: Sequence[int], into: memoryview) -> None:
    """Copies the elements of a tensor with gaps side by side."""
    import torch

    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[DTYPE_BYTES[spec.dtype]]
    elements = torch.frombuffer(span, dtype=dtype).as_strided(spec.shape, tuple(strides))
    torch.frombuffer(into, dtype=dtype).view(spec.shape).copy_(elements)
