"""One update of an IpcSender: its receivers, and the thread that serves them."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from rl_plane._util.forks import not_for_children
from rl_plane._util.peer_credentials import same_user
from rl_plane.errors import DeadlineExceeded, InvalidRequest, PlaneError, Unavailable
from rl_plane.transports.ipc.cuda_buffers import GpuBuffers, Handle, release, seen
from rl_plane.transports.ipc.host_buffers import HostBuffers, SealedMemory
from rl_plane.transports.ipc.in_place import LentTensors
from rl_plane.transports.ipc.torch_cuda import TorchCuda
from rl_plane.transports.ipc.wire import (
    BUFFERS,
    PROTOCOL,
    address,
    close_all,
    read_packet,
    send_packet,
)
from rl_plane.weights.manifest import Manifest

log = logging.getLogger("rl_plane.transports.ipc.sender")

LOOK_S = 0.5
"""Seconds between two looks for receivers that are silent."""

ACCEPT_AGAIN_S = 0.2
"""Seconds to wait after a failed accept. The sending continues meanwhile."""

HELLO_S = 5.0
"""The time in seconds in which a connection must send the update's secret. A receiver sends it at once."""

STRANGERS = 64
"""The most connections that have not sent the secret. Beyond them the oldest is closed."""

BACKLOG = 1024
"""Connections that may wait for an accept: in the layout `tensors` the thread starts late."""

CLOSE_S = 5.0
"""The time for the thread to end, in seconds. It waits for nothing else."""

NO_TURN = -1
"""The key of the buffers' shares."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The times in seconds that the receivers of an update have."""

    first_receiver_s: float = 300.0
    """The time for the first receiver to come. The update may wait for the fleet's lock, and for an earlier update."""
    other_receivers_s: float = 30.0
    """The time for all others after the first. A receiver may have to end an earlier reception."""
    silent_receiver_s: float = 60.0
    """The time to take one bucket. Before the first bucket an engine that is overwritten may finish its requests."""
    give_up_s: float = 3.0
    """The time to close the GPU's memory, which must happen before it is freed. Receivers do so at once, unless they
    hang."""


BOUNDS = Bounds()


@dataclass(slots=True)
class _ConnectedReceiver:
    """One connected receiver."""

    connection: socket.socket
    sent: int
    """The number of turns that were sent to it."""
    taken: int
    """The number of turns that it has answered."""
    since: float
    """The monotonic time of its last answer, or of the last turn that was sent to it."""
    named: bool
    """Turns can be sent to it: if the buffers are on GPUs, it has named its own."""
    gpu: str = ""
    shares: dict[int, list[Handle]] = field(default_factory=dict)
    """Shares of a GPU's memory that it may have open, by turn; those of the buffers under NO_TURN."""

    def gave_up(self, turns: int) -> None:
        """Forgets the shares of the buffers and of the first `turns` turns, which the receiver has closed."""
        self.shares = {turn: handles for turn, handles in self.shares.items() if turn >= turns}

    def release_shares(self, cuda: TorchCuda) -> None:
        """Releases all shares of a receiver that has died."""
        for handles in self.shares.values():
            release(cuda, handles)
        self.shares.clear()


def closed() -> Unavailable:
    """The error of a call after `close`."""
    return Unavailable("this update is closed", fix="open another one")


