"""Who may write the decision record: the fence is in the record, and every write is a compare-and-set.

A coordinator takes the lock, then *seals* the record: it writes the record once more, with its own fence. Only then it
acts. A call that seals nothing *bars* the holder before it from the record, if that has not given the lock back. Each
later write names the sequence of the writer's own last one, so the server refuses it once another call has written the
record. A coordinator never writes again over a record that is not its own. Therefore a coordinator that has lost the
lock can't decide once another call acts, however late its write arrives. docs/protocol.md has the whole argument.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from rl_plane.bus.connection import Bus, WrongSequence
from rl_plane.bus.lock import HeldLock
from rl_plane.bus.state_store import record_of
from rl_plane.errors import StaleFence
from rl_plane.protocol.record import DecisionRecord, newer
from rl_plane.protocol.subjects import RECORD, Bucket, Entry

log = logging.getLogger("rl_plane.bus.sealed_record")

SEAL_TRIES = 5
"""Others may write between a read and the seal: the last decision of the former holder, workers that restore."""

Newest = Callable[[DecisionRecord | None], DecisionRecord | None]
"""The store's record → the newest one that is known anywhere."""


class SealedRecord:
    """The record while a coordinator holds the lock."""

    def __init__(self, bus: Bus, bucket: Bucket, held: HeldLock) -> None:
        self._bus = bus
        self._bucket = bucket
        self._held = held
        self._mine: DecisionRecord | None = None
        """The record as this coordinator has written it last."""
        self._sequence = 0
        """The sequence of that write."""
        self._connection: tuple[str, int] | None = None
        """The connection on which the record was last known to be at that sequence. A server that lost writes gives
        their sequences a second time, and it breaks every connection before that."""

    async def seal(self, newest: Newest) -> DecisionRecord | None:
        """Writes the newest record with this coordinator's fence. None: there is no record yet.

        StaleFence: another coordinator has taken the record over, or a worker has barred this one from it."""
        for _ in range(SEAL_TRIES):
            connection = self._bus.identity
            entry = await self._bus.get(self._bucket, RECORD)
            there = record_of(entry)
            record = newest(there)
            if record is None:
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
        raise StaleFence("the record changes all the time", fix="repeat the call")

    async def decide(self, record: DecisionRecord) -> DecisionRecord:
        """Writes a decision of this coordinator, in the place of what it has sealed."""
        return await self.write(replace(record, fence=self._held.fence))

    async def write(self, record: DecisionRecord) -> DecisionRecord:
        """Replaces what this coordinator has written last. StaleFence: another writer has replaced it.

        BusUnreachable: it is not known whether the server has taken the write."""
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
        """Either this coordinator has lost the lock, or a store that lost writes gives fences for the second time. It
        has acted on its fence once it has sealed the record; then only another call can take a higher one."""
        if self._mine is not None:
            raise self._replaced()
        await self._held.refence(lowest)

    async def _look_again(self) -> None:
        """On a new connection: is the lock ours, and the record as it was left?"""
        await self._held.check()
        connection = self._bus.identity
        if not self._is_mine(await self._bus.get(self._bucket, RECORD)):
            raise self._replaced()
        self._connection = connection

    def _is_mine(self, entry: Entry | None) -> bool:
        """Is this the last write of this coordinator, unchanged?"""
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
            "the record is not the one that this call has left: another coordinator has taken over, or a worker has "
            "written back what the store had lost",
            fence=self._held.fence,
            fix="read the state, then repeat",
        )


def _lowest_fence(record: DecisionRecord | None) -> int:
    """The lowest fence that may write over this record."""
    return max(record.seal, record.barred + 1) if record is not None else 0


async def bar(bus: Bus, bucket: Bucket, entry: Entry, fence: int) -> bool:
    """Bars a coordinator that is gone, and everyone before it, from the record at `entry`. For a worker that wants to
    give up what this coordinator has staged while no other coordinator is there. False: the record has changed."""
    there = record_of(entry)
    assert there is not None
    if there.barred >= fence:
        return True  # a write more would only cost the next coordinator its seal
    try:
        await bus.put(bucket, RECORD, replace(there, barred=fence).encode(), last=entry.sequence)
    except WrongSequence:
        return False
    return True


async def bar_former(bus: Bus, bucket: Bucket, held: HeldLock) -> None:
    """Bars the former holder of the lock from the record, before this holder acts. For calls that seal nothing."""
    for _ in range(SEAL_TRIES):
        entry = await bus.get(bucket, RECORD)
        there = record_of(entry)
        if entry is None or there is None or there.barred >= held.fence - 1:
            return
        if await bar(bus, bucket, entry, held.fence - 1):
            return
    raise StaleFence("the record changes all the time", fix="repeat the call")


async def restore(bus: Bus, bucket: Bucket, record: DecisionRecord, entry: Entry | None) -> None:
    """Writes back a record that the store has lost, in the place of what was read as `entry`. Nothing happens where
    another writer was faster."""
    there = record_of(entry)
    assert newer(record, there)
    barred = max(record.barred, there.barred if there is not None else 0)
    value = replace(record, barred=barred).encode()
    try:
        if entry is None or entry.value is None:
            await bus.create(bucket, RECORD, value)
        else:
            await bus.put(bucket, RECORD, value, last=entry.sequence)
            log.warning("%s: the store had lost %s: it is written back", bus.name, record.made.label)
    except WrongSequence:
        pass
