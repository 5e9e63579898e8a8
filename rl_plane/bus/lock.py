"""The component's lock: one coordinator at a time, enforced by the server.

Workers know a holder by its fence, the sequence of the write that acquired the lock, and refuse lower fences. A holder
that died loses the lock a moment after the server has reported its closed connection, or when the TTL of the key runs
out. The lock alone does not stop a late write of the former holder: `sealed_record.py` does, before the next holder
acts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rl_plane._util.tasks import end_tasks
from rl_plane.bus.connection import Bus, WrongSequence
from rl_plane.bus.entries import decoded, is_unreadable
from rl_plane.errors import BusUnreachable, Locked, StaleFence
from rl_plane.protocol.subjects import FENCE_KEY, LOCK, Entry, KeyValueBucket

log = logging.getLogger("rl_plane.bus.lock")

LOCK_TTL_S = 5
"""A holder that is silent for this long has lost the lock."""
RENEW_S = 1.5
"""The interval of the holder's renewals: three fit in one TTL."""
POLL_S = 0.05
"""The interval at which a waiter tries again. An acquire takes 0.1 ms, and a changing op other than an update about 10
ms."""
DEFAULT_LOCK_WAIT_S = 2.0
"""A caller that has waited this long gets Locked. Two trainers that wait for one lock are a mistake in their setup."""


@dataclass(frozen=True, slots=True)
class LockTimings:
    """The time that a lock outlives a silent holder, and the interval of its renewals; in seconds."""

    ttl_s: int = LOCK_TTL_S
    renew_s: float = RENEW_S


LOCK_TIMINGS = LockTimings()

MAX_RAISES = 100_000
"""Writes that a store may have lost: the writes of some hours."""

DiedCheck = Callable[[tuple[str, int]], bool]
Holder = dict[str, str | int]
"""The lock's value: owner, server_id, client_id, nonce; update_id, if an update holds the lock; fence, from the first
renewal on; phase, phase_began_ms and phase_bound_ms, from the first renewal in a phase of an update on."""

_HOLDER_TYPES: dict[str, type] = {
    "owner": str,
    "server_id": str,
    "client_id": int,
    "nonce": str,
    "update_id": str,
    "fence": int,
    "phase": str,
    "phase_began_ms": int,
    "phase_bound_ms": int,
}
_REQUIRED = ("owner", "server_id", "client_id", "nonce")


