"""Keeps a worker's record in the members bucket for as long as the worker lives."""

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
from rl_plane.protocol.subjects import MEMBER_PREFIX, Entry, KeyValueBucket

log = logging.getLogger("worker.runtime.registration")

RETRY_S = 0.05
MAX_RETRY_S = 1.0
"""A server that restarts is back within seconds. At first, 20 tries a second cost nothing."""

CHECK_S = 10.0
"""The interval at which a worker reads its own record. If the news of its removal is lost, the worker is missing for so
long at most. One read is one request to the server; the serving lease takes six in that time."""


class Registration:
    """Writes the record at the start, after a reconnect, and after a prober took this worker for dead.

    `on_registered` is awaited after each write, one call at a time; several writes may share one call.
    `on_superseded` is called when another process has taken the instance id: only one process may have it."""

    def __init__(
        self,
        bus: Bus,
        members: KeyValueBucket,
        instance_id: str,
        incarnation: str,
        info: dict[str, Any],
        *,
        on_registered: Callable[[], Awaitable[None]],
        on_superseded: Callable[[], None],
        check_s: float = CHECK_S,
    ) -> None:
        """`check_s`: the interval at which `keep` reads the record."""
        self.revision = 0
        """The sequence of this worker's record. 0: it is not written yet."""
        self._bus = bus
        self._members = members
        self._key = MEMBER_PREFIX + instance_id
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._info = info
        self._on_registered = on_registered
        self._on_superseded = on_superseded
        self._check_s = check_s
        self._registering = asyncio.Lock()
        self._following = asyncio.Lock()
        self._to_follow = False
        """The record was written, and `on_registered` was not awaited since."""
        self._leaving = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Joins. The caller subscribes everything else first, because requests come from now on."""
        await self._bus.ensure_bucket(self._members)
        await self._bus.subscribe(self._members.feed(self._key), self._heard)
        await self._bus.flush()
        self._bus.on_reconnect(self._register_soon)
        await self.register()

    async def keep(self) -> None:
        """Reads the record at an interval. The news that the record was removed, or that another process has the
        instance id, may be lost on its way while every connection stays: the servers of a cluster lose sight of each
        other."""
        while True:
            await asyncio.sleep(self._check_s)
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
            if entry is None or Member.from_entry(entry) is None:
                log.warning("this worker's record was removed, and the news of it was lost: registering again")
                await self.register(revision)

    async def register(self, lost: int | None = None) -> None:
        """Writes the record for the present connection, until NATS takes it. `lost`: the sequence at which the record
        was removed; nothing is written if that has been repaired since."""
        async with self._registering:
            if lost is None or lost >= self.revision:
                await self._write()
        # After the write, because calls before it did not reach this worker. And not under that lock: this may take
        # as long as an update in place, and meanwhile another task must be able to write the registration again.
        await self._follow()

    async def _write(self) -> None:
        wait_s = RETRY_S
        while not self._leaving:  # an answer may be lost, so each step can be repeated
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
            log.warning("a prober took this worker for dead at sequence %d: registering again", sequence)
            await self._register_soon(sequence)
            return
        entry = Entry(self._key, message.data, sequence)
        if Member.from_entry(entry) is None:
            await self._register_soon(sequence)
        elif self._is_another(entry):
            self._superseded()

    def _is_another(self, entry: Entry) -> bool:
        """Returns whether the record is another process's. An older record comes from a store that has lost writes."""
        there = Member.from_entry(entry)
        return there is not None and entry.sequence > self.revision and there.incarnation != self._incarnation

    def _superseded(self) -> None:
        log.error("another process has taken the instance id %s", self._instance_id)
        self._leaving = True
        self._on_superseded()

    async def leave(self) -> None:
        """Removes the record, unless another process has it."""
        self._leaving = True
        if self.revision:
            with contextlib.suppress(WrongSequence, BusUnreachable):
                await self._bus.purge(self._members, self._key, self.revision)
