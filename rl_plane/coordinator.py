"""Carries an update through the fleet: the shell around `update.py`. Whoever calls coordinates, under the lock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rl_plane.bus import WrongSequence
from rl_plane.client import RlClient, check_pin
from rl_plane.errors import (
    BusUnreachable,
    Conflict,
    Locked,
    MembershipChanged,
    NotFound,
    NoWorkers,
    OutcomeUnknown,
    PlaneError,
    StaleFence,
    Unavailable,
    UpdateAborted,
    WorkerLost,
)
from rl_plane.history import Journal
from rl_plane.lock import HeldLock
from rl_plane.membership import Member, Snapshot
from rl_plane.ops import DEFAULT_PAUSE_LEASE_S, UpdatePolicy, UpdateWeights
from rl_plane.record import (
    LEASE_MARGIN_S,
    SERVING_LEASE_S,
    DecisionRecord,
    DesiredPause,
    UpdateSession,
    read_record,
    read_session,
)
from rl_plane.rows import WorkerRow
from rl_plane.subjects import PAUSE, RECORD, SESSION
from rl_plane.update import Prepared, closed, judge_prepare, still_there
from rl_plane.versions import WeightVersion
from rl_plane.view import MembershipView

log = logging.getLogger("rl_plane.coordinator")

SESSION_IDLE_S = 120.0
"""A prepared update whose trainer is silent this long is aborted: its staging is a model's worth of memory."""
GATE_TIMEOUT_S = 2.0
"""Closing and opening admission is answered by the worker's NATS loop at once."""
WATCH_S = 0.1
WATCH_GRACE_S = 10.0
"""Beyond the commit's own time-out: a NATS server takes seconds to come back."""


@dataclass(slots=True)
class Outcome:
    """What an update's reply is made of."""

    version: WeightVersion
    snapshot: Snapshot
    rows: list[WorkerRow]
    excluded: list[str]
    phases: dict[str, float] = field(default_factory=dict)


