"""The fleet's updates, as Fleet's callers ask for them: each held by its lock, told by its journal, done by a
Coordinator."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rl_plane.bus.lock import DEFAULT_LOCK_WAIT_S, HeldLock
from rl_plane.bus.state_store import read_record, read_session
from rl_plane.client import RlClient
from rl_plane.commit.coordinator import Coordinator
from rl_plane.commit.history import (
    Journal,
    UpdateEntry,
    before_of,
    first_answer,
    is_answered,
    read_entry,
    read_history,
    request_hash,
    rollback_target,
    source_of,
    target_of,
)
from rl_plane.commit.session_keepalive import lock_with_keepalive
from rl_plane.commit.steps import Members, Outcome, PartReceived, Prepared, UpdateCommand
from rl_plane.errors import InvalidRequest, Locked, PlaneError, StaleFence, UpdateAborted
from rl_plane.fleet.fleet_replies import Call, answered, ended, head, updated
from rl_plane.membership.core import Snapshot
from rl_plane.protocol import update_requests
from rl_plane.protocol.record import Source, UpdateSession
from rl_plane.protocol.versions import WeightVersion


class FleetUpdates:
    """`members(call)`: the fleet that a call means."""

    def __init__(self, client: RlClient, members: Callable[[Call], Awaitable[Snapshot]]) -> None:
        self._client = client
        self._members = members

    async def update(self, call: Call) -> dict[str, Any]:
        asked = update_requests.UpdateCall.model_validate(call.body)
        request = request_hash(asked.model_dump())
        if (first := await self._first_answer(call, request)) is not None:
            return first
        snapshot = await self.whole(call)
        body, before = await self._with_source(call, asked, snapshot)
        _check_name(body.target, snapshot)
        pinned = call.select.epoch is not None or call.select.fingerprint is not None
        policy = body.policy
        # Asked twice at once, by way of two frontends: the second waits for the first.
        same_wait_s = policy.prepare_timeout_s + 2 * policy.commit_timeout_s
        pin = snapshot.fingerprint if pinned else None
        asked_for = UpdateCommand("update", call.request_id, body, pin, before=before)
        return await self._once(call, request, asked_for, body.model_dump(), asked.rollback, same_wait_s)

    async def _once(
        self,
        call: Call,
        request: str,
        asked_for: UpdateCommand,
        body: Mapping[str, Any],
        rollback: update_requests.Rollback | None = None,
        same_wait_s: float = 0.0,
    ) -> dict[str, Any]:
        """Coordinates it, or, asked again, gives the first answer; one that was decided and not answered goes on."""
        try:
            async with self._client.lock(call.view, update_id=call.request_id, same_wait_s=same_wait_s) as held:
                journal = self._journal(call, held, body, request, rollback)
                if call.may_repeat and (entry := await journal.first_answer()) is not None:
                    return answered(call, entry)
                try:
                    return await self._committed(call, held, journal, asked_for)
                except PlaneError as error:
                    await journal.failed(error)
                    raise
        except (Locked, StaleFence):
            # The first may have ended, and a third one begun, between two looks at the lock; or, while this process
            # stood still, another call under the same id has taken over and done it.
            if (first := await self._first_answer(call, request)) is not None:
                return first
            raise

    async def _first_answer(self, call: Call, request: str) -> dict[str, Any] | None:
        entry = await self._first_entry(call, request)
        return answered(call, entry) if entry is not None else None

    async def _first_entry(self, call: Call, request: str) -> UpdateEntry | None:
        if not call.may_repeat:
            return None
        return await first_answer(self._client.bus, call.view.subjects.state, call.request_id, request)

    async def _with_source(
        self, call: Call, asked: update_requests.UpdateCall, snapshot: Snapshot
    ) -> tuple[update_requests.UpdateWeights, Source | None]:
        """The update itself: a roll-back is one with the source and the digest that the history has, and of a delta
        with the source of what it changed."""
        given: dict[str, Any] = asked.model_dump(exclude={"rollback"}, exclude_unset=True)
        if asked.rollback is None:
            return update_requests.UpdateWeights.model_validate(given), None
        state = call.view.subjects.state
        entries = await read_history(self._client.bus, state)
        record = await read_record(self._client.bus, state)
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
        call: Call,
        held: HeldLock,
        body: Mapping[str, Any],
        request: str,
        rollback: update_requests.Rollback | None = None,
    ) -> Journal:
        return Journal(
            self._client.bus,
            call.view.subjects.state,
            held,
            self._client.owner,
            call.request_id,
            body,
            request,
            rollback.model_dump(exclude_none=True) if rollback is not None else None,
        )

    async def _committed(
        self, call: Call, held: HeldLock, journal: Journal | None, asked_for: UpdateCommand
    ) -> dict[str, Any]:
        """Coordinates what is to be committed, and tells the history."""
        coordinator = Coordinator(self._client, call.view, held, journal)
        outcome = await coordinator.run(asked_for)
        assert isinstance(outcome, Outcome)
        reply = updated(call, outcome, coordinator.phases)
        if journal is not None:
            await journal.committed(outcome, reply["workers"], coordinator.phases)
        return reply

    async def prepare(self, call: Call) -> dict[str, Any]:
        snapshot = await self.whole(call)
        body = update_requests.UpdateWeights.model_validate(call.body)
        _check_name(body.target, snapshot)
        asked = request_hash(body.model_dump())
        if (
            body.in_parts and body.transport is not None
        ):  # a group with ranks that are not there any more is no use
            ranks = sum(int(member.info["world_size"]) for member in snapshot)
            transport = body.transport.model_copy(update={"fleet_ranks": ranks})
            body = body.model_copy(update={"transport": transport})
        async with self._client.lock(call.view, update_id=call.request_id) as held:
            journal = self._journal(call, held, body.model_dump(), asked)
            if (entry := await self._first_entry(call, asked)) is not None:
                raise ended(entry)
            if call.may_repeat:
                await journal.settle_own()
            start = time.monotonic()
            try:
                prepared = await Coordinator(self._client, call.view, held, journal).run(
                    UpdateCommand("prepare", call.request_id, body)
                )
            except PlaneError as error:
                await journal.failed(error)
                raise
            assert isinstance(prepared, Prepared)
            rows = _rows_of(prepared.ready)
            await journal.prepared(rows, prepared.digest or None, time.monotonic() - start)
        return {
            **head(call, call.view.snapshot()),
            "update_id": call.request_id,
            "ready": True,
            "digest": prepared.digest or None,
            "workers": rows,
            "excluded": prepared.excluded,
        }

    async def feed(self, call: Call) -> dict[str, Any]:
        part = update_requests.Part.model_validate(
            {key: call.body[key] for key in update_requests.Part.model_fields if key in call.body}
        )
        snapshot, update_id = await self.whole(call), call.body.get("update_id")
        waiting = await self._session(call, update_id)
        # Its trainer sends already: there is no "later" for it. Another part may be on its way, by another group.
        wait_s = DEFAULT_LOCK_WAIT_S if waiting is None else part.timeout_s
        held_for = "" if waiting is None else waiting.update_id
        async with lock_with_keepalive(self._client, call.view, waiting, wait_s, held_for) as held:
            journal = await self._prepared_journal(call, held, await self._session(call, update_id))
            asked_for = UpdateCommand(
                "receive_part",
                update_id or "",
                part=part,
                version=call.body.get("version"),
                pause_mode=call.body.get("pause_mode"),
            )
            try:
                fed = await Coordinator(self._client, call.view, held, journal).run(asked_for)
            except PlaneError as error:
                if journal is not None and not isinstance(error, Locked):
                    await journal.failed(error)
                raise
        assert isinstance(fed, PartReceived)
        return {
            **head(call, snapshot),
            "update_id": fed.session.update_id,
            "missing": fed.missing,
            "tensors": len(part.names),
            "bytes": sum(spec.nbytes for spec in part.specs),
            "workers": _rows_of(fed.session.prepared),
        }

    async def name(self, call: Call) -> dict[str, Any]:
        snapshot, update_id = await self.whole(call), call.body.get("update_id")
        waiting = await self._session(call, update_id)
        async with lock_with_keepalive(self._client, call.view, waiting, _complete_wait_s(waiting)) as held:
            asked_for = UpdateCommand("label", update_id or "", version=call.body["version"])
            session = await Coordinator(self._client, call.view, held).run(asked_for)
        assert isinstance(session, UpdateSession)
        rows = _rows_of(session.prepared)
        return {**head(call, snapshot), "update_id": session.update_id, "label": session.label, "workers": rows}

    async def complete(self, call: Call) -> dict[str, Any]:
        update_id = call.body.get("update_id")
        if (first := await self._completed(call, update_id)) is not None:
            return first
        await self.whole(call)
        waiting = await self._session(call, update_id)
        async with lock_with_keepalive(self._client, call.view, waiting, _complete_wait_s(waiting)) as held:
            session = await self._session(call, update_id)
            # The first call may have ended while this one waited for it.
            if session is None and (first := await self._completed(call, update_id)) is not None:
                return first
            journal = await self._prepared_journal(call, held, session, update_id)
            pushed = journal.entry.num_buckets if journal is not None else None
            asked = call.body.get("num_buckets")
            if session is not None and asked is not None and asked != pushed:
                raise InvalidRequest(
                    f"{asked} buckets are said to be sent; "
                    + ("none are awaited" if pushed is None else f"{pushed} were announced"),
                    field="num_buckets",
                    fix="send what the manifest lists, or abort_weights_update",
                )
            asked_for = UpdateCommand(
                "complete",
                update_id or "",
                digest=call.body.get("digest"),
                version=call.body.get("version"),
                min_ready=journal.entry.min_ready if journal is not None else 1,
            )
            try:
                reply = await self._committed(call, held, journal, asked_for)
            except PlaneError as error:
                if journal is not None:
                    await journal.failed(error)
                    if journal.entry.outcome_unreported and isinstance(error, UpdateAborted):
                        raise journal.entry.first_error() from error  # another one is committed since
                raise
        return _with_buckets(reply, pushed)

    async def _completed(self, call: Call, update_id: str | None) -> dict[str, Any] | None:
        """The first answer, or its error again; None: that update has not ended, or was not answered."""
        bus, state = self._client.bus, call.view.subjects.state
        entry = await read_entry(bus, state, update_id) if update_id else None
        if entry is None or not await is_answered(bus, state, entry):
            return None
        if entry.outcome == "aborted" and await self._session(call, update_id) is not None:
            return None  # it is there still, and may go well
        return _with_buckets(answered(call, entry), entry.num_buckets)

    async def _session(self, call: Call, update_id: str | None) -> UpdateSession | None:
        """The update that waits for complete or abort, if it is the one that is meant."""
        session = await read_session(self._client.bus, call.view.subjects.state)
        return session if session is not None and update_id in (None, session.update_id) else None

    async def _prepared_journal(
        self, call: Call, held: HeldLock, session: UpdateSession | None, update_id: str | None = None
    ) -> Journal | None:
        """`update_id`: of one that waits no more, and was decided perhaps."""
        if session is None:
            if not update_id:
                return None
            call.request_id = update_id
            journal = self._journal(call, held, {}, "")
            await journal.go_on()
            return journal
        call.request_id = session.update_id
        body = update_requests.UpdateWeights.model_validate(session.body)
        journal = self._journal(call, held, body.model_dump(), request_hash(body.model_dump()))
        await journal.take_up()
        return journal

    async def abort(self, call: Call) -> dict[str, Any]:
        snapshot = await self.whole(call)
        update_id = call.body.get("update_id")
        async with self._client.lock(call.view) as held:
            journal = await self._prepared_journal(call, held, await self._session(call, update_id))
            session = await Coordinator(self._client, call.view, held, journal).run(
                UpdateCommand("abort", update_id or "")
            )
            assert isinstance(session, UpdateSession)
            if journal is not None:
                await journal.failed(
                    UpdateAborted("its caller aborted it", field="update_id", fix="begin another update")
                )
        return {**head(call, snapshot), "update_id": session.update_id, "workers": []}

    async def whole(self, call: Call) -> Snapshot:
        if call.select.workers is not None:
            raise InvalidRequest(
                "an update is of the whole fleet", field="workers", fix="leave it out; disable a worker instead"
            )
        return await self._members(call)

    async def load_lora(self, call: Call) -> dict[str, Any]:
        name = call.body["lora_name"]
        record = await read_record(self._client.bus, call.view.subjects.state)
        op = "swap" if record is not None and name in record.adapters else "load"
        if call.may_repeat:
            entry = await read_entry(self._client.bus, call.view.subjects.state, call.request_id)
            if entry is not None and entry.target is not None:
                op = entry.target.get("op", op)  # asked again, it means what it meant
        call.body = {
            "target": {"kind": "lora", "op": op, "name": name},
            "transport": {"backend": "filesystem", "path": call.body["lora_path"]},
            "cast": call.body.get("cast", False),
        }
        return await self.update(call)

    async def unload_lora(self, call: Call) -> dict[str, Any]:
        call.body = {"target": {"kind": "lora", "op": "unload", "name": call.body["lora_name"]}}
        return await self.update(call)

    async def new_run(self, call: Call) -> dict[str, Any]:
        request = request_hash({"new_run": True})
        if (first := await self._first_answer(call, request)) is not None:
            return first
        await self.whole(call)
        asked_for = UpdateCommand("new_run", call.request_id)
        return await self._once(call, request, asked_for, {"version": "initial"})

    async def finish(self) -> WeightVersion:
        """Finishes or drops what a dead coordinator has left; nothing, while one is alive. Returns what the newest
        decision has made: the version before, if that one came back."""
        view = await self._client.view()
        async with self._client.lock(view, 0.0) as held:
            outcome = await Coordinator(self._client, view, held).run(UpdateCommand("finish", ""))
        assert isinstance(outcome, Outcome)
        return outcome.version

    async def check_none_waits(self, call: Call, held: HeldLock) -> None:
        """Locked while a prepared update waits; one that nobody can complete any more is dropped."""
        if await self._session(call, None) is not None:
            await Coordinator(self._client, call.view, held).run(UpdateCommand("finish", ""))


def _complete_wait_s(waiting: UpdateSession | None) -> float:
    """What was sent is not sent again, or nameless, because the fleet is taken for a moment: as long as bytes are
    waited for."""
    if waiting is None:
        return DEFAULT_LOCK_WAIT_S
    return update_requests.UpdateWeights.model_validate(waiting.body).policy.prepare_timeout_s


def _rows_of(ready: Members) -> list[dict[str, Any]]:
    return [{"instance_id": key, "incarnation": one, "status": "ok"} for key, one in sorted(ready.items())]


def _with_buckets(reply: dict[str, Any], pushed: int | None) -> dict[str, Any]:
    return reply if pushed is None else {**reply, "num_buckets_received": pushed}


def _check_name(target: update_requests.BaseTarget | update_requests.LoraTarget, snapshot: Snapshot) -> None:
    """Requests name an adapter as they name a model."""
    names = {member.info.get("model") for member in snapshot}
    if isinstance(target, update_requests.LoraTarget) and target.op == "load" and target.name in names:
        raise InvalidRequest(
            f"the base model is called {target.name!r}", field="target.name", fix="give the adapter another name"
        )
