"""The shell of `UpdateMachine`: carries out its instructions on NATS, under the component's lock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_plane._util import tracing
from rl_plane._util.tasks import end_tasks
from rl_plane.bus.entries import decoded
from rl_plane.bus.lock import HeldLock
from rl_plane.bus.sealed_record import SealedRecord
from rl_plane.bus.state_store import pause_of, read_session
from rl_plane.commit.cancellation import cancelled
from rl_plane.commit.commands import machine_for
from rl_plane.commit.journal import Journal
from rl_plane.commit.phase_span import asked_of, note_event
from rl_plane.commit.preparation import STOP_S
from rl_plane.commit.rules import gave_up, newest, serves, still_there
from rl_plane.commit.steps import (
    Announce,
    Answered,
    BeginJournal,
    Done,
    End,
    Event,
    Failed,
    Instruction,
    Needs,
    Put,
    RecordAcks,
    ResolveWrite,
    Result,
    SendOp,
    Survey,
    Surveyed,
    UpdateCommand,
    WaitSilent,
    Watch,
    Write,
    Written,
)
from rl_plane.errors import BusUnreachable, PlaneError, Unavailable, UpdateAborted
from rl_plane.membership.core import Member, Snapshot
from rl_plane.membership.view import MembershipView
from rl_plane.membership.worker_calls import WorkerCalls
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.canary import CanaryHistory
from rl_plane.protocol.record import LEASE_MARGIN_S, SERVING_LEASE_S, TAKEOVER_S, DecisionRecord, newer
from rl_plane.protocol.relay import SourceUse
from rl_plane.protocol.subjects import CANARY_HISTORY, PAUSE

log = logging.getLogger("rl_plane.commit.coordinator")

WATCH_S = 0.1
WATCH_GRACE_S = 10.0
"""Added to the commit's own time-out, because a NATS server takes seconds to restart."""
BACK_S = SERVING_LEASE_S + LEASE_MARGIN_S + TAKEOVER_S
"""This long after an outage of NATS each worker has opened by itself."""

TIMED = frozenset({"prepare", "receive", "gate", "commit", "roll", "leases", "open"})
"""The phases whose seconds the reply and the history have."""