class Coordinator:
    """One update under the lock. Any failure before the decision leaves no trace; after it, the version stands
    and a worker that fails is excluded and heals by itself."""

    def __init__(self, client: RlClient, view: MembershipView, held: HeldLock, update_id: str) -> None:
        self._client = client
        self._view = view
        self._held = held
        self._id = update_id
        self._state = view.subjects.state
        self._phases: dict[str, float] = {}

    @asynccontextmanager
    async def _phase(self, name: str) -> AsyncIterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._phases[f"{name}_s"] = time.monotonic() - start

    async def _all(
        self, op: str, body: dict[str, Any], workers: Sequence[str] | None, timeout_s: float | None = None
    ) -> list[WorkerRow]:
        out = await self._client.call_all(
            op,
            body,
            workers=workers,
            component=self._view.subjects.component,
            timeout_s=timeout_s,
            empty="ok",
            held=self._held,
        )
        return out.rows

    async def prepare(self, body: UpdateWeights, label: str, pin: Snapshot | None) -> tuple[Prepared, Snapshot]:
        """Stages on every member; on failure everything is dropped again and the error tells of each worker."""
        snapshot = await self._view.barrier()
        if pin is not None and pin.fingerprint != snapshot.fingerprint:
            raise MembershipChanged(before_epoch=pin.epoch, after_epoch=snapshot.epoch)
        states = await self._client.call_all("state", component=self._view.subjects.component, empty="ok")
        ids = [member.instance_id for member in snapshot]
        request = {
            "update_id": self._id,
            "target": body.target.model_dump(),
            "transport": body.transport.model_dump(),
            "encoding": body.encoding,
            "label": label,
            "digest": body.digest,
            "cast": body.cast,
        }
        async with self._phase("prepare"):
            rows = await self._present("prepare_update", request, ids, body.policy.prepare_timeout_s)
            asked = {row.instance_id for row in rows}
            rows += [_left(member) for member in snapshot if member.instance_id not in asked]
        try:
            if pin is not None:
                after = await self._view.barrier()
                check_pin(after, None, pin.fingerprint)
            return judge_prepare(rows, set(ids) - closed(states.rows), body.policy, body.digest), snapshot
        except PlaneError as error:
            error.facts.setdefault("workers", [row.to_wire() for row in rows])
            error.facts.setdefault("phases", dict(self._phases))
            await self.abort(self._id)
            raise

    async def abort(self, update_id: str | None) -> None:
        """Drops what is staged, wherever it is. A worker that doesn't hear it drops it by its own idle limit."""
        try:
            await self._all("abort_update", {"update_id": update_id}, None)
        except PlaneError as error:
            log.warning("abort of %s: %s", update_id, error)

    async def decide(self, record: DecisionRecord) -> None:
        """After this the version is committed. A lost answer is settled by the record itself."""
        try:
            await self._held.put(RECORD, record.encode())
        except BusUnreachable:
            try:
                decided = await self._was_decided(record)
            except PlaneError as error:
                raise OutcomeUnknown(
                    f"whether {record.version.label} was committed is not known: {error.message}",
                    update_id=record.update_id,
                    retry_after_s=1.0,
                    fix="repeat the call with the same Idempotency-Key, or read the state",
                ) from error
            if not decided:
                raise

    async def _was_decided(self, record: DecisionRecord) -> bool:
        # Renewing the lock moves its sequence, which kills a late copy of our own write; then the record is final.
        await self._held.renew()
        now = await read_record(self._client.bus, self._state)
        return now is not None and now.update_id == record.update_id

    def _enough(self, outcome: Outcome, policy: UpdatePolicy) -> Outcome:
        """A version that is committed and hardly served is no success."""
        serving = sum(row.status == "ok" for row in outcome.rows)
        if serving < policy.min_ready:
            raise Conflict(
                f"{outcome.version.label} is committed, but {serving} workers serve it: the others follow by "
                "themselves",
                version=outcome.version.to_wire(),
                workers=[row.to_wire() for row in outcome.rows],
                excluded=outcome.excluded,
                fix="read the state until they are ready; don't send it again",
            )
        return outcome

    async def commit(self, body: UpdateWeights, record: DecisionRecord, prepared: Prepared) -> Outcome:
        """Gate, commit and open. The version stands already: if NATS or the lock is lost on the way, the workers
        go on by the record, and this only watches them."""
        try:
            return self._enough(await self._commit(body, record, prepared), body.policy)
        except (BusUnreachable, StaleFence) as error:
            log.warning("the update %s is decided; watching the workers finish it: %s", self._id, error)
            return self._enough(await self._watch(record, body.policy.commit_timeout_s), body.policy)

    async def _commit(self, body: UpdateWeights, record: DecisionRecord, prepared: Prepared) -> Outcome:
        """Strict: nobody opens before every member is gated, and swapped or excluded."""
        policy = body.policy
        if policy.keep_pause:
            desired = DesiredPause(True, policy.pause_mode, time.time() + DEFAULT_PAUSE_LEASE_S)
            await self._held.put(PAUSE, desired.encode())
        snapshot = await self._view.barrier()
        now = {member.instance_id: member.incarnation for member in snapshot}
        gated_at = time.monotonic()
        async with self._phase("gate"):
            gated = await self._present("set_admission", {"open": False, "reason": "updating"}, now)
        shut = {row.instance_id for row in gated if row.status == "ok"}
        decision = {
            "update_id": self._id,
            "version": record.version.to_wire(),
            "pause_mode": policy.pause_mode,
            "keep_pause": policy.keep_pause,
        }
        async with self._phase("commit"):
            ready = [key for key in still_there(prepared.ready, now) if key in shut]
            committed = await self._present("commit_update", decision, ready, policy.commit_timeout_s)
        async with self._phase("open"):
            await self._nobody_serves_the_old(gated, now, gated_at)
            await self._held.put(RECORD, replace(record, open=True).encode())
            opened = await self._present("set_admission", {"open": True, "reason": "updating"}, shut)
        swapped = {row.instance_id for row in committed if row.status == "ok"}
        serving = swapped & {row.instance_id for row in opened if row.status == "ok"}
        # The row that tells most of each worker: its error, else its commit.
        rows = {row.instance_id: row for row in [*committed, *gated, *opened] if row.status == "error"}
        rows |= {row.instance_id: row for row in committed if row.instance_id in serving}
        excluded = sorted({*prepared.ready, *prepared.excluded, *now} - serving)
        return Outcome(record.version, snapshot, [rows[key] for key in sorted(rows)], excluded, self._phases)

    async def _nobody_serves_the_old(
        self, gated: Sequence[WorkerRow], now: Mapping[str, str], gated_at: float
    ) -> None:
        """A member that has not acknowledged the gate may serve until it leaves or its lease has run out."""
        silent = {row.instance_id: now[row.instance_id] for row in gated if row.status != "ok" and not row.lost}
        left_s = gated_at + SERVING_LEASE_S + LEASE_MARGIN_S - time.monotonic()
        if silent and left_s > 0:
            await self._view.wait_until(
                lambda fleet: not still_there(silent, {each.instance_id: each.incarnation for each in fleet}),
                left_s,
            )

    async def _watch(self, record: DecisionRecord, timeout_s: float) -> Outcome:
        """The outcome as the workers' states tell it, once each one serves the version or the time is over."""
        give_up = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(BusUnreachable):
                out = await self._client.call_all("state", component=self._view.subjects.component, empty="ok")
                version = record.version.to_wire()
                serving = [row for row in out.rows if row.body.get("ready") and row.body.get("version") == version]
                if len(serving) == len(out.rows) or time.monotonic() > give_up:
                    excluded = sorted({row.instance_id for row in out.rows} - {row.instance_id for row in serving})
                    return Outcome(record.version, out.snapshot, out.rows, excluded, self._phases)
            if time.monotonic() > give_up + WATCH_GRACE_S:
                raise Unavailable(
                    f"{record.version.label} is committed, but NATS does not tell what the workers do",
                    version=record.version.to_wire(),
                    fix="read the state; the workers follow the record by themselves",
                )
            await asyncio.sleep(WATCH_S)

    async def _present(
        self, op: str, body: dict[str, Any], workers: Iterable[str], timeout_s: float = GATE_TIMEOUT_S
    ) -> list[WorkerRow]:
        """Like `_all`, but a worker that has left meanwhile is only left out."""
        wanted = set(workers)
        present = [member.instance_id for member in await self._view.barrier() if member.instance_id in wanted]
        try:
            return await self._all(op, body, present, timeout_s)
        except NotFound:
            return await self._present(op, body, present, timeout_s)


