"""Receives weights from checkpoint-engine's parameter server: `{backend: ipc, zmq_handles: {GPU's UUID: address}}`.

The worker answers the socket of each of its ranks, because the server waits for all of them. It reads the tensors from
the buffer of its first rank only. pyzmq must be installed beside the worker, as with vLLM and SGLang. NOT yet run on a
GPU.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    InvalidWeights,
    PlaneError,
    Unavailable,
    Unsupported,
)
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.described_tensors import SelfDescribedDelivery
from rl_plane.transports.ipc.checkpoint_engine_wire import (
    ADDRESS,
    BufferHandle,
    Failure,
    read_handle,
    read_tensors,
)
from rl_plane.transports.ipc.cuda_buffers import Handle, opened, release
from rl_plane.transports.ipc.torch_cuda import TorchCuda
from rl_plane.weights.pickle_reader import UnreadablePickle

T = TypeVar("T")

MESSAGE_S = 300.0
"""The longest wait in seconds for one message. The server gathers a bucket from its own ranks before each."""
LOOK_MS = 100
"""Milliseconds between two looks at `cancelled`."""
TELL_S = 10.0
"""The time in seconds to tell the server of an error, and to hear what it sends then."""
DROPPED = "the update was dropped"
FIELD = "transport.zmq_handles"
FIX = "update with checkpoint-engine's parameter server, which makes the sockets"


class CheckpointEngineDelivery(SelfDescribedDelivery):
    """The delivery of one version. `specs` grow as the server describes the tensors."""

    def __init__(self, handles: Any, cuda: TorchCuda, devices: Sequence[str]) -> None:
        super().__init__()
        self._cuda = cuda
        self._gpus, self.addresses = _own_sockets(handles, cuda, devices)
        """`addresses`: those of the trainer's sockets to which this process connects."""
        self._zmq = _import_zmq()
        self._began = False
        self._running: Generator[tuple[str, HostTensor]] | None = None
        self._sockets: list[Any] = []
        self._owed = set[int]()
        """The sockets whose server waits for an answer."""
        self._counter = b""
        """The file in which torch counts the buffer's share. It names the server's process."""

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        self._running = self._tensors(cancelled)
        return self._running

    def _tensors(self, cancelled: Cancelled) -> Generator[tuple[str, HostTensor]]:
        self._began = True
        with self._connected():
            try:
                yield from self._received(cancelled)
            except BaseException as error:  # also GeneratorExit: the worker wants no more tensors
                self._tell(error.message if isinstance(error, PlaneError) else DROPPED)
                raise
        self._check_whole()

    def close(self) -> None:
        """Ends the delivery. If it ends between two tensors, this tells the servers at once. If the delivery never
        began, a thread tells the servers, because they may be slow."""
        if self._began and self._running is not None:
            self._running.close()
        elif not self._began:
            self._began = True
            threading.Thread(target=self._refuse, name="checkpoint-engine", daemon=True).start()

    def _refuse(self) -> None:
        with self._connected():
            self._tell(DROPPED)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        context = self._zmq.Context()
        try:
            for address in self.addresses:
                socket = context.socket(self._zmq.REP)
                socket.setsockopt(self._zmq.LINGER, int(TELL_S * 1000))
                self._sockets.append(socket)
                socket.connect(address)
            yield
        finally:
            for socket in self._sockets:
                socket.close()
            context.term()

    def _received(self, cancelled: Cancelled) -> Iterator[tuple[str, HostTensor]]:
        first, *others = [_read(read_handle, data) for data in self._messages(cancelled)]
        release(self._cuda, [_handle(one) for one in others])
        buffers = self._opened(first)
        try:
            self._answer()
            while (found := self._described(first, cancelled)) is not None:
                copied = [(name, self._copied(buffers, name, *found[name], first.start)) for name in found]
                self._cuda.synchronize(self._gpus[0])
                self._answer()
                yield from copied
        finally:
            buffers.clear()
            self._cuda.collect()
        self._answer()
        for data in self._messages(cancelled):
            if _read(lambda one: read_tensors(one, 0), data) is not None:
                raise _refused("tensors after their end")
        self._answer()

    def _opened(self, share: BufferHandle) -> list[Any]:
        handle = _handle(share)
        self._counter = handle.counter
        if not self._cuda.is_counted(handle.counter):
            raise InvalidRequest("the parameter server is not on this machine, or has ended", field=FIELD, fix=FIX)
        try:
            return opened(self._cuda, [handle], self._gpus[0])
        except Exception as error:  # CUDA's errors have no common base
            raise Unavailable(f"the server's buffer can't be opened: {str(error)[:300]}", fix=FIX) from error

    def _described(self, buffer: BufferHandle, cancelled: Cancelled) -> dict[str, tuple[TensorSpec, int]] | None:
        """Returns the next tensors, which must be the same for each rank. It returns None after the last ones."""
        messages = [
            _read(lambda one: read_tensors(one, buffer.nbytes), data) for data in self._messages(cancelled)
        ]
        found: dict[str, tuple[TensorSpec, int]] | None = messages[0]
        if any(one != found for one in messages):
            raise _refused("other tensors to one rank than to another")
        if found is None:
            return None
        self._announce({name: spec for name, (spec, _) in found.items()})
        return found

    def _refused(self, what: str) -> InvalidWeights:
        return _refused(what)

    def _copied(self, buffers: list[Any], name: str, spec: TensorSpec, offset: int, start: int) -> HostTensor:
        import torch

        into = self._memory_for(name, spec)
        if spec.nbytes:
            at = start + offset
            torch.frombuffer(into, dtype=torch.uint8).copy_(buffers[0][at : at + spec.nbytes])
        return HostTensor(spec, into, owned=True)

    # ---- the sockets ----

    def _messages(self, cancelled: Cancelled) -> list[bytes]:
        """The next message of each rank's server."""
        until = time.monotonic() + MESSAGE_S
        found = []
        for number, socket in enumerate(self._sockets):
            while not socket.poll(LOOK_MS):
                if cancelled():
                    raise EngineFailed("staging was cancelled")
                if self._counter and not self._cuda.is_counted(self._counter):
                    raise Unavailable("checkpoint-engine's parameter server has ended", fix=FIX)
                if time.monotonic() > until:
                    raise DeadlineExceeded(f"checkpoint-engine sent nothing within {MESSAGE_S:g} s", fix=FIX)
            found.append(socket.recv())
            self._owed.add(number)
        return found

    def _answer(self, text: str = "") -> None:
        for number in sorted(self._owed):
            self._sockets[number].send(text.encode())
        self._owed.clear()

    def _tell(self, why: str) -> None:
        """Answers each server's present or next message with an error, so that it ends its update. A server then sends
        its own error to every rank, or, at its end, asks once more. It would wait for ever if this one had left."""
        until = time.monotonic() + TELL_S
        with contextlib.suppress(self._zmq.ZMQError):
            self._take_next(until, [number for number in range(len(self._sockets)) if number not in self._owed])
            told = sorted(self._owed)
            why = why or "the update has failed"
            self._answer(why)
            self._take_next(until, told)
            self._answer(why)

    def _take_next(self, until: float, numbers: Iterable[int]) -> None:
        """Takes the next message of these sockets, if it comes in time from a server that lives."""
        for number in numbers:
            while not self._sockets[number].poll(LOOK_MS):
                if time.monotonic() > until or (self._counter and not self._cuda.is_counted(self._counter)):
                    return
            self._sockets[number].recv()
            self._owed.add(number)


