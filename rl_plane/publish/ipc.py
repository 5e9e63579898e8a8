"""The sender of the `ipc` transport: weights for the engines on the trainer's own machine.

Two buffers, in memory without a name which receivers map read-only, or on a GPU (`ipc_cuda`). A bucket is packed into
one of them while the other is read; a buffer is used again when every receiver that is still there has taken what was
in it. One that dies is noticed at once; one that stands still is given up. See `ipc_wire`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgpack

from rl_plane.errors import DeadlineExceeded, InvalidRequest, Unavailable
from rl_plane.manifest import Manifest
from rl_plane.publish.ipc_cuda import GpuBuffers, Handle, given_up
from rl_plane.publish.ipc_memory import HostBuffers, SealedMemory, not_for_children
from rl_plane.publish.ipc_wire import (
    BACKEND,
    BUFFERS,
    PROTOCOL,
    address,
    buffer_bytes,
    check_platform,
    read_packet,
    same_user,
    send_packet,
)
from rl_plane.publish.packing import Place
from rl_plane.publish.sender import Surroundings, world_size

log = logging.getLogger("rl_plane.publish.ipc")

FIRST_RECEIVER_S = 300.0
"""The update may wait for the fleet's lock, and for an earlier one to end."""

OTHER_RECEIVERS_S = 30.0
"""After the first: they are asked at once, but one may have to end an earlier reception before."""

SILENT_RECEIVER_S = 60.0
"""For one bucket. Before the first, an engine that is overwritten lets its running requests end."""

LOOK_S = 0.5
"""How often it is looked who is silent."""

GIVE_UP_S = 3.0
"""For receivers to give up the memory of a GPU, which CUDA wants before it is freed. They look for the end all the
time, unless they stand still."""

CLOSE_S = 5.0
"""For the thread to end, which waits for nothing else."""


class IpcSender:
    """A Sender. `receivers`: how many will come to an update, asked when it is opened: each rank of each engine is one.
    `on_gpus`: whether all of them have GPUs. Buffers in host memory stay for the next update, those of a GPU don't."""

    backend = BACKEND
    device = "cpu"
    """Where the tensors of the next update are."""
    receivers_from: ClassVar[Literal["open", "finish"]] = "open"
    """When the fleet is to be asked: the buffers hold two buckets, and receivers make room for more."""

    def __init__(
        self,
        receivers: Callable[[], int],
        *,
        on_gpus: Callable[[], bool] = lambda: False,
        first_receiver_s: float = FIRST_RECEIVER_S,
        other_receivers_s: float = OTHER_RECEIVERS_S,
        silent_receiver_s: float = SILENT_RECEIVER_S,
    ) -> None:
        self._receivers = receivers
        self._on_gpus = on_gpus
        self._first_receiver_s = first_receiver_s
        self._other_receivers_s = other_receivers_s
        self._silent_receiver_s = silent_receiver_s
        self._buffers = HostBuffers()
        self._told_of_host = False
        self._update: _Update | None = None

    def open(self, manifest: Manifest) -> dict[str, Any]:
        check_platform()
        self.close()
        receivers = self._receivers()
        if receivers < 1:
            raise InvalidRequest("nobody is to receive this", field="receivers", fix="say how many will come")
        on_gpu = self.device.startswith("cuda")
        if on_gpu and self._on_gpus():
            buffers: HostBuffers | GpuBuffers = GpuBuffers(manifest, buffer_bytes(manifest), self.device)
        else:
            buffers = self._buffers.fit(manifest)
            if on_gpu and not self._told_of_host:
                self._told_of_host = True
                log.warning(
                    "the weights on %s go by host memory, since not every worker's engine is on a GPU", self.device
                )
        self._update = _Update(
            manifest,
            buffers,
            receivers,
            self._first_receiver_s,
            self._other_receivers_s,
            self._silent_receiver_s,
        )
        return {"backend": BACKEND, "socket": self._update.name}

    def buffer(self, number: int) -> Place:
        update = self._open_update()
        update.await_free(number)
        return update.buffers.place(number)

    def send(self, number: int) -> None:
        self._open_update().send_bucket(number)

    def finish(self, digests: Mapping[str, str] | None) -> None:
        update = self._open_update()
        manifest = update.manifest if digests is None else update.manifest.digested(digests)
        update.send({"end": manifest.digest})
        update.await_taken(len(manifest.buckets) + 1)

    def close(self) -> None:
        """From any thread: whoever waits here then gets Unavailable."""
        update, self._update = self._update, None
        if update is not None:
            update.close()

    def destroy(self) -> None:
        self.close()
        self._buffers = HostBuffers()

    def _open_update(self) -> _Update:
        if self._update is None:
            raise _closed()
        return self._update


def _closed() -> Unavailable:
    return Unavailable("this update is closed", fix="open another one")


