"""A client of the simulated NATS server: a connection, and a Bus on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_plane.bus.connection import Bus, WrongSequence
from rl_plane.errors import BusUnreachable
from rl_plane.protocol.subjects import Entry, KeyValueBucket
from tests.sim.sim_store import MARKER_S
from tests.sim.virtual_loop import PROCESS

if TYPE_CHECKING:
    from tests.sim.sim_nats import SimServer

RECONNECT_S = (0.05, 0.4)
TIMEOUT_S = 2.0


@dataclass(slots=True)
class SimMsg:
    subject: str
    reply: str
    data: bytes
    headers: dict[str, str] | None = None


@dataclass(slots=True, eq=False)
class Subscription:
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
    """The part of a nats-py client that the plane uses."""

    max_payload = 1 << 20

    def __init__(self, server: SimServer, name: str) -> None:
        self.server = server
        self.name = name
        self.client_id = next(server.numbers)
        self.is_connected = server.up
        self.up = asyncio.Event()
        self.is_closed = False
        self.context: Context = copy_context()
        """The context of the client's process."""
        self.process = PROCESS.get()
        self.subscriptions: list[Subscription] = []
        self.pending: list[Callable[[], None]] = []
        """Messages that were sent while it was cut off. nats-py sends them later."""
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
            server.later(server.rng.uniform(*RECONNECT_S), server.reconnect, self.conn)

    async def connected(self) -> None:
        """Waits for the connection, as `Bus.connect` does."""
        if not self.conn.is_connected:
            await self.conn.up.wait()

    @property
    def identity(self) -> tuple[str, int]:
        return self.server.id, self.conn.client_id

    async def close(self) -> None:
        await self.conn.close()

    @asynccontextmanager
    async def another_connection(self) -> AsyncIterator[tuple[str, int]]:
        """Fails, as on a server without advisories: the sweep runs at its full rate."""
        raise OSError("simulated")
        yield self.identity

    async def subscribe(self, subject: str, callback: Callable[[Any], Awaitable[None]], queue: str = "") -> Any:
        subscription = Subscription(self.conn, next(self.server.numbers), subject.split("."), callback, queue)
        if not self.conn.is_closed:
            self.server.remember(subscription)
            subscription.task = asyncio.get_running_loop().create_task(subscription.run(), name=f"sub {self.name}")
        return subscription

    async def _request(  # type: ignore[override]
        self, work: Callable[[], Any], *, on_disk: bool = True
    ) -> Any:
        """`work` is done by the server. What is sent, and what is answered, may be late or lost."""
        server, conn = self.server, self.conn
        restarts = server.restarts
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def answered(result: Any, client_id: int) -> None:
            if not answer.done() and conn.is_connected and conn.client_id == client_id:
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)

        def arrive() -> None:
            if not server.up or server.restarts != restarts:
                return
            if on_disk and server.loop.now < server.disk_until:
                server.at(server.disk_until, arrive)
                return
            try:
                result = work()
            except (WrongSequence, BusUnreachable) as error:
                result = error
            if server.rng.random() >= server.lost_answers:
                server.answer(conn, answered, result, of_bucket=on_disk)

        conn.send(lambda: server.arrive_from(conn, arrive, for_bucket=on_disk))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise BusUnreachable("simulated: NATS does not answer", retry_after_s=1.0) from None

    async def flush(self) -> None:
        await self._request(lambda: None, on_disk=False)

    async def ensure_bucket(self, bucket: KeyValueBucket) -> None:
        await self._request(lambda: self.server.make(bucket))

    async def bucket_exists(self, bucket: KeyValueBucket) -> bool:
        found: bool = await self._request(lambda: bucket.name in self.server.streams)
        return found

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
        if self.server.holding is not None:
            self.server.holding.sending(self.conn, bucket, key, value)
        sequence: int = await self._request(
            lambda: self.server.write_of(self.conn, bucket, key, value, last, ttl_s, while_key)
        )
        return sequence

    async def purge(self, bucket: KeyValueBucket, key: str, last: int) -> int:
        sequence: int = await self._request(
            lambda: self.server.write_of(self.conn, bucket, key, None, last, int(MARKER_S), None)
        )
        return sequence

    async def get(self, bucket: KeyValueBucket, key: str) -> Entry | None:
        def read() -> Entry | None:
            found = self.server.told(self.conn, bucket).keys.get(key)
            return Entry(key, found.value, found.sequence, found.expired) if found else None

        entry: Entry | None = await self._request(read)
        return entry

    async def last_sequence(self, bucket: KeyValueBucket) -> int:
        last: int = await self._request(lambda: self.server.told(self.conn, bucket).last)
        return last

    async def server_time(self, bucket: KeyValueBucket) -> float:
        now: float = await self._request(lambda: 1.7e9 + self.server.loop.time())
        return now

    async def read_keys(self, bucket: KeyValueBucket, keys: str) -> tuple[list[Entry], int]:
        def read() -> tuple[list[Entry], int]:
            stream = self.server.told(self.conn, bucket)
            found = [
                Entry(key, stream.keys[key].value, stream.keys[key].sequence) for key in stream.matching(keys)
            ]
            return sorted(found, key=lambda entry: entry.sequence), stream.last

        entries: tuple[list[Entry], int] = await self._request(read)
        return entries

    async def list_keys(self, bucket: KeyValueBucket, keys: str) -> list[Entry]:
        return (await self.read_keys(bucket, keys))[0]

    async def keep_newest(self, bucket: KeyValueBucket, keys: str, count: int) -> None:
        def shorten() -> None:
            stream = self.server.stream(bucket)
            for key in sorted(stream.matching(keys), key=lambda key: stream.keys[key].sequence)[:-count]:
                del stream.keys[key]

        await self._request(shorten)
