"""A simulated NATS server with the few JetStream calls that the plane makes, behind the interface of `Bus`.

Like the real one: messages from one connection to another keep their order, others overtake each other; what is in
flight is lost when the server restarts; a request to a subject without subscribers is answered 503; writes to a
bucket are compare-and-set, kept over restarts, and republished. A write's answer may be lost though it was taken.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from rl_plane.bus import Bus, WrongSequence
from rl_plane.errors import BusUnreachable
from rl_plane.subjects import ADVISORY, Bucket, Entry

DELAY_S = (0.0001, 0.003)
SLOW_S = (0.05, 0.6)
SLOW_SHARE = 0.01
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
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Stream:
    last: int
    keys: dict[str, _Key] = field(default_factory=dict)

    def matching(self, keys: str) -> list[str]:
        """`prefix.>`, or `>` for all."""
        return [key for key in self.keys if key.startswith(keys.removesuffix(">"))]


@dataclass(slots=True, eq=False)
class _Subscription:
    conn: SimConn
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
        self.conn.server.subscriptions.discard(self)
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
        self.frozen = False
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.pending: list[tuple[str, bytes, str]] = []
        """What was published while the process stood still or was cut off: nats-py sends it later."""
        self.bus: SimBus

    def new_inbox(self) -> str:
        return f"_INBOX.{next(self.server.numbers)}"

    async def publish(self, subject: str, payload: bytes = b"", reply: str = "") -> None:
        if self.is_closed:
            return
        if self.is_connected and not self.frozen:
            self.server.publish(self, subject, payload, reply)
        else:
            self.pending.append((subject, payload, reply))

    def send_pending(self) -> None:
        if self.is_connected and not self.frozen:
            pending, self.pending = self.pending, []
            for subject, payload, reply in pending:
                self.server.publish(self, subject, payload, reply)

    async def close(self) -> None:
        if not self.is_closed:
            self.server.disconnect(self, for_good=True)


class SimBus(Bus):
    """A Bus on the simulated server. After `die`, nothing that its process still does reaches anybody."""

    def __init__(self, server: SimServer, name: str) -> None:
        super().__init__("sim", name)
        self.server = server
        self.conn = SimConn(server, name)
        self.conn.bus = self
        self.nc = self.conn
        server.conns.add(self.conn)
        if not server.up:
            server.loop.call_later(server.rng.uniform(*RECONNECT_S), server._reconnect, self.conn)

    async def connected(self) -> None:
        """As `Bus.connect` waits."""
        if not self.conn.is_connected:
            await self.conn.up.wait()

    def die(self) -> None:
        self.server.disconnect(self.conn, for_good=True)

    @property
    def identity(self) -> tuple[str, int]:
        return self.server.id, self.conn.client_id

    async def subscribe(self, subject: str, callback: Callable[[Any], Awaitable[None]], queue: str = "") -> Any:
        subscription = _Subscription(self.conn, subject.split("."), callback, queue)
        if not self.conn.is_closed:
            self.server.subscriptions.add(subscription)
            subscription.task = asyncio.get_running_loop().create_task(subscription.run(), name=f"sub {self.name}")
        return subscription

    async def flush(self) -> None:
        await self._trip()

    async def _trip(self) -> None:
        """To the server, or an error."""
        if self.conn.is_closed:
            raise asyncio.CancelledError  # a dead process does nothing more
        await self.conn.thawed.wait()
        if not self.conn.is_connected:
            await asyncio.sleep(TIMEOUT_S)
            raise BusUnreachable("simulated: NATS does not answer")
        await asyncio.sleep(self.server.delay())
        if self.conn.is_closed or not self.conn.is_connected:
            await asyncio.sleep(TIMEOUT_S)
            raise BusUnreachable("simulated: lost on the way")

    async def _answered(self) -> None:
        """And back. The server may have died in between, or the answer got lost."""
        if self.server.rng.random() < self.server.lost_answers:
            await asyncio.sleep(TIMEOUT_S)
            raise BusUnreachable("simulated: the answer was lost")
        await self._trip()

    async def ensure_bucket(self, bucket: Bucket) -> None:
        await self._trip()
        first = int((1.7e9 + self.server.loop.time()) * 1000)
        self.server.streams.setdefault(bucket.name, _Stream(first - 1))
        await self._answered()

    async def bucket_exists(self, bucket: Bucket) -> bool:
        await self._trip()
        return bucket.name in self.server.streams

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
        await self._trip()
        sequence = self.server.write(bucket, key, value, last, ttl_s, while_key)
        await self._answered()
        return sequence

    async def purge(self, bucket: Bucket, key: str, last: int) -> int:
        await self._trip()
        sequence = self.server.write(bucket, key, None, last, int(MARKER_S), None)
        await self._answered()
        return sequence

    async def get(self, bucket: Bucket, key: str) -> Entry | None:
        await self._trip()
        stream = self.server.stream(bucket)
        found = stream.keys.get(key)
        entry = Entry(key, found.value, found.sequence, found.expired) if found else None
        await self._answered()
        return entry

    async def last_sequence(self, bucket: Bucket) -> int:
        await self._trip()
        last = self.server.stream(bucket).last
        await self._answered()
        return last

    async def read_all(self, bucket: Bucket, keys: str = ">") -> tuple[list[Entry], int]:
        await self._trip()
        stream = self.server.stream(bucket)
        entries = [Entry(key, stream.keys[key].value, stream.keys[key].sequence) for key in stream.matching(keys)]
        last = stream.last
        await self._answered()
        return sorted(entries, key=lambda entry: entry.sequence), last

    async def keep_newest(self, bucket: Bucket, keys: str, count: int) -> None:
        await self._trip()
        stream = self.server.stream(bucket)
        for key in sorted(stream.matching(keys), key=lambda key: stream.keys[key].sequence)[:-count]:
            del stream.keys[key]
        await self._answered()


class SimServer:
    def __init__(self, loop: asyncio.AbstractEventLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.id = "SIM"
        self.up = True
        self.lost_answers = 0.0
        self.numbers = itertools.count(1)
        self.conns: set[SimConn] = set()
        self.subscriptions: set[_Subscription] = set()
        self.streams: dict[str, _Stream] = {}
        self.on_write: Callable[[Bucket, str, bytes | None], None] = lambda bucket, key, value: None
        self._free_at: dict[tuple[int, int], float] = {}

    def delay(self) -> float:
        return self.rng.uniform(*(SLOW_S if self.rng.random() < SLOW_SHARE else DELAY_S))

    # ---- core NATS ----

    def publish(
        self, source: SimConn | None, subject: str, data: bytes, reply: str = "", headers: Any = None
    ) -> None:
        if not self.up:
            return
        tokens = subject.split(".")
        queues: dict[str, list[_Subscription]] = {}
        chosen = []
        for subscription in sorted(self.subscriptions, key=lambda each: each.conn.client_id):
            if subscription.conn.is_connected and subscription.matches(tokens):
                if subscription.queue:
                    queues.setdefault(subscription.queue, []).append(subscription)
                else:
                    chosen.append(subscription)
        chosen += [self.rng.choice(members) for members in queues.values()]
        if not chosen and reply:
            self.publish(None, reply, b"", headers={"Status": "503"})
        for subscription in chosen:
            self._deliver(source, subscription, SimMsg(subject, reply, data, headers))

    def _deliver(self, source: SimConn | None, subscription: _Subscription, message: SimMsg) -> None:
        pair = (source.client_id if source else 0, subscription.conn.client_id)
        at = max(self.loop.time() + self.delay(), self._free_at.get(pair, 0.0) + 1e-6)
        self._free_at[pair] = at
        conn, client_id = subscription.conn, subscription.conn.client_id

        def arrive() -> None:
            if conn.frozen:
                self.loop.call_later(0.1, arrive)  # it waits in the kernel's buffers
            elif conn.is_connected and conn.client_id == client_id:
                subscription.inbox.put_nowait(message)

        self.loop.call_at(at, arrive)

    # ---- streams ----

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
        stream.last += 1
        entry = stream.keys[key] = _Key(stream.last, value, expired)
        if ttl_s is not None:
            entry.timer = self.loop.call_later(ttl_s, self._expire, bucket, key, entry)
        headers = {"Nats-Sequence": str(stream.last)}
        if value is None:
            headers["Nats-Marker-Reason" if expired else "KV-Operation"] = "MaxAge" if expired else "PURGE"
        self.publish(None, bucket.feed(key), value or b"", headers=headers)
        self.on_write(bucket, key, value)
        return stream.last

    def _expire(self, bucket: Bucket, key: str, entry: _Key) -> None:
        stream = self.streams.get(bucket.name)
        if stream is None or stream.keys.get(key) is not entry:
            return
        if entry.value is None:
            del stream.keys[key]
        else:
            self.write(bucket, key, None, None, int(MARKER_S), None, expired=True)

    # ---- connections and restarts ----

    def disconnect(self, conn: SimConn, for_good: bool) -> None:
        was_connected, conn.is_connected = conn.is_connected, False
        if for_good:
            conn.is_closed = True
            self.conns.discard(conn)
            for subscription in [each for each in self.subscriptions if each.conn is conn]:
                self.subscriptions.discard(subscription)
                if subscription.task is not None:
                    subscription.task.cancel()
        if was_connected and self.up:
            event = {"server": {"id": self.id}, "client": {"id": conn.client_id}}
            self.publish(None, ADVISORY, json.dumps(event).encode())
        if not for_good:
            self.loop.call_later(self.rng.uniform(*RECONNECT_S), self._reconnect, conn)

    def _reconnect(self, conn: SimConn) -> None:
        if conn.is_closed or conn.is_connected:
            return
        if not self.up:
            self.loop.call_later(self.rng.uniform(*RECONNECT_S), self._reconnect, conn)
            return
        conn.client_id = next(self.numbers)
        conn.is_connected = True
        conn.up.set()
        conn.send_pending()
        self.loop.create_task(conn.bus._reconnected(), name=f"reconnected {conn.name}")

    def kill(self) -> None:
        self.up = False
        for conn in sorted(self.conns, key=lambda each: each.client_id):
            self.disconnect(conn, for_good=False)

    def start(self) -> None:
        self.up = True
