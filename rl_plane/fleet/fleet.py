"""The fleet's ops, which the HTTP facade, the fleet subject, RlClient and the command line share.

`Fleet.run(op, body)` checks the body, calls the op's handler, and returns the merged reply. It raises a PlaneError
unless the call is a complete success; the error's facts name every worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from rl_plane._util import tracing
from rl_plane.bus.lock import DEFAULT_LOCK_WAIT_S, HeldLock
from rl_plane.bus.state_store import read_memory, read_pause
from rl_plane.commit.history import read_history
from rl_plane.commit.running_update import read_running, with_workers
from rl_plane.commit.steps import SESSION_IDLE_S
from rl_plane.errors import (
    BusUnreachable,
    Conflict,
    InvalidRequest,
    MembershipChanged,
    NoWorkers,
    PlaneError,
    StaleFence,
    Unavailable,
    Unsupported,
    WrongIncarnation,
)
from rl_plane.fleet.call_reports import begin_span, note_reply, noticed
from rl_plane.fleet.fleet_call import (
    ASKED_BY,
    CALLED_FROM,
    FleetCall,
    check_engines,
    members_of,
    said,
    whole_fleet,
)
from rl_plane.fleet.fleet_replies import (
    adapters_of,
    change_error,
    common,
    error_in,
    facts_of,
    group_places,
    head,
    in_order,
    is_serving,
    join,
    listed,
    merged,
    with_pipeline_stages,
)
from rl_plane.fleet.fleet_updates import FleetUpdates
from rl_plane.membership.core import Snapshot
from rl_plane.membership.worker_calls import FanOut, WorkerCalls, check_pin
from rl_plane.protocol import update_requests, worker_ops
from rl_plane.protocol.fleet_ops import FLEET_OPS, Select
from rl_plane.protocol.fleet_reply_types import LeftWorker, RunningUpdate, StartingWorker
from rl_plane.protocol.record import DesiredMemory, DesiredPause, version_wire
from rl_plane.protocol.subjects import ADMISSION_PREFIX, DISABLED, ENABLED, MEMORY, PAUSE, Subjects, check_name
from rl_plane.protocol.trainer_groups import FORM_MARGIN_S, JOIN_TORCH_S
from rl_plane.protocol.validation import Empty, parse_body, same_values

log = logging.getLogger("rl_plane.fleet")

READY_POLL_S = 0.2
"""Seconds between two looks of `ready`. Workers become ready within seconds, so a faster look gains nothing."""
FRONTENDS_S = 2.0
"""Seconds for a frontend's answer. A running frontend answers within milliseconds; a stopped one never does."""
FORM_CHECK_S = 30.0
"""Seconds in which every worker says that it can join a group: half of the time that a trainer waits for the first one.
For its first group a worker may import torch, which takes long from a slow disk."""
FORM_WAIT_S = FORM_CHECK_S + JOIN_TORCH_S + FORM_MARGIN_S
"""Seconds to wait for the lock to form a trainer's own group. A trainer forms one group for each stage of its pipeline
side by side, and the group before may take this long."""
LOST_RETRIES = 3
"""The number of tries of a changing call: it is repeated on the other workers after one has died during it."""
UNTOUCHED = (InvalidRequest, Unsupported, StaleFence, WrongIncarnation)
"""Errors by which a worker says that it has done nothing."""

Handler = Callable[[FleetCall[Any]], Awaitable[dict[str, Any]]]


