"""Connections to NATS on which a test loses, delays or watches what passes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.msg import Msg

from rl_plane.bus.connection import Bus
from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.protocol.subjects import Entry, KeyValueBucket


async def _nothing(key: str) -> None:
    pass


class BusFaults:
    """The faults of the connections that `connect` opens. A test may change them at any time.

    `connect` goes to the argument `connect_bus` of `RlClient.connect`, `Frontend.running` and `serve`."""

    def __init__(self) -> None:
        self.loses: Callable[[Msg], bool] = lambda message: False
        """Whether a message is lost on its way to its subscription."""
        self.after: Callable[[Msg], None] = lambda message: None
        """Called with each message that a subscription has taken."""
        self.before_put: Callable[[str], Awaitable[None]] = _nothing
        """Awaited with the key, before each write of a key-value bucket."""
        self.after_put: Callable[[str], Awaitable[None]] = _nothing
        self.before_get: Callable[[str], Awaitable[None]] = _nothing
        """Awaited with the key, or the pattern of the keys, before each read of a bucket."""
        self.before_bucket: Callable[[KeyValueBucket], Awaitable[None]] | None = None
        """Awaited before the connection makes sure that a bucket exists."""

    async def connect(
        self, url: str, name: str, wait_s: float, credentials: NatsCredentials = NO_CREDENTIALS
    ) -> Bus:
        bus = await FaultyBus.connect(url, name, wait_s, credentials)
        bus.faults = self
        return bus


class FaultyBus(Bus):
    """One connection with these faults."""

    faults: BusFaults | None = None

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]], queue: str = "") -> Any:
        async def take(message: Msg) -> None:
            faults = self.faults
            if faults is None:
                await callback(message)
            elif not faults.loses(message):
                await callback(message)
                faults.after(message)

        return await super().subscribe(subject, take, queue)

    async def put(self, bucket: KeyValueBucket, key: str, *args: Any, **more: Any) -> int:
        if self.faults is not None:
            await self.faults.before_put(key)
        sequence = await super().put(bucket, key, *args, **more)
        if self.faults is not None:
            await self.faults.after_put(key)
        return sequence

    async def get(self, bucket: KeyValueBucket, key: str) -> Entry | None:
        if self.faults is not None:
            await self.faults.before_get(key)
        return await super().get(bucket, key)

    async def read_keys(self, bucket: KeyValueBucket, keys: str) -> tuple[list[Entry], int]:
        if self.faults is not None:
            await self.faults.before_get(keys)
        return await super().read_keys(bucket, keys)

    async def ensure_bucket(self, bucket: KeyValueBucket) -> None:
        if self.faults is not None and self.faults.before_bucket is not None:
            await self.faults.before_bucket(bucket)
        await super().ensure_bucket(bucket)
