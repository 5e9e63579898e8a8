"""A simulated NATS server with the few JetStream calls that the plane makes, behind the interface of `Bus`.

Like the real one: messages from one connection to another keep their order, others overtake each other; what is in
flight is lost when the server restarts; what a client sends while it is cut off it sends later, its writes included; a
request to a subject without subscribers is answered 503; writes to a bucket are compare-and-set, kept over restarts,
and republished. A write's answer may be lost though it was taken. A restart may lose writes that were acknowledged, or
the whole store.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

from rl_plane.bus import Bus, WrongSequence
from rl_plane.errors import BusUnreachable
from rl_plane.subjects import ADVISORY, Bucket, Entry
from tests.sim.virtual_loop import PROCESS

DELAY_S = (0.0001, 0.003)
SLOW_S = (0.05, 0.6)
SLOW_SHARE = 0.01
STALL_S = (0.6, 8.0)
"""With `stalls`: a path that stands still for a while."""
LATE_S = (0.0, 6.0)
"""How much later the second copy of a request comes."""
RECONNECT_S = (0.05, 0.4)
TIMEOUT_S = 2.0
MARKER_S = 60.0


@dataclass(slots=True)
class SimMsg:
    subject: str
    reply: str
    data: bytes
    headers: dict[str, str] | None = None


@dataclass(slots=True)
class _Key:
    sequence: int
    value: bytes | None
    expired: bool = False
    timer: Any = None
    expires_at: float | None = None


@dataclass(slots=True)
class _Stream:
    bucket: Bucket
    last: int
    keys: dict[str, _Key] = field(default_factory=dict)
    log: list[tuple[float, int, str, _Key | None]] = field(default_factory=list)
    """Of each write: when, the last sequence before it, its key, and what that held: to undo it."""

    def matching(self, keys: str) -> list[str]:
        """`prefix.>`, or `>` for all."""
        return [key for key in self.keys if key.startswith(keys.removesuffix(">"))]


@dataclass(slots=True, eq=False)
class _Subscription:
    conn: SimConn
    number: int
    tokens: list[str]
    callback: Callable[[Any], Awaitable[None]]
    queue: str
    inbox: asyncio.Queue[SimMsg] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None

    def matches(self, tokens: list[str]) -> bool:
        for index, want in enumerate(self.tokens):
            if want == ">":
                return len(tokens) > index
            if index >= len(tokens) or want not in ("*", tokens[index]):
                return False
        return len(tokens) == len(self.tokens)

    async def run(self) -> None:
        """nats-py runs a subscription's callbacks one after another."""
        while True:
            await self.callback(await self.inbox.get())

    async def unsubscribe(self) -> None:
        self.conn.server.forget(self)
        if self.task is not None:
            self.task.cancel()


class SimConn:
    """What the plane uses of a nats-py client."""

    max_payload = 1 << 20

    def __init__(self, server: SimServer, name: str) -> None:
        self.server = server
        self.name = name
        self.client_id = next(server.numbers)
        self.is_connected = server.up
        self.up = asyncio.Event()
        self.is_closed = False
        self.context: Context = copy_context()
        """Of the process whose client this is."""
        self.process = PROCESS.get()
        self.subscriptions: list[_Subscription] = []
        self.pending: list[Callable[[], None]] = []
        """What was sent while it was cut off: nats-py sends it later."""
        self.bus: SimBus

    def new_inbox(self) -> str:
        return f"_INBOX.{next(self.server.numbers)}"

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        self.send(lambda: self.server.publish(self, subject, payload, reply, headers))

    def send(self, message: Callable[[], None]) -> None:
        if self.is_closed:
            return
        if self.is_connected:
            message()
        else:
            self.pending.append(message)

    def send_pending(self) -> None:
        pending, self.pending = self.pending, []
        for message in pending:
            message()

    async def close(self) -> None:
        if not self.is_closed:
            self.server.disconnect(self, for_good=True)


