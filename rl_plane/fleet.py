"""The fleet's ops: what the HTTP facade, the fleet subject, RlClient and the command line all answer.

`Fleet.run(op, body)` takes the same body and gives the same merged reply everywhere. It raises a PlaneError for
everything that is not a complete success; the error's facts then name every worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rl_plane import bodies, ops, update_bodies
from rl_plane.client import FanOut, RlClient, check_pin, select_members
from rl_plane.coordinator import Coordinator
from rl_plane.errors import (
    Conflict,
    InvalidRequest,
    Locked,
    MembershipChanged,
    NoWorkers,
    PlaneError,
    StaleFence,
    Unavailable,
    Unsupported,
    UpdateAborted,
)
from rl_plane.fleet_ops import FLEET_OPS, ONE_COMPONENT, Select
from rl_plane.fleet_replies import (
    Call,
    adapters_of,
    answered,
    change_error,
    common,
    ended,
    facts_of,
    group_places,
    head,
    in_order,
    is_serving,
    join,
    merged,
    updated,
)
from rl_plane.history import (
    Journal,
    before_of,
    first_answer,
    pushed_buckets,
    read_entry,
    read_history,
    request_hash,
    rollback_target,
    source_of,
    target_of,
)
from rl_plane.lock import HeldLock
from rl_plane.membership import Snapshot
from rl_plane.record import (
    DesiredPause,
    Source,
    UpdateSession,
    read_pause,
    read_record,
    read_session,
    version_wire,
)
from rl_plane.subjects import ADMISSION_PREFIX, PAUSE, check_name
from rl_plane.update_steps import Call as Coordination
from rl_plane.update_steps import Fed, Members, Outcome, Prepared

READY_POLL_S = 0.2
LOST_RETRIES = 3
"""A changing call repeats itself on the rest when a member dies under it; so many deaths in a row are a storm."""


Handler = Callable[["Call"], Awaitable[dict[str, Any]]]


class Fleet:
    """The merged ops over one RlClient; safe to call concurrently."""

    def __init__(self, client: RlClient) -> None:
        self.client = client
        self.liveness_timeout_s = ops.OPS["liveness"].timeout_s
        self._handlers: dict[str, Handler] = {
            "liveness": self._liveness,
            "ready": self._ready,
            "state": self._state,
            "workers": self._workers,
            "weight_version": self._weight_version,
            "describe": self._read,
            "updates": self._updates,
            "init_transport": self._init_transport,
            "release_memory": self._memory,
            "resume_memory": self._memory,
            "pause": self._pause,
            "resume": self._resume,
            "update_weights": self._update,
            "prepare_weights_update": self._prepare,
            "feed_weights_update": self._feed,
            "complete_weights_update": self._complete,
            "abort_weights_update": self._abort,
            "load_lora_adapter": self._load_lora,
            "unload_lora_adapter": self._unload_lora,
            "new_run": self._new_run,
            "enable": self._admission,
            "disable": self._admission,
        }

    async def run(self, op: str, body: dict[str, Any] | None = None, request_id: str = "") -> dict[str, Any]:
        """The merged reply. `request_id` makes updates idempotent: asked again, the first answer comes back."""
        spec = FLEET_OPS.get(op)
        if spec is None:
            raise InvalidRequest(f"unknown op {op!r}", field="op", fix=f"the ops are {', '.join(FLEET_OPS)}")
        parsed = bodies.parse_body(spec.request, body or {})
        assert isinstance(parsed, Select)
        own = parsed.model_dump(exclude=set(Select.model_fields), exclude_unset=True)
        names = list(dict.fromkeys(parsed.component or [self.client.component]))
        calls = []
        for name in names:  # every name is checked before anybody is asked
            check_name("component", name)
            view = await self.client.view(name)
            update_id = request_id or uuid.uuid4().hex
            calls.append(Call(spec, parsed, own, view, update_id, bool(request_id), time.monotonic()))
        handler = self._handlers.get(op, self._change)
        if len(calls) > 1 and op in ONE_COMPONENT:
            raise InvalidRequest("an update is of one component", field="component", fix="name one, call by call")
        if len(calls) > 1 and spec.method == "POST":
            for call in calls:
                await self._members(call)
        replies = [await handler(call) for call in calls]
        return replies[0] if len(replies) == 1 else join(names, replies)

    # ---- who ----

    async def _members(self, call: Call) -> Snapshot:
        """The fleet that the call means, once it is large enough."""
        select, view = call.select, call.view
        if len(view.snapshot()) < select.min_workers:
            await view.wait_until(lambda now: len(now) >= select.min_workers, select.wait_s)
        pinned = select.epoch is not None or select.fingerprint is not None
        # Reading asks whom this view knows; what changes the fleet or names it means the fleet as it is.
        snapshot = await view.barrier() if pinned or call.op.method == "POST" else view.snapshot()
        if len(snapshot) < select.min_workers:
            raise NoWorkers(
                f"{len(snapshot)} of {select.min_workers} workers are there after {select.wait_s:g} s",
                field="min_workers",
                fix="start workers (`rl-plane worker`), or wait longer (wait_s)",
                epoch=snapshot.epoch,
                fingerprint=snapshot.fingerprint,
                retry_after_s=1.0,
            )
        check_pin(snapshot, select.epoch, select.fingerprint)
        select_members(snapshot, select.workers)
        return snapshot

    async def _ask(self, call: Call, op: str, body: dict[str, Any] | None = None, **more: Any) -> FanOut:
        return await self.client.call_all(
            op,
            body,
            workers=call.select.workers,
            component=call.view.subjects.component,
            epoch=call.select.epoch,
            fingerprint=call.select.fingerprint,
            empty="ok",
            **more,
        )

    # ---- reading ----

    async def _read(self, call: Call) -> dict[str, Any]:
        await self._members(call)
        return merged(call, await self._ask(call, call.op.name))

    async def _liveness(self, call: Call) -> dict[str, Any]:
        await self._members(call)
        out = await self._ask(call, "liveness", timeout_s=self.liveness_timeout_s)
        if out.failed:
            raise Unavailable(
                f"{len(out.failed)} of {len(out.rows)} engines did not answer", **facts_of(call, out), alive=False
            )
        return merged(call, out, alive=True)

    async def _ready(self, call: Call) -> dict[str, Any]:
        """A probe answers at once; a caller that gives `wait_s` waits so long for it to hold."""
        wait_s = call.select.wait_s if "wait_s" in call.select.model_fields_set else 0.0
        while True:
            try:
                return await self._ready_now(call)
            except Unavailable:
                if time.monotonic() >= call.start + wait_s:
                    raise
            await asyncio.sleep(READY_POLL_S)

    async def _ready_now(self, call: Call) -> dict[str, Any]:
        reply = await self._liveness(call)
        record = call.view.record
        out = await self._ask(call, "state")
        serving = [row for row in out.rows if row.status == "ok" and is_serving(row, record)]
        wanted = max(1, call.select.min_workers)
        if len(serving) < wanted:
            raise Unavailable(
                f"{len(serving)} admitted workers hold the committed version; {wanted} are wanted",
                **facts_of(call, out),
                ready=False,
            )
        return {**merged(call, out, ready=True), "alive": reply["alive"]}

    async def _state(self, call: Call) -> dict[str, Any]:
        await self._members(call)
        record = call.view.record
        out = await self._ask(call, "state")
        bodies = [row.body for row in out.rows if row.status == "ok"]
        return merged(
            call,
            out,
            ready=bool(bodies) and not out.failed and all(is_serving(row, record) for row in out.rows),
            engine_alive=bool(bodies) and not out.failed and all(body["engine_alive"] for body in bodies),
            pause_state=common([body["pause_state"] for body in bodies], "mixed"),
            applied_weight_version=common([body["applied_weight_version"] for body in bodies], None),
            loras=sorted({name for body in bodies for name in body["loras"]}),
            version=version_wire(record),
            adapters=adapters_of(record),
            sources=[source.transport for source in record.sources if source.transport] if record else [],
            sequence=record.sequence if record else None,
        )

    async def _workers(self, call: Call) -> dict[str, Any]:
        snapshot = await self._members(call)
        out = await self._ask(call, "state")
        reply = merged(call, out)
        for row, member in zip(reply["workers"], in_order(snapshot, out), strict=True):
            row.update({"namespace": call.view.subjects.namespace, "component": call.view.subjects.component})
            if member is not None:
                row.update(member.info)
        return reply

    async def _weight_version(self, call: Call) -> dict[str, Any]:
        await self._members(call)
        out = await self._ask(call, "state")
        served: dict[str, list[str]] = {}
        for row in out.rows:
            if row.status == "ok" and row.body["admission"]["open"] and row.body["version"]:
                adapters = sorted(row.body["adapters"].items())
                held = [row.body["version"]["digest"], *(f"{name}={one['digest']}" for name, one in adapters)]
                served.setdefault(" ".join(held), []).append(row.instance_id)
        if len(served) > 1:
            raise Conflict("the fleet serves several versions", versions=served, **facts_of(call, out))
        record = call.view.record
        return merged(call, out, version=version_wire(record), adapters=adapters_of(record))

    async def _updates(self, call: Call) -> dict[str, Any]:
        """Past updates: nobody is asked, so an empty fleet tells them too. `workers` picks of each its rows."""
        snapshot = call.view.snapshot()
        check_pin(snapshot, call.select.epoch, call.select.fingerprint)
        entries = await read_history(
            self.client.bus, call.view.subjects.state, update_bodies.ListUpdates.model_validate(call.body).limit
        )
        told = [entry.to_wire() for entry in entries]
        if call.select.workers is not None:
            for one in told:
                rows = one["workers"]
                one["workers"] = {key: rows[key] for key in call.select.workers if key in rows}
        return {**head(call, snapshot), "updates": told, "workers": []}

    # ---- changing ----

    async def _change(self, call: Call) -> dict[str, Any]:
        """An op that is the same on every worker: done on all of them, or an error that names each."""
        return await self._on_all(call, call.op.name, call.body)

    async def _on_all(
        self,
        call: Call,
        op: str,
        body: dict[str, Any],
        *,
        desired: DesiredPause | None = None,
        admission: bytes | None = None,
    ) -> dict[str, Any]:
        """`desired` and `admission` are written before anybody is asked, so that a worker which joins meanwhile
        does as the fleet does; a call that fails takes the desired pause back."""
        snapshot = await self._members(call)
        async with self.client.lock(call.view) as held:
            for instance_id in (call.select.workers or []) if admission is not None else []:
                await held.put(ADMISSION_PREFIX + instance_id, admission or b"")
            if desired is None or call.select.workers is not None:
                return await self._on_each(call, op, body, held, snapshot)
            earlier = await read_pause(self.client.bus, call.view.subjects.state)
            await held.put(PAUSE, desired.encode())
            try:
                return await self._on_each(call, op, body, held, snapshot)
            except PlaneError:
                with contextlib.suppress(PlaneError):
                    await held.put(PAUSE, earlier.encode())
                raise

    async def _on_each(
        self, call: Call, op: str, body: dict[str, Any], held: HeldLock, snapshot: Snapshot
    ) -> dict[str, Any]:
        component, workers = call.view.subjects.component, call.select.workers
        pinned = call.select.epoch is not None or call.select.fingerprint is not None
        for _ in range(LOST_RETRIES):
            out = await self.client.call_all(
                op, body, workers=workers, component=component, empty="ok", held=held, request_id=call.request_id
            )
            # A member that died under an unpinned call: the call means the fleet, whoever is in it. Again on the
            # rest, which costs them nothing.
            if workers is not None or pinned or not any(row.lost for row in out.rows):
                break
        after = await call.view.barrier() if pinned else snapshot
        if after.fingerprint != snapshot.fingerprint:
            raise MembershipChanged(
                **{**facts_of(call, out), "epoch": after.epoch, "fingerprint": after.fingerprint},
                before_epoch=snapshot.epoch,
                after_epoch=after.epoch,
                fix=f"{op} was done where a row says ok; read the members again, then repeat it or take it back",
            )
        if out.failed:
            raise change_error(call, op, out)
        return merged(call, out)

    async def _memory(self, call: Call) -> dict[str, Any]:
        """By all or by nobody: not every engine, or not as it was started, can do this."""
        out, op = await self._ask(call, "describe"), call.op.name
        told = [row for row in out.rows if row.status == "ok"]
        lacking = {row.instance_id: why for row in told if (why := row.body["capabilities"].get(op)) is not None}
        if lacking:
            first = next(iter(lacking.values()))
            raise Unsupported(
                f"{len(lacking)} of {len(out.rows)} engines can't {op}: {first}",
                field="op",
                lacking=lacking,
                fix="start the workers with --enable-memory-saver, where the engine has it; or only pause",
            )
        return await self._change(call)

    async def _init_transport(self, call: Call) -> dict[str, Any]:
        """A group is formed by every rank of the fleet, each at its own place in it."""
        if call.body["backend"] not in update_bodies.PUSHED:
            return await self._change(call)
        await self._whole_fleet(call)
        async with self.client.lock(call.view) as held:
            snapshot = await call.view.barrier()
            places = group_places(snapshot, call.body)
            out = await self.client.call_all(
                "init_transport",
                {**call.body, **places},
                component=call.view.subjects.component,
                fingerprint=snapshot.fingerprint,
                empty="ok",
                held=held,
            )
        if out.failed:
            raise change_error(call, "init_transport", out)
        return merged(call, out, **places)

    async def _pause(self, call: Call) -> dict[str, Any]:
        pause = ops.Pause.model_validate(call.body)
        desired = DesiredPause(True, pause.mode, time.time() + pause.lease_s)
        return await self._on_all(call, "pause", call.body, desired=desired)

    async def _resume(self, call: Call) -> dict[str, Any]:
        return await self._on_all(call, "resume", call.body, desired=DesiredPause(False))

    async def _admission(self, call: Call) -> dict[str, Any]:
        if not call.select.workers:
            raise InvalidRequest("name the workers", field="workers", fix="workers: [instance_id]")
        is_open = call.op.name == "enable"
        body = {"open": is_open}
        return await self._on_all(call, "set_admission", body, admission=b"" if is_open else b"disabled")

    # ---- updates ----

    async def _update(self, call: Call) -> dict[str, Any]:
        asked = update_bodies.UpdateCall.model_validate(call.body)
        request = request_hash(asked.model_dump())
        if (first := await self._first_answer(call, request)) is not None:
            return first
        snapshot = await self._whole_fleet(call)
        body, before = await self._with_source(call, asked, snapshot)
        _check_name(body.target, snapshot)
        pinned = call.select.epoch is not None or call.select.fingerprint is not None
        policy = body.policy
        # Asked twice at once, by way of two frontends: the second waits for the first.
        same_wait_s = policy.prepare_timeout_s + 2 * policy.commit_timeout_s
        try:
            async with self.client.lock(call.view, update_id=call.request_id, same_wait_s=same_wait_s) as held:
                journal = self._journal(call, held, body.model_dump(), request, asked.rollback)
                if call.may_repeat and (entry := await journal.first_answer(goes_on=True)) is not None:
                    return answered(call, entry)
                try:
                    pin = snapshot.fingerprint if pinned else None
                    asked_for = Coordination("update", call.request_id, body, pin, before=before)
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
        if not call.may_repeat:
            return None
        entry = await first_answer(self.client.bus, call.view.subjects.state, call.request_id, request)
        return answered(call, entry) if entry is not None else None

    async def _with_source(
        self, call: Call, asked: update_bodies.UpdateCall, snapshot: Snapshot
    ) -> tuple[update_bodies.UpdateWeights, Source | None]:
        """The update itself: a roll-back is one with the source and the digest that the history has, and of a delta
        with the source of what it changed."""
        given: dict[str, Any] = asked.model_dump(exclude={"rollback"}, exclude_unset=True)
        if asked.rollback is None:
            return update_bodies.UpdateWeights.model_validate(given), None
        state = call.view.subjects.state
        entries = await read_history(self.client.bus, state)
        record = await read_record(self.client.bus, state)
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
        body = update_bodies.UpdateWeights.model_validate({"version": target.label, **given, **found})
        return body, before_of(target)

    def _journal(
        self,
        call: Call,
        held: HeldLock,
        body: Mapping[str, Any],
        request: str,
        rollback: update_bodies.Rollback | None = None,
    ) -> Journal:
        return Journal(
            self.client.bus,
            call.view.subjects.state,
            held,
            self.client.owner,
            call.request_id,
            body,
            request,
            rollback.model_dump(exclude_none=True) if rollback is not None else None,
        )

    async def _committed(
        self, call: Call, held: HeldLock, journal: Journal | None, asked_for: Coordination
    ) -> dict[str, Any]:
        """Coordinates what is to be committed, and tells the history."""
        coordinator = Coordinator(self.client, call.view, held, journal)
        outcome = await coordinator.run(asked_for)
        assert isinstance(outcome, Outcome)
        reply = updated(call, outcome, coordinator.phases)
        if journal is not None:
            await journal.committed(outcome.version, reply["workers"], outcome.excluded, coordinator.phases)
        return reply

    async def _prepare(self, call: Call) -> dict[str, Any]:
        snapshot = await self._whole_fleet(call)
        body = update_bodies.UpdateWeights.model_validate(call.body)
        _check_name(body.target, snapshot)
        asked = request_hash(body.model_dump())
        if body.fed and body.transport is not None:  # a group with ranks that are not there any more is no use
            ranks = sum(int(member.info["world_size"]) for member in snapshot)
            transport = body.transport.model_copy(update={"fleet_ranks": ranks})
            body = body.model_copy(update={"transport": transport})
        async with self.client.lock(call.view, update_id=call.request_id) as held:
            journal = self._journal(call, held, body.model_dump(), asked)
            if call.may_repeat and (entry := await journal.first_answer()) is not None:
                raise ended(entry)
            start = time.monotonic()
            try:
                prepared = await Coordinator(self.client, call.view, held, journal).run(
                    Coordination("prepare", call.request_id, body)
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

    async def _feed(self, call: Call) -> dict[str, Any]:
        part = update_bodies.Part.model_validate(
            {key: call.body[key] for key in update_bodies.Part.model_fields if key in call.body}
        )
        snapshot, update_id = await self._whole_fleet(call), call.body.get("update_id")
        async with self.client.lock(call.view) as held:
            journal = await self._prepared_journal(call, held, await self._session(call, update_id))
            asked_for = Coordination("feed", update_id or "", part=part)
            try:
                fed = await Coordinator(self.client, call.view, held, journal).run(asked_for)
            except PlaneError as error:
                if journal is not None and not isinstance(error, Locked):
                    await journal.failed(error)
                raise
        assert isinstance(fed, Fed)
        return {
            **head(call, snapshot),
            "update_id": fed.session.update_id,
            "missing": fed.missing,
            "tensors": len(part.names),
            "bytes": sum(spec.nbytes for spec in part.specs),
            "workers": _rows_of(fed.session.prepared),
        }

    async def _complete(self, call: Call) -> dict[str, Any]:
        update_id = call.body.get("update_id")
        state = call.view.subjects.state
        if update_id is not None:
            entry = await read_entry(self.client.bus, state, update_id)
            if entry is not None and entry.outcome == "committed":
                return _with_buckets(answered(call, entry), entry.num_buckets)
        await self._whole_fleet(call)
        async with self.client.lock(call.view) as held:
            session = await self._session(call, update_id)
            pushed = pushed_buckets(session.body["transport"]) if session is not None and session.armed else None
            asked = call.body.get("num_buckets")
            if session is not None and asked is not None and asked != pushed:
                raise InvalidRequest(
                    f"{asked} buckets are said to be sent; "
                    + ("none are awaited" if pushed is None else f"{pushed} were announced"),
                    field="num_buckets",
                    fix="send what the manifest lists, or abort_weights_update",
                )
            journal = await self._prepared_journal(call, held, session)
            asked_for = Coordination(
                "complete", update_id or "", digest=call.body.get("digest"), version=call.body.get("version")
            )
            try:
                reply = await self._committed(call, held, journal, asked_for)
            except PlaneError as error:
                if journal is not None:
                    await journal.failed(error)
                raise
        return _with_buckets(reply, pushed)

    async def _session(self, call: Call, update_id: str | None) -> UpdateSession | None:
        """The update that waits for complete or abort, if it is the one that is meant."""
        session = await read_session(self.client.bus, call.view.subjects.state)
        return session if session is not None and update_id in (None, session.update_id) else None

    async def _prepared_journal(self, call: Call, held: HeldLock, session: UpdateSession | None) -> Journal | None:
        if session is None:
            return None
        call.request_id = session.update_id
        body = update_bodies.UpdateWeights.model_validate(session.body)
        journal = self._journal(call, held, body.model_dump(), request_hash(body.model_dump()))
        await journal.take_up()
        return journal

    async def _abort(self, call: Call) -> dict[str, Any]:
        snapshot = await self._whole_fleet(call)
        update_id = call.body.get("update_id")
        async with self.client.lock(call.view) as held:
            journal = await self._prepared_journal(call, held, await self._session(call, update_id))
            session = await Coordinator(self.client, call.view, held, journal).run(
                Coordination("abort", update_id or "")
            )
            assert isinstance(session, UpdateSession)
            if journal is not None:
                await journal.failed(UpdateAborted("its caller aborted it"))
        return {**head(call, snapshot), "update_id": session.update_id, "workers": []}

    async def _whole_fleet(self, call: Call) -> Snapshot:
        if call.select.workers is not None:
            raise InvalidRequest(
                "an update is of the whole fleet", field="workers", fix="leave it out; disable a worker instead"
            )
        return await self._members(call)

    async def _load_lora(self, call: Call) -> dict[str, Any]:
        name = call.body["lora_name"]
        record = await read_record(self.client.bus, call.view.subjects.state)
        op = "swap" if record is not None and name in record.adapters else "load"
        if call.may_repeat:
            entry = await read_entry(self.client.bus, call.view.subjects.state, call.request_id)
            if entry is not None and entry.target is not None:
                op = entry.target.get("op", op)  # asked again, it means what it meant
        call.body = {
            "target": {"kind": "lora", "op": op, "name": name},
            "transport": {"backend": "filesystem", "path": call.body["lora_path"]},
        }
        return await self._update(call)

    async def _unload_lora(self, call: Call) -> dict[str, Any]:
        call.body = {"target": {"kind": "lora", "op": "unload", "name": call.body["lora_name"]}}
        return await self._update(call)

    async def _new_run(self, call: Call) -> dict[str, Any]:
        request = request_hash({"new_run": True})
        if (first := await self._first_answer(call, request)) is not None:
            return first
        await self._whole_fleet(call)
        async with self.client.lock(call.view, update_id=call.request_id) as held:
            journal = self._journal(call, held, {"version": "initial"}, request)
            if call.may_repeat and (entry := await journal.first_answer()) is not None:
                return answered(call, entry)
            try:
                return await self._committed(call, held, journal, Coordination("new_run", call.request_id))
            except PlaneError as error:
                await journal.failed(error)
                raise

    async def finish(self) -> None:
        """Finishes or drops what a dead coordinator has left; nothing, while one is alive."""
        view = await self.client.view()
        async with self.client.lock(view, 0.0) as held:
            await Coordinator(self.client, view, held).run(Coordination("finish", ""))


def _rows_of(ready: Members) -> list[dict[str, Any]]:
    return [{"instance_id": key, "incarnation": one, "status": "ok"} for key, one in sorted(ready.items())]


def _with_buckets(reply: dict[str, Any], pushed: int | None) -> dict[str, Any]:
    return reply if pushed is None else {**reply, "num_buckets_received": pushed}


def _check_name(target: update_bodies.BaseTarget | update_bodies.LoraTarget, snapshot: Snapshot) -> None:
    """Requests name an adapter as they name a model."""
    names = {member.info.get("model") for member in snapshot}
    if isinstance(target, update_bodies.LoraTarget) and target.op == "load" and target.name in names:
        raise InvalidRequest(
            f"the base model is called {target.name!r}", field="target.name", fix="give the adapter another name"
        )
