"""Guards the decision record: the record has the fence of its writer, and every write is a compare-and-set.

A coordinator takes the lock, then *seals* the record: it writes the record once more, with its own fence. Only then it
acts. A call that seals nothing *bars* the former holder from the record, unless that holder has released the lock. Each
later write names the sequence of the writer's own last write, so the server refuses it when another call has written
the record since. A coordinator never writes again over a record that is not its own. Therefore a coordinator that has
lost the lock can't decide once another call acts, however late its write arrives. docs/protocol.md has the whole
argument."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from rl_plane.bus.connection import Bus, WrongSequence
from rl_plane.bus.entries import is_unreadable
from rl_plane.bus.lock import HeldLock, fence_of
from rl_plane.bus.state_store import record_of, unreadable_record
from rl_plane.errors import StaleFence
from rl_plane.protocol.record import DecisionRecord, newer
from rl_plane.protocol.subjects import LOCK, RECORD, Entry, KeyValueBucket

log = logging.getLogger("rl_plane.bus.sealed_record")

SEAL_TRIES = 5
"""Tries to seal. Between a read and the seal the former holder or a worker that restores the record may write it."""

Newest = Callable[[DecisionRecord | None], DecisionRecord | None]
"""Takes the store's record, and returns the newest record that is known anywhere."""


class SealedRecord:
    """Reads and writes the record for a coordinator that holds the lock."""

    def __init__(self, bus: Bus, bucket: KeyValueBucket, held: HeldLock) -> None:
        self._bus = bus
        self._bucket = bucket
        self._held = held
        self._mine: DecisionRecord | None = None
        """This coordinator's last write."""
        self._sequence = 0
        """The sequence of that write."""
        self._connection: tuple[str, int] | None = None
        """The connection on which the record was last known to be at that sequence. A server that has lost writes gives
        their sequences a second time, and it breaks every connection before that."""

    async def seal(self, newest: Newest) -> DecisionRecord | None:
        """Writes the newest record with this coordinator's fence. None: there is no record yet.

        BusUnreachable: the stored record can't be read, and no process that was asked knows it.
        StaleFence: another coordinator has taken the record over, or a worker has barred this one from it."""
        for _ in range(SEAL_TRIES):
            connection = self._bus.identity
            entry = await self._bus.get(self._bucket, RECORD)
            there = record_of(entry)
            record = newest(there)
            if record is None:
                if is_unreadable(entry, there):
                    raise unreadable_record()
                return None
            lowest = max(_lowest_fence(record), _lowest_fence(there))
            if self._held.fence < lowest:
                await self._rise(lowest)
                continue
            if record == self._mine and self._is_mine(entry):
                self._connection = connection
                return record
            try:
                return await self._put(record, entry.sequence if entry is not None else 0)
            except WrongSequence:
                continue
        raise StaleFence(f"the record has changed {SEAL_TRIES} times during the seal", fix="repeat the call")

    async def decide(self, record: DecisionRecord) -> DecisionRecord:
        """Writes a decision of this coordinator over the record that it has sealed."""
        return await self.write(replace(record, fence=self._held.fence))

    async def write(self, record: DecisionRecord) -> DecisionRecord:
        """Writes the record over this coordinator's last write. StaleFence: another writer has replaced that write.
        BusUnreachable: it is not known whether the server has taken the new one."""
        if self._bus.identity != self._connection:
            await self._look_again()
        try:
            return await self._put(record, self._sequence)
        except WrongSequence as error:
            raise self._replaced() from error

    async def refence(self) -> None:
        """Takes a new fence. A record that was written under the old one counts only if the next seal finds it."""
        await self._held.refence()
        self._mine = None

    @property
    def sequence(self) -> int:
        """The sequence of the last write."""
        return self._sequence

    async def _rise(self, lowest: int) -> None:
        """Takes a fence of at least `lowest`, because a store that has lost writes gives fences a second time.
        StaleFence: this coordinator has sealed the record already, so another call has taken the higher fence."""
        if self._mine is not None:
            raise self._replaced()
        await self._held.refence(lowest)

    async def _look_again(self) -> None:
        """Checks on a new connection that this coordinator still has the lock, and that its last write stands."""
        await self._held.check()
        connection = self._bus.identity
        if not self._is_mine(await self._bus.get(self._bucket, RECORD)):
            raise self._replaced()
        self._connection = connection

    def _is_mine(self, entry: Entry | None) -> bool:
        """Reports whether the entry is the last write of this coordinator, unchanged."""
        there = record_of(entry)
        if entry is None or there is None or self._mine is None:
            return False
        sealed = (there.seal, there.barred) == (self._mine.seal, self._mine.barred)
        return sealed and there == self._mine and entry.sequence == self._sequence

    async def _put(self, record: DecisionRecord, last: int) -> DecisionRecord:
        fence = self._held.fence
        sealed = replace(record, seal=fence, barred=max(record.barred, fence - 1))
        self._held.check_unlost()
        connection = self._bus.identity
        self._sequence = await self._bus.put(self._bucket, RECORD, sealed.encode(), last=last)
        self._mine, self._connection = sealed, connection
        return sealed

    def _replaced(self) -> StaleFence:
        return StaleFence(
            "another writer has replaced this call's record: another coordinator has taken over, or a worker has "
            "restored a record that the store had lost",
            fence=self._held.fence,
            fix="read the state, then repeat",
        )