class SimBus(Bus):
    """A Bus on the simulated server."""

    def __init__(self, server: SimServer, name: str) -> None:
        super().__init__("sim", name)
        self.server = server
        self.conn = SimConn(server, name)
        self.conn.bus = self
        self.nc = self.conn
        server.conns.append(self.conn)
        if not server.up:
            server.later(server.rng.uniform(*RECONNECT_S), server._reconnect, self.conn)

    async def connected(self) -> None:
        """As `Bus.connect` waits."""
        if not self.conn.is_connected:
            await self.conn.up.wait()

    @property
    def identity(self) -> tuple[str, int]:
        return self.server.id, self.conn.client_id

    async def close(self) -> None:
        await self.conn.close()

    async def subscribe(self, subject: str, callback: Callable[[Any], Awaitable[None]], queue: str = "") -> Any:
        subscription = _Subscription(self.conn, next(self.server.numbers), subject.split("."), callback, queue)
        if not self.conn.is_closed:
            self.server.remember(subscription)
            subscription.task = asyncio.get_running_loop().create_task(subscription.run(), name=f"sub {self.name}")
        return subscription

    async def _request(self, work: Callable[[], Any]) -> Any:  # type: ignore[override]
        """`work` is done by the server. What is sent, and what is answered, may be late or lost."""
        server, conn = self.server, self.conn
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def answered(result: Any, client_id: int) -> None:
            if not answer.done() and conn.is_connected and conn.client_id == client_id:
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)

        def arrive() -> None:
            if not server.up:
                return
            try:
                result = work()
            except (WrongSequence, BusUnreachable) as error:
                result = error
            if server.rng.random() >= server.lost_answers:
                server.later(server.delay(), answered, result, conn.client_id)

        conn.send(lambda: server.arrive_from(conn, arrive))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise BusUnreachable("simulated: NATS does not answer", retry_after_s=1.0) from None

    async def flush(self) -> None:
        await self._request(lambda: None)

    async def ensure_bucket(self, bucket: Bucket) -> None:
        await self._request(lambda: self.server.make(bucket))

    async def bucket_exists(self, bucket: Bucket) -> bool:
        found: bool = await self._request(lambda: bucket.name in self.server.streams)
        return found

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
        sequence: int = await self._request(lambda: self.server.write(bucket, key, value, last, ttl_s, while_key))
        return sequence

    async def purge(self, bucket: Bucket, key: str, last: int) -> int:
        sequence: int = await self._request(
            lambda: self.server.write(bucket, key, None, last, int(MARKER_S), None)
        )
        return sequence

    async def get(self, bucket: Bucket, key: str) -> Entry | None:
        def read() -> Entry | None:
            found = self.server.stream(bucket).keys.get(key)
            return Entry(key, found.value, found.sequence, found.expired) if found else None

        entry: Entry | None = await self._request(read)
        return entry

    async def last_sequence(self, bucket: Bucket) -> int:
        last: int = await self._request(lambda: self.server.stream(bucket).last)
        return last

    async def server_time(self, bucket: Bucket) -> float:
        now: float = await self._request(lambda: 1.7e9 + self.server.loop.time())
        return now

    async def read_all(self, bucket: Bucket) -> tuple[list[Entry], int]:
        return await self.read_keys(bucket, ">")

    async def read_keys(self, bucket: Bucket, keys: str) -> tuple[list[Entry], int]:
        def read() -> tuple[list[Entry], int]:
            stream = self.server.stream(bucket)
            found = [
                Entry(key, stream.keys[key].value, stream.keys[key].sequence) for key in stream.matching(keys)
            ]
            return sorted(found, key=lambda entry: entry.sequence), stream.last

        entries: tuple[list[Entry], int] = await self._request(read)
        return entries

    async def list_keys(self, bucket: Bucket, keys: str) -> list[Entry]:
        return (await self.read_keys(bucket, keys))[0]

    async def keep_newest(self, bucket: Bucket, keys: str, count: int) -> None:
        def shorten() -> None:
            stream = self.server.stream(bucket)
            for key in sorted(stream.matching(keys), key=lambda key: stream.keys[key].sequence)[:-count]:
                del stream.keys[key]

        await self._request(shorten)