def _left(member: Member) -> WorkerRow:
    error = WorkerLost("it left before the update began", instance_id=member.instance_id)
    return WorkerRow(member.instance_id, member.incarnation, "error", error=error)


async def _next_record(
    client: RlClient, view: MembershipView, body: Mapping[str, Any], update_id: str, prepared: Prepared, label: str
) -> DecisionRecord:
    record = await read_record(client.bus, view.subjects.state)
    if record is None:
        raise NoWorkers("no worker has fixed the fleet's first version yet", retry_after_s=1.0)
    version = WeightVersion(record.version.run, record.version.sequence + 1, label, prepared.digest)
    policy = body["policy"]
    return DecisionRecord(
        version,
        update_id,
        body["transport"],
        bool(body.get("cast")),
        prepared.refetchable,
        policy["pause_mode"],
        policy["keep_pause"],
        open=False,
    )


async def _check_no_session(client: RlClient, view: MembershipView, held: HeldLock, update_id: str) -> None:
    """An update prepared by another call blocks until it ends or falls silent; then it is aborted here."""
    session = await read_session(client.bus, view.subjects.state)
    if session is None:
        if held.took_over:
            await Coordinator(client, view, held, update_id).abort(None)
        return
    if session.live(time.time()):
        raise Locked(
            f"the update {session.update_id!r} is prepared and waits for complete or abort",
            holder=session.update_id,
            retry_after_s=1.0,
            fix="complete it, abort it, or wait until its idle limit ends it",
        )
    await Coordinator(client, view, held, update_id).abort(session.update_id)
    await _end_session(client, view)


async def _end_session(client: RlClient, view: MembershipView) -> None:
    entry = await client.bus.get(view.subjects.state, SESSION)
    if entry is not None and entry.value:
        with contextlib.suppress(WrongSequence):
            await client.bus.purge(view.subjects.state, SESSION, entry.sequence)


