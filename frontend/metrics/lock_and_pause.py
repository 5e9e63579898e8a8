"""Follows the component's lock and the desired pause, for the metrics alone: no decision depends on this copy."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from nats.aio.msg import Msg

from rl_plane.bus.connection import Bus, is_marker
from rl_plane.bus.lock import LOCK_TTL_S, holder_of
from rl_plane.bus.state_store import pause_of
from rl_plane.errors import PlaneError
from rl_plane.protocol.record import DesiredPause
from rl_plane.protocol.subjects import LOCK, PAUSE, Entry, KeyValueBucket

HOLDERS = ("this_frontend", "another_frontend", "client")
"""The kinds of process that may hold the lock. `client`: a process with RlClient."""
FRONTEND_NAME = "frontend-"
"""The beginning of the name by which a frontend holds the lock."""


class LockAndPause:
    """The lock and the pause in the state bucket, as far as this process has heard."""

    def __init__(self, bus: Bus, state: KeyValueBucket, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._state = state
        self._clock = clock
        self._lock_sequence = self._pause_sequence = 0
        self._holder: tuple[str, str] | None = None
        """The owner and the nonce of the lock's holder."""
        self._held_since = self._renewed_at = 0.0
        self._pause = DesiredPause(False)
        self._server_ahead_s: float | None = None
        """The NATS server's Unix time minus this clock. None: the server was not asked yet."""

    async def start(self) -> None:
        """Subscribes, and reads both keys. A read that fails is repeated at the next connection."""
        await self._bus.subscribe(self._state.feed(LOCK), self._on_lock)
        await self._bus.subscribe(self._state.feed(PAUSE), self._on_pause)
        self._bus.on_reconnect(self._read)
        await self._bus.flush()
        await self._read()

    async def _read(self) -> None:
        self._lock_sequence = self._pause_sequence = 0  # the store may be another one
        with contextlib.suppress(PlaneError):
            lock, pause, server_time = await asyncio.gather(
                self._bus.get(self._state, LOCK),
                self._bus.get(self._state, PAUSE),
                self._bus.server_time(self._state),
            )
            self._server_ahead_s = server_time - self._clock()
            self.take_lock(lock)
            self.take_pause(pause)

    async def _on_lock(self, message: Msg) -> None:
        self.take_lock(_entry(LOCK, message))

    async def _on_pause(self, message: Msg) -> None:
        self.take_pause(_entry(PAUSE, message))

    def take_lock(self, entry: Entry | None) -> None:
        """Takes the lock's entry, unless it is older than the last one. None: no call holds the lock."""
        sequence = entry.sequence if entry is not None else 0
        if sequence < self._lock_sequence:
            return
        self._lock_sequence = sequence
        found = holder_of(entry)
        holder = (str(found["owner"]), str(found["nonce"])) if found is not None else None
        now = self._clock()
        if holder != self._holder:
            self._holder, self._held_since = holder, now
        self._renewed_at = now

    def take_pause(self, entry: Entry | None) -> None:
        """Takes the pause's entry in the same way."""
        sequence = entry.sequence if entry is not None else 0
        if sequence >= self._pause_sequence:
            self._pause_sequence = sequence
            self._pause = pause_of(entry)

    def held_by(self) -> dict[str, int]:
        """Returns kind of holder → 1 if such a process holds the lock, else 0."""
        found = dict.fromkeys(HOLDERS, 0)
        owner = self.owner()
        if owner == self._bus.name:
            found["this_frontend"] = 1
        elif owner is not None:
            found["another_frontend" if owner.startswith(FRONTEND_NAME) else "client"] = 1
        return found

    def owner(self) -> str | None:
        """The holder's name. None: the lock is free, or it was not renewed for so long that it has expired."""
        if self._holder is None or self._clock() - self._renewed_at > LOCK_TTL_S:
            return None
        return self._holder[0]

    def held_s(self) -> float:
        """The seconds since this process heard of the present holder. 0: the lock is free."""
        return self._clock() - self._held_since if self.owner() is not None else 0.0

    def pause_left_s(self) -> float:
        """The seconds that the pause still lasts. 0: the fleet is not paused."""
        return (
            self._pause.left_s(self._clock() + self._server_ahead_s) if self._server_ahead_s is not None else 0.0
        )


def _entry(key: str, message: Msg) -> Entry:
    headers = message.headers or {}
    return Entry(key, None if is_marker(headers) else message.data, int(headers["Nats-Sequence"]))