class IpcUpdate:
    """The connections of one update. A thread accepts them, reads their answers, and notices their end."""

    def __init__(self, manifest: Manifest, alive: Callable[[], int], bounds: Bounds, cuda: TorchCuda) -> None:
        """`alive`: returns how many receivers there are."""
        self.name = f"rl-plane-ipc-{secrets.token_hex(16)}"
        self.secret = secrets.token_hex(16)
        """The secret that a receiver must send first. The name of the socket is no secret: /proc/net/unix has it."""
        self.manifest = manifest
        self.buffers: HostBuffers | GpuBuffers | None = None
        """None if all buckets are lent."""
        self.begun = False
        self._own: LentTensors | None = None
        self._on_gpu = False
        self._alive, self.expected = alive, alive()
        if self.expected < 1:
            raise InvalidRequest(
                "there is no receiver for this update", field="receivers", fix="start workers first"
            )
        self._bounds = bounds
        self._cuda = cuda
        self._come_until = time.monotonic() + bounds.first_receiver_s
        self._come = 0
        self._begun_without = False
        """The first bucket is overwritten, so a receiver that comes now is too late."""
        self._ended = 0
        """The number of receivers that have everything."""
        self._why_dropped = ""
        """Why the last receiver that has not everything was dropped."""
        self._turns: list[dict[str, Any]] = []
        self._receivers: dict[socket.socket, _ConnectedReceiver] = {}
        self._strangers: dict[socket.socket, float] = {}
        """Connections that have not sent the secret, each with the time at which it is closed."""
        self._closed = False
        self._changed = threading.Condition()
        packed: bytes = msgpack.packb(manifest.to_wire())
        self._manifest = SealedMemory(len(packed))
        self._manifest.map[: len(packed)] = packed
        self._first: dict[str, Any] = {"protocol": PROTOCOL, "manifest": len(packed)}
        self._wake, self._woken = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(address(self.name))
        self._listener.listen(BACKLOG)
        not_for_children.update((self._wake, self._woken, self._listener))
        self._thread = threading.Thread(target=self._serve, name="ipc sender", daemon=True)

    # ---- the trainer's thread ----

    def begin(self, buffers: HostBuffers | GpuBuffers | None, own: LentTensors | None, *, on_gpu: bool) -> None:
        """Answers receivers from here on. `own`: the lent tensors."""
        with self._changed:
            self._check()
            self.buffers, self._own, self._on_gpu = buffers, own, on_gpu
            self._first |= {"buffer": 0 if buffers is None else buffers.nbytes, "cuda": on_gpu}
            self.begun = True
            self._thread.start()

    def send_bucket(self, number: int) -> None:
        if self._is_lent(number):
            self.await_free(number)
        with self._changed:  # no receiver may come meanwhile: it could need buffers on another GPU
            self._check()
            if isinstance(self.buffers, GpuBuffers) and not self._is_lent(number):
                self.buffers.filled(number)
            self.send({"bucket": number})

    def _is_lent(self, number: int | None) -> bool:
        return self._own is not None and number in self._own.lent

    def send(self, turn: dict[str, Any]) -> None:
        with self._changed:
            self._check()
            self._turns.append(turn)
            for receiver in list(self._receivers.values()):
                self._send_turns(receiver)

    def await_free(self, number: int) -> None:
        if number < BUFFERS:
            with self._changed:
                self._check()
            return
        self.await_taken(number - BUFFERS + 1, overwrites=True)

    def await_taken(self, turns: int, overwrites: bool = False) -> None:
        """Waits until every receiver that is still there has taken so many turns, and no further receiver can come."""
        look_at = time.monotonic() + LOOK_S
        while True:
            with self._changed:
                self._check()
                late_s = self._come_until - time.monotonic() if self._come < self.expected else 0.0
                if late_s <= 0 and all(receiver.taken >= turns for receiver in self._receivers.values()):
                    self._begun_without = self._begun_without or overwrites
                    return
                self._changed.wait(min(late_s, LOOK_S) if late_s > 0 else LOOK_S)
            if late_s > 0 and self._come and time.monotonic() >= look_at:
                self._look_who_is_late()
                look_at = time.monotonic() + LOOK_S

    def _look_who_is_late(self) -> None:
        """Stops waiting for further receivers if no more of them are alive."""
        try:
            alive = self._alive()
        except PlaneError as error:
            log.info("the number of receivers is unknown: %s", error)
            return
        with self._changed:
            if len(self._receivers) + self._ended >= alive:
                self._come_until = time.monotonic()

    def _check(self) -> None:
        if self._closed:
            raise closed()
        if self._receivers or self._ended:
            return
        if self._come >= self.expected or (self._come and time.monotonic() >= self._come_until):
            raise Unavailable(
                f"no receiver is left: {self._come} came, and ended too early; the last: {self._why_dropped}"
            )
        if not self._come and time.monotonic() >= self._come_until:
            raise DeadlineExceeded(
                "no receiver came", fix="run the workers on this machine, in its network namespace, as this user"
            )

    def close(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                self._wake.close()
                self._changed.notify_all()
                if not self.begun:
                    self._release()
        if self.begun and threading.current_thread() is not self._thread:
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
                        self._drop_strangers()
                        self._changed.notify_all()
            finally:
                with self._changed:
                    self._closed = True
                    self._release()
                    self._changed.notify_all()

    def _look(self, ready: Any) -> None:
        if ready is self._listener:
            self._accept()
        elif ready in self._strangers:
            self._hear_secret(ready)
        elif ready in self._receivers:
            self._read(self._receivers[ready])

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (
            OSError
        ):  # the receiver is gone again, or there are no descriptors: then the next accept fails at once
            self._changed.wait(ACCEPT_AGAIN_S)
            return
        not_for_children.add(connection)
        connection.setblocking(False)
        if not same_user(connection):
            log.warning("a process of another user asked for the weights")
            connection.close()
            return
        self._strangers[connection] = time.monotonic() + HELLO_S
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear_secret(self, connection: socket.socket) -> None:
        try:
            said, _ = read_packet(connection)
            secret = str(said.get("secret"))
        except BlockingIOError:
            return
        except (OSError, EOFError, ValueError):
            secret = ""
        self._selector.unregister(connection)
        del self._strangers[connection]
        if hmac.compare_digest(secret.encode(), self.secret.encode()):
            self._add_receiver(connection)
        else:
            log.warning("a process that does not know the update's secret asked for the weights")
            connection.close()

    def _drop_strangers(self) -> None:
        now, over = time.monotonic(), len(self._strangers) - STRANGERS
        for place, (connection, until) in enumerate(list(self._strangers.items())):
            if place < over or until < now:
                self._selector.unregister(connection)
                del self._strangers[connection]
                connection.close()

    def _add_receiver(self, connection: socket.socket) -> None:
        receiver = _ConnectedReceiver(connection, 0, 0, time.monotonic(), named=not self._on_gpu)
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
            self._come_until = time.monotonic() + self._bounds.other_receivers_s
        self._receivers[connection] = receiver
        self._selector.register(connection, selectors.EVENT_READ)
        self._send_turns(receiver)

    def _send_turns(self, receiver: _ConnectedReceiver) -> None:
        """Sends the turns that the receiver does not know: at most three packets, for which the socket has room."""
        try:
            while receiver.named and receiver.sent < len(self._turns):
                self._send_turn(receiver, self._turns[receiver.sent])
                receiver.sent += 1
                receiver.since = time.monotonic()
        except Exception as error:  # torch raises many kinds of errors
            self._refuse(receiver, error)

    def _send_turn(self, receiver: _ConnectedReceiver, turn: dict[str, Any]) -> None:
        number = turn.get("bucket")
        if self._own is None or number is None or not self._is_lent(number):
            send_packet(receiver.connection, turn)
        elif self._on_gpu:
            starts, handles = self._own.shared(number, receiver.gpu)
            try:
                wire = [one.to_wire() for one in handles]
                send_packet(receiver.connection, {**turn, "starts": starts, "handles": wire})
            except BaseException:
                release(self._cuda, handles)  # the receiver does not know them
                raise
            receiver.shares[number] = handles
        else:
            starts, opened = self._own.opened(number)
            try:
                send_packet(receiver.connection, {**turn, "starts": starts}, opened)
            finally:
                close_all(opened)

    def _read(self, receiver: _ConnectedReceiver) -> None:
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
        if self._on_gpu and answer.keys() == {"closed"}:
            receiver.gave_up(_turns(answer))
            return
        if answer != {"taken": receiver.taken} or receiver.taken >= receiver.sent:
            self._drop(receiver, f"it sent {str(answer)[:100]} out of turn")
            return
        receiver.shares.pop(receiver.taken, None)
        receiver.taken += 1
        receiver.since = time.monotonic()
        if receiver.taken > len(self.manifest.buckets):
            self._ended += 1
            self._forget(receiver)

    def _name(self, receiver: _ConnectedReceiver, gpu: Any) -> None:
        """Sends the receiver the handles of the buffers on its GPU."""
        try:
            receiver.gpu = seen(self._cuda, gpu)
            handles = self.buffers.shared(gpu) if isinstance(self.buffers, GpuBuffers) else []
            receiver.shares[NO_TURN] = handles
            send_packet(receiver.connection, {"handles": [one.to_wire() for one in handles]})
        except Exception as error:
            receiver.release_shares(self._cuda)
            self._refuse(receiver, error)
            return
        receiver.named = True
        self._send_turns(receiver)

    def _drop_silent(self) -> None:
        limit = time.monotonic() - self._bounds.silent_receiver_s
        for receiver in list(self._receivers.values()):
            if (receiver.taken < receiver.sent or not receiver.named) and receiver.since < limit:
                self._drop(receiver, f"it was silent for {self._bounds.silent_receiver_s:g} s")

    def _refuse(self, receiver: _ConnectedReceiver, error: Exception) -> None:
        """Drops a receiver, and sends it the reason."""
        why, gone = str(error) or type(error).__name__, isinstance(error, ConnectionError)
        if not gone:
            # The log gets the text, because the error itself holds its frames.
            log.warning("a receiver is dropped: %s", repr(error))
        with contextlib.suppress(OSError):
            send_packet(receiver.connection, {"error": why})
        self._drop(receiver, why, gone)

    def _drop(self, receiver: _ConnectedReceiver, why: str, gone: bool = False) -> None:
        self._why_dropped = why
        if gone and receiver.shares:
            self._hear_closed(receiver)
            receiver.release_shares(self._cuda)
        log.info("a receiver is given up after %d of %d turns: %s", receiver.taken, receiver.sent, why)
        self._forget(receiver)

    def _hear_closed(self, receiver: _ConnectedReceiver) -> None:
        """Reads what the receiver sent before its connection ended. An error of the connection comes once, before
        that."""
        for _ in range(BUFFERS + 2):
            try:
                answer, _ = read_packet(receiver.connection)
            except EOFError:
                return
            except (OSError, ValueError):
                continue
            if answer.keys() == {"closed"}:
                receiver.gave_up(_turns(answer))

    def _forget(self, receiver: _ConnectedReceiver) -> None:
        del self._receivers[receiver.connection]
        with contextlib.suppress(KeyError, ValueError, RuntimeError):
            self._selector.unregister(receiver.connection)
        receiver.connection.close()

    def _release(self) -> None:
        if self._on_gpu:
            self._await_closed_memory()
        if self._own is not None:
            self._own.close()
        if isinstance(self.buffers, GpuBuffers):
            self.buffers.close()
        for receiver in list(self._receivers.values()):
            self._forget(receiver)
        for one in (*self._strangers, self._listener, self._woken, self._wake):
            one.close()
        self._strangers.clear()

    def _await_closed_memory(self) -> None:
        """Ends the receivers' waits, and waits until they have closed the GPU's memory."""
        give_up = time.monotonic() + self._bounds.give_up_s
        for receiver in self._receivers.values():
            with contextlib.suppress(OSError):
                receiver.connection.shutdown(socket.SHUT_WR)
        while any(receiver.shares for receiver in self._receivers.values()) and time.monotonic() < give_up:
            for key, _ in self._selector.select(max(0.0, give_up - time.monotonic())):
                if key.fileobj in self._receivers:
                    self._look(key.fileobj)


def _turns(closed: Mapping[str, Any]) -> int:
    turns = closed["closed"]
    return turns if type(turns) is int else 0
