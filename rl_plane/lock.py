"""The component's lock: one coordinator at a time, enforced by the server.

A holder is known to workers by its fence, the sequence of its acquire: they refuse lower ones. A dead holder
loses the lock at once where the server tells of closed connections, else when its TTL runs out. What it has still on
its way then is refused: the record, which a decision is written over, is written anew before anybody else has the lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rl_plane.bus import Bus, WrongSequence
from rl_plane.errors import BusUnreachable, Locked, StaleFence
from rl_plane.subjects import LOCK, RECORD, Bucket, Entry
from rl_plane.tasks import end_tasks

log = logging.getLogger("rl_plane.lock")

LOCK_TTL_S = 5
"""How long a holder that fell silent keeps others waiting."""
RENEW_S = 1.5
"""Three tries fit in one TTL."""
POLL_S = 0.05
"""A waiter's interval; an acquire takes 0.1 ms, a changing op that isn't an update about 10."""
DEFAULT_LOCK_WAIT_S = 2.0
"""Then the caller is told to come back, rather than kept: a queue of trainers is a mistake somewhere."""

DiedCheck = Callable[[tuple[str, int]], bool]
Holder = dict[str, str | int]
"""owner, server_id, client_id; update_id, if it is held for an update; fence, once it is known (from the first
renewal on)."""
Anew = tuple[int, int]
"""The record's sequences before and after it was written anew, as it was."""


class HeldLock:
    """The lock while it is held. `fence` goes into every changing request."""

    def __init__(
        self, bus: Bus, bucket: Bucket, holder: Holder, fence: int, took_over: bool, anew: Anew | None = None
    ) -> None:
        self.fence = fence
        self.took_over = took_over
        """The one before did not give it back: what it left half done is for this one to end."""
        self.anew = anew
        """None: the record was not written anew for this holder."""
        self._holder = holder
        self._value = json.dumps({**holder, "fence": fence}).encode()
        self._connection = bus.identity
        """On which the lock was known to be ours: a server that restarted may have lost it, and given its sequence to
        another holder."""
        self._bus = bus
        self._bucket = bucket
        self._revision = fence
        self._busy = asyncio.Lock()
        self._in_doubt = False
        """A decision was sent, and may be taken yet: it is refused once the record is written anew, as it is by whoever
        takes a lock that was not given back."""
        self.lost = False

    async def renew(self) -> None:
        async with self._busy:
            await self._check_ours()
            try:
                self._revision = await self._bus.put(
                    self._bucket, LOCK, self._value, last=self._revision, ttl_s=LOCK_TTL_S
                )
            except WrongSequence as error:
                await self._renewed_unheard(error)

    async def put(self, key: str, value: bytes) -> int:
        """A write that the server takes only while this lock is held."""
        async with self._busy:
            await self._check_ours()
            try:
                return await self._bus.put(self._bucket, key, value, while_key=(LOCK, self._revision))
            except WrongSequence as error:
                await self._renewed_unheard(error)
            try:
                return await self._bus.put(self._bucket, key, value, while_key=(LOCK, self._revision))
            except WrongSequence as error:
                self.lost = True
                raise self._stale() from error

    async def replace(self, key: str, value: bytes, last: int) -> int:
        """A write that the server takes only while the key is at the sequence `last` (0: absent), else WrongSequence.
        The lock may have been lost meanwhile: whoever takes it over writes the record anew first."""
        async with self._busy:
            await self._check_ours()
            try:
                sequence = await self._bus.put(self._bucket, key, value, last=last)
            except BusUnreachable:
                self._in_doubt = True
                raise
            self._in_doubt = False  # what went before was to replace another one
            return sequence

    async def check(self) -> None:
        """StaleFence when it is not ours any more, as the leader says."""
        async with self._busy:
            await self._look()

    async def _check_ours(self) -> None:
        """Once lost, it is never ours again: a store that lost writes gives their sequences a second time."""
        if self.lost:
            raise self._stale()
        connection = self._bus.identity
        if connection != self._connection:
            await self._look()
            self._connection = connection

    async def _renewed_unheard(self, error: WrongSequence) -> None:
        """Our own renewal, whose answer was lost, counts; anybody else's doesn't: StaleFence."""
        try:
            await self._look()
        except StaleFence as stale:
            raise stale from error

    async def _look(self) -> None:
        entry = await self._bus.get(self._bucket, LOCK)
        mine = (self._value, json.dumps(self._holder).encode())  # renewed, or as it was acquired
        if entry is None or entry.value not in mine:
            self.lost = True
            raise self._stale()
        self._revision = entry.sequence

    def _stale(self) -> StaleFence:
        return StaleFence(
            "another coordinator has taken the lock over", fence=self.fence, fix="read the state, then repeat"
        )

    async def release(self) -> None:
        """One that is in doubt goes by its TTL."""
        if self.lost or self._in_doubt:
            return
        async with self._busy:
            with contextlib.suppress(WrongSequence, BusUnreachable, StaleFence):
                await self._check_ours()
                try:
                    await self._bus.purge(self._bucket, LOCK, self._revision)
                except WrongSequence:
                    # A renewal that was cancelled on its way may have arrived: the lock would stay for its TTL.
                    entry = await self._bus.get(self._bucket, LOCK)
                    if entry is not None and entry.value == self._value:
                        await self._bus.purge(self._bucket, LOCK, entry.sequence)


