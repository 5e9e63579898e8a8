"""The `ipc` transport: weights from a trainer on this machine, through shared memory.

`{backend: ipc, socket: S}`, as `rl_plane.publish.ipc` gives it. What arrives is checked before it is believed: who
sends it, how large the memory really is, and that it can't become smaller while it is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Literal

import msgpack

from rl_plane.errors import DeadlineExceeded, EngineFailed, InvalidRequest, InvalidWeights, Unavailable
from rl_plane.manifest import Manifest
from rl_plane.publish.ipc_wire import (
    BACKEND,
    BUFFERS,
    MAX_MANIFEST_BYTES,
    NAME,
    PROTOCOL,
    address,
    buffer_bytes,
    buffer_count,
    check_platform,
    close_all,
    read_packet,
    same_user,
    seals,
    send_packet,
)
from rl_plane.tasks import never
from rl_plane.versions import HostTensor
from worker.reception import Cancelled
from worker.transports.base import Places, check_fields
from worker.transports.packed import PackedDelivery

FIRST_PACKET_S = 30.0
"""A sender answers from a thread of its own; only a process that stands still does not."""

BUCKET_S = 300.0
"""A trainer that gathers a sharded model takes seconds for a bucket; before that it may wait for other receivers."""

LOOK_S = 0.1
"""How often a receiver that waits looks whether it is still wanted."""

_FIX = "is the trainer on this machine, in this network namespace, and still there? else use another transport"


class IpcTransport:
    """The `ipc` backend. Keeps nothing between two updates."""

    backend = BACKEND

    def __init__(self, places: Places) -> None:
        pass

    def init(self, config: Mapping[str, Any]) -> None:
        check_fields(BACKEND, config)

    def destroy(self) -> None:
        pass

    def open(self, request: Mapping[str, Any], kind: Literal["base", "lora"]) -> PackedDelivery:
        check_platform()
        check_fields(BACKEND, request, "socket")
        name = request.get("socket")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidRequest(
                "transport.socket is not the name of a sender's socket",
                field="transport.socket",
                fix="pass on the `transport` that the sender's `open` gave",
            )
        connection = _connected(name)
        try:
            return _opened(connection, kind)
        except BaseException:
            connection.close()
            raise


class IpcDelivery(PackedDelivery):
    def __init__(self, manifest: Manifest, connection: socket.socket, maps: list[mmap.mmap]) -> None:
        self._taking = self._take()
        super().__init__(manifest, self._taking, refetchable=False)
        self._connection = connection
        self._maps = maps
        self._bucket = self._tensor = memoryview(b"")

    def tensors(self) -> Iterator[tuple[str, HostTensor]]:
        for name, tensor in super().tensors():
            self._tensor = tensor.data
            yield name, tensor

    def close(self) -> None:
        """From any thread: one that waits for a bucket gets Unavailable."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        with contextlib.suppress(ValueError):  # that thread is in it
            self._taking.close()
        # An error's traceback may hold what was looked at last, for long; the memory is to go now.
        with contextlib.suppress(BufferError):  # a thread is at it: it goes with that
            self._tensor.release()
            self._bucket.release()
            for one in self._maps:
                one.close()
        self._maps = []

    def _take(self) -> Generator[memoryview, None, None]:
        """Bucket by bucket. What was taken is told when the next one is asked for."""
        for number, bucket in enumerate(self._manifest.buckets):
            self._await("bucket", number)
            with memoryview(self._maps[number % BUFFERS]) as whole:
                self._bucket = whole[: bucket.nbytes]
            yield self._bucket
            self._taken(number)
        digest = self._await("end", None)
        if digest is not None and not isinstance(digest, str):
            raise _refuse("its digest is no text")
        self.digest = digest
        self._taken(len(self._manifest.buckets))

    def _await(self, key: str, expected: int | None) -> Any:
        packet, _ = _packet(self._connection, BUCKET_S, cancelled=self.cancelled)
        if packet.keys() != {key} or expected not in (None, packet[key]):
            raise _refuse(f"it said {str(packet)[:100]} out of turn")
        return packet[key]

    def _taken(self, number: int) -> None:
        try:
            send_packet(self._connection, {"taken": number})
        except OSError as error:
            raise _gone(error) from error


