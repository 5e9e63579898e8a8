"""The receiving half of `object_store`: weights that a publisher has stored in NATS.

A request is `{backend: object_store, object: ID}`, for an object of this worker's own component. It is read in batches
by direct get. After an interruption the receiver asks again, from the chunk after the last good one. It can read a
version that is still being written.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from rl_plane.bus.connection import CONNECT_TIMEOUT_S
from rl_plane.bus.credentials import NatsCredentials
from rl_plane.errors import BusUnreachable, InvalidWeights, Unavailable
from rl_plane.protocol.subjects import StoredObject, Subjects, check_object_id
from rl_plane.transports.base import TransportContext, WeightTransport, check_fields
from rl_plane.transports.object_store.bulk_socket import NatsSocket
from rl_plane.transports.object_store.wire import (
    ANSWER_S,
    BACKEND,
    DIGEST_BYTES,
    LAYOUT,
    RETRY_S,
    Layout,
    NoSuchObject,
    ask,
    decode_manifest,
    with_digests,
)
from rl_plane.transports.packed_delivery import PackedDelivery, check_kind
from rl_plane.weights.checkpoint import Kind
from rl_plane.weights.read_ahead import ReadAhead, host_memory

log = logging.getLogger("rl_plane.transports.object_store.receiver")

BATCH = 16
"""The chunks of one request. Two requests are under way, half of what the server buffers for a slow client."""
STALL_S = 25.0
"""The longest time without a chunk in seconds, because NATS is away or the publisher hangs. Shorter than the time that
an abort waits for a receive to end (`worker.reconcile.staged_updates.ABORT_WAIT_S`)."""


class StoredReader:
    """Reads the chunks of one object. Reconnects as often as it must."""

    def __init__(
        self,
        url: str,
        stored: StoredObject,
        credentials: NatsCredentials,
        stall_s: float,
    ) -> None:
        """`stall_s`: how long the reader waits for the next chunk, in seconds."""
        self._url = url
        self._credentials = credentials
        self._stall_s = stall_s
        self._stored = stored
        self._socket: NatsSocket | None = None
        self._closed = False
        try:
            info = self._info(time.monotonic() + self._stall_s)
            self.layout = Layout.decode((info["config"].get("metadata") or {}).get(LAYOUT))
        except BaseException:
            self.close()
            raise
        self.last_sequence = int(info["state"]["last_seq"])
        """The sequence number of the last chunk when the object was opened."""

    def read(self, sequence: int, view: memoryview) -> None:
        """Fills `view` with the chunks from `sequence` on. Raises Unavailable after `stall_s` without a chunk."""
        chunks = self.layout.cut(view)
        done, give_up = 0, time.monotonic() + self._stall_s
        while done < len(chunks):
            before = done
            why = "the publisher has sent no more"
            try:
                for _ in self._arriving(sequence + done, chunks[done:]):
                    done, give_up = done + 1, time.monotonic() + self._stall_s
            except OSError as error:
                why = f"NATS: {error}"
                self._drop()
            if done == before:
                if time.monotonic() > give_up:
                    raise Unavailable(
                        f"no chunk of the object {self._stored.id} came for {self._stall_s:g} s: {why}"
                    )
                time.sleep(RETRY_S)
                self._info(give_up)  # raises if the object is gone

    def _arriving(self, sequence: int, chunks: list[memoryview]) -> Iterator[None]:
        """Fills the chunks that are stored, in order, and yields once for each."""
        connection, first, end = self._connected(), sequence, sequence + len(chunks)
        asked, due = first, deque[int]()  # `due`: the end of each batch that is under way
        while True:
            while asked < end and len(due) < 2:
                batch = min(BATCH, end - asked)
                body = {"seq": asked, "batch": batch, "next_by_subj": self._stored.subject}
                what = json.dumps(body).encode()
                connection.publish(f"$JS.API.DIRECT.GET.{self._stored.stream}", what, reply=True)
                asked += batch
                due.append(asked)
            if not due:
                return
            arrival = connection.next(ANSWER_S)
            if arrival.status is not None:
                connection.take()
                if due.popleft() > sequence:
                    asked = end  # the batch was cut short: ask for no more now
            elif arrival.headers.get("Nats-Sequence") != str(sequence):
                connection.take()  # a message after a batch that was cut short
            else:
                chunk = chunks[sequence - first]
                if arrival.nbytes != len(chunk):
                    raise _wrong(f"message {sequence} has {arrival.nbytes} bytes, not {len(chunk)}")
                connection.take_into(chunk)
                sequence += 1
                yield

    def _info(self, give_up: float) -> dict[str, Any]:
        """The stream's info. Raises InvalidWeights if the object does not exist, or belongs to another component."""
        while True:
            try:
                info = ask(self._connected(), f"STREAM.INFO.{self._stored.stream}")
                break
            except NoSuchObject:
                raise self._gone() from None
            except OSError as error:
                self._drop()
                if time.monotonic() > give_up:
                    raise BusUnreachable(f"NATS did not give the weights: {error}", retry_after_s=1.0) from error
                time.sleep(RETRY_S)
        if info["config"].get("subjects") != [self._stored.subject]:
            raise self._gone()
        return info

    def _gone(self) -> InvalidWeights:
        return InvalidWeights(
            f"source_gone: there is no object {self._stored.id} of this component",
            field="transport.object",
            fix="publish the weights again",
        )

    def _connected(self) -> NatsSocket:
        if self._closed:
            raise Unavailable("the delivery was closed")
        if (connection := self._socket) is None:
            connection = self._socket = NatsSocket(
                self._url, "rl-plane-receiver", CONNECT_TIMEOUT_S, self._credentials
            )
            if self._closed:  # closed while it connected
                self._drop()
                raise Unavailable("the delivery was closed")
        return connection

    def _drop(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        self._closed = True
        self._drop()


class ObjectDelivery(PackedDelivery):
    """The delivery of one stored version."""

    def __init__(self, reader: StoredReader, kind: Kind) -> None:
        raw = memoryview(bytearray(reader.layout.manifest_bytes))
        reader.read(1, raw)
        manifest = decode_manifest(bytes(raw))
        check_kind(manifest, kind, "transport.object")
        digests = memoryview(bytearray(DIGEST_BYTES * len(manifest.specs)))
        *starts, after = reader.layout.starts(manifest)
        whole = reader.last_sequence >= after + reader.layout.pieces(len(digests)) - 1
        if whole:  # with the digests at hand, a wrong tensor is found when it arrives
            reader.read(after, digests)
            manifest = with_digests(manifest, digests)

        def buckets() -> Iterator[memoryview]:
            for start, bucket in zip(starts, manifest.buckets, strict=True):
                data = host_memory(bucket.nbytes)
                reader.read(start, data)
                yield data
            if not whole:
                reader.read(after, digests)
                self.digest = with_digests(manifest, digests).digest

        ahead = ReadAhead(buckets(), lambda: self.cancelled(), reader.close)
        super().__init__(manifest, iter(ahead), refetchable=True, owned=True, close=ahead.close)


class ObjectStoreTransport(WeightTransport):
    """The `object_store` transport of one process. It has no state between two updates."""

    backend = BACKEND

    def __init__(self, context: TransportContext, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._url = context.nats_url
        self._credentials = context.credentials
        self._subjects = Subjects(context.namespace, context.component)

    def open(self, request: Mapping[str, Any], kind: Kind) -> ObjectDelivery:
        check_fields(BACKEND, request, "object")
        object_id = check_object_id("transport.object", request.get("object"))
        stored = self._subjects.object(object_id)
        reader = StoredReader(self._url, stored, self._credentials, self._stall_s)
        try:
            return ObjectDelivery(reader, kind)
        except BaseException:
            reader.close()
            raise


def _wrong(what: str) -> InvalidWeights:
    return InvalidWeights(what, field="transport.object", fix="publish the weights again")