async def _renewals(held: HeldLock) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            await held.renew()
        except StaleFence:
            return
        except BusUnreachable as error:
            log.warning("could not renew the lock: %s", error)


@asynccontextmanager
async def hold_lock(
    bus: Bus,
    bucket: Bucket,
    owner: str,
    *,
    wait_s: float = DEFAULT_LOCK_WAIT_S,
    died: DiedCheck,
    update_id: str = "",
    same_wait_s: float = 0.0,
) -> AsyncIterator[HeldLock]:
    """Acquires the lock within `wait_s`, else Locked; renews it until the block ends, then gives it back.

    `same_wait_s`: how long to wait while it is held for this very update."""
    server_id, client_id = bus.identity
    holder: dict[str, str | int] = {"owner": owner, "server_id": server_id, "client_id": client_id}
    if update_id:
        holder["update_id"] = update_id
    held = await _acquire(bus, bucket, holder, wait_s, died, same_wait_s)
    renewals = asyncio.create_task(_renewals(held))
    try:
        yield held
    finally:
        await end_tasks([renewals])
        await held.release()


async def _acquire(
    bus: Bus, bucket: Bucket, mine: Holder, wait_s: float, died: DiedCheck, same_wait_s: float
) -> HeldLock:
    start = time.monotonic()
    while True:
        entry = await bus.get(bucket, LOCK)
        holder = _holder(entry)
        dead = holder is not None and died((str(holder["server_id"]), int(holder["client_id"])))
        if holder is None or dead:
            try:
                anew = None if given_back(entry) else await _write_anew(bus, bucket)
                # A dead holder's entry is not purged first: who is faster then would take that for given back.
                last = entry.sequence if entry is not None else 0
                fence = await bus.put(bucket, LOCK, json.dumps(mine).encode(), last=last, ttl_s=LOCK_TTL_S)
                took_over = dead or bool(entry and entry.expired)
                return HeldLock(bus, bucket, mine, fence, took_over, anew)
            except WrongSequence:
                continue  # somebody was faster: look again
        same = "update_id" in mine and holder.get("update_id") == mine["update_id"]
        if time.monotonic() >= start + (max(wait_s, same_wait_s) if same else wait_s):
            raise Locked(
                f"{holder['owner']} is changing the fleet",
                holder=holder["owner"],
                retry_after_s=1.0,
                fix="try again when its update has ended",
            )
        await asyncio.sleep(POLL_S)


def given_back(entry: Entry | None) -> bool:
    """Did the last holder give the lock back? Else a write of that one may still be on its way; also where nothing
    tells any more how it was lost."""
    return entry is not None and entry.value is None and not entry.expired


async def _write_anew(bus: Bus, bucket: Bucket) -> Anew | None:
    """The record as it is, before the lock changes hands: nobody acts on a lock that is lost while its last holder may
    still decide. WrongSequence: somebody else wrote it. None: there is none yet."""
    entry = await bus.get(bucket, RECORD)
    if entry is None or entry.value is None:
        return None
    return entry.sequence, await bus.put(bucket, RECORD, entry.value, last=entry.sequence)


def _holder(entry: Entry | None) -> Holder | None:
    if entry is None or entry.value is None:
        return None
    holder: Holder = json.loads(entry.value)
    return holder


async def read_holder(bus: Bus, bucket: Bucket) -> Holder | None:
    """Who holds it, from the leader."""
    return _holder(await bus.get(bucket, LOCK))


def fence_of(entry: Entry | None) -> tuple[int, bool]:
    """(the newest fence that the lock's entry tells of, is it held?)."""
    if entry is None:
        return 0, False
    holder = _holder(entry)
    if holder is None:
        return entry.sequence, False
    return int(holder.get("fence", entry.sequence)), True