def _lowest_fence(record: DecisionRecord | None) -> int:
    """The lowest fence that may write over this record."""
    return max(record.seal, record.barred + 1) if record is not None else 0


async def bar(bus: Bus, bucket: KeyValueBucket, entry: Entry, fence: int) -> bool:
    """Bars the coordinator with this fence, and every earlier one, from the record at `entry`. A worker calls this
    before it drops what that coordinator has staged, when no other coordinator is there. False: the record has
    changed."""
    there = record_of(entry)
    assert there is not None
    if there.barred >= fence:
        return True  # one more write would only delay the next coordinator's seal
    try:
        await bus.put(bucket, RECORD, replace(there, barred=fence).encode(), last=entry.sequence)
    except WrongSequence:
        return False
    return True


async def bar_former(bus: Bus, bucket: KeyValueBucket, held: HeldLock, known: DecisionRecord | None) -> None:
    """Bars the former holder of the lock from the record, before this holder acts. A call that seals the record does
    not need this.

    `known`: the record that this process knows. It replaces a stored record that can't be read."""
    for _ in range(SEAL_TRIES):
        entry = await bus.get(bucket, RECORD)
        there = record_of(entry)
        if entry is not None and is_unreadable(entry, there):
            if known is None:
                raise unreadable_record()
            await restore(bus, bucket, known, entry)
            continue
        if entry is None or there is None or there.barred >= held.fence - 1:
            return
        if await bar(bus, bucket, entry, held.fence - 1):
            return
    raise StaleFence(f"the record has changed {SEAL_TRIES} times during the call", fix="repeat the call")


async def restore(bus: Bus, bucket: KeyValueBucket, record: DecisionRecord, entry: Entry | None) -> None:
    """Writes back a record that the store has lost, over the value that was read as `entry`. Does nothing if another
    writer has replaced that value.

    A value that can't be read may have barred coordinators. So the restored record bars every coordinator but the
    present holder of the lock."""
    there = record_of(entry)
    assert newer(record, there)
    barred = max(record.barred, there.barred if there is not None else 0)
    if is_unreadable(entry, there):
        fence, held = fence_of(await bus.get(bucket, LOCK))
        barred = max(barred, fence - 1 if held else fence)
    value = replace(record, barred=barred).encode()
    try:
        if entry is None or entry.value is None:
            await bus.create(bucket, RECORD, value)
        else:
            await bus.put(bucket, RECORD, value, last=entry.sequence)
            log.warning("%s: the store had lost %s: restored", bus.name, record.made.label)
    except WrongSequence:
        pass
