"""A live view of the fleet: the shell around the membership core, and the sweep that finds dead workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import nats.errors
from nats.aio.msg import Msg

from rl_plane._util.limited_log import LimitedLog
from rl_plane._util.tasks import end_tasks
from rl_plane.bus.connection import RECONNECT_GRACE_S, Bus, WrongSequence, is_marker
from rl_plane.bus.scatter import Answer, Gather, Missing, Scatter
from rl_plane.bus.sealed_record import restore
from rl_plane.bus.state_store import record_of
from rl_plane.errors import BusUnreachable, PermissionDenied, PlaneError
from rl_plane.membership.core import Changed, Instruction, Member, MembershipCore, Purge, Resync, Snapshot
from rl_plane.membership.probe import PROBE_TIMEOUT_S, Outcome, ProbeCore
from rl_plane.protocol.envelope import Request, encode
from rl_plane.protocol.record import DecisionRecord, newer
from rl_plane.protocol.subjects import ADVISORY, MEMBER_PREFIX, RECORD, Entry, Subjects

log = logging.getLogger("rl_plane.membership.view")

RESYNC_RETRY_S = 0.1
CANARY_TIMEOUT_S = 2.0
"""An advisory takes milliseconds. Until this time is over, the sweep runs at its faster rate."""
STALLED_FACTOR = 3.0
"""A sweep that is this many intervals late shows that this process was stopped."""
REMEMBERED_DISCONNECTS = 4096
EPOCH_KEY = MEMBER_PREFIX + "epoch"
"""A key that belongs to no worker. Markers on it raise the epoch."""
MAX_RAISES = 100_000
"""Writes that a store may have lost: the joins and leaves of more than a day."""

PING_REQUEST = Request("ping")
PING = encode(PING_REQUEST.to_wire())

Listener = Callable[[Changed], None]
RecordListener = Callable[[DecisionRecord], None]


class MembershipView:
    """A live copy of the members and of the decision record. `start` it; then `snapshot()` is the fleet, a fraction of
    a millisecond old."""

    def __init__(self, bus: Bus, subjects: Subjects, gather: Gather) -> None:
        self.bus = bus
        self.subjects = subjects
        self.advisories = False
        """Whether this server sends advisories of closed connections."""
        self.record: DecisionRecord | None = None
        """The newest decision that this process has learnt. It never goes back."""
        self.record_sequence = 0
        """The sequence of the newest known write. It orders writes of one decision."""
        self._gather = gather
        self._core = MembershipCore()
        self._probes = ProbeCore()
        self._last_sweep: Scatter | None = None
        self._listeners: list[Listener] = []
        self._record_listeners: list[RecordListener] = []
        self._changed = asyncio.Event()
        self._resync_wanted = asyncio.Event()
        self._canary: tuple[str, int] | None = None
        self._canary_seen = asyncio.Event()
        self._dead_connections: OrderedDict[tuple[str, int], float] = OrderedDict()
        """Connection → monotonic seconds at which the server reported that it is closed."""
        self._connected_at = time.monotonic()
        self._malformed = LimitedLog(log)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.bus.subscribe(self.subjects.members.feed(">"), self._feed)
        await self.bus.subscribe(self.subjects.state.feed(RECORD), self._record_feed)
        await self.bus.subscribe(ADVISORY, self._advisory)
        await self.bus.flush()
        self.bus.on_reconnect(self._reconnected)
        await self._resync()
        self._spawn(self._resyncs())
        self._spawn(self._sweeps())
        self._spawn(self._learn_advisories())

    async def stop(self) -> None:
        await end_tasks(self._tasks)

    def snapshot(self) -> Snapshot:
        return self._core.snapshot()

    def member(self, instance_id: str) -> Member | None:
        return self._core.members.get(instance_id)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Registers a listener for every change. The result removes it. It must not raise, or other listeners would
        miss the change."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def listen_record(self, listener: RecordListener) -> Callable[[], None]:
        """Registers a listener for every record that this process learns. The result removes it."""
        self._record_listeners.append(listener)
        return lambda: self._record_listeners.remove(listener)

    def take_record(self, record: DecisionRecord, sequence: int) -> None:
        """Learns a record from any source. `sequence`: the sequence of its write in the state bucket. A record that is
        older than the known one is ignored: its message may be late, or a store may have lost a write."""
        known = self.record
        if known is not None and not newer(record, known):
            overtaken = sequence <= self.record_sequence
            if overtaken or newer(known, record):
                return
        self.record_sequence = max(sequence, self.record_sequence)
        self.record = record
        if record != known:
            for listener in list(self._record_listeners):
                listener(record)

    async def read_record(self) -> Entry | None:
        """Learns the record that the leader has now."""
        known = self.record_sequence
        entry = await self.bus.get(self.subjects.state, RECORD)
        record = record_of(entry)
        if entry is not None and record is not None:
            if self.record_sequence == known and entry.sequence <= known:
                # No feed came between: the leader's store is another one.
                self.record_sequence = entry.sequence - 1
            self.take_record(record, entry.sequence)
        return entry

    async def keep_record(self) -> None:
        """Learns the record that the leader has now. Writes the known record back if the leader has lost it: a frontend
        that knows a decision can restore it as a worker can."""
        entry = await self.read_record()
        mine = self.record
        if mine is not None and newer(mine, record_of(entry)):
            await restore(self.bus, self.subjects.state, mine, entry)

    async def wait_until(self, holds: Callable[[Snapshot], bool], timeout_s: float) -> bool:
        """Waits until a condition holds. Returns whether it did within the time-out."""
        if holds(self.snapshot()):
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not holds(self.snapshot()):
                    changed = self._changed
                    await changed.wait()
        return holds(self.snapshot())

    async def barrier(self) -> Snapshot:
        """Returns a snapshot that is at least as new as the leader's bucket at the time of the call."""
        last = await self.bus.last_sequence(self.subjects.members)
        # Expired markers can leave the last sequence below the feed's, but never above that of a resync.
        if self._core.epoch < last and not await self.wait_until(lambda now: now.epoch >= last, PROBE_TIMEOUT_S):
            await self._resync()
        return self.snapshot()

    def connection_died(self, identity: tuple[str, int]) -> bool:
        """Reports whether the server has closed this connection, so long ago that a living process has another one."""
        closed_at = self._dead_connections.get(identity)
        return closed_at is not None and time.monotonic() >= closed_at + RECONNECT_GRACE_S

    def connection_closed(self, identity: tuple[str, int]) -> bool:
        """Reports whether the server has said that this connection is closed. The process may have another one."""
        return identity in self._dead_connections

    def found_dead(self, instance_id: str, revision: int) -> None:
        """Removes a member after a 503 to its registration at `revision`. Just after a connect a 503 is no proof."""
        if not self._just_connected():
            self._carry_out(self._core.found_dead(instance_id, revision))

    def _just_connected(self) -> bool:
        """Reports whether this process has just connected. The server may have just started then."""
        return time.monotonic() < self._connected_at + RECONNECT_GRACE_S

    # ---- events in ----

    async def _feed(self, message: Msg) -> None:
        headers = message.headers or {}
        key = self.subjects.members.key_of_feed(message.subject)
        value = None if is_marker(headers) else message.data
        self._carry_out(self._core.feed(Entry(key, value, int(headers["Nats-Sequence"]))))

    async def _record_feed(self, message: Msg) -> None:
        headers = message.headers or {}
        if is_marker(headers):
            return
        entry = Entry(RECORD, message.data, int(headers["Nats-Sequence"]))
        record = record_of(entry)
        if record is not None:
            self.take_record(record, entry.sequence)

    async def _advisory(self, message: Msg) -> None:
        try:
            event = json.loads(message.data)
            identity = (str(event["server"]["id"]), int(event["client"]["id"]))
        except (ValueError, TypeError, LookupError, RecursionError):
            self._malformed.warning("a malformed message on %s", message.subject)
            return
        if identity == self._canary:
            self._canary_seen.set()
        self._dead_connections.setdefault(identity, time.monotonic())
        while len(self._dead_connections) > REMEMBERED_DISCONNECTS:
            self._dead_connections.popitem(last=False)
        self._carry_out(self._core.disconnected(*identity))

    async def _reconnected(self) -> None:
        self._connected_at = time.monotonic()
        self._probes.restart()
        self._core.reconnected()
        self._resync_wanted.set()

    async def _resync(self) -> None:
        # The store may be lost, together with the server.
        await self.bus.ensure_bucket(self.subjects.members)
        await self.bus.ensure_bucket(self.subjects.state)
        with contextlib.suppress(PermissionDenied):  # a service only reads
            await self.bus.ensure_bucket(self.subjects.offers)
        await self.read_record()
        known = self._core.epoch
        entries, last = await self.bus.read_keys(self.subjects.members, ">")
        if last < known:
            await self._raise_epoch(known)
            entries, last = await self.bus.read_keys(self.subjects.members, ">")
        self._carry_out(self._core.snapshot_read(entries, last))

    async def _raise_epoch(self, known: int) -> None:
        """Raises the bucket's sequence above `known`, because the store has lost writes that it had acknowledged.
        Otherwise a known epoch would return for another fleet, and followers of the feed would take new writes for old
        ones."""
        members = self.subjects.members
        log.warning("the store of the members bucket has lost writes: it is below epoch %d", known)
        for _ in range(MAX_RAISES):
            entry = await self.bus.get(members, EPOCH_KEY)
            with contextlib.suppress(WrongSequence):  # another process raises it too
                if await self.bus.purge(members, EPOCH_KEY, entry.sequence if entry is not None else 0) > known:
                    return

    # ---- instructions out ----

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Resync():
                    self._resync_wanted.set()
                case Purge(instance_id, revision):
                    self._spawn(self._purge(instance_id, revision))
                case Changed():
                    for listener in list(self._listeners):
                        listener(instruction)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _purge(self, instance_id: str, revision: int) -> None:
        try:
            await self.bus.purge(self.subjects.members, MEMBER_PREFIX + instance_id, revision)
            log.info("worker %s is gone", instance_id)
        except WrongSequence:
            pass  # another frontend has removed it, or the worker has registered again
        except PermissionDenied:
            log.info("worker %s has died: a frontend will remove it", instance_id)
        except BusUnreachable as error:
            log.warning("could not remove worker %s; the sweep tries again: %s", instance_id, error)

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _resyncs(self) -> None:
        while True:
            await self._resync_wanted.wait()
            self._resync_wanted.clear()
            try:
                await self._resync()
            except Exception as error:
                if not isinstance(error, PlaneError):
                    log.exception("resync")  # the loop must continue
                self._resync_wanted.set()
                await asyncio.sleep(RESYNC_RETRY_S)

    async def _sweeps(self) -> None:
        """Probes every member again and again, each with one round trip on the bus."""
        due = time.monotonic()
        while True:
            interval = self._probes.interval_s(len(self._core.members), self.advisories)
            await asyncio.sleep(interval)
            now = time.monotonic()
            if now - due > STALLED_FACTOR * (interval + PROBE_TIMEOUT_S):
                self._probes.restart()
            if not self.bus.nc.is_connected or self._just_connected():
                self._probes.restart()
                await asyncio.sleep(RECONNECT_GRACE_S)
            else:
                try:
                    await self._sweep()
                    await self.read_record()
                except (PlaneError, nats.errors.Error) as error:
                    log.debug("sweep: %s", error)
                except Exception:
                    log.exception("sweep")  # the loop must continue
            due = time.monotonic()

    async def _sweep(self) -> None:
        members = list(self._core.members.values())
        self._probes.keep_only(set(self._core.members))
        targets = [(self.subjects.read(member.instance_id), PING) for member in members]

        def heard(index: int, answer: Answer) -> None:
            if not isinstance(answer, Missing):
                member = members[index]
                self._probes.probed(member.instance_id, member.revision, "answered", time.monotonic())

        scatter = await self._gather.scatter(targets, heard)
        # A large or busy fleet answers late. An answer before the end of the next sweep still counts.
        previous, self._last_sweep = self._last_sweep, scatter
        await scatter.wait(PROBE_TIMEOUT_S)
        if previous is not None:
            self._gather.close(previous)
        now = time.monotonic()
        for member, answer in zip(members, scatter.answers(), strict=True):
            if isinstance(answer, Missing):
                outcome: Outcome = "no_responder" if answer is Missing.LOST else "silent"
                if self._probes.probed(member.instance_id, member.revision, outcome, now):
                    self._carry_out(self._core.found_dead(member.instance_id, member.revision))

    async def _learn_advisories(self) -> None:
        """Opens and closes a connection, to learn whether the server sends an advisory of it."""
        trip = asyncio.create_task(self._send_canary())
        try:
            await asyncio.shield(trip)
            async with asyncio.timeout(CANARY_TIMEOUT_S):
                await self._canary_seen.wait()
            self.advisories = True
        except (nats.errors.Error, TimeoutError, OSError):
            log.info("this NATS server sends no disconnect advisories: members are probed instead")
        finally:
            # nats-py leaves the socket open if this is cancelled half-way.
            await asyncio.wait([trip], timeout=CANARY_TIMEOUT_S)
            trip.cancel()

    async def _send_canary(self) -> None:
        async with self.bus.another_connection() as identity:
            self._canary = identity