def _connected(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(FIRST_PACKET_S)
        connection.connect(address(name))
        if not same_user(connection):
            raise InvalidRequest(
                "a process of another user listens at transport.socket",
                field="transport.socket",
                fix="run trainer and workers as one user",
            )
        return connection
    except OSError as error:
        connection.close()
        raise InvalidRequest(
            f"no trainer listens at transport.socket on this machine: {error.strerror or error}",
            field="transport.socket",
            fix=_FIX,
        ) from error
    except BaseException:
        connection.close()
        raise


def _opened(connection: socket.socket, kind: Literal["base", "lora"]) -> IpcDelivery:
    first, descriptors = _packet(connection, FIRST_PACKET_S, 1 + BUFFERS)
    try:
        if first.get("protocol") != PROTOCOL:
            raise _refuse(f"it speaks version {str(first.get('protocol'))[:20]}, this worker {PROTOCOL}")
        nbytes, room = first.get("manifest"), first.get("buffer")
        if not descriptors or type(nbytes) is not int or type(room) is not int:
            raise _refuse("its first packet has no manifest and buffers")
        manifest = _manifest(descriptors[0], nbytes)
        if (manifest.adapter_config is None) != (kind == "base"):
            wanted, came = ("base weights", "an adapter") if kind == "base" else ("an adapter", "base weights")
            raise InvalidWeights(f"{came} came, not {wanted}", field="target.kind", fix=f"send {wanted}")
        if len(descriptors) != 1 + buffer_count(manifest):
            raise _refuse(f"{len(descriptors) - 1} buffers came for {len(manifest.buckets)} buckets")
        needed = buffer_bytes(manifest)
        if room < needed:
            raise _refuse(f"its buffers have {room} bytes, a bucket {needed}")
        for descriptor in descriptors[1:]:
            _check_memory(descriptor, needed)
        maps = [mmap.mmap(descriptor, needed, prot=mmap.PROT_READ) for descriptor in descriptors[1:]]
    finally:
        close_all(descriptors)
    try:
        return IpcDelivery(manifest, connection, maps)
    except BaseException:
        for one in maps:
            one.close()
        raise


def _manifest(descriptor: int, nbytes: int) -> Manifest:
    if not 0 < nbytes <= MAX_MANIFEST_BYTES:
        raise _refuse(f"its manifest has {nbytes} bytes, at most {MAX_MANIFEST_BYTES} are read")
    _check_memory(descriptor, nbytes)
    try:
        wire = msgpack.unpackb(os.pread(descriptor, nbytes, 0))
    except Exception as error:  # msgpack has no common root for them
        raise _refuse(f"its manifest can't be read: {error}") from error
    return Manifest.from_wire(wire)


def _check_memory(descriptor: int, needed: int) -> None:
    """It is so large, and stays so: reading behind the end of a map ends a process."""
    if not seals(descriptor) & fcntl.F_SEAL_SHRINK:
        raise _refuse("its memory could shrink while it is read")
    if os.fstat(descriptor).st_size < needed:
        raise _refuse(f"its memory has {os.fstat(descriptor).st_size} bytes, not {needed}")


def _packet(
    connection: socket.socket,
    timeout_s: float,
    max_descriptors: int = 0,
    cancelled: Cancelled = never,
) -> tuple[dict[str, Any], list[int]]:
    give_up = time.monotonic() + timeout_s
    try:
        packet = None
        while packet is None:
            if cancelled():
                raise EngineFailed("staging was cancelled")
            if time.monotonic() > give_up:
                raise DeadlineExceeded(f"the trainer was silent for {timeout_s:g} s", fix="publish again")
            connection.settimeout(LOOK_S)
            with contextlib.suppress(TimeoutError):
                packet, descriptors = read_packet(connection, max_descriptors)
    except (OSError, EOFError) as error:
        raise _gone(error) from error
    except ValueError as error:
        raise _refuse(f"it sent {error}") from error
    if isinstance(packet.get("error"), str):
        close_all(descriptors)
        raise Unavailable(f"the trainer refused: {packet['error'][:500]}", fix="publish again")
    return packet, descriptors


def _gone(error: BaseException) -> Unavailable:
    return Unavailable(
        f"the trainer has gone, or has ended the update, before all weights had come: {error}", fix="publish again"
    )


def _refuse(what: str) -> InvalidWeights:
    return InvalidWeights(f"not a sender of ours: {what}", field="transport.socket", fix="update both sides")
