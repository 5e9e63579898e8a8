"""The NATS connection of every process of the plane, and the few JetStream calls that it makes.

This module translates the exceptions of nats-py, once. The settings and headers follow from the measured behaviour of
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
from typing import Any, Self
from urllib.parse import urlsplit

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from rl_plane._util.limited_log import LimitedLog
from rl_plane.bus.connect_errors import refusal_of, why_refused
from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.bus.nats_client import NatsClient
from rl_plane.errors import BusUnreachable, Conflict, InvalidRequest, PermissionDenied, PlaneError
from rl_plane.protocol.envelope import MAX_MESSAGE_BYTES
from rl_plane.protocol.subjects import DEFAULT_NATS_URL, INBOX, Entry, KeyValueBucket

log = logging.getLogger("rl_plane.bus.connection")

URL_SCHEMES = ("nats", "tls", "ws", "wss")

CONNECT_TIMEOUT_S = 5.0
"""Bounds the first connect. nats-py tries forever, because reconnects are unlimited."""
SERVICE_CONNECT_S = 30.0
"""The bound for workers and frontends: a server that starts together with them may be ready later."""
RECONNECT_WAIT_S = 0.1
"""The default of nats-py, 2 s, would be most of the time that a restart of the server costs."""
RECONNECT_GRACE_S = 1.0
"""After a restart of the server the workers reconnect within 0.2 s. A 503 in this time does not mean a death."""
PING_INTERVAL_S = 2.0
MAX_PINGS = 2
"""Both ends find a dead TCP peer within 4 to 6 s. The default of nats-py is 120 s × 2."""
REQUEST_TIMEOUT_S = 2.0
"""A JetStream call takes 0.1 ms, and seconds during a restart of the server."""
LOOK_S = 0.1
"""The interval at which a process looks for a bucket that only another one may make."""
MARKER_TTL_S = 60
"""Purge markers disappear after this time. A reader that is further behind reads the whole bucket again."""
READ_BATCH = 20_000
"""Messages in one batch of a direct get: twice the members of the largest measured fleet."""

WRONG_LAST_SEQUENCE = (10071, 10164)
STREAM_EXISTS = 10058
NO_MESSAGE = 10037

OWNER = "rl_plane_component"
"""Stream metadata: `<namespace>.<component>`."""

_TTL = "Nats-TTL"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_EXPECTED_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"

AsyncCallback = Callable[[], Awaitable[None]]
DenialCallback = Callable[[str, PermissionDenied], None]
"""Gets the subject to which NATS has refused to publish, in lower case as nats-py has it, and the error for the caller
that waits for an answer."""


class WrongSequence(Exception):
    """A compare-and-set write lost: the key was not at the sequence that it named."""


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//…@", url)


def _check_url(url: str) -> None:
    """Refuses a wrong address at once. nats-py reports some of them as unreachable, after a while."""
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        good = parts.scheme in URL_SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that don't close
        good = False
    if not good:
        raise InvalidRequest(
            f"{_without_password(url)!r} is no NATS address", field="nats_url", fix="such as nats://127.0.0.1:4222"
        )


WRITE_FIX = (
    "look at nats-server's log; if the disk of its store was full, make room, then restart nats-server: until then it "
    "answers no write"
)


@asynccontextmanager
async def _translated(what: str, late_fix: str | None = None) -> AsyncIterator[None]:
    """`late_fix`: the fix if no answer comes in time."""
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
        facts = {"fix": late_fix} if late_fix is not None and isinstance(error, TimeoutError) else {}
        raise BusUnreachable(f"NATS did not {what}: {_words(error)}", retry_after_s=1.0, **facts) from error


def _check_owner(bucket: KeyValueBucket, config: dict[str, Any]) -> None:
    """Refuses the bucket of another component: `a_b.c` and `a.b_c` would share a bucket's name."""
    owner = (config.get("metadata") or {}).get(OWNER, "")
    if owner != bucket.owner:
        raise InvalidRequest(
            f"the bucket {bucket.name} belongs to {owner or 'something else'}, not to {bucket.owner}",
            field="component",
            fix="use a component name without '_'",
        )


