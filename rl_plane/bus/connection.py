"""The NATS connection of every process of the plane, and the few JetStream calls that it makes.

Foreign exceptions are translated here, once. The settings and the header tricks answer measured behaviour of
nats-py 2.16 and nats-server 2.15 (docs/decisions/membership.md).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.js import JetStreamContext, api

from rl_plane.errors import BusUnreachable, Conflict, InvalidRequest, PlaneError
from rl_plane.protocol.subjects import DEFAULT_NATS_URL, Bucket, Entry

log = logging.getLogger("rl_plane.bus.connection")

URL_SCHEMES = ("nats", "tls", "ws", "wss")

CONNECT_TIMEOUT_S = 5.0
"""With endless reconnects the first connect to a dead server would never return."""
SERVICE_CONNECT_S = 30.0
"""For workers and frontends: a server that is started together with them may come up after them."""
RECONNECT_WAIT_S = 0.1
"""nats-py's own 2 s would be most of the time that a restart of the server costs."""
RECONNECT_GRACE_S = 1.0
"""After a server's restart the workers are back within 0.2 s; before that a 503 means nothing."""
PING_INTERVAL_S = 2.0
MAX_PINGS = 2
"""Both ends find a dead TCP peer within 4 to 6 s; nats-py's default is 120 s × 2."""
REQUEST_TIMEOUT_S = 2.0
"""A JetStream call takes 0.1 ms; during a server's restart, seconds."""
CLOSE_TIMEOUT_S = 2.0
"""What was published last goes out as the connection is closed; a server that has not taken it by then stands still."""
MARKER_TTL_S = 60
"""Purge markers disappear after this; a reader further behind than that resyncs."""
READ_BATCH = 20_000
"""Messages per batch direct-get: all members of any fleet we measured (10,000) in one."""

WRONG_LAST_SEQUENCE = (10071, 10164)
STREAM_EXISTS = 10058
NO_MESSAGE = 10037

OWNER = "rl_plane_component"
"""Stream metadata: `<namespace>.<component>`."""

_TTL = "Nats-TTL"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_EXPECTED_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"

AsyncCallback = Callable[[], Awaitable[None]]


class WrongSequence(Exception):
    """A compare-and-set write lost: the key was not at the sequence that it named."""


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//…@", url)


def _check_url(url: str) -> None:
    """nats-py calls some of these unreachable, after a while."""
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        good = parts.scheme in URL_SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that don't close
        good = False
    if not good:
        raise InvalidRequest(
            f"{_without_password(url)!r} is no NATS address", field="nats_url", fix="such as nats://127.0.0.1:4222"
        )


@asynccontextmanager
async def _translated(what: str) -> AsyncIterator[None]:
    try:
        yield
    except nats.js.errors.APIError as error:
        if error.err_code in WRONG_LAST_SEQUENCE:
            raise WrongSequence(what) from error
        raise BusUnreachable(
            f"NATS refused to {what}: {error.description}",
            fix="JetStream must be enabled for this account (`rl-plane nats` and rl_plane/bus/nats.conf do it)",
        ) from error
    except (nats.js.errors.NoStreamResponseError, nats.errors.NoRespondersError) as error:
        raise BusUnreachable(
            f"no JetStream answers to {what}", fix="start nats-server with JetStream (`-js`)", retry_after_s=1.0
        ) from error
    except (nats.errors.Error, TimeoutError, OSError) as error:
        raise BusUnreachable(f"NATS did not {what}: {_words(error)}", retry_after_s=1.0) from error


def _check_owner(bucket: Bucket, config: dict[str, Any]) -> None:
    """`a_b.c` and `a.b_c` would share a bucket's name."""
    owner = (config.get("metadata") or {}).get(OWNER, "")
    if owner != bucket.owner:
        raise InvalidRequest(
            f"the bucket {bucket.name} belongs to {owner or 'something else'}, not to {bucket.owner}",
            field="component",
            fix="use another name without '_'",
        )


def _check_one_copy(bucket: Bucket, config: dict[str, Any]) -> None:
    """A stream with replicas answers reads from a leader that may have been replaced, and can lose acknowledged writes
    while every connection stays: the commit protocol rests on the opposite (docs/protocol.md)."""
    if (replicas := int(config.get("num_replicas", 1))) > 1:
        raise Conflict(
            f"the stream {bucket.stream} has {replicas} replicas, and the fleet's state needs exactly one copy",
            field="num_replicas",
            fix=f"set it back to one copy (`nats stream edit {bucket.stream} --replicas 1`)",
        )