class HeldLock:
    """The lock while a call holds it. `fence` goes into every changing request."""

    def __init__(
        self,
        bus: Bus,
        bucket: KeyValueBucket,
        holder: Holder,
        fence: int,
        *,
        taken: bool = False,
        ttl_s: int = LOCK_TTL_S,
    ) -> None:
        """`taken`: the former holder has not released the lock, so it may still have a write on its way."""
        self.fence = fence
        self.taken = taken
        self.lost = False
        self._holder = holder
        """The value that acquired the lock. Its nonce is different in every acquire, also in one process."""
        self._connection = bus.identity
        """The connection on which this process was known to hold the lock. A server that restarted may have lost the
        lock, and given its sequence to another holder."""
        self._bus = bus
        self._bucket = bucket
        self._ttl_s = ttl_s
        self._revision = fence
        self._busy = asyncio.Lock()
        self._phase: Holder = {}

    def note_phase(self, phase: str, bound_s: float | None) -> None:
        """Notes the phase of the update that holds the lock. The next renewal tells other processes of it, so that this
        costs no write. `bound_s`: the longest time that the phase may take from now on."""
        now_ms = int(time.time() * 1000)
        self._phase = {"phase": phase, "phase_began_ms": now_ms}
        if bound_s is not None:
            self._phase["phase_bound_ms"] = now_ms + int(bound_s * 1000)

    async def renew(self) -> None:
        """Restarts the TTL, and writes the connection that this process has now. StaleFence: the lock is lost."""
        async with self._busy:
            await self._write_lock(self._value())

    async def refence(self, lowest: int = 0) -> None:
        """Takes a new and higher fence, of at least `lowest`, and keeps the lock."""
        async with self._busy:
            await self._check_ours()
            await raise_sequence(self._bus, self._bucket, lowest - 1)
            await self._look()  # a renewal whose answer was lost counts only by the old nonce
            self._holder = {**self._holder, **_identity(self._bus), "nonce": _nonce()}
            await self._write_lock(json.dumps(self._holder).encode())
            self.fence = self._revision

    async def put(self, key: str, value: bytes, ttl_s: int | None = None) -> int:
        """Writes a key. The server takes the write only while this process has the lock. StaleFence: it has lost the
        lock."""
        async with self._busy:
            await self._check_ours()
            try:
                return await self._bus.put(self._bucket, key, value, while_key=(LOCK, self._revision), ttl_s=ttl_s)
            except WrongSequence:
                await self._look()  # the server may have taken a renewal whose answer was lost
            try:
                return await self._bus.put(self._bucket, key, value, while_key=(LOCK, self._revision), ttl_s=ttl_s)
            except WrongSequence as error:
                self.lost = True
                raise self.stale() from error

    async def check(self) -> None:
        """Asks the leader. StaleFence: this process does not hold the lock any more."""
        async with self._busy:
            await self._look()

    def check_unlost(self) -> None:
        """StaleFence: this process knows that it has lost the lock."""
        if self.lost:
            raise self.stale()

    def stale(self) -> StaleFence:
        return StaleFence(
            "another coordinator has taken the lock over", fence=self.fence, fix="read the state, then repeat"
        )

    async def release(self) -> None:
        """Releases the lock. If the server can't be reached, the lock ends by its TTL."""
        async with self._busy:
            with contextlib.suppress(WrongSequence, BusUnreachable, StaleFence):
                await self._check_ours()
                try:
                    await self._bus.purge(self._bucket, LOCK, self._revision)
                except WrongSequence:
                    # A cancelled renewal may have arrived all the same. Without this the lock would stay for its TTL.
                    await self._look()
                    await self._bus.purge(self._bucket, LOCK, self._revision)

    def _value(self) -> bytes:
        return json.dumps({**self._holder, **self._phase, **_identity(self._bus), "fence": self.fence}).encode()

    async def _write_lock(self, value: bytes) -> None:
        await self._check_ours()
        try:
            self._revision = await self._bus.put(self._bucket, LOCK, value, last=self._revision, ttl_s=self._ttl_s)
        except WrongSequence:
            await self._look()  # this process's own renewal counts, also if its answer was lost

    async def _check_ours(self) -> None:
        """StaleFence: the lock is lost. A lost lock stays lost, because a store that has lost writes gives their
        sequences a second time."""
        self.check_unlost()
        connection = self._bus.identity
        if connection != self._connection:
            await self._look()
            self._connection = connection

    async def _look(self) -> None:
        entry = await self._bus.get(self._bucket, LOCK)
        holder = holder_of(entry)
        if entry is None or holder is None or holder.get("nonce") != self._holder["nonce"]:
            self.lost = True
            raise self.stale()
        self._revision = entry.sequence


def _nonce() -> str:
    return secrets.token_hex(8)


def _identity(bus: Bus) -> Holder:
    server_id, client_id = bus.identity
    return {"server_id": server_id, "client_id": client_id}


