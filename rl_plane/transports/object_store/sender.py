"""The sending half of `object_store`: a version goes into a stream of NATS, from which workers fetch it at any time.

After a broken connection, or a restart of the server, the sender continues where it was. Receivers may read a version
while it is written.

Opening a version removes old versions of the same publisher, and unfinished versions that the publisher left when it
died. The newest few versions stay, and so does each version that the fleet's record names.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from rl_plane.bus.connect_errors import why_refused
from rl_plane.bus.connection import CONNECT_TIMEOUT_S, WRONG_LAST_SEQUENCE
from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.bus.entries import decoded
from rl_plane.errors import BusUnreachable, InvalidRequest, Unavailable
from rl_plane.protocol.record import DecisionRecord
from rl_plane.protocol.subjects import (
    DEFAULT_COMPONENT,
    DEFAULT_NAMESPACE,
    DEFAULT_NATS_URL,
    RECORD,
    Entry,
    StoredObject,
    Subjects,
)
from rl_plane.transports.base import Sender, SenderContext
from rl_plane.transports.object_store.bulk_socket import NatsSocket
from rl_plane.transports.object_store.wire import (
    ANSWER_S,
    BACKEND,
    HEADROOM_BYTES,
    LAYOUT,
    MAX_CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    PUBLISHER,
    RETRY_S,
    Layout,
    NoSuchObject,
    ask,
    encode_digests,
    encode_manifest,
    refused,
)
from rl_plane.weights.manifest import Manifest

log = logging.getLogger("rl_plane.transports.object_store.sender")

NAME = "rl-plane-publisher"
"""The name of the connection, as the NATS server shows it."""
DEFAULT_KEEP = 2
"""The number of versions that stay beside the committed ones: for a roll-back, and for workers that still fetch."""
IN_FLIGHT = 16
"""The most chunks without an acknowledgement: they keep the server busy, and fill little of its buffer."""
OUTAGE_S = 30.0
"""The longest time that NATS may be away, in seconds. A restart takes a second, and a few with a large store."""
ABANDONED_S = 300.0
"""Seconds without a write after which an unfinished version is abandoned. Between two buckets a trainer takes less."""
HALF_AGE_S = 86_400.0
"""Seconds after which NATS itself removes the chunks of an unfinished version. No version takes so long."""

T = TypeVar("T")


class ObjectStoreSender(Sender):
    """Stores each version as a stream of its own. For one thread."""

    backend = BACKEND
    receivers_from = "finish"
    slow = True

    def __init__(
        self,
        nats_url: str = DEFAULT_NATS_URL,
        namespace: str = DEFAULT_NAMESPACE,
        component: str = DEFAULT_COMPONENT,
        *,
        keep: int = DEFAULT_KEEP,
        publisher: str = "",
        credentials: NatsCredentials = NO_CREDENTIALS,
        outage_s: float = OUTAGE_S,
        abandoned_s: float = ABANDONED_S,
    ) -> None:
        """Makes the sender.

        Args:
            nats_url: the URL of the fleet's NATS.
            namespace: the fleet's namespace.
            component: the fleet's component. Only its workers read the versions.
            keep: how many versions stay. The versions that the fleet's record names, and the version that is being
                written, are not counted.
            publisher: the publisher's name, the same after a restart.
            credentials: the files by which it connects to NATS.
            outage_s: how long the sender waits for a NATS that is away, in seconds.
            abandoned_s: the seconds without a write after which an unfinished version of this publisher is abandoned.
        """
        self._url = nats_url
        self._credentials = credentials
        self._subjects = Subjects(namespace, component)
        self._keep = keep
        self._publisher = publisher
        self._outage_s = outage_s
        self._abandoned_s = abandoned_s
        self._socket: NatsSocket | None = None
        self._object: StoredObject | None = None  # the version that is being written
        self._config: dict[str, Any] = {}
        self._layout: Layout
        self._manifest: Manifest
        self._buffer = memoryview(b"")
        self._closed = 0  # how often `close` was called
        self._written = 0  # the stream's last known sequence number

    def open(self, manifest: Manifest) -> dict[str, Any]:
        self.close()
        raw = encode_manifest(manifest)
        if len(raw) > MAX_MANIFEST_BYTES:
            raise InvalidRequest(
                f"the manifest has {len(raw)} bytes, more than {MAX_MANIFEST_BYTES}",
                field="tensors",
                fix="use shorter names, or fewer tensors",
            )
        max_payload = self._persistently(lambda connection: connection.max_payload)
        chunk_bytes = min(max_payload, MAX_CHUNK_BYTES) - HEADROOM_BYTES
        if chunk_bytes <= 0:
            raise InvalidRequest(
                f"the server takes messages of {max_payload} bytes only", field="nats_url", fix="raise max_payload"
            )
        self._persistently(self._retire)
        self._manifest, self._layout, self._written = manifest, Layout(chunk_bytes, len(raw)), 0
        made = self._subjects.object(f"{int(time.time() * 1000):012x}{secrets.token_hex(4)}")
        self._config = {
            "name": made.stream,
            "subjects": [made.subject],
            "storage": "file",
            "discard": "new",
            "allow_direct": True,
            "max_age": int(HALF_AGE_S * 1e9),
            "metadata": {LAYOUT: self._layout.encode(), PUBLISHER: self._publisher},
        }
        self._persistently(lambda connection: ask(connection, f"STREAM.CREATE.{made.stream}", self._config))
        self._object = made
        self._append(memoryview(raw))
        return {"backend": BACKEND, "object": made.id}

    def buffer(self, number: int) -> memoryview:
        if not self._buffer:
            self._buffer = memoryview(bytearray(max(bucket.nbytes for bucket in self._manifest.buckets)))
        return self._buffer[: self._manifest.buckets[number].nbytes]

    def send(self, number: int) -> None:
        self._append(self.buffer(number))

    def finish(self, digests: Mapping[str, str] | None) -> None:
        made = self._writing()
        self._append(memoryview(encode_digests(self._manifest, digests)))
        # Sealing sets these two. They are in the request, so that a repeated call after a lost answer changes nothing.
        sealed = {**self._config, "max_age": 0, "sealed": True, "deny_delete": True, "deny_purge": True}
        self._persistently(lambda connection: ask(connection, f"STREAM.UPDATE.{made.stream}", sealed))
        self._object = None

    def close(self) -> None:
        """Removes an unfinished version. From any thread: a call that blocks ends with Unavailable."""
        made, self._object = self._object, None
        self._closed += 1
        self._drop()
        self._buffer = memoryview(b"")
        if made is not None:
            with contextlib.suppress(OSError, Unavailable, NoSuchObject):
                connection = NatsSocket(self._url, NAME, CONNECT_TIMEOUT_S, self._credentials)
                try:
                    ask(connection, f"STREAM.DELETE.{made.stream}")
                finally:
                    connection.close()

    def destroy(self) -> None:
        self.close()

    def remove(self, object_id: str) -> None:
        """Removes a version early. If it is gone already, this does nothing."""
        stream = self._subjects.object(object_id).stream
        self._persistently(lambda connection: _delete(connection, stream))

    # ---- chunks ----

    def _append(self, data: memoryview) -> None:
        """Writes `data` as the stream's next chunks, and returns when the server has acknowledged them."""
        made, base = self._writing(), self._written
        chunks = self._layout.cut(data)

        def push(connection: NatsSocket) -> None:
            sent = self._written
            while self._written < base + len(chunks):
                while sent < min(base + len(chunks), self._written + IN_FLIGHT):
                    expected = {"Nats-Expected-Last-Sequence": str(sent)}
                    connection.publish(made.subject, chunks[sent - base], reply=True, headers=expected)
                    sent += 1
                arrival = connection.next(ANSWER_S)
                answer = connection.take()
                if arrival.status is not None:
                    raise ConnectionError("no stream takes it")
                ack = json.loads(answer)
                if (error := ack.get("error")) is None:
                    self._written = int(ack["seq"])
                elif error.get("err_code") in WRONG_LAST_SEQUENCE:
                    raise ConnectionError("a chunk before was lost")
                else:
                    raise refused("a chunk of the weights", error)

        def synchronise(connection: NatsSocket) -> None:
            state = ask(connection, f"STREAM.INFO.{made.stream}")["state"]
            if state["last_seq"] < base:
                raise Unavailable(f"NATS has lost a part of the object {made.id} that it had acknowledged")
            self._written = int(state["last_seq"])

        self._persistently(push, synchronise, lambda: self._written)

    def _writing(self) -> StoredObject:
        if self._object is None:
            raise InvalidRequest("no version is open", field="tensors", fix="open one first")
        return self._object

    # ---- removing old versions ----

    def _retire(self, connection: NatsSocket) -> None:
        record = self._record(connection)
        named = _named(record)
        whole: list[str] = []
        abandoned: list[str] = []
        for info in self._listed(connection):
            config, state = info["config"], info["state"]
            object_id = config["subjects"][0].rpartition(".")[2]
            ours = (config.get("metadata") or {}).get(PUBLISHER) == self._publisher
            written = state["last_ts"] if state["last_seq"] else info["created"]
            silent_s = (datetime.fromisoformat(info["ts"]) - datetime.fromisoformat(written)).total_seconds()
            if object_id in named:
                continue
            if config.get("sealed"):
                if ours and record is not None:  # without a record it is unknown which versions are needed
                    whole.append(object_id)
            elif silent_s >= (self._abandoned_s if ours else HALF_AGE_S):  # NATS has removed its chunks by then
                abandoned.append(object_id)
        for object_id in [*abandoned, *sorted(whole, reverse=True)[self._keep :]]:
            log.info("the object %s is removed", object_id)
            _delete(connection, self._subjects.object(object_id).stream)

    def _listed(self, connection: NatsSocket) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            page = ask(connection, "STREAM.LIST", {"subject": self._subjects.objects, "offset": len(found)})
            found += page.get("streams") or []
            if not page.get("streams") or len(found) >= page["total"]:
                return found

    def _record(self, connection: NatsSocket) -> DecisionRecord | None:
        state = self._subjects.state
        try:
            found = ask(connection, f"STREAM.MSG.GET.{state.stream}", {"last_by_subj": state.key(RECORD)})
        except NoSuchObject:
            return None
        message = found["message"]
        data = base64.b64decode(message.get("data", ""))
        return decoded(Entry(RECORD, data, message["seq"]), DecisionRecord.decode)

    # ---- the connection ----

    def _connected(self) -> NatsSocket:
        """The open connection, or a new one. Raises Unauthorized if the server does not let this process in. An error
        that ends an open connection, such as an expired token, does not say that: a new one reads the token again."""
        if (connection := self._socket) is None:
            try:
                connection = self._socket = NatsSocket(self._url, NAME, CONNECT_TIMEOUT_S, self._credentials)
            except OSError as error:
                where = self._url.rpartition("@")[2]  # without a password
                stays_out = why_refused(error, where, self._credentials.load(), self._credentials)
                if stays_out is not None:
                    raise stays_out from error
                raise
        return connection

    def _drop(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _persistently(
        self,
        work: Callable[[NatsSocket], T],
        before_again: Callable[[NatsSocket], None] = lambda connection: None,
        progress: Callable[[], int] = lambda: 0,
    ) -> T:
        """Runs `work`, again on a new connection if one breaks. Raises BusUnreachable after `outage_s` without
        progress, and Unauthorized at once if the server does not let this process in."""
        give_up, reached, again, closed = time.monotonic() + self._outage_s, progress(), False, self._closed
        while True:
            try:
                connection = self._connected()
                if again:
                    before_again(connection)
                return work(connection)
            except OSError as error:
                self._drop()
                if self._closed != closed:
                    raise Unavailable("the sender was closed") from error
                if progress() > reached:
                    give_up, reached = time.monotonic() + self._outage_s, progress()
                if time.monotonic() > give_up:
                    raise BusUnreachable(f"NATS did not take the weights: {error}", retry_after_s=1.0) from error
                again = True
                time.sleep(RETRY_S)
            except NoSuchObject:
                raise Unavailable("the object was removed while it was written") from None
            except BaseException:
                self._drop()  # this connection may still deliver answers
                raise


def _delete(connection: NatsSocket, stream: str) -> None:
    with contextlib.suppress(NoSuchObject):
        ask(connection, f"STREAM.DELETE.{stream}")


def _named(record: DecisionRecord | None) -> set[Any]:
    """The ids of the objects that a worker would fetch to heal."""
    return {
        source.transport.get("object")
        for source in (record.sources if record is not None else ())
        if source.transport is not None and source.transport.get("backend") == BACKEND
    }


def build(context: SenderContext) -> ObjectStoreSender:
    """Makes the sender.

    Options: `nats_url` (needed if the fleet was given by the frontend's URL), `keep` (versions), `publisher` (see
    `SenderContext.publisher`).
    """
    context.check_options(BACKEND, "nats_url", "keep", "publisher")
    url, keep = context.options.get("nats_url", context.nats_url), context.keep_option(DEFAULT_KEEP, least=0)
    if not isinstance(url, str):
        raise InvalidRequest(
            "the frontend's URL does not tell where NATS is",
            field="options.nats_url",
            fix="options={'nats_url': 'nats://…'} (--option nats_url=nats://…), as the workers have it",
        )
    fleets = {(str(worker["namespace"]), str(worker["component"])) for worker in context.workers()}
    if len(fleets) != 1:
        raise InvalidRequest(
            f"there are workers of {len(fleets)} components, and an object belongs to one",
            field="component",
            fix="make a publisher for each component",
        )
    return ObjectStoreSender(
        url, *fleets.pop(), keep=keep, publisher=context.publisher(), credentials=context.credentials
    )