class Fleet:
    """The fleet's ops over one connection. Methods may be called concurrently."""

    def __init__(self, client: WorkerCalls, session_idle_s: int = SESSION_IDLE_S) -> None:
        """`session_idle_s`: the seconds after which a prepared update ends if its trainer is silent."""
        self.client = client
        self.updates = updates = FleetUpdates(client, session_idle_s)
        self.expected = 0
        """The number of workers that must serve before the client's own component is ready. A call's `min_workers`
        counts instead."""
        self.left: Callable[[str], list[LeftWorker]] = lambda component: []
        """The workers that have left a component, newest first."""
        self.starting: Callable[[str], list[StartingWorker]] = lambda component: []
        """The workers of a component that load their engines."""
        self.liveness_timeout_s = worker_ops.OPS["liveness"].timeout_s
        self._handlers: dict[str, Handler] = {
            "liveness": self._liveness,
            "ready": self._ready,
            "state": self._state,
            "workers": self._workers,
            "weight_version": self._weight_version,
            "describe": self._describe,
            "updates": self._history,
            "init_transport": self._init_transport,
            "destroy_transport": self._change,
            "release_memory": self._memory,
            "resume_memory": self._memory,
            "check_weights": self._change,
            "pause": self._pause,
            "resume": self._resume,
            "flush_cache": self._change,
            "abort_requests": self._abort,
            "update_weights": updates.update,
            "prepare_weights_update": updates.prepare,
            "receive_weights_part": updates.receive_part,
            "label_weights_update": updates.label,
            "complete_weights_update": updates.complete,
            "abort_weights_update": updates.abort,
            "load_lora_adapter": updates.load_lora,
            "unload_lora_adapter": updates.unload_lora,
            "new_run": updates.new_run,
            "enable": self._admission,
            "disable": self._admission,
        }
        assert self._handlers.keys() == FLEET_OPS.keys(), "each op has a handler, and each handler has an op"

    async def run(self, op: str, body: dict[str, Any] | None = None, request_id: str = "") -> dict[str, Any]:
        """Carries out an op of `FLEET_OPS`, and returns the merged reply.

        Args:
            op: The op's name.
            body: Its own fields and those of `Select`.
            request_id: Makes an update idempotent: a repeated call returns the first answer.

        Raises:
            PlaneError: the call is not a complete success.
        """
        spec = FLEET_OPS.get(op)
        if spec is None:
            raise InvalidRequest(f"unknown op {op!r}", field="op", fix=f"the ops are {', '.join(FLEET_OPS)}")
        parsed = parse_body(spec.request, body or {})
        select, own = same_values(Select, parsed), same_values(spec.own, parsed)
        names = list(dict.fromkeys(select.component or [self.client.component]))
        asked_by, calls = ASKED_BY.get(), []
        for name in names:  # all names are checked before the first worker is asked
            check_name("component", name)
            view = await self.client.view(name)
            update_id = request_id or uuid.uuid4().hex
            key = said(self.client.bus.login.public) if asked_by is None else asked_by
            start, caller = time.monotonic(), CALLED_FROM.get()
            calls.append(FleetCall(spec, select, own, view, update_id, bool(request_id), start, key, caller))
        if spec.method == "GET" or asked_by is not None:  # a frontend itself reports what it was asked for
            return await self._carry_out(calls)
        async with noticed(self.client, op, names):
            return await self._carry_out(calls)

    async def _carry_out(self, calls: Sequence[FleetCall[Any]]) -> dict[str, Any]:
        """Carries out one op, on each component that it names."""
        with tracing.within(begin_span(calls[0])) as span:
            reply = await self._answer(calls)
            note_reply(span, reply)
        return reply

    async def _answer(self, calls: Sequence[FleetCall[Any]]) -> dict[str, Any]:
        spec = calls[0].op
        handler = self._handlers[spec.name]
        if len(calls) > 1 and spec.one_component:
            raise InvalidRequest("an update is of one component", field="component", fix="name one, call by call")
        if len(calls) > 1 and spec.method == "POST":
            for call in calls:
                await members_of(call)
        names = [call.view.subjects.component for call in calls]
        replies: list[dict[str, Any]] = []
        for name, call in zip(names, calls, strict=True):
            try:
                replies.append(with_pipeline_stages(call, await handler(call)))
            except PlaneError as error:
                if len(calls) == 1:
                    raise
                raise error_in(name, error, names[: len(replies)], replies) from error
        return replies[0] if len(replies) == 1 else join(names, replies)

    async def _ask(
        self,
        call: FleetCall[Any],
        op: str,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> FanOut:
        """Asks the workers that the call means for an op that changes nothing."""
        return await self.client.call_all(
            op,
            body,
            workers=call.select.workers,
            component=call.view.subjects.component,
            epoch=call.select.epoch,
            fingerprint=call.select.fingerprint,
            timeout_s=timeout_s,
            empty="ok",
        )

    # ---- reading ----

    async def _describe(self, call: FleetCall[worker_ops.Describe]) -> dict[str, Any]:
        if call.body.manifest_from is not None and len(call.select.workers or ()) != 1:
            raise InvalidRequest(
                "a manifest is of one worker's model",
                field="workers",
                fix="name one worker; all workers of a model have the same tensors",
            )
        await members_of(call)
        return merged(call, await self._ask(call, "describe", call.fields))

    async def _liveness(self, call: FleetCall[Any]) -> dict[str, Any]:
        await members_of(call)
        out = await self._ask(call, "liveness", timeout_s=self.liveness_timeout_s)
        if out.failed:
            raise Unavailable(
                f"{len(out.failed)} of {len(out.rows)} engines did not answer", **facts_of(call, out), alive=False
            )
        return merged(call, out, alive=True)

    async def _ready(self, call: FleetCall[Any]) -> dict[str, Any]:
        """Answers at once, or waits up to `wait_s` seconds if the caller has given that field."""
        wait_s = call.select.wait_s if "wait_s" in call.select.model_fields_set else 0.0
        while True:
            try:
                return await self._ready_now(call)
            except Unavailable:
                if time.monotonic() >= call.start + wait_s:
                    raise
            await asyncio.sleep(READY_POLL_S)

    async def _ready_now(self, call: FleetCall[Any]) -> dict[str, Any]:
        reply = await self._liveness(call)
        record = call.view.record
        out = await self._ask(call, "state")
        serving = [row for row in out.rows if row.status == "ok" and is_serving(row, record)]
        named = "min_workers" in call.select.model_fields_set
        wanted = max(1, call.select.min_workers if named else self._expected(call))
        if len(serving) < wanted:
            raise Unavailable(
                f"{len(serving)} admitted workers hold the committed version, of {wanted} that are asked for",
                **facts_of(call, out),
                ready=False,
            )
        return {**merged(call, out, ready=True), "alive": reply["alive"]}

    async def _state(self, call: FleetCall[Any]) -> dict[str, Any]:
        await self._members_of(call)
        record = call.view.record
        out, running = await asyncio.gather(self._ask(call, "state"), self._running(call.view.subjects))
        bodies = [row.body for row in out.rows if row.status == "ok"]
        return merged(
            call,
            out,
            ready=bool(bodies)
            and not out.failed
            and all(is_serving(row, record) for row in out.rows)
            and (call.select.workers is not None or len(out.rows) >= self._expected(call)),
            expected=self._expected(call) or None,
            left=self.left(call.view.subjects.component),
            starting=self.starting(call.view.subjects.component),
            engine_alive=bool(bodies) and not out.failed and all(body["engine_alive"] for body in bodies),
            pause_state=common([body["pause_state"] for body in bodies], "mixed"),
            applied_weight_version=common([body["applied_weight_version"] for body in bodies], None),
            loras=sorted({name for body in bodies for name in body["loras"]}),
            version=version_wire(record),
            adapters=adapters_of(record),
            sources=[
                update_requests.without_secret(source.transport) for source in record.sources if source.transport
            ]
            if record
            else [],
            encoding=record.source.encoding if record else None,
            sent_bytes=record.source.sent_bytes if record else None,
            model_bytes=record.source.model_bytes if record else None,
            sequence=record.sequence if record else None,
            update=with_workers(running, out.rows) if running is not None else None,
        )

    def _expected(self, call: FleetCall[Any]) -> int:
        return self.expected if call.view.subjects.component == self.client.component else 0

    async def _members_of(self, call: FleetCall[Any]) -> Snapshot:
        """Returns the fleet that a read means. NoWorkers names the workers that have left or that start."""
        try:
            return await members_of(call)
        except NoWorkers as error:
            if left := self.left(call.view.subjects.component):
                error.facts["left"] = left
            if starting := self.starting(call.view.subjects.component):
                error.facts["starting"] = starting
            raise

    async def running_update(self) -> RunningUpdate | None:
        """The update that runs in the client's own component, as the op `state` reports it. None: no update runs."""
        running = await self._running(self.client.subjects())
        if running is None:
            return None
        return with_workers(running, (await self.client.call_all("state", empty="ok")).rows)

    async def _running(self, subjects: Subjects) -> RunningUpdate | None:
        """The update that runs. None also while the store does not answer: the workers may answer all the same."""
        try:
            return await read_running(self.client.bus, subjects.state)
        except BusUnreachable as error:
            log.debug("the store does not say which update runs: %s", error)
            return None

    async def _workers(self, call: FleetCall[Any]) -> dict[str, Any]:
        snapshot = await self._members_of(call)
        out = await self._ask(call, "state")
        component = call.view.subjects.component
        reply = merged(call, out, left=self.left(component), starting=self.starting(component))
        for row, member in zip(reply["workers"], in_order(snapshot, out), strict=True):
            row.update(listed(call, member))
        return reply

    async def _weight_version(self, call: FleetCall[Any]) -> dict[str, Any]:
        await members_of(call)
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

    async def _history(self, call: FleetCall[update_requests.ListUpdates]) -> dict[str, Any]:
        """Lists past updates from the store, also for an empty fleet. `workers` selects rows of each update."""
        snapshot = call.view.snapshot()
        check_pin(snapshot, call.select.epoch, call.select.fingerprint)
        entries = await read_history(self.client.bus, call.view.subjects.state, call.body.limit)
        listed_updates = [entry.to_wire() for entry in entries]
        if call.select.workers is not None:
            for update in listed_updates:
                rows = update["workers"]
                update["workers"] = {key: rows[key] for key in call.select.workers if key in rows}
        return {**head(call, snapshot), "updates": listed_updates, "workers": []}

    # ---- changing ----

    async def _change(self, call: FleetCall[Any]) -> dict[str, Any]:
        """Carries out a worker's op of the same name on every worker, or raises an error that names each."""
        return await self._on_all(call, call.op.name, call.fields)

    async def _on_all(
        self,
        call: FleetCall[Any],
        op: str,
        body: dict[str, Any],
        *,
        desired: DesiredPause | None = None,
        admission: bytes | None = None,
    ) -> dict[str, Any]:
        """Carries out a worker's op on every worker, under the lock.

        `desired` and `admission` are stored before the first worker is asked, so that a worker which joins meanwhile
        does the same. If the call fails, the desired pause before it is stored again."""
        snapshot = await members_of(call)
        async with self.client.lock(call.view) as held:
            if admission is not None:
                for instance_id in call.select.workers or []:
                    await held.put(ADMISSION_PREFIX + instance_id, admission)
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
        self, call: FleetCall[Any], op: str, body: dict[str, Any], held: HeldLock, snapshot: Snapshot
    ) -> dict[str, Any]:
        component, workers = call.view.subjects.component, call.select.workers
        for _ in range(LOST_RETRIES):
            out = await self.client.call_all(op, body, workers=workers, component=component, empty="ok", held=held)
            # An unpinned call means the fleet without the workers that die during it. The op is repeated on the others:
            # ops are idempotent.
            if workers is not None or call.pinned or not any(row.lost for row in out.rows):
                break
        after = await call.view.barrier() if call.pinned else snapshot
        if after.fingerprint != snapshot.fingerprint:
            raise MembershipChanged(
                **{**facts_of(call, out), "epoch": after.epoch, "fingerprint": after.fingerprint},
                before_epoch=snapshot.epoch,
                after_epoch=after.epoch,
                fix=f"{op} was done on each worker whose row says ok; read the members, then repeat it or undo it",
            )
        if out.failed:
            raise change_error(call, op, out)
        check_engines(call, out.snapshot)  # the last engine may have died meanwhile
        return merged(call, out)

    async def check_memory(
        self, op: str, workers: Sequence[str] | None = None, component: str | None = None
    ) -> None:
        """Raises Unsupported before any worker is changed, if the engines can't release or resume memory.

        All engines must be able to release memory. One is enough to resume it: the others have released nothing."""
        out = await self.client.call_all("describe", workers=workers, component=component, empty="ok")
        described = [row for row in out.rows if row.status == "ok"]
        lacking = {row.instance_id: why for row in described if (why := row.body["lacks"].get(op)) is not None}
        if lacking and (op == "release_memory" or len(lacking) == len(described)):
            first = next(iter(lacking.values()))
            raise Unsupported(
                f"{len(lacking)} of {len(out.rows)} engines can't {op}: {first}",
                field="op",
                lacking=lacking,
                fix="start the workers with --enable-memory-saver, where the engine has it; or only pause",
            )

    async def _memory(self, call: FleetCall[worker_ops.MemoryTags]) -> dict[str, Any]:
        """Releases or resumes memory on the workers.

        The desired state is stored before the first worker is asked, so that a worker which starts meanwhile follows
        it. After a failed call the desired state is that memory is there, as it is when a worker starts."""
        op, workers, subjects = call.op.name, call.select.workers, call.view.subjects
        await self.check_memory(op, workers, subjects.component)
        snapshot = await members_of(call)
        async with self.client.lock(call.view) as held:
            earlier = await read_memory(self.client.bus, subjects.state) or DesiredMemory()
            await held.put(MEMORY, earlier.after(op, call.body.tags, workers).encode())
            try:
                return await self._on_each(call, op, call.fields, held, snapshot)
            except PlaneError:
                if op == "release_memory":
                    with contextlib.suppress(PlaneError):
                        await held.put(MEMORY, earlier.encode())
                raise

    async def _init_transport(self, call: FleetCall[update_requests.InitTransport]) -> dict[str, Any]:
        """Sets up a transport. Every rank of the fleet joins a group, at its own place in it.

        First every worker says that it can join. If a worker refused later, the other workers and the trainer would
        wait for it."""
        if not call.body.traits.pushed:
            return await self._change(call)
        await whole_fleet(call)
        given = call.fields
        own = given.get("form") == "torch"
        async with self.client.lock(call.view, FORM_WAIT_S if own else DEFAULT_LOCK_WAIT_S) as held:
            snapshot = await call.view.barrier()
            check_engines(call, snapshot)
            places = group_places(snapshot, given)
            if not own:  # it replaces the present group, by which another trainer may be sending
                await self.updates.check_none_waits(call, held)
            start = time.monotonic()
            body, members = {**given, **places}, snapshot.members
            check = {**body, "check_only": True}
            rows = await self.client.ask(call.view, members, "init_transport", check, FORM_CHECK_S, held)
            if (out := FanOut(snapshot, rows, time.monotonic() - start)).failed:
                raise change_error(call, "init_transport", out)
            check_pin(await call.view.barrier(), None, snapshot.fingerprint)
            rows = await self.client.ask(call.view, members, "init_transport", body, held=held)
            if (out := FanOut(snapshot, rows, time.monotonic() - start)).failed:
                error = change_error(call, "init_transport", out)
                if own:
                    await self._keep_out(call, held, out, error)
                raise error
            check_pin(await call.view.barrier(), None, snapshot.fingerprint)
        return merged(call, out, **places)

    async def _keep_out(self, call: FleetCall[Any], held: HeldLock, out: FanOut, error: PlaneError) -> None:
        """Disables each worker that has failed to join a trainer's own group, until a person enables it.

        The state of such a worker after a broken rendezvous is unknown. A worker that refused is unchanged. A worker
        that left has no state. The plane's own groups need no such step: their sender forms them anew."""
        failed = {row.instance_id for row in out.failed if not (row.lost or isinstance(row.error, UNTOUCHED))}
        if not failed:
            return
        with contextlib.suppress(PlaneError):  # the caller gets the first error
            for instance_id in sorted(failed):
                await held.put(ADMISSION_PREFIX + instance_id, DISABLED)
            error.facts["disabled"] = sorted(failed)
            error.facts["fix"] = "look after each worker, then enable it: POST /v1/rl/workers/{id}/enable"
            present = [member for member in (await call.view.barrier()).members if member.instance_id in failed]
            await self.client.ask(call.view, present, "set_admission", {"open": False}, held=held)

    async def _pause(self, call: FleetCall[worker_ops.Pause]) -> dict[str, Any]:
        now = await self.client.bus.server_time(call.view.subjects.state)
        desired = DesiredPause(True, call.body.mode, now + call.body.lease_s)
        return await self._on_all(call, "pause", call.fields, desired=desired)

    async def _resume(self, call: FleetCall[Any]) -> dict[str, Any]:
        return await self._on_all(call, "resume", call.fields, desired=DesiredPause(False))

    async def _abort(self, call: FleetCall[worker_ops.AbortRequests]) -> dict[str, Any]:
        """Ends requests in the frontends first, where they may wait for a worker, then on the workers. Only a frontend
        knows the names that callers have chosen, so its answer has the workers' ids of these requests."""
        if "min_workers" not in call.select.model_fields_set:  # an empty fleet has nothing to wait for
            call = replace(call, select=call.select.model_copy(update={"min_workers": 0}))
        await members_of(call)
        waiting, silent = 0, list[str]()
        if call.select.workers is None or call.body.request_ids is not None:
            waiting, silent, made = await self._abort_waiting(call)
            if made:
                ids = [one for name in call.body.request_ids or () for one in made.get(name, [name])]
                call = call.with_body(worker_ops.AbortRequests(request_ids=list(dict.fromkeys(ids))))
        reply = {**await self._change(call), "waiting": waiting}
        if silent:
            raise Unavailable(
                f"{len(silent)} frontends did not answer within {FRONTENDS_S:g} s; requests that only they know "
                "continue",
                frontends=silent,
                fix="ask again: requests that have ended stay ended",
                retry_after_s=1.0,
                **{key: value for key, value in reply.items() if key != "status"},
            )
        return reply

    async def _abort_waiting(self, call: FleetCall[Any]) -> tuple[int, list[str], dict[str, list[str]]]:
        """Ends the waiting choices, unless the call means some workers only. Returns their number, the frontends that
        did not answer, and the workers' ids of the requests that callers have named."""
        body = {**call.fields, "waiting": call.select.workers is None}
        replies = await self.client.ask_frontends(call.view, "abort_requests", body, FRONTENDS_S)
        done = {key: reply for key, reply in replies.items() if reply is not None and reply.get("status") == "ok"}
        count, made = 0, dict[str, list[str]]()
        for reply in done.values():
            count += int(reply["body"]["aborted"])
            for name, ids in reply["body"]["made"].items():
                made.setdefault(name, []).extend(ids)
        return count, [key for key in replies if key not in done], made

    async def _admission(self, call: FleetCall[Empty]) -> dict[str, Any]:
        if not call.select.workers:
            raise InvalidRequest("name the workers", field="workers", fix="workers: [instance_id]")
        is_open = call.op.name == "enable"
        body = {"open": is_open}
        return await self._on_all(call, call.op.worker_op, body, admission=ENABLED if is_open else DISABLED)