async def _renewals(held: HeldLock, reconnected: asyncio.Event, renew_s: float) -> None:
    """Renews the lock every `renew_s`, and at once on a new connection, because the lock names the holder's
    connection."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(renew_s):
                await reconnected.wait()
        reconnected.clear()
        try:
            await held.renew()
        except StaleFence:
            return
        except BusUnreachable as error:
            log.warning("could not renew the lock: %s", error)


@asynccontextmanager
async def hold_lock(
    bus: Bus,
    bucket: KeyValueBucket,
    owner: str,
    *,
    wait_s: float = DEFAULT_LOCK_WAIT_S,
    died: DiedCheck,
    update_id: str = "",
    same_wait_s: float = 0.0,
    timings: LockTimings = LOCK_TIMINGS,
) -> AsyncIterator[HeldLock]:
    """Acquires the lock, renews it until the block ends, then releases it. Locked: another call holds it for longer
    than `wait_s`.

    `same_wait_s`: the longest wait while another process holds the lock for this same update."""
    holder: Holder = {"owner": owner, **_identity(bus), "nonce": _nonce()}
    if update_id:
        holder["update_id"] = update_id
    held = await _acquire(bus, bucket, holder, wait_s, died, same_wait_s, timings.ttl_s)
    reconnected = asyncio.Event()

    async def note() -> None:
        reconnected.set()

    forget = bus.on_reconnect(note)
    renewals = asyncio.create_task(_renewals(held, reconnected, timings.renew_s))
    try:
        yield held
    finally:
        forget()
        await end_tasks([renewals])
        await held.release()


async def _acquire(
    bus: Bus,
    bucket: KeyValueBucket,
    mine: Holder,
    wait_s: float,
    died: DiedCheck,
    same_wait_s: float,
    ttl_s: int,
) -> HeldLock:
    start = time.monotonic()
    while True:
        entry = await bus.get(bucket, LOCK)
        holder = holder_of(entry)
        if holder is None or died((str(holder["server_id"]), int(holder["client_id"]))):
            try:
                last = entry.sequence if entry is not None else 0
                fence = await bus.put(bucket, LOCK, json.dumps(mine).encode(), last=last, ttl_s=ttl_s)
                taken = holder is not None or (entry is not None and entry.expired)
                return HeldLock(bus, bucket, mine, fence, taken=taken or is_unreadable(entry, holder), ttl_s=ttl_s)
            except WrongSequence:
                continue  # another call has acquired it first: look again
        same = "update_id" in mine and holder.get("update_id") == mine["update_id"]
        if time.monotonic() >= start + (max(wait_s, same_wait_s) if same else wait_s):
            raise Locked(
                f"{holder['owner']} is changing the fleet",
                holder=holder["owner"],
                retry_after_s=1.0,
                fix="try again when its update has ended",
            )
        await asyncio.sleep(POLL_S)


def holder_of(entry: Entry | None) -> Holder | None:
    """The holder in an entry. None: the lock is free, or the entry can't be read, so that no holder can renew it."""
    holder = decoded(entry, _decode_holder)
    return holder if entry is not None and holder is not None and _fence(holder, entry) <= entry.sequence else None


def _fence(holder: Holder, entry: Entry) -> int:
    """The fence: the sequence of the write that acquired the lock. That write itself does not know it yet."""
    return int(holder.get("fence", entry.sequence))


def _decode_holder(value: bytes) -> Holder:
    holder = json.loads(value)
    if not isinstance(holder, dict):
        raise TypeError(f"the lock is a {type(holder).__name__}")
    for name, kind in _HOLDER_TYPES.items():
        if type(holder.get(name)) is not kind and (name in holder or name in _REQUIRED):
            raise TypeError(f"the lock's {name} is {holder.get(name)!r}")
    return holder


async def raise_sequence(bus: Bus, bucket: KeyValueBucket, least: int) -> None:
    """Raises the bucket's last sequence to `least`. Without this a store that has lost writes would give fences that
    are lower than those of workers and records."""
    if await bus.last_sequence(bucket) >= least:
        return
    log.warning("the store of the state bucket has lost writes: it is below the fence %d", least)
    for _ in range(MAX_RAISES):
        if await bus.put(bucket, FENCE_KEY, b"") >= least:
            return


async def read_holder(bus: Bus, bucket: KeyValueBucket) -> Holder | None:
    """Reads the holder of the lock from the leader. None: the lock is free."""
    return holder_of(await bus.get(bucket, LOCK))


def fence_of(entry: Entry | None) -> tuple[int, bool]:
    """Returns the newest fence in the lock's entry, and whether a process holds the lock."""
    if entry is None:
        return 0, False
    holder = holder_of(entry)
    if holder is None:
        return entry.sequence, False
    return _fence(holder, entry), True