class SimServer:
    def __init__(self, loop: asyncio.AbstractEventLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.id = "SIM"
        self.up = True
        self.up_since = 0.0
        self.restarts = 0
        self.lost_answers = 0.0
        self.stalls = 0.0
        """Of the messages, how many stand still on their way, and all behind them on the same path."""
        self.stalled = False
        """Has anything?"""
        self.duplicates = 0.0
        """Of the requests, how many come twice."""
        self.numbers = itertools.count(1)
        self.conns: list[SimConn] = []
        self.streams: dict[str, _Stream] = {}
        self.on_write: Callable[[Bucket, str, bytes | None, int], None] = lambda bucket, key, value, sequence: None
        self._context = copy_context()
        self._exact: dict[str, list[_Subscription]] = {}
        self._patterns: list[_Subscription] = []
        self._free_at: dict[tuple[int, int], float] = {}

    def later(self, delay: float, work: Callable[..., None], *args: Any) -> None:
        """Whatever becomes of the process that runs now."""
        self.loop.call_later(delay, work, *args, context=self._context)

    def delay(self) -> float:
        chance = self.rng.random()
        if chance < SLOW_SHARE:
            return self.rng.uniform(*SLOW_S)
        if chance > 1.0 - self.stalls:
            self.stalled = True
            return self.rng.uniform(*STALL_S)
        return self.rng.uniform(*DELAY_S)

    # ---- core NATS ----

    def remember(self, subscription: _Subscription) -> None:
        subscription.conn.subscriptions.append(subscription)
        if "*" in subscription.tokens or ">" in subscription.tokens:
            self._patterns.append(subscription)
        else:
            self._exact.setdefault(".".join(subscription.tokens), []).append(subscription)

    def forget(self, subscription: _Subscription) -> None:
        if subscription not in subscription.conn.subscriptions:
            return
        subscription.conn.subscriptions.remove(subscription)
        if "*" in subscription.tokens or ">" in subscription.tokens:
            self._patterns.remove(subscription)
        else:
            self._exact[".".join(subscription.tokens)].remove(subscription)

    def publish(
        self,
        source: SimConn | None,
        subject: str,
        data: bytes,
        reply: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        if not self.up:
            return
        tokens = subject.split(".")
        head = tokens[0]
        found = list(self._exact.get(subject, ()))
        found += [one for one in self._patterns if one.tokens[0] in (head, "*", ">") and one.matches(tokens)]
        queues: dict[str, list[_Subscription]] = {}
        chosen = []
        for subscription in sorted(found, key=lambda each: each.number) if len(found) > 1 else found:
            if subscription.conn.is_connected:
                if subscription.queue:
                    queues.setdefault(subscription.queue, []).append(subscription)
                else:
                    chosen.append(subscription)
        chosen += [self.rng.choice(members) for members in queues.values()]
        if not chosen and reply:
            self.publish(None, reply, b"", headers={"Status": "503"})
        for subscription in chosen:
            message = SimMsg(subject, reply, data, headers)
            self._deliver(source, subscription, message)
            if reply and self.duplicates and self.rng.random() < self.duplicates:
                self.later(self.rng.uniform(*LATE_S), self._deliver, source, subscription, message)

    def _travel(self, source: int, to: int, arrive: Callable[[], None]) -> None:
        pair = (source, to)
        at = max(self.loop.time() + self.delay(), self._free_at.get(pair, 0.0) + 1e-6)
        self._free_at[pair] = at
        self.loop.call_at(at, arrive, context=self._context)

    def arrive_from(self, conn: SimConn, arrive: Callable[[], None]) -> None:
        """A client's message for the server itself: JetStream's. In flight it dies with the connection."""
        client_id, restarts = conn.client_id, self.restarts

        def arrived() -> None:
            if conn.client_id == client_id and self.restarts == restarts:
                arrive()

        self._travel(conn.client_id, 0, arrived)

    def _deliver(self, source: SimConn | None, subscription: _Subscription, message: SimMsg) -> None:
        conn, client_id = subscription.conn, subscription.conn.client_id

        def arrive() -> None:
            if conn.is_connected and conn.client_id == client_id:
                subscription.inbox.put_nowait(message)

        self._travel(source.client_id if source else 0, client_id, arrive)

    # ---- streams ----

    def make(self, bucket: Bucket) -> None:
        """As `Bus.ensure_bucket` makes it: from the Unix milliseconds of now on."""
        first = int((1.7e9 + self.loop.time()) * 1000)
        if bucket.name not in self.streams:
            self.streams[bucket.name] = _Stream(bucket, first - 1)

    def stream(self, bucket: Bucket) -> _Stream:
        if bucket.name not in self.streams:
            raise BusUnreachable(f"simulated: no stream {bucket.name}")
        return self.streams[bucket.name]

    def write(
        self,
        bucket: Bucket,
        key: str,
        value: bytes | None,
        last: int | None,
        ttl_s: int | None,
        while_key: tuple[str, int] | None,
        expired: bool = False,
    ) -> int:
        stream = self.stream(bucket)
        watched, expected = while_key if while_key is not None else (key, last)
        if expected is not None:
            found = stream.keys.get(watched)
            if (found.sequence if found else 0) != expected:
                raise WrongSequence(f"simulated: {key}")
        if (before := stream.keys.get(key)) is not None and before.timer is not None:
            before.timer.cancel()
        stream.log.append((self.loop.time(), stream.last, key, before))
        stream.last += 1
        entry = stream.keys[key] = _Key(stream.last, value, expired)
        if ttl_s is not None:
            entry.expires_at = self.loop.time() + ttl_s
            self._set_timer(stream, key, entry)
        headers = {"Nats-Sequence": str(stream.last)}
        if value is None:
            headers["Nats-Marker-Reason" if expired else "KV-Operation"] = "MaxAge" if expired else "PURGE"
        self.publish(None, bucket.feed(key), value or b"", headers=headers)
        self.on_write(bucket, key, value, stream.last)
        return stream.last

    def _set_timer(self, stream: _Stream, key: str, entry: _Key) -> None:
        assert entry.expires_at is not None
        entry.timer = self.loop.call_at(
            max(entry.expires_at, self.loop.time()), self._expire, stream, key, entry, context=self._context
        )

    def _expire(self, stream: _Stream, key: str, entry: _Key) -> None:
        if self.streams.get(stream.bucket.name) is not stream or stream.keys.get(key) is not entry:
            return
        if not self.up:  # it looks when it is back
            entry.expires_at = self.loop.time() + 0.2
            self._set_timer(stream, key, entry)
        elif entry.value is None:
            del stream.keys[key]
        else:
            self.write(stream.bucket, key, None, None, int(MARKER_S), None, expired=True)

    def lose_writes(self, bucket: Bucket, count: int) -> int:
        """The newest writes of a bucket were acknowledged, and are gone; how many."""
        stream = self.streams.get(bucket.name)
        lost = 0
        while stream is not None and stream.log and lost < count:
            _, stream.last, key, before = stream.log.pop()
            now = stream.keys.pop(key, None)
            if now is not None and now.timer is not None:
                now.timer.cancel()
            if before is not None:
                stream.keys[key] = before
                if before.expires_at is not None:
                    self._set_timer(stream, key, before)
            lost += 1
        return lost

    def lose_since(self, bucket: Bucket, at: float) -> int:
        stream = self.streams.get(bucket.name)
        return self.lose_writes(bucket, sum(when >= at for when, *_ in stream.log)) if stream is not None else 0

    def lose_store(self) -> None:
        self.streams.clear()

    # ---- connections and restarts ----

    def disconnect(self, conn: SimConn, for_good: bool) -> None:
        was_connected, conn.is_connected = conn.is_connected, False
        if for_good:
            conn.is_closed = True
            self.conns.remove(conn)
            for subscription in list(conn.subscriptions):
                self.forget(subscription)
                if subscription.task is not None:
                    subscription.task.cancel()
        if was_connected and self.up:
            event = {"server": {"id": self.id}, "client": {"id": conn.client_id}}
            self.publish(None, ADVISORY, json.dumps(event).encode())
        if not for_good:
            self.later(self.rng.uniform(*RECONNECT_S), self._reconnect, conn)

    def _reconnect(self, conn: SimConn) -> None:
        if conn.is_closed or conn.is_connected:
            return
        if not self.up or (conn.process is not None and conn.process.frozen):
            self.later(self.rng.uniform(*RECONNECT_S), self._reconnect, conn)
            return
        conn.client_id = next(self.numbers)
        conn.is_connected = True
        conn.up.set()
        conn.send_pending()
        conn.context.run(self.loop.create_task, conn.bus._reconnected(), name=f"reconnected {conn.name}")

    def kill(self) -> None:
        self.up = False
        self.restarts += 1
        for conn in sorted(self.conns, key=lambda each: each.client_id):
            self.disconnect(conn, for_good=False)

    def start(self) -> None:
        if not self.up:
            self.up, self.up_since = True, self.loop.time()
