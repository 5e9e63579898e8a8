"""A worker's place in the membership: its record in the members bucket, kept there for as long as it lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.msg import Msg

from rl_plane.bus.connection import Bus, WrongSequence, is_marker
from rl_plane.errors import BusUnreachable
from rl_plane.membership.core import Member
from rl_plane.protocol.subjects import MEMBER_PREFIX, Bucket, Entry

log = logging.getLogger("worker.runtime.registration")

RETRY_S = 0.05
MAX_RETRY_S = 1.0
"""A server that restarts is back within seconds; asking it 20 times a second at first costs nothing."""

CHECK_S = 10.0
"""How often a worker reads its own record: so long a worker is missing at most after the news of it was lost. Each read
is one request to the server; the serving lease takes six in that time."""


class Registration:
    """`register` writes the record and keeps it: after a reconnect, and when somebody took us for dead.

    `on_registered` is awaited after it was written anew, one at a time; once for all that were written before its
    turn came. `on_superseded` is called when another process has taken our instance id: there can be only one."""

    def __init__(
        self,
        bus: Bus,
        members: Bucket,
        instance_id: str,
        incarnation: str,
        info: dict[str, Any],
        *,
        on_registered: Callable[[], Awaitable[None]],
        on_superseded: Callable[[], None],
    ) -> None:
        self.revision = 0
        """The sequence of our record; 0 before it is written."""
        self._bus = bus
        self._members = members
        self._key = MEMBER_PREFIX + instance_id
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._info = info
        self._on_registered = on_registered
        self._on_superseded = on_superseded
        self._registering = asyncio.Lock()
        self._following = asyncio.Lock()
        self._to_follow = False
        """The record was written, and `on_registered` not awaited since."""
        self._leaving = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Subscribe everything else first: once this returns, requests may come."""
        await self._bus.ensure_bucket(self._members)
        await self._bus.subscribe(self._members.feed(self._key), self._heard)
        await self._bus.flush()
        self._bus.on_reconnect(self._register_soon)
        await self.register()

    async def keep(self) -> None:
        """Reads the record every CHECK_S. The news that the record was taken out, or that another process has the
        instance id, may be lost on its way while every connection stays: the servers of a cluster lose sight of each
        other."""
        while True:
            await asyncio.sleep(CHECK_S)
            revision = self.revision
            try:
                entry = await self._bus.get(self._members, self._key)
            except BusUnreachable as error:
                log.debug("checking the registration: %s", error)
                continue
            if self._leaving:
                return
            if entry is not None and self._is_another(entry):
                self._superseded()
                return
            if entry is None or entry.value is None:
                log.warning("taken for dead, and the news of it was lost: registering again")
                await self.register(revision)

    async def register(self, lost: int | None = None) -> None:
        """Writes the record for the connection as it is now; keeps trying until NATS takes it. `lost`: it was taken
        out at this sequence, and need not be written if it has been since."""
        async with self._registering:
            if lost is None or lost >= self.revision:
                await self._write()
        # Only after the record is there: what was called meanwhile asked those that were listed. And not under that
        # lock: it may take as long as the weights are written over, and the record must come back meanwhile.
        await self._follow()

    async def _write(self) -> None:
        wait_s = RETRY_S
        while not self._leaving:  # its answer may be lost, so each step may be done twice
            with contextlib.suppress(WrongSequence):
                try:
                    entry = await self._bus.get(self._members, self._key)
                    if self.revision and entry is not None and self._is_another(entry):
                        self._superseded()
                        return
                    self.revision = await self._bus.put(
                        self._members, self._key, self._record(), last=entry.sequence if entry else 0
                    )
                    self._to_follow = True
                    return
                except BusUnreachable as error:
                    log.debug("registering: %s", error)
                    with contextlib.suppress(BusUnreachable):  # the store may have been lost
                        await self._bus.ensure_bucket(self._members)
            await asyncio.sleep(wait_s)
            wait_s = min(MAX_RETRY_S, wait_s * 2)

    async def _follow(self) -> None:
        async with self._following:
            wait_s = RETRY_S
            while self._to_follow and not self._leaving:
                self._to_follow = False
                try:
                    await self._on_registered()
                except BusUnreachable as error:
                    log.debug("after registering: %s", error)
                    self._to_follow = True
                    await asyncio.sleep(wait_s)
                    wait_s = min(MAX_RETRY_S, wait_s * 2)

    def _record(self) -> bytes:
        server_id, client_id = self._bus.identity
        return Member(self._instance_id, self._incarnation, server_id, client_id, 0, self._info).to_record()

    async def _register_soon(self, lost: int | None = None) -> None:
        task = asyncio.create_task(self.register(lost))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _heard(self, message: Msg) -> None:
        headers = message.headers or {}
        sequence = int(headers["Nats-Sequence"])
        if self._leaving or not self.revision or sequence <= self.revision:
            return
        if is_marker(headers):
            log.warning("taken for dead at sequence %d: registering again", sequence)
            await self._register_soon(sequence)
            return
        if self._is_another(Entry(self._key, message.data, sequence)):
            self._superseded()

    def _is_another(self, entry: Entry) -> bool:
        """A record that is older than ours is one of before, which a store that went back still has."""
        newer = entry.sequence > self.revision
        return newer and entry.value is not None and Member.from_entry(entry).incarnation != self._incarnation

    def _superseded(self) -> None:
        log.error("another process has taken the instance id %s", self._instance_id)
        self._leaving = True
        self._on_superseded()

    async def leave(self) -> None:
        """Takes the record out, unless it is not ours any more."""
        self._leaving = True
        if self.revision:
            with contextlib.suppress(WrongSequence, BusUnreachable):
                await self._bus.purge(self._members, self._key, self.revision)