class Coordinator:
    """Carries out one command under the lock. `journal` gets its entry when work begins. `clock`: monotonic seconds.
    `stop_s`: the longest wait in seconds for receiving workers that the coordinator tells to stop."""

    def __init__(
        self,
        calls: WorkerCalls,
        view: MembershipView,
        held: HeldLock,
        journal: Journal | None = None,
        clock: Callable[[], float] | None = None,
        stop_s: float = STOP_S,
    ) -> None:
        self.phases: dict[str, float] = {}
        """Phase → seconds."""
        self.sources: dict[str, Sequence[SourceUse]] = {}
        """Worker → the bytes that it took from each source, if there were several."""
        self._calls = calls
        self._view = view
        self._held = held
        self._journal = journal
        self._clock = clock or time.monotonic
        self._stop_s = stop_s
        self._state = view.subjects.state
        self._record = SealedRecord(calls.bus, view.subjects.state, held)
        self._announced_at = 0.0
        self._server_ahead_s = time.time() - self._clock()
        """The NATS server's Unix time minus this process's monotonic time, from the first survey on. A pause ends by
        the server's clock, because every worker can read that clock."""

    async def run(self, command: UpdateCommand) -> Result:
        """Returns the result of the command. An error has the seconds of each phase so far among its facts."""
        machine = machine_for(command)
        event: Event | None = None
        began = self._clock()
        while True:
            instruction = machine.step(event, self._server_time(), self._clock() - began)
            if isinstance(instruction, End):
                if isinstance(instruction.result, PlaneError):
                    if self.phases:
                        instruction.result.facts.setdefault("phases", dict(self.phases))
                    raise instruction.result
                return instruction.result
            start = self._clock()
            self._held.note_phase(machine.phase, _bound_s(instruction))
            try:
                with tracing.child(machine.phase, **asked_of(instruction)) as span:
                    event = await self._carry_out_unless_cancelled(instruction)
                    note_event(span, event)
            except PlaneError as error:
                log.log(
                    logging.INFO if machine.phase in ("decide", "prepare") else logging.WARNING,
                    "%s: %s: %s",
                    command.update_id,
                    machine.phase,
                    error,
                )
                event = Failed(error)
            if machine.phase in TIMED:
                key = f"{machine.phase}_s"
                self.phases[key] = self.phases.get(key, 0.0) + self._clock() - start

    async def _carry_out_unless_cancelled(self, instruction: Instruction) -> Event:
        """Carries out one instruction. UpdateAborted: the update was cancelled while workers received."""
        update_id = instruction.body.get("update_id") if isinstance(instruction, SendOp) else None
        if instruction.phase not in ("prepare", "receive") or not update_id:
            return await self.carry_out(instruction)
        work = asyncio.create_task(self.carry_out(instruction))
        watch = asyncio.create_task(cancelled(self._calls.bus, self._state, str(update_id)))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise watch.result()
            return work.result()
        finally:
            await end_tasks([work, watch])

    async def carry_out(self, instruction: Instruction) -> Event:
        """Carries out one instruction, and returns the event that answers it."""
        match instruction:
            case Survey():
                return await self._survey()
            case ResolveWrite():
                await self._record.refence()
                return await self._survey()
            case SendOp(_, op, body, workers, timeout_s, each, needs):
                if needs is None:
                    replies = await self._ask_members(op, body, self._members_among(workers), timeout_s, each)
                else:
                    replies = await self._ask_needed(op, body, workers, timeout_s, each, needs)
                self._note_sources(replies)
                return Answered(replies)
            case Announce():
                return await self._announce(instruction)
            case Write(phase, record):
                write = self._record.decide if phase == "decide" else self._record.write
                written = await write(record)
                if phase == "decide" and self._journal is not None:
                    self._journal.decided(record)
                return Written(written, self._record.sequence)
            case BeginJournal(base):
                if self._journal is not None:
                    await self._journal.begin(base)
                return Done()
            case Put(_, key, value, ttl_s):
                # An end is not a purge, which the server would take without the lock.
                await self._held.put(key, value.encode() if value is not None else b"", ttl_s=ttl_s)
                return Done()
            case WaitSilent():
                await self._wait_silent(instruction)
                return Done()
            case Watch(record, timeout_s):
                return await self._watch(record, timeout_s)
            case End():
                raise AssertionError("End is not an instruction to carry out")

    # ---- asking ----

    async def _survey(self) -> Surveyed:
        bus, state = self._calls.bus, self._state
        (snapshot, replies), session, pause, history, server_time = await asyncio.gather(
            self._reports(),
            read_session(bus, state),
            bus.get(state, PAUSE),
            bus.get(state, CANARY_HISTORY),
            bus.server_time(state),
        )
        self._server_ahead_s = server_time - self._clock()
        record = await self._record.seal(lambda stored: newest(stored, self._view.record, replies))
        return Surveyed(
            _members(snapshot),
            snapshot.fingerprint,
            snapshot.epoch,
            replies,
            record,
            self._record.sequence,
            session,
            pause_of(pause),
            pause.sequence if pause else 0,
            decoded(history, CanaryHistory.decode) or CanaryHistory(),
        )

    def _server_time(self) -> float:
        return self._clock() + self._server_ahead_s

    async def _reports(self) -> tuple[Snapshot, list[WorkerReply]]:
        snapshot = await self._view.barrier()
        return snapshot, await self._ask_members("report_record", {}, snapshot.members, None)

    def _members_among(self, workers: Iterable[str]) -> list[Member]:
        """The workers that are still members. The local view suffices: the subject of a worker that just left has no
        subscriber, so NATS answers at once."""
        wanted = set(workers)
        return [member for member in self._view.snapshot() if member.instance_id in wanted]

    def _note_sources(self, replies: Iterable[WorkerReply]) -> None:
        for reply in replies:
            if reply.ok and reply.body.get("sources"):
                self.sources[reply.instance_id] = reply.body["sources"]
        if self.sources and self._journal is not None:
            self._journal.note_sources(self.sources)

    async def _ask_needed(
        self,
        op: str,
        body: Mapping[str, Any],
        workers: Sequence[str],
        timeout_s: float | None,
        each: Mapping[str, Mapping[str, Any]],
        needs: Needs,
    ) -> list[WorkerReply]:
        """Sends the op to workers that an update needs. When the failures decide that it can't be committed, this tells
        all of them to stop, and waits `stop_s` for their replies. The first failure comes first: it may be the cause of
        others."""
        members = self._members_among(workers)
        failed = set(workers) - {member.instance_id for member in members}
        replies: dict[str, WorkerReply] = {}
        lost = asyncio.Event()
        first: list[str] = []
        if needs.are_lost(failed, len(workers)):
            lost.set()

        def heard(reply: WorkerReply) -> None:
            told_before = lost.is_set() and isinstance(reply.error, UpdateAborted)
            replies[reply.instance_id] = replace(reply, stopped=told_before)
            if not reply.ok:
                first.append(reply.instance_id)
                failed.add(reply.instance_id)
                if needs.are_lost(failed, len(workers)):
                    lost.set()

        async def stop_all() -> None:
            await lost.wait()
            with contextlib.suppress(PlaneError):  # the caller aborts once more
                await self._ask_members("abort_update", {"update_id": needs.update_id}, members, self._stop_s)

        asking = asyncio.create_task(
            self._calls.ask(self._view, members, op, dict(body), timeout_s, self._held, heard, each)
        )
        stopping = asyncio.create_task(stop_all())
        losing = asyncio.create_task(lost.wait())
        try:
            await asyncio.wait((asking, losing), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                await asyncio.wait((asking, stopping), timeout=self._stop_s)
            if asking.done():
                for reply in asking.result():  # also a row for each worker that was silent until the time-out
                    replies.setdefault(reply.instance_id, reply)
        finally:
            await end_tasks((asking, stopping, losing))
        rows = [replies.get(member.instance_id) or _still_stopping(member, self._stop_s) for member in members]
        return sorted(rows, key=lambda reply: reply.instance_id not in first[:1])

    async def _ask_members(
        self,
        op: str,
        body: Mapping[str, Any],
        members: Sequence[Member],
        timeout_s: float | None,
        each: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[WorkerReply]:
        return await self._calls.ask(self._view, members, op, dict(body), timeout_s, self._held, each=each)

    async def _announce(self, announce: Announce) -> RecordAcks:
        body = {"record": announce.record.to_wire(), "sequence": announce.sequence}
        (members, replies), silent = await asyncio.gather(
            self._announce_to_members(body, announce.timeout_s),
            self._announce_to_frontends(body, announce.timeout_s),
        )
        return RecordAcks(members, replies, silent)

    async def _announce_to_members(
        self, body: dict[str, Any], timeout_s: float
    ) -> tuple[dict[str, str], list[WorkerReply]]:
        """Sends the record to every member of the leader's list, which is read after the record was written. A worker
        that registers later reads the record first. Members that are known already are asked at the same time."""
        self._announced_at = self._clock()
        known = {member.instance_id: member for member in self._view.snapshot()}

        async def ask_the_others() -> tuple[Snapshot, list[WorkerReply]]:
            fleet = await self._view.barrier()
            others = [member for member in fleet if known.get(member.instance_id) != member]
            return fleet, await self._ask_members("follow_record", body, others, timeout_s)

        replies, (fleet, more) = await asyncio.gather(
            self._ask_members("follow_record", body, list(known.values()), timeout_s), ask_the_others()
        )
        first = dict(zip(known, replies, strict=True))
        still = [first[member.instance_id] for member in fleet if known.get(member.instance_id) == member]
        return _members(fleet), [*still, *more]

    async def _announce_to_frontends(self, body: dict[str, Any], timeout_s: float) -> list[str]:
        """Sends the record to the frontends, and returns the frontends that have not acknowledged it."""
        replies = await self._calls.ask_frontends(
            self._view, "follow_record", body, timeout_s, fence=self._held.fence
        )
        return [key for key, reply in replies.items() if reply is None or reply.get("status") != "ok"]

    # ---- waiting ----

    async def _wait_silent(self, wait: WaitSilent) -> None:
        """Waits until each process has left, or can't have a serving lease any more."""
        until = self._announced_at + SERVING_LEASE_S + LEASE_MARGIN_S

        def gone(fleet: Snapshot) -> bool:
            return not wait.frontends and not still_there(wait.workers, _members(fleet))

        if (left_s := until - self._clock()) > 0:
            await self._view.wait_until(gone, left_s)

    async def _watch(self, record: DecisionRecord, timeout_s: float) -> Answered:
        """Returns the workers' states when each worker serves the version or has given it up, when another version is
        committed, or when the time is over. No worker can continue while NATS is down, so each one gets BACK_S after
        that."""
        until = self._clock() + timeout_s
        last = until + WATCH_GRACE_S
        while True:
            try:
                out = await self._calls.call_all("state", component=self._view.subjects.component, empty="ok")
                known = self._view.record
                replaced = known is not None and known.made != record.made and newer(known, record)
                settled = all(serves(reply, record) or gave_up(reply, record) for reply in out.rows)
                if replaced or settled or self._clock() > until:
                    return Answered(out.rows)
            except BusUnreachable:
                until = min(last, max(until, self._clock() + BACK_S))
            if self._clock() > last:
                raise Unavailable(
                    f"{record.made.label} is committed, but NATS does not answer, so the workers' state is unknown",
                    version=record.made.to_wire(),
                    fix="read the state; the workers follow the record by themselves",
                )
            await asyncio.sleep(WATCH_S)


def _bound_s(instruction: Instruction) -> float | None:
    """The longest time in seconds that an instruction may take. None: it takes moments, or the op has its own bound."""
    match instruction:
        case SendOp() | Announce() | Watch():
            return instruction.timeout_s
        case WaitSilent():
            return SERVING_LEASE_S + LEASE_MARGIN_S
    return None


def _still_stopping(member: Member, within_s: float) -> WorkerReply:
    error = UpdateAborted(f"it was told to stop, and has not answered within {within_s:g} s", field="update_id")
    return WorkerReply(member.instance_id, member.incarnation, "error", error=error, stopped=True)


def _members(snapshot: Snapshot) -> dict[str, str]:
    return {member.instance_id: member.incarnation for member in snapshot}