@dataclass(slots=True)
class _Receiver:
    connection: socket.socket
    told: int
    """Turns that it was told of."""
    taken: int
    """Turns that it has answered."""
    since: float
    """Of its last word, or of the last that was said to it."""
    handles: list[Handle]
    """Of a GPU's memory, that it has open."""
    named: bool
    """It has all that it needs to be told of turns."""


class _Update:
    """One update's connections. A thread of its own accepts them, reads what they say, and sees them end."""

    def __init__(
        self,
        manifest: Manifest,
        buffers: HostBuffers | GpuBuffers,
        expected: int,
        first_receiver_s: float,
        other_receivers_s: float,
        silent_receiver_s: float,
    ) -> None:
        self.name = f"rl-plane-ipc-{secrets.token_hex(16)}"
        self.manifest = manifest
        self.buffers = buffers
        self._expected = expected
        self._other_receivers_s = other_receivers_s
        self._silent_receiver_s = silent_receiver_s
        self._come_until = time.monotonic() + first_receiver_s
        self._come = 0
        self._begun_without = False
        """A bucket that a receiver would begin with is overwritten."""
        self._ended = 0
        """Receivers that have everything."""
        self._turns: list[dict[str, Any]] = []
        self._receivers: dict[socket.socket, _Receiver] = {}
        self._closed = False
        self._changed = threading.Condition()
        packed: bytes = msgpack.packb(manifest.to_wire())
        self._manifest = SealedMemory(len(packed))
        self._manifest.map[: len(packed)] = packed
        self._on_gpu = isinstance(buffers, GpuBuffers)
        self._first = {
            "protocol": PROTOCOL,
            "manifest": len(packed),
            "buffer": buffers.nbytes,
            "cuda": self._on_gpu,
        }
        self._wake, self._woken = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(address(self.name))
        self._listener.listen()
        not_for_children.update((self._wake, self._woken, self._listener))
        self._thread = threading.Thread(target=self._serve, name="ipc sender", daemon=True)
        self._thread.start()

    # ---- the trainer's thread ----

    def send_bucket(self, number: int) -> None:
        with self._changed:  # nobody comes meanwhile, who would need buffers on another GPU
            self._check()
            if isinstance(self.buffers, GpuBuffers):
                self.buffers.filled(number)
            self.send({"bucket": number})

    def send(self, turn: dict[str, Any]) -> None:
        with self._changed:
            self._check()
            self._turns.append(turn)
            for receiver in list(self._receivers.values()):
                self._tell(receiver)

    def await_free(self, number: int) -> None:
        if number < BUFFERS:
            with self._changed:
                self._check()
            return
        self.await_taken(number - BUFFERS + 1, overwrites=True)

    def await_taken(self, turns: int, overwrites: bool = False) -> None:
        """Until every receiver that is still there has taken so many turns, and no other one can come."""
        with self._changed:
            while True:
                self._check()
                late_s = self._come_until - time.monotonic() if self._come < self._expected else 0.0
                if late_s <= 0 and all(receiver.taken >= turns for receiver in self._receivers.values()):
                    self._begun_without = self._begun_without or overwrites
                    return
                self._changed.wait(min(late_s, LOOK_S) if late_s > 0 else LOOK_S)

    def _check(self) -> None:
        if self._closed:
            raise _closed()
        if self._receivers or self._ended:
            return
        if self._come >= self._expected or (self._come and time.monotonic() >= self._come_until):
            raise Unavailable(f"no receiver is left: {self._come} came, and ended before they had everything")
        if not self._come and time.monotonic() >= self._come_until:
            raise DeadlineExceeded(
                "no receiver came", fix="are the workers on this machine, in its network namespace, of this user?"
            )

    def close(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                self._wake.close()
                self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    # ---- its own thread ----

    def _serve(self) -> None:
        with contextlib.closing(selectors.DefaultSelector()) as selector:
            self._selector = selector
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            try:
                while not self._closed:
                    ready = selector.select(LOOK_S)
                    with self._changed:
                        for key, _ in ready:
                            self._look(key.fileobj)
                        self._drop_silent()
                        self._changed.notify_all()
            finally:
                with self._changed:
                    self._closed = True
                    self._release()
                    self._changed.notify_all()

    def _look(self, ready: Any) -> None:
        if ready is self._listener:
            self._accept()
        elif ready in self._receivers:
            self._read(self._receivers[ready])

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # gone again, or out of descriptors
        not_for_children.add(connection)
        connection.setblocking(False)
        if not same_user(connection):
            log.warning("a process of another user wanted the weights")
            connection.close()
            return
        receiver = _Receiver(connection, 0, 0, time.monotonic(), [], not self._on_gpu)
        try:
            if self._begun_without:
                send_packet(connection, {"error": "the update has begun without this receiver: it came too late"})
                connection.close()
                return
            buffers = self.buffers.descriptors if isinstance(self.buffers, HostBuffers) else []
            send_packet(connection, self._first, [self._manifest.descriptor, *buffers])
        except OSError:
            connection.close()
            return
        self._come += 1
        if self._come == 1:
            self._come_until = time.monotonic() + self._other_receivers_s
        self._receivers[connection] = receiver
        self._selector.register(connection, selectors.EVENT_READ)
        self._tell(receiver)

    def _tell(self, receiver: _Receiver) -> None:
        """The turns that it doesn't know of: three packets at most, for which there is always room."""
        try:
            while receiver.named and receiver.told < len(self._turns):
                send_packet(receiver.connection, self._turns[receiver.told])
                receiver.told += 1
                receiver.since = time.monotonic()
        except OSError as error:
            self._drop(receiver, str(error), gone=not isinstance(error, BlockingIOError))

    def _read(self, receiver: _Receiver) -> None:
        try:
            answer, _ = read_packet(receiver.connection)
        except BlockingIOError:
            return
        except (OSError, EOFError, ValueError) as error:
            self._drop(receiver, str(error), gone=not isinstance(error, ValueError))
            return
        if not receiver.named and answer.keys() == {"gpu"}:
            self._name(receiver, answer["gpu"])
            return
        if receiver.handles and answer == {"closed": True}:
            receiver.handles = []
            return
        if answer != {"taken": receiver.taken} or receiver.taken >= receiver.told:
            self._drop(receiver, f"it said {str(answer)[:100]}")
            return
        receiver.taken += 1
        receiver.since = time.monotonic()
        if receiver.taken > len(self.manifest.buckets):
            self._ended += 1
            self._forget(receiver)

    def _name(self, receiver: _Receiver, gpu: Any) -> None:
        """The handles of the buffers on its GPU."""
        assert isinstance(self.buffers, GpuBuffers)
        try:
            receiver.handles = self.buffers.shared(gpu)
            send_packet(receiver.connection, {"handles": [one.to_wire() for one in receiver.handles]})
        except (OSError, RuntimeError, ValueError, Unavailable) as error:  # torch's and CUDA's are RuntimeErrors
            given_up(receiver.handles)
            with contextlib.suppress(OSError):
                send_packet(receiver.connection, {"error": str(error)})
            self._drop(receiver, str(error))
            return
        receiver.named = True
        self._tell(receiver)

    def _drop_silent(self) -> None:
        limit = time.monotonic() - self._silent_receiver_s
        for receiver in list(self._receivers.values()):
            if (receiver.taken < receiver.told or not receiver.named) and receiver.since < limit:
                self._drop(receiver, f"it was silent for {self._silent_receiver_s:g} s")

    def _drop(self, receiver: _Receiver, why: str, gone: bool = False) -> None:
        if gone and receiver.handles and not self._said_closed(receiver):
            given_up(receiver.handles)
        log.info("a receiver is given up after %d of %d turns: %s", receiver.taken, receiver.told, why)
        self._forget(receiver)

    def _said_closed(self, receiver: _Receiver) -> bool:
        """Before its connection ended. An error of the connection comes once, ahead of what was said."""
        for _ in range(BUFFERS + 2):
            try:
                answer, _ = read_packet(receiver.connection)
            except EOFError:
                return False
            except (OSError, ValueError):
                continue
            if answer == {"closed": True}:
                return True
        return False

    def _forget(self, receiver: _Receiver) -> None:
        del self._receivers[receiver.connection]
        with contextlib.suppress(KeyError, ValueError, RuntimeError):
            self._selector.unregister(receiver.connection)
        receiver.connection.close()

    def _release(self) -> None:
        if isinstance(self.buffers, GpuBuffers):
            self._await_given_up()
            self.buffers.close()
        for receiver in list(self._receivers.values()):
            self._forget(receiver)
        for one in (self._listener, self._woken, self._wake):
            one.close()

    def _await_given_up(self) -> None:
        """Ends what receivers wait for, and waits until they have given up the GPU's memory."""
        give_up = time.monotonic() + GIVE_UP_S
        for receiver in self._receivers.values():
            with contextlib.suppress(OSError):
                receiver.connection.shutdown(socket.SHUT_WR)
        while any(receiver.handles for receiver in self._receivers.values()) and time.monotonic() < give_up:
            for key, _ in self._selector.select(max(0.0, give_up - time.monotonic())):
                if key.fileobj in self._receivers:
                    self._look(key.fileobj)


def build(around: Surroundings) -> IpcSender:
    """It has no options."""
    around.check_options(BACKEND)

    def on_gpus() -> bool:
        rows = around.run("describe", {})["workers"]
        return all(str(row.get("device", "")).startswith("cuda") for row in rows)

    return IpcSender(lambda: world_size(around.workers()) - 1, on_gpus=on_gpus)