async def update_fleet(
    client: RlClient,
    view: MembershipView,
    held: HeldLock,
    body: UpdateWeights,
    update_id: str,
    pin: Snapshot | None = None,
    journal: Journal | None = None,
) -> Outcome:
    """A whole update in one call. `pin`: abort if the fleet is another one after preparing; `journal` is told when
    work begins."""
    await _check_no_session(client, view, held, update_id)
    record = await read_record(client.bus, view.subjects.state)
    if record is not None and record.update_id == update_id:
        return Outcome(record.version, await view.barrier(), [], [])  # asked again: the first answer stands
    coordinator = Coordinator(client, view, held, update_id)
    label = body.version or str(record.version.sequence + 1 if record else 1)
    if journal is not None:
        await journal.begin(record)
    prepared, _ = await coordinator.prepare(body, label, pin)
    try:
        record = await _next_record(client, view, body.model_dump(), update_id, prepared, label)
        await coordinator.decide(record)
    except OutcomeUnknown:
        raise
    except PlaneError:
        await coordinator.abort(update_id)
        raise
    return await coordinator.commit(body, record, prepared)


async def prepare_fleet(
    client: RlClient,
    view: MembershipView,
    held: HeldLock,
    body: UpdateWeights,
    update_id: str,
    journal: Journal | None = None,
) -> tuple[UpdateSession, Prepared, Snapshot]:
    """The first half, which any frontend can complete later. Prepared twice under one id: the first stands."""
    session = await read_session(client.bus, view.subjects.state)
    if session is not None and session.update_id == update_id and session.live(time.time()):
        return session, Prepared(session.digest, dict(session.prepared), [], session.refetchable), view.snapshot()
    await _check_no_session(client, view, held, update_id)
    record = await read_record(client.bus, view.subjects.state)
    label = body.version or str(record.version.sequence + 1 if record else 1)
    if journal is not None:
        await journal.begin(record)
    prepared, snapshot = await Coordinator(client, view, held, update_id).prepare(body, label, None)
    session = UpdateSession(
        update_id,
        label,
        body.model_dump(),
        prepared.digest,
        prepared.refetchable,
        prepared.ready,
        time.time() + SESSION_IDLE_S,
    )
    await held.put(SESSION, session.encode())
    return session, prepared, snapshot


async def complete_fleet(client: RlClient, view: MembershipView, held: HeldLock, update_id: str | None) -> Outcome:
    """The second half: decide and commit what `prepare_fleet` has left."""
    session = await _open_session(client, view, update_id)
    coordinator = Coordinator(client, view, held, session.update_id)
    body = UpdateWeights.model_validate(session.body)
    now = {member.instance_id: member.incarnation for member in await view.barrier()}
    ready = {key: session.prepared[key] for key in still_there(session.prepared, now)}
    prepared = Prepared(session.digest, ready, [], session.refetchable)
    try:
        if not session.live(time.time()):
            raise UpdateAborted(f"the update was silent for {SESSION_IDLE_S:g} s", fix="prepare it again")
        if not ready or (len(ready) < len(session.prepared) and body.policy.on_prepare_failure == "abort"):
            raise UpdateAborted("a worker that had prepared the update is gone", fix="prepare it again")
        record = await _next_record(client, view, session.body, session.update_id, prepared, session.label)
        await coordinator.decide(record)
    except OutcomeUnknown:
        raise
    except PlaneError:
        await coordinator.abort(session.update_id)
        await _end_session(client, view)
        raise
    await _end_session(client, view)
    return await coordinator.commit(body, record, prepared)


async def abort_fleet(
    client: RlClient, view: MembershipView, held: HeldLock, update_id: str | None
) -> UpdateSession:
    session = await _open_session(client, view, update_id)
    await Coordinator(client, view, held, session.update_id).abort(session.update_id)
    await _end_session(client, view)
    return session


async def _open_session(client: RlClient, view: MembershipView, update_id: str | None) -> UpdateSession:
    session = await read_session(client.bus, view.subjects.state)
    if session is None or (update_id is not None and session.update_id != update_id):
        raise UpdateAborted(
            "no such update is prepared" + (f": {update_id}" if update_id else ""),
            field="update_id",
            fix="prepare_weights_update first; a prepared update is dropped when its trainer is silent",
        )
    return session
