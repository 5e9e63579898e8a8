"""The fleet's updates: each takes the lock, is written in the history by a Journal, and done by a Coordinator."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from rl_plane.bus.entries import is_unreadable
from rl_plane.bus.lock import DEFAULT_LOCK_WAIT_S, HeldLock, read_holder
from rl_plane.bus.sealed_record import restore
from rl_plane.bus.state_store import read_record, read_session, record_of, unreadable_record
from rl_plane.commit.cancellation import aborted_by, write_cancellation
from rl_plane.commit.coordinator import Coordinator
from rl_plane.commit.history import UpdateEntry, first_answer, is_answered, read_entry, read_history, request_hash
from rl_plane.commit.journal import Journal
from rl_plane.commit.past_versions import before_of, rollback_target, source_of, target_of
from rl_plane.commit.rules import committed_already, newest, one_model
from rl_plane.commit.session_keepalive import lock_with_keepalive
from rl_plane.commit.steps import SESSION_IDLE_S, Members, Outcome, PartReceived, Prepared, UpdateCommand
from rl_plane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Locked,
    PlaneError,
    StaleFence,
    UpdateAborted,
)
from rl_plane.fleet.fleet_call import FleetCall, whole_fleet
from rl_plane.fleet.fleet_replies import answered, ended, head, updated
from rl_plane.membership.core import Snapshot
from rl_plane.membership.worker_calls import WorkerCalls
from rl_plane.protocol import fleet_ops, update_requests
from rl_plane.protocol.record import UpdateSession, VersionSource, first_record
from rl_plane.protocol.transport_traits import directory_transport
from rl_plane.protocol.validation import Empty, same_values
from rl_plane.protocol.versions import WeightVersion

CANCEL_WAIT_S = 40.0
"""Seconds for a coordinator to end its update: a worker may take 30 s to break a receive off."""
CANCEL_POLL_S = 0.1
"""Seconds between two looks at the lock of an update that is to end."""


class FleetUpdates:
    """The handlers of the ops that change the fleet's weights."""

    def __init__(self, calls: WorkerCalls, session_idle_s: int = SESSION_IDLE_S) -> None:
        """`session_idle_s`: the seconds after which a prepared update ends if its trainer is silent."""
        self._calls = calls
        self._session_idle_s = session_idle_s

    async def update(self, call: FleetCall[update_requests.UpdateCall]) -> dict[str, Any]:
        """Commits new weights on the whole fleet, or on no worker."""
        asked = call.body
        request = request_hash(asked.model_dump())
        if (first := await self._first_answer(call, request)) is not None:
            return first
        snapshot = await whole_fleet(call)
        body, before = await self._with_source(call, asked, snapshot)
        _check_name(body.target, snapshot)
        policy = body.policy
        # If the same call comes twice at once, by two frontends, the second waits for the first.
        same_wait_s = policy.prepare_timeout_s + policy.commit_bound_s
        pin = snapshot.fingerprint if call.pinned else None
        asked_for = UpdateCommand("update", call.request_id, body, pin, before=before)
        return await self._once(call, request, asked_for, body, asked.rollback, same_wait_s)

    async def _once(
        self,
        call: FleetCall[Any],
        request: str,
        asked_for: UpdateCommand,
        body: update_requests.UpdateWeights | None,
        rollback: update_requests.Rollback | None = None,
        same_wait_s: float = 0.0,
        label: str = "",
    ) -> dict[str, Any]:
        """Coordinates an update once. A repeated call returns the first answer. If the update was decided and has no
        answer yet, the call continues it."""
        try:
            async with self._calls.lock(call.view, update_id=call.request_id, same_wait_s=same_wait_s) as held:
                journal = self._journal(call, held, body, request, rollback, label=label)
                if call.may_repeat and (entry := await journal.first_answer()) is not None:
                    return answered(call, entry)
                try:
                    return await self._committed(call, held, journal, asked_for)
                except PlaneError as error:
                    await journal.failed(error)
                    raise
        except (Locked, StaleFence):
            # Between two reads of the lock the first call may have ended, and a third one begun. While this process
            # stood still, another call under the same id may have taken over and finished.
            if (first := await self._first_answer(call, request)) is not None:
                return first
            raise

    async def _first_answer(self, call: FleetCall[Any], request: str) -> dict[str, Any] | None:
        entry = await self._first_entry(call, request)
        return answered(call, entry) if entry is not None else None

    async def _first_entry(self, call: FleetCall[Any], request: str) -> UpdateEntry | None:
        if not call.may_repeat:
            return None
        return await first_answer(self._calls.bus, call.view.subjects.state, call.request_id, request)

    async def _with_source(
        self, call: FleetCall[Any], asked: update_requests.UpdateCall, snapshot: Snapshot
    ) -> tuple[update_requests.UpdateWeights, VersionSource | None]:
        """The update to coordinate. A rollback becomes an update with the source and digest that the history has; for a
        delta or a partial version, the second value is the source of the version that it changed."""
        if asked.rollback is None:
            return same_values(update_requests.UpdateWeights, asked), None
        given: dict[str, Any] = asked.model_dump(exclude={"rollback"}, exclude_unset=True)
        state = call.view.subjects.state
        entries = await read_history(self._calls.bus, state)
        record = await read_record(self._calls.bus, state)
        run = record.version.run if record is not None else ""
        target = rollback_target(entries, run, asked.rollback.label, asked.rollback.sequence)
        found = {
            "target": target_of(target, record.adapters if record is not None else ()),
            "transport": source_of(target, snapshot),
            "digest": target.digest,
            "cast": target.cast,
            "encoding": target.encoding,
            "base": target.base,
        }
        body = update_requests.UpdateWeights.model_validate({"version": target.label, **given, **found})
        return body, before_of(target)

    def _journal(
        self,
        call: FleetCall[Any],
        held: HeldLock,
        body: update_requests.UpdateWeights | None,
        request: str,
        rollback: update_requests.Rollback | None = None,
        update_id: str | None = None,
        label: str = "",
    ) -> Journal:
        """The journal of an update; `update_id` None: of this call's own. `label`: of a version without a body."""
        return Journal(
            self._calls.bus,
            call.view.subjects.state,
            held,
            self._calls.owner,
            update_id or call.request_id,
            body,
            label,
            request,
            rollback.model_dump(exclude_none=True) if rollback is not None else None,
            call.asked_by,
            call.caller or self._calls.owner,
            call.start,
        )

    async def _committed(
        self, call: FleetCall[Any], held: HeldLock, journal: Journal | None, asked_for: UpdateCommand
    ) -> dict[str, Any]:
        """Coordinates an update up to its commit, and writes the outcome in the history."""
        coordinator = Coordinator(self._calls, call.view, held, journal)
        outcome = await coordinator.run(asked_for)
        assert isinstance(outcome, Outcome)
        reply = updated(call, outcome, coordinator.phases, coordinator.sources)
        if journal is not None:
            reply["phases"] = dict(await journal.committed(outcome, reply["workers"], coordinator.phases))
            reply["elapsed_s"] = time.monotonic() - call.start
        return reply

    async def prepare(self, call: FleetCall[update_requests.UpdateWeights]) -> dict[str, Any]:
        """Stages and verifies an update, which then waits for `complete` or `abort`."""
        snapshot = await whole_fleet(call)
        body = call.body
        _check_name(body.target, snapshot)
        asked = request_hash(body.model_dump())
        if body.described_as_it_comes and body.transport is not None:
            # The workers refuse a group that has lost ranks.
            ranks = sum(int(member.info.get("world_size") or 1) for member in snapshot)
            transport = body.transport.model_copy(update={"fleet_ranks": ranks})
            body = body.model_copy(update={"transport": transport})
        async with self._calls.lock(call.view, update_id=call.request_id) as held:
            journal = self._journal(call, held, body, asked)
            if (entry := await self._first_entry(call, asked)) is not None:
                raise ended(entry)
            if call.may_repeat:
                await journal.settle_own()
            try:
                prepared = await Coordinator(self._calls, call.view, held, journal).run(
                    UpdateCommand("prepare", call.request_id, body, session_idle_s=self._session_idle_s)
                )
            except PlaneError as error:
                await journal.failed(error)
                raise
            assert isinstance(prepared, Prepared)
            rows = _rows_of(prepared.ready)
            await journal.prepared(rows, prepared.digest or None)
        return {
            **head(call, call.view.snapshot()),
            "update_id": call.request_id,
            "ready": True,
            "digest": prepared.digest or None,
            "workers": rows,
            "excluded": prepared.excluded,
        }

    async def receive_part(self, call: FleetCall[fleet_ops.ReceiveWeightsPart]) -> dict[str, Any]:
        """Receives the tensors that the trainer broadcasts now, on every rank."""
        part = same_values(update_requests.Part, call.body)
        snapshot, update_id = await whole_fleet(call), call.body.update_id
        waiting = await self._session(call, update_id)
        # The trainer is already sending, so a retry would be too late. Another group may be sending another part.
        wait_s = DEFAULT_LOCK_WAIT_S if waiting is None else part.timeout_s
        held_for = "" if waiting is None else waiting.update_id
        async with lock_with_keepalive(self._calls, call.view, waiting, wait_s, held_for) as held:
            journal = await self._prepared_journal(call, held, await self._session(call, update_id))
            asked_for = UpdateCommand(
                "receive_part",
                update_id or "",
                part=part,
                version=call.body.version,
                pause_mode=call.body.pause_mode,
                kv=call.body.kv,
            )
            try:
                received = await Coordinator(self._calls, call.view, held, journal).run(asked_for)
            except PlaneError as error:
                if journal is not None:
                    await journal.failed(error)
                raise
        assert isinstance(received, PartReceived)
        return {
            **head(call, snapshot),
            "update_id": received.session.update_id,
            "missing": received.missing,
            "tensors": len(part.names),
            "bytes": sum(spec.nbytes for spec in part.specs),
            "workers": _rows_of(received.session.prepared),
        }

    async def label(self, call: FleetCall[fleet_ops.LabelUpdate]) -> dict[str, Any]:
        """Labels the prepared update."""
        snapshot, update_id = await whole_fleet(call), call.body.update_id
        waiting = await self._session(call, update_id)
        async with lock_with_keepalive(self._calls, call.view, waiting, _complete_wait_s(waiting)) as held:
            asked_for = UpdateCommand("label", update_id or "", version=call.body.version)
            session = await Coordinator(self._calls, call.view, held).run(asked_for)
        assert isinstance(session, UpdateSession)
        rows = _rows_of(session.prepared)
        return {**head(call, snapshot), "update_id": session.update_id, "label": session.label, "workers": rows}

    async def complete(self, call: FleetCall[fleet_ops.CompleteUpdate]) -> dict[str, Any]:
        """Commits the prepared update."""
        update_id = call.body.update_id
        if (first := await self._completed(call, update_id)) is not None:
            return first
        await whole_fleet(call)
        waiting = await self._session(call, update_id)
        held_for = "" if waiting is None else waiting.update_id
        async with lock_with_keepalive(
            self._calls, call.view, waiting, _complete_wait_s(waiting), held_for
        ) as held:
            session = await self._session(call, update_id)
            # A first call may have ended while this one waited for the lock.
            if session is None and (first := await self._completed(call, update_id)) is not None:
                return first
            journal = await self._prepared_journal(call, held, session, update_id)
            pushed = journal.entry.num_buckets if journal is not None else None
            asked = call.body.num_buckets
            if session is not None and asked is not None and asked != pushed:
                raise InvalidRequest(
                    f"num_buckets is {asked}; "
                    + ("the workers wait for none" if pushed is None else f"the update announced {pushed}"),
                    field="num_buckets",
                    fix="send what the manifest lists, or abort_weights_update",
                )
            asked_for = UpdateCommand(
                "complete",
                update_id or "",
                digest=call.body.digest,
                version=call.body.version,
                kv=call.body.kv,
                min_ready=journal.entry.min_ready if journal is not None else 1,
            )
            try:
                reply = await self._committed(call, held, journal, asked_for)
            except PlaneError as error:
                if journal is not None:
                    await journal.failed(error)
                    if journal.entry.outcome_unreported and isinstance(error, UpdateAborted):
                        raise journal.entry.first_error() from error  # another version was committed since
                raise
        return _with_buckets(reply, pushed)

    async def _completed(self, call: FleetCall[Any], update_id: str | None) -> dict[str, Any] | None:
        """The answer of an update that has ended, or its error again. None: it has not ended, or has no answer yet."""
        bus, state = self._calls.bus, call.view.subjects.state
        entry = await read_entry(bus, state, update_id) if update_id else None
        if entry is None or not await is_answered(bus, state, entry):
            return None
        if entry.outcome == "aborted" and await self._session(call, update_id) is not None:
            return None  # the session still exists, so a new attempt may succeed
        return _with_buckets(answered(call, entry), entry.num_buckets)

    async def _session(self, call: FleetCall[Any], update_id: str | None) -> UpdateSession | None:
        """The update that waits for `complete` or `abort`, if `update_id` is its id or None."""
        session = await read_session(self._calls.bus, call.view.subjects.state)
        return session if session is not None and update_id in (None, session.update_id) else None

    async def _prepared_journal(
        self, call: FleetCall[Any], held: HeldLock, session: UpdateSession | None, update_id: str | None = None
    ) -> Journal | None:
        """The journal of a prepared update. `update_id`: an update that waits no more, and may have been decided."""
        if session is None:
            if not update_id:
                return None
            journal = self._journal(call, held, None, "", update_id=update_id)
            await journal.go_on()
            return journal
        body = update_requests.UpdateWeights.model_validate(session.body)
        request = request_hash(body.model_dump())
        journal = self._journal(call, held, body, request, update_id=session.update_id)
        await journal.take_up()
        return journal

    async def abort(self, call: FleetCall[fleet_ops.AbortWeightsUpdate]) -> dict[str, Any]:
        """Ends an update before its decision, while a coordinator works on it or while it waits for its next call."""
        await whole_fleet(call)
        ended = await self._cancel(call)
        if ended is None:
            return await self._abort_waiting(call)
        return {**head(call, call.view.snapshot()), "update_id": ended, "workers": []}

    async def _cancel(self, call: FleetCall[fleet_ops.AbortWeightsUpdate]) -> str | None:
        """Has the coordinator that works on the update end it. Returns the update's id. None: no coordinator works on
        it, so that this call can take the lock."""
        bus, state, told = self._calls.bus, call.view.subjects.state, ""
        until = time.monotonic() + CANCEL_WAIT_S
        while True:
            holder = await read_holder(bus, state)
            whose = str(holder.get("update_id", "")) if holder is not None else ""
            if not whose or whose != (told or call.body.update_id or whose):
                break
            if not told:
                told = whose
                await write_cancellation(bus, state, told, self._aborter(call))
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"the coordinator of {told} has not ended it within {CANCEL_WAIT_S:g} s",
                    fix="read the state: after its decision an update can't be aborted",
                )
            await asyncio.sleep(CANCEL_POLL_S)
        entry = await read_entry(bus, state, told) if told else None
        if entry is not None and entry.outcome == "committed":
            if entry.version is None:
                raise entry.first_error()
            raise committed_already(told, entry.version, "roll back to the version before, if it is not wanted")
        return told if entry is not None and entry.outcome == "aborted" else None

    def _aborter(self, call: FleetCall[fleet_ops.AbortWeightsUpdate]) -> str:
        return call.body.by or call.caller or self._calls.owner

    async def _abort_waiting(self, call: FleetCall[fleet_ops.AbortWeightsUpdate]) -> dict[str, Any]:
        """Drops the prepared update."""
        snapshot = call.view.snapshot()
        update_id = call.body.update_id
        async with self._calls.lock(call.view) as held:
            journal = await self._prepared_journal(call, held, await self._session(call, update_id))
            session = await Coordinator(self._calls, call.view, held, journal).run(
                UpdateCommand("abort", update_id or "")
            )
            assert isinstance(session, UpdateSession)
            if journal is not None:
                await journal.failed(aborted_by(self._aborter(call)))
        return {**head(call, snapshot), "update_id": session.update_id, "workers": []}

    async def load_lora(self, call: FleetCall[fleet_ops.LoadLora]) -> dict[str, Any]:
        """Loads an adapter from a directory, or replaces the adapter of this name."""
        name = call.body.lora_name
        record = await read_record(self._calls.bus, call.view.subjects.state)
        op: Literal["load", "swap"] = "swap" if record is not None and name in record.adapters else "load"
        if call.may_repeat:
            entry = await read_entry(self._calls.bus, call.view.subjects.state, call.request_id)
            if entry is not None and entry.target is not None:
                op = entry.target.get("op", op)  # a repeated call means what the first one meant
        body = update_requests.UpdateCall(
            target=update_requests.LoraTarget(kind="lora", op=op, name=name),
            transport=update_requests.Transport.model_validate(directory_transport(call.body.lora_path)),
            cast=call.body.cast,
        )
        return await self.update(call.with_body(body))

    async def unload_lora(self, call: FleetCall[fleet_ops.UnloadLora]) -> dict[str, Any]:
        """Unloads an adapter."""
        target = update_requests.LoraTarget(kind="lora", op="unload", name=call.body.lora_name)
        return await self.update(call.with_body(update_requests.UpdateCall(target=target)))

    async def new_run(self, call: FleetCall[Empty]) -> dict[str, Any]:
        """Commits sequence 0 of a new run: the model that each worker was started with."""
        request = request_hash({"new_run": True})
        if (first := await self._first_answer(call, request)) is not None:
            return first
        await whole_fleet(call)
        asked_for = UpdateCommand("new_run", call.request_id)
        return await self._once(call, request, asked_for, None, label="initial")

    async def fix_first_version(self) -> None:
        """Writes the record of a fleet that has none: the newest that a worker knows, else sequence 0 by the model of
        all workers. Where keys have roles, no worker may write it. Locked while a coordinator is alive."""
        view = await self._calls.view()
        async with self._calls.lock(view, 0.0):
            entry = await view.read_record()
            stored = record_of(entry)
            if stored is not None:
                return
            reports = await self._calls.ask(view, list(await view.barrier()), "report_record", {})
            record = newest(None, view.record, reports)
            if record is None:
                if is_unreadable(entry, stored):
                    raise unreadable_record()  # a version may be committed
                record = first_record(one_model(reports))
            await restore(self._calls.bus, view.subjects.state, record, entry)

    async def finish(self) -> WeightVersion:
        """Finishes or drops an update whose coordinator has died. Returns what the newest decision has made. Locked
        while a coordinator is alive."""
        view = await self._calls.view()
        async with self._calls.lock(view, 0.0) as held:
            outcome = await Coordinator(self._calls, view, held).run(UpdateCommand("finish", ""))
        assert isinstance(outcome, Outcome)
        return outcome.version

    async def check_none_waits(self, call: FleetCall[Any], held: HeldLock) -> None:
        """Raises Locked while a prepared update waits. Drops an update that can't be completed any more."""
        if await self._session(call, None) is not None:
            await Coordinator(self._calls, call.view, held).run(UpdateCommand("finish", ""))


def _complete_wait_s(waiting: UpdateSession | None) -> float:
    """Seconds to wait for the lock to complete or label an update: as long as for its bytes. After a short wait the
    trainer would send them again, because another call held the lock for a moment."""
    if waiting is None:
        return DEFAULT_LOCK_WAIT_S
    return update_requests.UpdateWeights.model_validate(waiting.body).policy.prepare_timeout_s


def _rows_of(ready: Members) -> list[dict[str, Any]]:
    return [{"instance_id": key, "incarnation": one, "status": "ok"} for key, one in sorted(ready.items())]


def _with_buckets(reply: dict[str, Any], pushed: int | None) -> dict[str, Any]:
    return reply if pushed is None else {**reply, "num_buckets_received": pushed}


def _check_name(target: update_requests.BaseTarget | update_requests.LoraTarget, snapshot: Snapshot) -> None:
    """Refuses an adapter with the base model's name: requests select both by the same field."""
    names = {member.info.get("model") for member in snapshot}
    if isinstance(target, update_requests.LoraTarget) and target.op == "load" and target.name in names:
        raise InvalidRequest(
            f"the base model is called {target.name!r}", field="target.name", fix="give the adapter another name"
        )
