"""The receiving half of `ipc`: weights from a trainer on this machine, through shared memory, or from a GPU's memory.

A request is `{backend: ipc, socket: S, secret: K}`, as the sender's `open` returns it. The receiver checks who sends,
how large the memory really is, and that it can't become smaller while it is read. For `{backend: ipc, in_parts: true}`
see `placed_delivery`.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import msgpack

from rl_plane._util.peer_credentials import peer_pid, same_user
from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import DeadlineExceeded, EngineFailed, InvalidRequest, InvalidWeights, Unavailable
from rl_plane.protocol.versions import DigestAlgorithm, HostTensor
from rl_plane.transports.base import TransportContext, WeightTransport, check_fields
from rl_plane.transports.ipc.checkpoint_engine import CheckpointEngineDelivery
from rl_plane.transports.ipc.cuda_buffers import Handle, OpenBuckets, read_opened, remove_counters
from rl_plane.transports.ipc.in_place import MAX_TOGETHER
from rl_plane.transports.ipc.placed_delivery import PlacedDelivery
from rl_plane.transports.ipc.torch_cuda import TORCH_CUDA, TorchCuda
from rl_plane.transports.ipc.wire import (
    BACKEND,
    BUFFERS,
    MAX_MANIFEST_BYTES,
    NAME,
    PROTOCOL,
    SECRET,
    address,
    buffer_bytes,
    buffer_count,
    check_platform,
    close_all,
    read_packet,
    seals,
    send_packet,
)
from rl_plane.transports.packed_delivery import Arrived, PackedDelivery, check_kind
from rl_plane.transports.trainer_memory import read_memory
from rl_plane.weights.checkpoint import Kind
from rl_plane.weights.manifest import Manifest, PackedBucket
from rl_plane.weights.read_ahead import host_memory

FIRST_PACKET_S = 30.0
"""The time for the first packet in seconds. A sender answers from a thread of its own, unless its process hangs."""

BUCKET_S = 300.0
"""The time for a bucket in seconds. Gathering a sharded model takes seconds; before, the trainer may wait for other
receivers."""

READERS = min(4, os.cpu_count() or 1)
"""Threads that read the lent tensors of a bucket. One core copies slower than memory allows."""

SEVERAL_READERS_BYTES = 1 << 20
"""The bytes of a lent bucket from which several threads read it. A smaller one is there before a thread wakes up."""

LOOK_S = 0.1
"""Seconds between two looks at `cancelled`, while the receiver waits."""

_FIX = "is the trainer on this machine, in this network namespace, and still there? else use another transport"


class IpcTransport(WeightTransport):
    """The `ipc` transport of one process. It has no state between two updates."""

    backend = BACKEND

    def __init__(
        self,
        context: TransportContext,
        cuda: TorchCuda = TORCH_CUDA,
        *,
        first_packet_s: float = FIRST_PACKET_S,
        bucket_s: float = BUCKET_S,
    ) -> None:
        """`first_packet_s` and `bucket_s`: how long to wait for the first packet and for each bucket, in seconds."""
        self._first_packet_s = first_packet_s
        self._bucket_s = bucket_s
        self._device = context.device
        self._devices = context.rank_devices or (context.device,)
        self._cuda = cuda

    def open(
        self, request: Mapping[str, Any], kind: Kind
    ) -> PackedDelivery | PlacedDelivery | CheckpointEngineDelivery:
        check_platform()
        if "zmq_handles" in request:
            check_fields(BACKEND, request, "zmq_handles")
            return CheckpointEngineDelivery(request["zmq_handles"], self._cuda, self._devices)
        if "in_parts" in request:
            check_fields(BACKEND, request, "in_parts", "fleet_ranks")
            return PlacedDelivery(self._cuda, self._devices)
        check_fields(BACKEND, request, "socket", "secret")
        name, secret = request.get("socket"), request.get("secret")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidRequest(
                "transport.socket is not the name of a sender's socket",
                field="transport.socket",
                fix="pass on the `transport` that the sender's `open` gave",
            )
        if not isinstance(secret, str) or not SECRET.fullmatch(secret):
            raise InvalidRequest(
                "transport.secret is not the secret of a sender's update",
                field="transport.secret",
                fix="pass on the `transport` that the sender's `open` gave",
            )
        connection = _connected(name, secret)
        try:
            first, descriptors = _packet(connection, self._first_packet_s, 1 + BUFFERS)
            return _opened(connection, first, descriptors, kind, self._device, self._cuda, self._bucket_s)
        except BaseException:
            connection.close()
            raise


@dataclass(frozen=True, slots=True)
class _LentBucket:
    """A bucket whose non-empty tensors are read in the trainer's memory."""

    starts: Sequence[int]
    handles: Any
    descriptors: Sequence[int]
    places: Sequence[memoryview]
    """The memory here into which the tensors go."""
    algorithm: DigestAlgorithm


