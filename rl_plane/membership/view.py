"""A live view of the fleet: the shell around the membership core, and the sweep that probes for the dead."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from rl_plane._util.tasks import end_tasks
from rl_plane.bus.connection import RECONNECT_GRACE_S, Bus, WrongSequence, is_marker
from rl_plane.bus.scatter import Answer, Gather, Missing, Scatter
from rl_plane.bus.sealed_record import restore
from rl_plane.bus.state_store import record_of
from rl_plane.errors import BusUnreachable, PlaneError
from rl_plane.membership.core import Changed, Instruction, Member, MembershipCore, Purge, Resync, Snapshot
from rl_plane.membership.probe import PROBE_TIMEOUT_S, Outcome, ProbeCore
from rl_plane.protocol.envelope import Request, encode
from rl_plane.protocol.record import DecisionRecord, newer
from rl_plane.protocol.subjects import ADVISORY, MEMBER_PREFIX, RECORD, Entry, Subjects

log = logging.getLogger("rl_plane.membership.view")

RESYNC_RETRY_S = 0.1
CANARY_TIMEOUT_S = 2.0
"""An advisory takes milliseconds; a server that sends none is swept at the faster rate meanwhile."""
STALLED_FACTOR = 3.0
"""A sweep that comes this many intervals late shows that this process stood still."""
REMEMBERED_DISCONNECTS = 4096
EPOCH_KEY = MEMBER_PREFIX + "epoch"
"""Of no worker: markers are written to it to raise the epoch."""
MAX_RAISES = 100_000
"""Writes that a store may have lost: more than a day of joins and leaves."""

PING = encode(Request("ping").to_wire())

Listener = Callable[[Changed], None]
RecordListener = Callable[[DecisionRecord], None]


class MembershipView:
    """Start it, then `snapshot()` is the fleet as this process knows it, a fraction of a millisecond old."""

    def __init__(self, bus: Bus, subjects: Subjects, gather: Gather) -> None:
        self.bus = bus
        self.subjects = subjects
        self.advisories = False
        """Whether this server was seen to tell us of closed connections."""
        self.record: DecisionRecord | None = None
        """What the fleet has decided, as far as this process has heard: it never goes back."""
        self._record_sequence = 0
        """Of the newest write that was heard of: it orders the writes of which neither was decided after the other."""
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
        """Connection → monotonic seconds when the server told that it is closed."""
        self._connected_at = time.monotonic()
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
        """Calls it with every change, from now on; the result ends that. It must not raise: others would miss it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def listen_record(self, listener: RecordListener) -> Callable[[], None]:
        """Calls it with every record that this process learns, from now on; the result ends that."""
        self._record_listeners.append(listener)
        return lambda: self._record_listeners.remove(listener)

    def take_record(self, record: DecisionRecord, sequence: int) -> None:
        """Learns a record from whoever tells; `sequence`: of its write in the state bucket. One that is older than
        the known one is left: what was told may have been overtaken, and a store may have lost a write."""
        known = self.record
        if known is not None and not newer(record, known):
            overtaken = sequence <= self._record_sequence
            if overtaken or newer(known, record):
                return
        self._record_sequence = max(sequence, self._record_sequence)
        self.record = record
        if record != known:
            for listener in list(self._record_listeners):
                listener(record)

    async def read_record(self) -> Entry | None:
        """Learns the record that the leader has now."""
        known = self._record_sequence
        entry = await self.bus.get(self.subjects.state, RECORD)
        record = record_of(entry)
        if entry is not None and record is not None:
            if self._record_sequence == known and entry.sequence <= known:
                self._record_sequence = entry.sequence - 1  # no feed was faster: the leader's store is another one
            self.take_record(record, entry.sequence)
        return entry

    async def keep_record(self) -> None:
        """Learns the record that the leader has now, and writes one back that it has lost: a frontend that has seen a
        decision is as good a witness as a worker."""
        entry = await self.read_record()
        mine = self.record
        if mine is not None and newer(mine, record_of(entry)):
            await restore(self.bus, self.subjects.state, mine, entry)

    async def wait_until(self, holds: Callable[[Snapshot], bool], timeout_s: float) -> bool:
        """Whether it came to hold within the time-out."""
        if holds(self.snapshot()):
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not holds(self.snapshot()):
                    changed = self._changed
                    await changed.wait()
        return holds(self.snapshot())

    async def barrier(self) -> Snapshot:
        """A snapshot at least as new as the leader's bucket when this was called."""
        last = await self.bus.last_sequence(self.subjects.members)
        # Expired markers can leave the last sequence below what a feed showed, never above what a resync shows.
        if self._core.epoch < last and not await self.wait_until(lambda now: now.epoch >= last, PROBE_TIMEOUT_S):
            await self._resync()
        return self.snapshot()

    def connection_died(self, identity: tuple[str, int]) -> bool:
        """Did the server tell us that this connection is closed, so long ago that a living process has another one?"""
        closed_at = self._dead_connections.get(identity)
        return closed_at is not None and time.monotonic() >= closed_at + RECONNECT_GRACE_S

    def found_dead(self, instance_id: str, revision: int) -> None:
        """Somebody has proof: a 503 to the member registered at `revision`. Just after a connect it is none."""
        if not self._just_connected():
            self._carry_out(self._core.found_dead(instance_id, revision))

    def _just_connected(self) -> bool:
        """The server may have just begun."""
        return time.monotonic() < self._connected_at + RECONNECT_GRACE_S

    # ---- events in ----

    async def _feed(self, message: Msg) -> None:
        headers = message.headers or {}
        key = self.subjects.members.key_of_feed(message.subject)
        value = None if is_marker(headers) else message.data
        self._carry_out(self._core.feed(Entry(key, value, int(headers["Nats-Sequence"]))))

    async def _record_feed(self, message: Msg) -> None:
        headers = message.headers or {}
        if not is_marker(headers):
            self.take_record(DecisionRecord.decode(message.data), int(headers["Nats-Sequence"]))

    async def _advisory(self, message: Msg) -> None:
        event = json.loads(message.data)
        identity = (str(event["server"]["id"]), int(event["client"]["id"]))
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
        # The store may have been lost with the server.
        await self.bus.ensure_bucket(self.subjects.members)
        await self.bus.ensure_bucket(self.subjects.state)
        await self.read_record()
        known = self._core.epoch
        entries, last = await self.bus.read_all(self.subjects.members)
        if last < known:
            await self._raise_epoch(known)
            entries, last = await self.bus.read_all(self.subjects.members)
        self._carry_out(self._core.snapshot_read(entries, last))

    async def _raise_epoch(self, known: int) -> None:
        """The store has lost writes that it had acknowledged. Epochs that were told must not come again for another
        fleet, and whoever follows the feed must not take what comes for old: so the sequence is raised above them."""
        members = self.subjects.members
        log.warning("the members' store has gone back below epoch %d", known)
        for _ in range(MAX_RAISES):
            entry = await self.bus.get(members, EPOCH_KEY)
            with contextlib.suppress(WrongSequence):  # another one raises it too
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
            pass  # another frontend was first, or the worker has registered again
        except BusUnreachable as error:
            log.warning("could not remove worker %s, the sweep will: %s", instance_id, error)

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
                    log.exception("resync")  # it must go on all the same
                self._resync_wanted.set()
                await asyncio.sleep(RESYNC_RETRY_S)

    async def _sweeps(self) -> None:
        """Asks every member for a bus round trip, for ever."""
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
                    log.exception("sweep")  # it must go on all the same
            due = time.monotonic()

    async def _sweep(self) -> None:
        members = list(self._core.members.values())
        self._probes.keep_only(set(self._core.members))
        targets = [(self.subjects.rl_direct(member.instance_id), PING) for member in members]

        def heard(index: int, answer: Answer) -> None:
            if not isinstance(answer, Missing):
                member = members[index]
                self._probes.probed(member.instance_id, member.revision, "answered", time.monotonic())

        scatter = await self._gather.scatter(targets, heard)
        # A large or busy fleet answers late: what comes before the next sweep ends still counts.
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
        """Opens and closes a connection and looks whether the server tells of it."""
        trip = asyncio.create_task(self._send_canary())
        try:
            await asyncio.shield(trip)
            async with asyncio.timeout(CANARY_TIMEOUT_S):
                await self._canary_seen.wait()
            self.advisories = True
        except (nats.errors.Error, TimeoutError, OSError):
            log.info("this NATS server sends us no disconnect advisories: members are probed instead")
        finally:
            # Cancelled half-way, nats-py would leave the socket open.
            await asyncio.wait([trip], timeout=CANARY_TIMEOUT_S)
            trip.cancel()

    async def _send_canary(self) -> None:
        canary = Client()
        await canary.connect(
            self.bus.url, name="canary", allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0.1
        )
        self._canary = str(canary._server_info["server_id"]), int(canary.client_id or 0)
        await canary.close()