def _own_sockets(handles: Any, cuda: TorchCuda, devices: Sequence[str]) -> tuple[list[str], list[str]]:
    """The GPUs of this worker's ranks, and their sockets. Raises InvalidRequest or Unsupported."""
    valid = isinstance(handles, Mapping) and all(
        isinstance(one, str) and ADDRESS.fullmatch(one) for one in handles.values()
    )
    if not valid:
        raise InvalidRequest(
            "zmq_handles are not the sockets of checkpoint-engine on this machine", field=FIELD, fix=FIX
        )
    own = [uuid for device in devices if (uuid := cuda.uuid_of(device)) is not None]
    found = {uuid: handles.get(uuid) or handles.get(f"GPU-{uuid}") for uuid in own}
    lacking = [uuid for uuid, address in found.items() if address is None]
    if lacking or not own:
        raise Unsupported(
            f"checkpoint-engine has no socket for {', '.join(lacking) or 'a worker without a GPU'}",
            field=FIELD,
            fix="run a rank of the parameter server on each GPU of the fleet",
        )
    return list(found), [str(address) for address in found.values()]


def _import_zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise Unsupported("there is no pyzmq beside this worker", field=FIELD, fix="pip install pyzmq") from error
    return zmq


def _read(reader: Callable[[bytes], T | Failure], data: bytes) -> T:
    """Reads one message. Raises Unavailable if it says that the update has failed elsewhere."""
    try:
        message = reader(data)
    except UnreadablePickle as refused:
        raise _refused(str(refused)) from None
    if isinstance(message, Failure):
        raise Unavailable(f"checkpoint-engine gave up: {message.why}", fix=FIX)
    return message


def _handle(share: BufferHandle) -> Handle:
    try:
        return Handle.from_wire(share.wire, share.nbytes, share.start)
    except ValueError as error:
        raise _refused(str(error)) from None


def _refused(what: str) -> InvalidWeights:
    return InvalidWeights(f"checkpoint-engine sent {what}. Nothing in it was run", field=FIELD, fix=FIX)
