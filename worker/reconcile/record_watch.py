"""Follows the decision record of the fleet, and keeps the worker's serving lease.

The worker hears of each write by a subscription. In addition it reads the record from the leader of the store: that
alone extends the lease, and a record that the store has lost is written back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import nats.errors
from nats.aio.msg import Msg

from rl_plane.bus.connection import Bus
from rl_plane.bus.entries import is_unreadable
from rl_plane.bus.sealed_record import restore
from rl_plane.bus.state_store import record_of, unreadable_record
from rl_plane.errors import BusUnreachable, PermissionDenied, PlaneError
from rl_plane.protocol.record import SERVING_LEASE_S, DecisionRecord
from rl_plane.protocol.subjects import RECORD, Entry, Subjects
from worker.reconcile.worker_core import WorkerCore

log = logging.getLogger("worker.reconcile.record_watch")

CONFIRM_S = SERVING_LEASE_S / 3
"""The lease survives two confirmations that are lost."""
RESTORES = 3
"""While this worker restores a lost record, so many writes of other processes may come first. Then it tries later."""


class RecordWatch:
    """Gives the core each record that the worker hears or reads. `on_news`: the core has learnt something."""

    def __init__(self, bus: Bus, subjects: Subjects, core: WorkerCore, on_news: Callable[[], None]) -> None:
        self._bus = bus
        self._bucket = subjects.state
        self._ask_subject = subjects.keep_record
        self._core = core
        self._instance_id = core.state.instance_id
        self._on_news = on_news

    async def start(self) -> None:
        await self._bus.ensure_bucket(self._bucket)
        await self._bus.subscribe(self._bucket.feed(RECORD), self._heard)
        self._bus.on_reconnect(self._reconnected)

    def learn(self, record: DecisionRecord, written: int) -> None:
        """Takes a record that a coordinator or the subscription brings. `written`: its sequence in the bucket."""
        if self._core.learnt(record, written, time.monotonic()):
            self._on_news()

    async def keep_lease(self) -> None:
        """Confirms the serving lease, for ever."""
        while True:
            await asyncio.sleep(CONFIRM_S)
            try:
                await self.read()
            except PlaneError as error:
                log.debug("%s could not confirm its lease: %s", self._instance_id, error)
            except Exception:
                log.exception("%s could not confirm its lease", self._instance_id)

    async def read(self) -> None:
        """Reads the record from the leader, and writes it back if the leader has lost it."""
        for _ in range(RESTORES):
            asked_at, connection = time.monotonic(), self._bus.identity
            try:
                entry = await self._bus.get(self._bucket, RECORD)
            except BusUnreachable:
                await self._bus.ensure_bucket(self._bucket)  # the store may have been lost
                entry = None
            record, written = record_of(entry), entry.sequence if entry is not None else 0
            if is_unreadable(entry, record):
                await self._replace_unreadable(entry)
                return
            before = self._core.record
            lost = self._core.leader_said(record, written, asked_at, connection, time.monotonic())
            if lost is None:
                if before is not self._core.record:
                    self._on_news()
                return
            await self._restore(lost, entry)
        raise BusUnreachable("the record could not be written")

    async def _replace_unreadable(self, entry: Entry | None) -> None:
        """Writes the known record over a record that can't be read.

        This does not extend the serving lease, because another process may know a newer decision. That process writes
        the newer decision before this worker reads again. A worker that knows no record stays closed, because a version
        may be committed."""
        known = self._core.record
        if known is None:
            error = unreadable_record()
            self._core.state.close("behind", error.message)
            raise error
        log.warning("%s: %s could not be read: restored", self._instance_id, RECORD)
        await self._restore(known, entry)

    async def _restore(self, record: DecisionRecord, entry: Entry | None) -> None:
        """Writes the record back. BusUnreachable: this worker's key may not, and it has asked the frontends."""
        try:
            await restore(self._bus, self._bucket, record, entry)
        except PermissionDenied as error:
            await self.ask_frontends()
            raise BusUnreachable(
                "this worker's key may not write the record, so a frontend was asked to"
            ) from error

    async def ask_frontends(self) -> None:
        """Asks the frontends to write the record, because this worker's key may not: a frontend takes the lock, asks
        all workers, and seals what it finds."""
        with contextlib.suppress(nats.errors.Error):  # the worker asks again
            await self._bus.nc.publish(self._ask_subject)

    async def _heard(self, message: Msg) -> None:
        if message.data:
            entry = Entry(RECORD, message.data, int((message.headers or {})["Nats-Sequence"]))
            record = record_of(entry)
            if record is not None:
                self.learn(record, entry.sequence)

    async def _reconnected(self) -> None:
        try:
            await self.read()
        except PlaneError as error:
            log.info("%s can't read the record now: %s", self._instance_id, error)
        self._on_news()
