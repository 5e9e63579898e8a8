"""The buckets of the simulated NATS server: compare-and-set, TTLs with markers, and writes that can be lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from rl_plane.bus.connection import WrongSequence
from rl_plane.errors import BusUnreachable
from rl_plane.protocol.subjects import KeyValueBucket
from tests.sim.clocks import UNIX_S
from tests.sim.virtual_loop import VirtualLoop

MARKER_S = 60.0


@dataclass(slots=True)
class Key:
    sequence: int
    value: bytes | None
    expired: bool = False
    timer: Any = None
    expires_at: float | None = None


@dataclass(slots=True)
class Stream:
    bucket: KeyValueBucket
    last: int
    keys: dict[str, Key] = field(default_factory=dict)
    log: list[tuple[float, int, str, Key | None]] = field(default_factory=list)
    """The facts to undo each write: its time, the last sequence before it, its key, and the key's former value."""

    def matching(self, keys: str) -> list[str]:
        """`prefix.>`, or `>` for all."""
        return [key for key in self.keys if key.startswith(keys.removesuffix(">"))]

    def as_of(self, at: float) -> Stream:
        """A copy as it was then: what an old leader, which has not heard of the writes since, still reports."""
        keys, last = dict(self.keys), self.last
        for when, last_before, key, before in reversed(self.log):
            if when < at:
                break
            last = last_before
            keys.pop(key, None)
            if before is not None:
                keys[key] = before
        return Stream(self.bucket, last, keys)


class SimStore:
    """Times are virtual; what happens here belongs to no process."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.up = True
        self.still_until = 0.0
        """The server's process stands still until then: nothing is taken and nothing is sent."""
        self.streams: dict[str, Stream] = {}
        self.on_write: Callable[[KeyValueBucket, str, bytes | None, int], None] = (
            lambda bucket, key, value, sequence: None
        )
        self.context = copy_context()

    def later(self, delay: float, work: Callable[..., None], *args: Any) -> None:
        """Whatever becomes of the process that runs now."""
        self.loop.call_later(delay, work, *args, context=self.context)

    def at(self, when: float, work: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        timer: asyncio.TimerHandle = self.loop.call_at(when, work, *args, context=self.context)
        return timer

    @property
    def still(self) -> bool:
        return self.loop.now < self.still_until

    def publish(
        self, source: Any, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        raise NotImplementedError

    def make(self, bucket: KeyValueBucket) -> None:
        """Creates a bucket as `Bus.ensure_bucket` does: its sequences begin at the Unix milliseconds of now."""
        first = int((UNIX_S + self.loop.now) * 1000)
        if bucket.name not in self.streams:
            self.streams[bucket.name] = Stream(bucket, first - 1)

    def stream(self, bucket: KeyValueBucket) -> Stream:
        if bucket.name not in self.streams:
            raise BusUnreachable(f"simulated: no stream {bucket.name}")
        return self.streams[bucket.name]

    def value(self, bucket: KeyValueBucket, key: str) -> Key | None:
        """The value of a key, for the checks."""
        stream = self.streams.get(bucket.name)
        return stream.keys.get(key) if stream is not None else None

    def write(
        self,
        bucket: KeyValueBucket,
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
        stream.log.append((self.loop.now, stream.last, key, before))
        stream.last += 1
        entry = stream.keys[key] = Key(stream.last, value, expired)
        if ttl_s is not None:
            entry.expires_at = self.loop.now + ttl_s
            self._set_timer(stream, key, entry)
        headers = {"Nats-Sequence": str(stream.last)}
        if value is None:
            headers["Nats-Marker-Reason" if expired else "KV-Operation"] = "MaxAge" if expired else "PURGE"
        self.publish(None, bucket.feed(key), value or b"", headers=headers)
        self.on_write(bucket, key, value, stream.last)
        return stream.last

    def _set_timer(self, stream: Stream, key: str, entry: Key) -> None:
        assert entry.expires_at is not None
        entry.timer = self.at(max(entry.expires_at, self.loop.now), self._expire, stream, key, entry)

    def _expire(self, stream: Stream, key: str, entry: Key) -> None:
        if self.streams.get(stream.bucket.name) is not stream or stream.keys.get(key) is not entry:
            return
        if not self.up or self.still:  # it looks when it is back
            entry.expires_at = max(self.loop.now, self.still_until) + 0.2
            self._set_timer(stream, key, entry)
        elif entry.value is None:
            del stream.keys[key]
        else:
            self.write(stream.bucket, key, None, None, int(MARKER_S), None, expired=True)

    def expire(self, bucket: KeyValueBucket, key: str) -> None:
        """Ends the TTL of a key now, as after a step of the server's clock."""
        stream = self.streams.get(bucket.name)
        entry = stream.keys.get(key) if stream is not None else None
        if stream is not None and entry is not None and entry.value is not None and entry.expires_at is not None:
            entry.expires_at = self.loop.now
            self._expire(stream, key, entry)

    def lose_writes(self, bucket: KeyValueBucket, count: int) -> int:
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

    def lose_since(self, bucket: KeyValueBucket, at: float) -> int:
        stream = self.streams.get(bucket.name)
        return self.lose_writes(bucket, sum(when >= at for when, *_ in stream.log)) if stream is not None else 0

    def lose_store(self) -> None:
        self.streams.clear()