class _Mapped:
    """The trainer's memory on the host: its buffers are read in place, lent tensors are copied."""

    copies = False

    def __init__(self, maps: list[mmap.mmap]) -> None:
        self._maps = maps
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ipc read")

    def read(self, number: int, nbytes: int) -> memoryview:
        if not self._maps:
            raise _refuse("it sent no buffers")
        with memoryview(self._maps[number % BUFFERS]) as whole:
            return whole[:nbytes]

    def read_own(self, number: int, own: _LentBucket) -> Sequence[str | None]:
        if len(own.descriptors) != len(own.places):
            raise _refuse(f"{len(own.descriptors)} descriptors came for {len(own.places)} tensors")
        algorithms = [own.algorithm] * len(own.places)
        if sum(place.nbytes for place in own.places) < SEVERAL_READERS_BYTES:
            return list(map(read_memory, own.descriptors, own.starts, own.places, algorithms))
        reads = [
            self._readers.submit(read_memory, *one)
            for one in zip(own.descriptors, own.starts, own.places, algorithms, strict=True)
        ]
        wait(reads)  # also after an error, because the caller closes the descriptors next
        return [one.result() for one in reads]

    def close(self) -> None:
        self._readers.shutdown(wait=False)
        for one in self._maps:
            one.close()


class _OnGpu:
    """The trainer's memory on a GPU, from which buckets and tensors are copied to the host."""

    copies = True

    def __init__(self, handles: list[Handle], uuid: str, connection: socket.socket, cuda: TorchCuda) -> None:
        self._cuda = cuda
        self._uuid = uuid
        self._handles = handles
        """The handles of the buffers, and one handle of lent tensors for each further file of counters."""
        self._closed_turns = 0
        """The number of turns that are closed."""
        self._connection = connection
        self._pid = peer_pid(connection)
        try:
            self._pidfd = os.pidfd_open(self._pid)
        except OSError as error:
            raise Unavailable(
                f"the trainer's process can't be watched: {error}",
                fix="let the worker share the trainer's PID namespace",
            ) from error
        self._open: OpenBuckets | None = None
        try:
            self._open = OpenBuckets(handles, uuid, cuda) if handles else None
        except Exception as error:
            self.close()
            raise _not_opened(uuid, error) from error

    def read(self, number: int, nbytes: int) -> memoryview:
        if self._open is None:
            raise _refuse("it sent no buffers")
        return self._open.read(number, nbytes)

    def read_own(self, number: int, own: _LentBucket) -> Sequence[str | None]:
        """Does the same as `_Mapped.read_own`. The digests are None: nothing is hashed on its way from a GPU."""
        if not isinstance(own.handles, list) or len(own.handles) != len(own.places):
            raise _refuse(f"it sent no handles of the {len(own.places)} tensors")
        handles = [
            Handle.from_wire(wire, place.nbytes, start)
            for wire, start, place in zip(own.handles, own.starts, own.places, strict=True)
        ]
        known = {one.counter for one in self._handles}
        self._handles += [one for one in handles if one.counter not in known]
        self._closed_turns = number + 1  # even if reading fails
        try:
            read_opened(self._cuda, self._uuid, handles, own.starts, own.places)
        except Exception as error:
            raise _not_opened(self._uuid, error) from error
        return [None] * len(own.places)

    def close(self) -> None:
        if self._pidfd < 0:
            return
        if self._open is not None:
            self._open.close()
            self._open = None
        try:
            send_packet(self._connection, {"closed": self._closed_turns})
        except OSError:
            remove_counters(self._handles, self._pid, self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1


class IpcDelivery(PackedDelivery):
    """The delivery of one version from a trainer on this machine."""

    def __init__(
        self, manifest: Manifest, connection: socket.socket, source: _Mapped | _OnGpu, bucket_s: float
    ) -> None:
        self._bucket_s = bucket_s
        self._taking = self._take()
        super().__init__(manifest, self._taking, refetchable=False)
        self._connection = connection
        self._source = source
        self._bucket = self._tensor = memoryview(b"")

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        for name, tensor in super().tensors(cancelled):
            if not tensor.owned:
                self._tensor = tensor.data
            yield name, tensor

    def close(self) -> None:
        """Ends the delivery, from any thread. A thread that waits for a bucket gets Unavailable."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)
        try:
            self._taking.close()
        except ValueError:
            return  # another thread is in the generator, and ends the delivery
        self._end()

    def _end(self) -> None:
        # An error's traceback may hold the last memory for a long time, so release it now.
        with contextlib.suppress(BufferError):  # a thread still reads: the memory is freed with it
            self._tensor.release()
            self._bucket.release()
            self._source.close()
        self._connection.close()

    def _take(self) -> Generator[Arrived, None, None]:
        """Yields bucket by bucket. Answers `taken` when the next bucket is asked for, or as soon as a bucket is
        copied."""
        try:
            last = len(self._manifest.buckets) - 1
            for number, bucket in enumerate(self._manifest.buckets):
                arrived = self._read(number, bucket)
                copied = self._source.copies or not isinstance(arrived, memoryview)
                if copied:
                    if number == last:
                        self._source.close()  # before the trainer frees it
                    self._taken(number)
                yield arrived
                if not copied:
                    self._taken(number)
            digest = self._await("end", None)[0]["end"]
            if digest is not None and not isinstance(digest, str):
                raise _refuse("its digest is not a text")
            self.digest = digest
            self._taken(last + 1)
        finally:
            self._end()

    def _read(self, number: int, bucket: PackedBucket) -> Arrived:
        """Reads one bucket: a lent one into its places, or into new memory."""
        packet, descriptors = self._await("bucket", number, MAX_TOGETHER)
        try:
            starts = packet.get("starts")
            if starts is None:
                self._bucket = self._source.read(number, bucket.nbytes)
                return self._bucket
            filled = [one for one in bucket.tensors if one.spec.nbytes]
            if not isinstance(starts, list) or [type(one) for one in starts] != [int] * len(filled):
                raise ValueError(f"no start for each of {len(filled)} tensors")
            if not all(0 <= one < 1 << 62 for one in starts):
                raise ValueError("impossible starts of tensors")
            places = self.find_places(bucket) or _new_places(bucket)
            into = [places[one.name] for one in filled]
            own = _LentBucket(starts, packet.get("handles"), descriptors, into, self.algorithm)
            digests = dict(zip((one.name for one in filled), self._source.read_own(number, own), strict=True))
            return [
                (one.name, HostTensor(one.spec, places[one.name], owned=True, digest=digests.get(one.name)))
                for one in bucket.tensors
            ]
        except ValueError as error:
            raise _refuse(f"it sent {error}") from error
        finally:
            close_all(descriptors)

    def _await(self, key: str, expected: int | None, descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
        packet, given = _packet(self._connection, self._bucket_s, descriptors, cancelled=self.cancelled)
        more = {"starts", "handles"} if key == "bucket" and "starts" in packet else set()
        if packet.keys() - more != {key} or expected not in (None, packet[key]):
            close_all(given)
            raise _refuse(f"it sent {str(packet)[:100]} out of turn")
        return packet, given

    def _taken(self, number: int) -> None:
        try:
            send_packet(self._connection, {"taken": number})
        except OSError as error:
            raise _gone(error) from error


def _new_places(bucket: PackedBucket) -> Mapping[str, memoryview]:
    whole = host_memory(bucket.nbytes)
    return {one.name: whole[one.offset : one.offset + one.spec.nbytes] for one in bucket.tensors}


def _connected(name: str, secret: str) -> socket.socket:
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
        send_packet(connection, {"secret": secret})
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


def _opened(
    connection: socket.socket,
    first: Mapping[str, Any],
    descriptors: list[int],
    kind: Kind,
    device: str,
    cuda: TorchCuda,
    bucket_s: float,
) -> IpcDelivery:
    """Opens the memory that the first packet names. Closes its descriptors."""
    try:
        if first.get("protocol") != PROTOCOL:
            raise _refuse(f"it speaks version {str(first.get('protocol'))[:20]}, this worker {PROTOCOL}")
        nbytes, room = first.get("manifest"), first.get("buffer")
        if not descriptors or type(nbytes) is not int or type(room) is not int:
            raise _refuse("its first packet has no manifest and buffers")
        manifest = _manifest(descriptors[0], nbytes)
        check_kind(manifest, kind)
        needed = buffer_bytes(manifest)
        if first.get("cuda") is True:
            source: _Mapped | _OnGpu = _on_gpu(connection, room, needed, device, cuda)
        else:
            source = _mapped(descriptors[1:], room, needed, buffer_count(manifest) if room else 0)
    finally:
        close_all(descriptors)
    try:
        return IpcDelivery(manifest, connection, source, bucket_s)
    except BaseException:
        source.close()
        raise


def _mapped(descriptors: list[int], room: int, needed: int, count: int) -> _Mapped:
    if len(descriptors) != count:
        raise _refuse(f"{len(descriptors)} buffers came where {count} are needed")
    if count and room < needed:
        raise _refuse(f"its buffers have {room} bytes, a bucket {needed}")
    for descriptor in descriptors:
        _check_memory(descriptor, needed)
    return _Mapped([mmap.mmap(descriptor, needed, prot=mmap.PROT_READ) for descriptor in descriptors])


def _on_gpu(connection: socket.socket, room: int, needed: int, device: str, cuda: TorchCuda) -> _OnGpu:
    """Opens the buffers on this rank's own GPU."""
    uuid = cuda.uuid_of(device)
    if uuid is None:
        raise Unavailable(
            "the weights are on the trainer's GPU, but this engine is on the CPU",
            fix="publish again: the sender then finds where each engine is",
        )
    try:
        send_packet(connection, {"gpu": uuid})
    except OSError as error:
        raise _gone(error) from error
    packet, _ = _packet(connection, FIRST_PACKET_S)
    handles = packet.get("handles")
    try:
        count = BUFFERS if room else 0
        if not isinstance(handles, list) or len(handles) != count or room not in (0, needed):
            raise ValueError("no handles of its two buffers")
        return _OnGpu([Handle.from_wire(one, needed) for one in handles], uuid, connection, cuda)
    except ValueError as error:
        raise _refuse(f"it sent {error}") from error


def _manifest(descriptor: int, nbytes: int) -> Manifest:
    if not 0 < nbytes <= MAX_MANIFEST_BYTES:
        raise _refuse(f"its manifest has {nbytes} bytes, at most {MAX_MANIFEST_BYTES} are read")
    _check_memory(descriptor, nbytes)
    try:
        wire = msgpack.unpackb(os.pread(descriptor, nbytes, 0))
    except Exception as error:  # msgpack's errors have no common base
        raise _refuse(f"its manifest can't be read: {error}") from error
    return Manifest.from_wire(wire)


def _check_memory(descriptor: int, needed: int) -> None:
    """Refuses memory that is too small, or may shrink: reading beyond the end of a map ends the process."""
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


def _not_opened(uuid: str, error: Exception) -> Unavailable:
    return Unavailable(
        f"the trainer's memory on {uuid} can't be opened: {str(error)[:300]}", fix="use another transport"
    )


def _gone(error: BaseException) -> Unavailable:
    return Unavailable(
        f"the trainer is gone, or has ended the update, before all weights had come: {error}", fix="publish again"
    )


def _refuse(what: str) -> InvalidWeights:
    return InvalidWeights(f"not a sender of ours: {what}", field="transport.socket", fix="update both sides")