class _Client(Client):  # type: ignore[misc]  # nats-py has no types
    """nats-py's own waits for ever, with all who publish, for a server that stands still with bytes for it unsent."""

    def abort(self) -> None:
        """Drops the connection with what was not sent: nobody waits for that any more."""
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            self._transport._io_writer.transport.abort()

    async def _attempt_reconnect(self) -> None:
        self.abort()  # it is given up; closing it would first send what is left
        await super()._attempt_reconnect()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        giving_up = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self.abort)
        try:
            await super()._close(status, do_cbs)
        finally:
            giving_up.cancel()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """A publisher waits here once 2 MB are pending. nats-py swallows a cancellation meanwhile, a time-out's too."""
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        flushed = await super()._flush_pending(force_flush)
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
        return flushed


class Bus:
    """A connection that comes back by itself. `on_reconnect` callbacks run, one by one, each time it has."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        self.nc: Client = _Client()
        self.js: JetStreamContext
        self._on_reconnect: list[AsyncCallback] = []
        self._inbox = self.nc.new_inbox()
        self._requests: dict[str, asyncio.Future[Msg]] = {}
        self._numbers = itertools.count()
        self._give_up_at = math.inf

    @classmethod
    async def connect(
        cls, url: str = DEFAULT_NATS_URL, name: str = "rl-plane", wait_s: float = CONNECT_TIMEOUT_S
    ) -> Bus:
        """BusUnreachable when no server answers within `wait_s`."""
        _check_url(url)
        bus = cls(url, name)
        bus._give_up_at = time.monotonic() + wait_s
        try:
            async with asyncio.timeout(wait_s):
                await bus.nc.connect(
                    url,
                    name=name,
                    disconnected_cb=bus._disconnected,
                    reconnected_cb=bus._reconnected,
                    error_cb=bus._error,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_WAIT_S,
                    ping_interval=int(PING_INTERVAL_S),
                    max_outstanding_pings=MAX_PINGS,
                    flush_timeout=REQUEST_TIMEOUT_S,
                    flusher_queue_size=0,  # endless: PINGs go through it too, and must not wait behind publishers
                )
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise BusUnreachable(
                f"no NATS server answers at {_without_password(url)}: {_words(error)}",
                fix="start one (`rl-plane nats`), or set --nats-url / RL_PLANE_NATS_URL",
            ) from error
        bus._give_up_at = math.inf
        await bus.subscribe(f"{bus._inbox}.*", bus._replied)
        bus.js = bus.nc.jetstream(timeout=REQUEST_TIMEOUT_S)
        return bus

    async def close(self) -> None:
        if not self.nc.is_closed:
            with contextlib.suppress(OSError):  # the server went first
                await self.nc.close()

    def on_reconnect(self, callback: AsyncCallback) -> Callable[[], None]:
        """Calls it after each reconnect, from now on; the result ends that."""
        self._on_reconnect.append(callback)
        return lambda: self._on_reconnect.remove(callback)

    async def _disconnected(self) -> None:
        if not self.nc.is_closed:  # a `close` is no loss
            log.warning("%s: the connection to NATS is lost; reconnecting", self.name)

    async def _reconnected(self) -> None:
        log.info("%s: connected to NATS again", self.name)
        for callback in list(self._on_reconnect):
            try:
                await callback()
            except PlaneError as error:
                log.warning("%s: after the reconnect: %s", self.name, error)

    async def _error(self, error: Exception) -> None:
        # Attempts that fail come here too: expected while a server restarts. But the first connect, which would
        # go on for ever, ends here: nats-py's loop can swallow the one cancellation that a timeout sends.
        if time.monotonic() > self._give_up_at:
            raise error
        log.debug("%s: NATS: %s", self.name, _words(error))

    @property
    def identity(self) -> tuple[str, int]:
        """(server id, client id): how the server names this connection in its advisories."""
        return str(self.nc._server_info["server_id"]), int(self.nc.client_id or 0)

    def check_connected(self) -> None:
        """Nothing may sit in the reconnect buffer and be done later, when nobody waits for it any more."""
        if not self.nc.is_connected:
            raise BusUnreachable("the connection to NATS is down", retry_after_s=1.0)

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]], queue: str = "") -> Any:
        return await self.nc.subscribe(
            subject, queue=queue, cb=callback, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def _request(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """JetStream's answer, or its error. Not by nats-py's own request: on Python 3.11 its `wait_for` can lose a
        cancellation, and then a task that is told to end goes on for ever."""
        key = format(next(self._numbers), "x")
        answer = self._requests[key] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self.nc.publish(subject, payload, reply=f"{self._inbox}.{key}", headers=headers)
                message = await answer
        finally:
            del self._requests[key]
        if not message.data:
            raise nats.errors.NoRespondersError
        reply: dict[str, Any] = json.loads(message.data)
        if (error := reply.get("error")) is not None:
            raise nats.js.errors.APIError.from_error(error)
        return reply

    async def _replied(self, message: Msg) -> None:
        answer = self._requests.get(message.subject.rsplit(".", 1)[1])
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def flush(self) -> None:
        """Returns when the server has everything that was sent before, subscriptions included."""
        async with _translated("flush"):
            # nats-py writes the PING before what is still pending, so the first flush may overtake it.
            await self.nc.flush()
            await self.nc.flush()

    # ---- buckets ----

    async def ensure_bucket(self, bucket: Bucket) -> None:
        """Creates the bucket unless it is there.

        Its sequences begin at the Unix milliseconds of its creation: whoever makes it anew after a store was
        lost, and however little they know, epochs and fences go on rising."""
        if (there := await self._config(bucket)) is not None:
            _check_owner(bucket, there)
            _check_one_copy(bucket, there)
            return
        config = api.StreamConfig(
            name=bucket.stream,
            subjects=[bucket.key(">")],
            max_msgs_per_subject=1,
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.NEW,
            allow_rollup_hdrs=True,
            deny_delete=True,
            allow_direct=True,
            allow_msg_ttl=True,
            subject_delete_marker_ttl=MARKER_TTL_S,
            republish=api.RePublish(src=bucket.key(">"), dest=bucket.feed(">")),
            first_seq=int(time.time() * 1000),
            metadata={OWNER: bucket.owner},
        )
        async with _translated(f"create the bucket {bucket.name}"):
            try:
                await self.js.add_stream(config)
            except nats.js.errors.BadRequestError as error:
                if error.err_code != STREAM_EXISTS:
                    raise  # else somebody was faster

    async def bucket_exists(self, bucket: Bucket) -> bool:
        return await self._config(bucket) is not None

    async def _config(self, bucket: Bucket) -> dict[str, Any] | None:
        """The configuration of the bucket's stream. None: there is no such stream."""
        async with _translated(f"read the bucket {bucket.name}"):
            try:
                info = await self._request(f"$JS.API.STREAM.INFO.{bucket.stream}", b"")
            except nats.js.errors.NotFoundError:
                return None
        config: dict[str, Any] = info["config"]
        return config

    async def put(
        self,
        bucket: Bucket,
        key: str,
        value: bytes,
        *,
        last: int | None = None,
        ttl_s: int | None = None,
        while_key: tuple[str, int] | None = None,
    ) -> int:
        """Writes and returns the sequence. `last`: only if the key is at this sequence (0: absent); `while_key`:
        only while *another* key is at a sequence (a lock). WrongSequence when not."""
        headers: dict[str, str] = {}
        if last is not None:
            headers[_EXPECTED] = str(last)
        if while_key is not None:
            headers[_EXPECTED] = str(while_key[1])
            headers[_EXPECTED_SUBJECT] = bucket.key(while_key[0])
        if ttl_s is not None:
            headers[_TTL] = str(ttl_s)
        async with _translated(f"write {bucket.name}/{key}"):
            ack = await self._request(bucket.key(key), value, headers or None)
        return int(ack["seq"])

    async def create(self, bucket: Bucket, key: str, value: bytes, ttl_s: int | None = None) -> int:
        """Writes the key if it is absent; a purge or expiry marker counts as absent."""
        try:
            return await self.put(bucket, key, value, last=0, ttl_s=ttl_s)
        except WrongSequence:
            entry = await self.get(bucket, key)
            if entry is None or entry.value is not None:
                raise
            return await self.put(bucket, key, value, last=entry.sequence, ttl_s=ttl_s)

    async def purge(self, bucket: Bucket, key: str, last: int) -> int:
        """Compare-and-set delete: leaves a marker that expires without a sequence of its own."""
        headers = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", _EXPECTED: str(last), _TTL: str(MARKER_TTL_S)}
        async with _translated(f"purge {bucket.name}/{key}"):
            ack = await self._request(bucket.key(key), b"", headers)
        return int(ack["seq"])

    async def get(self, bucket: Bucket, key: str) -> Entry | None:
        """The key's newest message, from the leader. None: never written (or its marker is gone)."""
        reply = await self._ask(bucket, "STREAM.MSG.GET", {"last_by_subj": bucket.key(key)})
        if reply is None:
            return None
        message = reply["message"]
        headers = _headers(base64.b64decode(message.get("hdrs", "")))
        value = None if is_marker(headers) else base64.b64decode(message.get("data", ""))
        return Entry(key, value, message["seq"], headers.get("Nats-Marker-Reason") == "MaxAge")

    async def last_sequence(self, bucket: Bucket) -> int:
        """The stream's last sequence, from the leader."""
        info = await self._ask(bucket, "STREAM.INFO")
        assert info is not None, "there is a stream, or an error"
        return int(info["state"]["last_seq"])

    async def server_time(self, bucket: Bucket) -> float:
        """The clock of the stream's leader, in Unix seconds. What several processes compare is told by this clock, so
        that their own need not agree."""
        info = await self._ask(bucket, "STREAM.INFO")
        assert info is not None, "there is a stream, or an error"
        return datetime.fromisoformat(info["ts"]).timestamp()

    async def _ask(self, bucket: Bucket, call: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """A question to the stream's leader; None: no such message."""
        ask = json.dumps(body).encode() if body else b""
        async with _translated(f"read the bucket {bucket.name}"):
            try:
                return await self._request(f"$JS.API.{call}.{bucket.stream}", ask)
            except nats.js.errors.NotFoundError as error:
                if error.err_code == NO_MESSAGE:
                    return None
                raise

    async def keep_newest(self, bucket: Bucket, keys: str, count: int) -> None:
        """Of the keys that match, the `count` that were written last stay; the others go without a marker."""
        ask = json.dumps({"filter": bucket.key(keys), "keep": count}).encode()
        async with _translated(f"shorten {bucket.name}/{keys}"):
            await self._request(f"$JS.API.STREAM.PURGE.{bucket.stream}", ask)

    async def read_all(self, bucket: Bucket) -> tuple[list[Entry], int]:
        """All keys' newest messages in order, and the sequence that they are complete up to."""
        return await self.read_keys(bucket, ">")

    async def read_keys(self, bucket: Bucket, keys: str) -> tuple[list[Entry], int]:
        """The same of the keys that match."""
        while True:
            entries = await self._batch_get(bucket, keys)
            top = entries[-1].sequence if entries else 0
            last = await self.last_sequence(bucket)
            # A lagging replica may have answered, and expired markers leave holes at the tail: complete only
            # if the leader has nothing after what we read.
            if top >= last or not await self._has_message_from(bucket, top + 1, keys):
                return entries, max(top, last)

    async def list_keys(self, bucket: Bucket, keys: str) -> list[Entry]:
        """The newest messages of the keys that match: all that the leader had when this was called."""
        while True:
            entries = await self._batch_get(bucket, keys)
            top = entries[-1].sequence if entries else 0
            if not await self._has_message_from(bucket, top + 1, keys):  # or a lagging replica has answered
                return entries

    async def _batch_get(self, bucket: Bucket, keys: str) -> list[Entry]:
        entries: list[Entry] = []
        loop = asyncio.get_running_loop()
        end: asyncio.Future[tuple[str, int]] = loop.create_future()
        prefix = len(bucket.key(""))

        async def collect(message: Msg) -> None:
            headers = message.headers or {}
            if status := headers.get("Status"):
                if not end.done():
                    end.set_result((status, int(headers.get("Nats-Num-Pending", "0"))))
                return
            value = None if is_marker(headers) else message.data
            entries.append(Entry(headers["Nats-Subject"][prefix:], value, int(headers["Nats-Sequence"])))

        inbox = self.nc.new_inbox()
        async with _translated(f"read the bucket {bucket.name}"):
            subscription = await self.subscribe(inbox, collect)
            try:
                while True:
                    start = entries[-1].sequence + 1 if entries else 1
                    ask = {"seq": start, "batch": READ_BATCH, "next_by_subj": bucket.key(keys)}
                    async with asyncio.timeout(REQUEST_TIMEOUT_S):
                        await self.nc.publish(
                            f"$JS.API.DIRECT.GET.{bucket.stream}", json.dumps(ask).encode(), reply=inbox
                        )
                        status, pending = await end
                    if status == "503":
                        raise nats.errors.NoRespondersError
                    if not pending:
                        return entries
                    end = loop.create_future()
            finally:
                await subscription.unsubscribe()

    async def _has_message_from(self, bucket: Bucket, sequence: int, keys: str) -> bool:
        ask = {"seq": sequence, "next_by_subj": bucket.key(keys)}
        return await self._ask(bucket, "STREAM.MSG.GET", ask) is not None


def _headers(block: bytes) -> dict[str, str]:
    """Of a stored message: `NATS/1.0`, then a line each."""
    pairs = (line.partition(":") for line in block.decode().split("\r\n")[1:] if line)
    return {name: value.strip() for name, _, value in pairs}


def is_marker(headers: dict[str, str] | None) -> bool:
    """Does a bucket's message say that its key is gone (purged, or expired)?"""
    return headers is not None and ("KV-Operation" in headers or "Nats-Marker-Reason" in headers)