def _check_one_copy(bucket: KeyValueBucket, config: dict[str, Any]) -> None:
    """Refuses a stream with replicas. A leader that was replaced may still answer reads, and acknowledged writes can be
    lost while every connection stays up. The commit protocol relies on the opposite (docs/protocol.md)."""
    if (replicas := int(config.get("num_replicas", 1))) > 1:
        raise Conflict(
            f"the stream {bucket.stream} has {replicas} replicas, and the fleet's state needs exactly one copy",
            field="num_replicas",
            fix=f"set it back to one copy (`nats stream edit {bucket.stream} --replicas 1`)",
        )


class Bus:
    """A connection that reconnects by itself. After each reconnect the `on_reconnect` callbacks run, one by one."""

    def __init__(self, url: str, name: str, credentials: NatsCredentials = NO_CREDENTIALS) -> None:
        self.url = url
        self.name = name
        self.credentials = credentials
        self.login = credentials.load()
        self.nc: Client = NatsClient(credentials, self.login, credentials.wants_tls(url))
        self._on_reconnect: list[AsyncCallback] = []
        self._inbox = self.nc.new_inbox()
        self._requests: dict[str, tuple[str, asyncio.Future[Msg]]] = {}
        """Key of a reply → the subject that was asked, and the answer."""
        self._numbers = itertools.count()
        self._wait_s = CONNECT_TIMEOUT_S
        self._give_up_at = math.inf
        self._connecting = True
        self._must_carry = 0
        """The bytes of the largest message that the server must take."""
        self._on_denial: list[DenialCallback] = []
        self._denied: PermissionDenied | None = None
        """The first subscription that NATS has refused since the last flush."""
        self._last_refusal = ""
        self._losses = LimitedLog(log)
        self._unanswered = LimitedLog(log)
        self._lost_at: float | None = None
        """Monotonic seconds of the loss of the connection. None: it is there."""
        self._back_at = -math.inf
        """Monotonic seconds of the last reconnect."""

    @classmethod
    async def connect(
        cls,
        url: str = DEFAULT_NATS_URL,
        name: str = "rl-plane",
        wait_s: float = CONNECT_TIMEOUT_S,
        credentials: NatsCredentials = NO_CREDENTIALS,
        *,
        ping_interval_s: float = PING_INTERVAL_S,
        must_carry: int = MAX_MESSAGE_BYTES,
    ) -> Self:
        """Connects. BusUnreachable: no server answers within `wait_s`. Unauthorized: the server refuses this process,
        or is not the right one. InvalidRequest: the server takes no messages of `must_carry` bytes."""
        _check_url(url)
        bus = cls(url, name, credentials)
        bus._wait_s = wait_s
        bus._give_up_at = time.monotonic() + wait_s
        bus._must_carry = must_carry
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
                    ping_interval=int(ping_interval_s),
                    max_outstanding_pings=MAX_PINGS,
                    flush_timeout=REQUEST_TIMEOUT_S,
                    inbox_prefix=bus.login.inbox,
                    flusher_queue_size=0,  # unlimited: PINGs use it too, and must not wait behind publishers
                )
        except (nats.errors.Error, TimeoutError, OSError) as error:
            bus.nc.abort()  # nats-py leaves its socket open
            await asyncio.sleep(0)  # a turn of the loop closes it
            if (refused := why_refused(error, _without_password(url), bus.login, credentials)) is not None:
                raise refused from error
            raise BusUnreachable(
                f"no NATS server answers at {_without_password(url)}: {_words(error)}",
                fix="start one (`rl-plane nats`), or set --nats-url / RL_PLANE_NATS_URL",
            ) from error
        bus._give_up_at = math.inf
        bus._connecting = False
        try:
            bus._check_carries()
            await bus.subscribe(f"{bus._inbox}.*", bus._replied)
            await bus.flush()
        except BaseException:
            await bus.close()
            raise
        return bus

    @asynccontextmanager
    async def another_connection(self) -> AsyncIterator[tuple[str, int]]:
        """Opens another connection of this process, yields its identity, and closes it."""
        other = NatsClient(self.credentials, self.login, self.credentials.wants_tls(self.url))
        await other.connect(
            self.url, name="canary", allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0.1
        )
        try:
            yield str(other._server_info["server_id"]), int(other.client_id or 0)
        finally:
            await other.close()

    async def close(self) -> None:
        if not self.nc.is_closed:
            with contextlib.suppress(OSError):  # the server has closed it first
                await self.nc.close()

    def on_reconnect(self, callback: AsyncCallback) -> Callable[[], None]:
        """Registers a callback that runs after each reconnect. The result removes it."""
        self._on_reconnect.append(callback)
        return lambda: self._on_reconnect.remove(callback)

    async def _disconnected(self) -> None:
        if not self.nc.is_closed:  # a `close` is no loss
            self._lost_at = time.monotonic()
            self._losses.warning("%s: the connection to NATS is lost; reconnecting", self.name)

    async def _reconnected(self) -> None:
        self._lost_at, self._back_at = None, time.monotonic()
        self._last_refusal = ""
        log.info("%s: connected to NATS again", self.name)
        try:
            self._check_carries()
        except InvalidRequest as error:
            log.error("%s: %s; fix: %s", self.name, error.message, error.facts["fix"])
        for callback in list(self._on_reconnect):
            try:
                await callback()
            except PlaneError as error:
                log.warning("%s: after the reconnect: %s", self.name, error)

    async def _error(self, error: Exception) -> None:
        # Failed attempts come here too, which is normal while a server restarts. The first connect would try forever,
        # so this ends it: the loop of nats-py can swallow the one cancellation that a time-out sends.
        refused = why_refused(error, _without_password(self.url), self.login, self.credentials)
        if time.monotonic() > self._give_up_at or (self._connecting and refused is not None):
            raise error
        if (denial := refusal_of(error, self.login, self._subjects())) is not None:
            self._deny(*denial)
        elif (reason := self._reason(error, refused)) is not None and reason.message != self._last_refusal:
            self._last_refusal = reason.message
            log.error("%s: %s; fix: %s", self.name, reason.message, reason.facts.get("fix"))
        else:
            log.debug("%s: NATS: %s", self.name, _words(error))

    def _reason(self, error: Exception, refused: PlaneError | None) -> PlaneError | None:
        """Why this process can't connect. What is wrong with its own files says more than the server's refusal."""
        if isinstance(error.__cause__, InvalidRequest):
            return error.__cause__
        return (self.nc.unread or refused) if refused is not None else None

    def _subjects(self) -> list[str]:
        """The subjects that a refusal may mean. nats-py gives it in lower case."""
        return [*(asked for asked, _ in self._requests.values()), *(sub.subject for sub in self.nc._subs.values())]

    def on_denial(self, callback: DenialCallback) -> None:
        """Registers a callback for each subject to which NATS refuses to publish. It must not raise."""
        self._on_denial.append(callback)

    def _deny(self, verb: str, subject: str, error: PermissionDenied) -> None:
        """NATS drops what this connection may not do. Without this, its caller would only see a time-out."""
        if verb == "subscribe":
            self._denied = self._denied or error
            log.error("%s: %s; fix: %s", self.name, error.message, error.facts["fix"])
            return
        if subject.startswith(f"{INBOX.lower()}."):
            self._unanswered.warning("%s: an answer is lost: %s", self.name, error.message)
        else:
            log.debug("%s: %s", self.name, error.message)
        for asked, answer in self._requests.values():
            if asked.lower() == subject and not answer.done():
                answer.set_exception(error)
        for callback in list(self._on_denial):
            callback(subject, error)

    @property
    def identity(self) -> tuple[str, int]:
        """The server id and the client id, by which the server names this connection in its advisories."""
        return str(self.nc._server_info["server_id"]), int(self.nc.client_id or 0)

    @property
    def about(self) -> dict[str, Any]:
        """The server as this connection knows it, for people: `url` without its password, `connected`, `lost_s` (the
        seconds since the connection was lost, or None), `version`, `max_payload` in bytes, and `jetstream`."""
        info: dict[str, Any] = self.nc._server_info
        return {
            "url": _without_password(self.url),
            "connected": bool(self.nc.is_connected),
            "lost_s": time.monotonic() - self._lost_at if self._lost_at is not None else None,
            "version": str(info.get("version", "")),
            "max_payload": int(info.get("max_payload", 0)),
            "jetstream": bool(info.get("jetstream", False)),
        }

    @property
    def others_may_reconnect(self) -> bool:
        """Whether the connection is lost, or was lost until RECONNECT_GRACE_S ago. A 503 then does not mean a death."""
        return self._lost_at is not None or time.monotonic() < self._back_at + RECONNECT_GRACE_S

    def check_connected(self) -> None:
        """BusUnreachable: the connection is down. nats-py would keep a message in its buffer and send it later, when no
        caller waits for it any more."""
        if not self.nc.is_connected:
            raise BusUnreachable("the connection to NATS is down", retry_after_s=1.0)

    def _check_carries(self) -> None:
        if (most := self.nc.max_payload) < self._must_carry:
            raise InvalidRequest(
                f"the server at {_without_password(self.url)} takes messages of at most {most} bytes",
                field="nats_url",
                fix=f"set max_payload of nats-server to {self._must_carry} or more",
            )

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]], queue: str = "") -> Any:
        return await self.nc.subscribe(
            subject, queue=queue, cb=callback, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def _request(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Sends a request to JetStream, and returns the answer or raises its error. This does not use the request of
        nats-py: on Python 3.11 its `wait_for` can lose a cancellation, and then a cancelled task never ends."""
        key = format(next(self._numbers), "x")
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._requests[key] = subject, answer
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
        _, answer = self._requests.get(message.subject.rsplit(".", 1)[1], (None, None))
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def flush(self) -> None:
        """Returns when the server has received everything that was sent before, subscriptions included.
        PermissionDenied: it has refused one of them."""
        async with _translated("flush"):
            # nats-py writes the PING before the pending bytes, so the first flush may overtake them.
            await self.nc.flush()
            await self.nc.flush()
        denied, self._denied = self._denied, None
        if denied is not None:
            raise denied

    # ---- buckets ----

    async def ensure_bucket(self, bucket: KeyValueBucket) -> None:
        """Creates the bucket if it does not exist.

        Its sequences begin at the Unix milliseconds of its creation. So epochs and fences still rise when a bucket is
        created again after its store was lost."""
        if (there := await self.bucket_config(bucket)) is not None:
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
                body = json.dumps(config.as_dict()).encode()
                await self._request(f"$JS.API.STREAM.CREATE.{bucket.stream}", body)
            except nats.js.errors.BadRequestError as error:
                if error.err_code != STREAM_EXISTS:
                    raise  # else another process has just created it
            except PermissionDenied as denied:
                await self._until_there(bucket, denied)

    async def _until_there(self, bucket: KeyValueBucket, denied: PermissionDenied) -> None:
        """Waits until another process has made the bucket, because this one's key may not. It waits as long as this
        process would have waited for the server."""
        give_up = time.monotonic() + self._wait_s
        while await self.bucket_config(bucket) is None:
            if time.monotonic() > give_up:
                namespace, component = bucket.owner.split(".")
                raise PermissionDenied(
                    f"there is no fleet in namespace {namespace}, component {component}: no frontend has made the "
                    f"bucket {bucket.name}, and {self.login} may not make it",
                    role=self.login.role,
                    fix="start a frontend (`rl-plane frontend`), or name another namespace or component",
                ) from denied
            await asyncio.sleep(LOOK_S)

    async def jetstream_account(self) -> dict[str, Any]:
        """JetStream's use and limits for this account, as the server reports them: `storage`, `limits`, …"""
        async with _translated("read the account of JetStream"):
            return await self._request("$JS.API.INFO", b"")

    async def bucket_config(self, bucket: KeyValueBucket) -> dict[str, Any] | None:
        """The configuration of the bucket's stream: `storage`, `num_replicas`, … None: there is no such stream."""
        async with _translated(f"read the bucket {bucket.name}"):
            try:
                info = await self._request(f"$JS.API.STREAM.INFO.{bucket.stream}", b"")
            except nats.js.errors.NotFoundError:
                return None
        config: dict[str, Any] = info["config"]
        return config

    async def bucket_exists(self, bucket: KeyValueBucket) -> bool:
        return await self.bucket_config(bucket) is not None

    async def put(
        self,
        bucket: KeyValueBucket,
        key: str,
        value: bytes,
        *,
        last: int | None = None,
        ttl_s: int | None = None,
        while_key: tuple[str, int] | None = None,
    ) -> int:
        """Writes a key and returns its sequence. WrongSequence: a condition does not hold.

        `last`: the key must be at this sequence (0: absent). `while_key`: *another* key must be at a sequence, as the
        lock."""
        headers: dict[str, str] = {}
        if last is not None:
            headers[_EXPECTED] = str(last)
        if while_key is not None:
            headers[_EXPECTED] = str(while_key[1])
            headers[_EXPECTED_SUBJECT] = bucket.key(while_key[0])
        if ttl_s is not None:
            headers[_TTL] = str(ttl_s)
        async with _translated(f"write {bucket.name}/{key}", WRITE_FIX):
            ack = await self._request(bucket.key(key), value, headers or None)
        return int(ack["seq"])

    async def create(self, bucket: KeyValueBucket, key: str, value: bytes, ttl_s: int | None = None) -> int:
        """Writes the key if it is absent. A purge or expiry marker counts as absent."""
        try:
            return await self.put(bucket, key, value, last=0, ttl_s=ttl_s)
        except WrongSequence:
            entry = await self.get(bucket, key)
            if entry is None or entry.value is not None:
                raise
            return await self.put(bucket, key, value, last=entry.sequence, ttl_s=ttl_s)

    async def purge(self, bucket: KeyValueBucket, key: str, last: int) -> int:
        """Deletes the key if it is at the sequence `last`. Leaves a marker, which expires without a new sequence."""
        headers = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", _EXPECTED: str(last), _TTL: str(MARKER_TTL_S)}
        async with _translated(f"purge {bucket.name}/{key}", WRITE_FIX):
            ack = await self._request(bucket.key(key), b"", headers)
        return int(ack["seq"])

    async def get(self, bucket: KeyValueBucket, key: str) -> Entry | None:
        """Reads the key's newest message from the leader. None: the key was never written, or its marker has
        expired."""
        reply = await self._ask(bucket, "STREAM.MSG.GET", {"last_by_subj": bucket.key(key)})
        if reply is None:
            return None
        return _entry(bucket, reply["message"])

    async def last_sequence(self, bucket: KeyValueBucket) -> int:
        """Reads the stream's last sequence from the leader."""
        info = await self._ask(bucket, "STREAM.INFO")
        assert info is not None, "there is a stream, or an error"
        return int(info["state"]["last_seq"])

    async def server_time(self, bucket: KeyValueBucket) -> float:
        """Reads the clock of the stream's leader, in Unix seconds. Processes compare times by this clock, so their own
        clocks need not agree."""
        info = await self._ask(bucket, "STREAM.INFO")
        assert info is not None, "there is a stream, or an error"
        return datetime.fromisoformat(info["ts"]).timestamp()

    async def _ask(
        self, bucket: KeyValueBucket, call: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Sends a request to the stream's leader. None: there is no such message."""
        ask = json.dumps(body).encode() if body else b""
        async with _translated(f"read the bucket {bucket.name}"):
            try:
                return await self._request(f"$JS.API.{call}.{bucket.stream}", ask)
            except nats.js.errors.NotFoundError as error:
                if error.err_code == NO_MESSAGE:
                    return None
                raise

    async def keep_newest(self, bucket: KeyValueBucket, keys: str, count: int) -> None:
        """Deletes all matching keys but the `count` newest. The deleted keys leave no marker."""
        ask = json.dumps({"filter": bucket.key(keys), "keep": count}).encode()
        async with _translated(f"shorten {bucket.name}/{keys}"):
            await self._request(f"$JS.API.STREAM.PURGE.{bucket.stream}", ask)

    async def read_keys(self, bucket: KeyValueBucket, keys: str) -> tuple[list[Entry], int]:
        """Reads the newest message of every matching key, in order, and the sequence up to which they are complete."""
        while True:
            entries = await self._read_all(bucket, keys)
            top = entries[-1].sequence if entries else 0
            last = await self.last_sequence(bucket)
            # A lagging replica may have answered, and expired markers leave holes at the end. The answer is complete
            # only if the leader has no message after it.
            if top >= last or not await self._has_message_from(bucket, top + 1, keys):
                return entries, max(top, last)

    async def list_keys(self, bucket: KeyValueBucket, keys: str) -> list[Entry]:
        """Reads the newest message of every matching key, as complete as the leader had them at the call."""
        while True:
            entries = await self._read_all(bucket, keys)
            top = entries[-1].sequence if entries else 0
            if not await self._has_message_from(bucket, top + 1, keys):  # else a lagging replica has answered
                return entries

    async def _read_all(self, bucket: KeyValueBucket, keys: str) -> list[Entry]:
        try:
            return await self._batch_get(bucket, keys)
        except PermissionDenied:  # a worker's or a service's key: see `bus/roles.py`
            return await self._one_by_one(bucket, keys)

    async def _one_by_one(self, bucket: KeyValueBucket, keys: str) -> list[Entry]:
        entries: list[Entry] = []
        while True:
            start = entries[-1].sequence + 1 if entries else 1
            ask = {"seq": start, "next_by_subj": bucket.key(keys)}
            reply = await self._ask(bucket, "STREAM.MSG.GET", ask)
            if reply is None:
                return entries
            entries.append(_entry(bucket, reply["message"]))

    async def _batch_get(self, bucket: KeyValueBucket, keys: str) -> list[Entry]:
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

        inbox, subject = self.nc.new_inbox(), f"$JS.API.DIRECT.GET.{bucket.stream}"

        def denied(what: str, error: PermissionDenied) -> None:
            if what == subject.lower() and not end.done():
                end.set_exception(error)

        async with _translated(f"read the bucket {bucket.name}"):
            subscription = await self.subscribe(inbox, collect)
            self._on_denial.append(denied)
            try:
                while True:
                    start = entries[-1].sequence + 1 if entries else 1
                    ask = {"seq": start, "batch": READ_BATCH, "next_by_subj": bucket.key(keys)}
                    async with asyncio.timeout(REQUEST_TIMEOUT_S):
                        await self.nc.publish(subject, json.dumps(ask).encode(), reply=inbox)
                        status, pending = await end
                    if status == "503":
                        raise nats.errors.NoRespondersError
                    if not pending:
                        return entries
                    end = loop.create_future()
            finally:
                self._on_denial.remove(denied)
                await subscription.unsubscribe()

    async def _has_message_from(self, bucket: KeyValueBucket, sequence: int, keys: str) -> bool:
        ask = {"seq": sequence, "next_by_subj": bucket.key(keys)}
        return await self._ask(bucket, "STREAM.MSG.GET", ask) is not None


def _headers(block: bytes) -> dict[str, str]:
    """Parses the headers of a stored message: the line `NATS/1.0`, then one line for each header."""
    pairs = (line.partition(":") for line in block.decode().split("\r\n")[1:] if line)
    return {name: value.strip() for name, _, value in pairs}


def _entry(bucket: KeyValueBucket, message: dict[str, Any]) -> Entry:
    """The entry of a message as STREAM.MSG.GET answers it."""
    key = message["subject"][len(bucket.key("")) :]
    headers = _headers(base64.b64decode(message.get("hdrs", "")))
    value = None if is_marker(headers) else base64.b64decode(message.get("data", ""))
    return Entry(key, value, message["seq"], headers.get("Nats-Marker-Reason") == "MaxAge")


def is_marker(headers: dict[str, str] | None) -> bool:
    """Reports whether a bucket's message marks a deleted key (purged or expired)."""
    return headers is not None and ("KV-Operation" in headers or "Nats-Marker-Reason" in headers)
