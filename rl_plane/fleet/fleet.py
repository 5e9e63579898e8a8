"""The fleet's ops: what the HTTP facade, the fleet subject, RlClient and the command line all answer.

`Fleet.run(op, body)` takes the same body and gives the same merged reply everywhere. It raises a PlaneError for
everything that is not a complete success; the error's facts then name every worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rl_plane.bus.lock import DEFAULT_LOCK_WAIT_S, HeldLock
from rl_plane.bus.scatter import Missing
from rl_plane.bus.state_store import read_frontends, read_memory, read_pause
from rl_plane.client import FanOut, RlClient, check_pin, select_members
from rl_plane.commit.history import read_history
from rl_plane.errors import (
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
from rl_plane.fleet.fleet_replies import (
    Call,
    adapters_of,
    change_error,
    check_engines,
    common,
    facts_of,
    group_places,
    head,
    in_order,
    is_serving,
    join,
    listed,
    merged,
    with_stages,
)
from rl_plane.fleet.fleet_updates import FleetUpdates
from rl_plane.membership.core import Snapshot
from rl_plane.protocol import update_requests, worker_ops
from rl_plane.protocol import validation as bodies
from rl_plane.protocol.envelope import Request, decode, encode
from rl_plane.protocol.fleet_ops import FLEET_OPS, ONE_COMPONENT, Select
from rl_plane.protocol.record import DesiredMemory, DesiredPause, version_wire
from rl_plane.protocol.subjects import ADMISSION_PREFIX, MEMORY, PAUSE, check_name
from rl_plane.protocol.versions import WeightVersion
from rl_plane.transports.group.torch_group import FORM_MARGIN_S, JOIN_TORCH_S

READY_POLL_S = 0.2
FRONTENDS_S = 2.0
"""For an answer of a frontend, whose loop has one within milliseconds: one that is stopped is not waited for longer."""
FORM_WAIT_S = JOIN_TORCH_S + FORM_MARGIN_S
"""For the lock, to form a trainer's own group: it forms several side by side, one for each stage of its pipeline, and
the one before may take so long."""
LOST_RETRIES = 3
"""A changing call repeats itself on the rest when a member dies under it; so many deaths in a row are a storm."""
UNTOUCHED = (InvalidRequest, Unsupported, StaleFence, WrongIncarnation)
"""Errors of a worker that has done nothing of what it was asked."""
LISTS = ("workers", "state")
"""Ops that tell of stages, too, where there are no engines."""
DISABLED = b"disabled"
"""Of an admission key; empty: enabled."""

Handler = Callable[["Call"], Awaitable[dict[str, Any]]]


class Fleet:
    """The merged ops over one RlClient; safe to call concurrently."""

    def __init__(self, client: RlClient) -> None:
        self.client = client
        self._updates = updates = FleetUpdates(client, self._members)
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
            "release_memory": self._memory,
            "resume_memory": self._memory,
            "pause": self._pause,
            "resume": self._resume,
            "abort_requests": self._abort,
            "update_weights": updates.update,
            "prepare_weights_update": updates.prepare,
            "receive_weights_part": updates.feed,
            "label_weights_update": updates.name,
            "complete_weights_update": updates.complete,
            "abort_weights_update": updates.abort,
            "load_lora_adapter": updates.load_lora,
            "unload_lora_adapter": updates.unload_lora,
            "new_run": updates.new_run,
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
        replies = [with_stages(call, await handler(call)) for call in calls]
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
            beside = f", beside {len(snapshot.stages)} stages that skip what engines do" if snapshot.stages else ""
            raise NoWorkers(
                f"{len(snapshot)} of {select.min_workers} workers are there after {select.wait_s:g} s{beside}",
                field="min_workers",
                fix="start workers (`rl-plane worker`), or wait longer (wait_s)",
                epoch=snapshot.epoch,
                fingerprint=snapshot.fingerprint,
                retry_after_s=1.0,
            )
        check_pin(snapshot, select.epoch, select.fingerprint)
        select_members(snapshot, select.workers)
        if call.op.name not in LISTS:
            check_engines(call, snapshot)
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

    async def _describe(self, call: Call) -> dict[str, Any]:
        if call.body.get("manifest_from") is not None and len(call.select.workers or ()) != 1:
            raise InvalidRequest(
                "the tensors of one worker's model are told",
                field="workers",
                fix="name one: those of a model agree",
            )
        await self._members(call)
        return merged(call, await self._ask(call, "describe", call.body))

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
            row.update(listed(call, member))
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

    async def _history(self, call: Call) -> dict[str, Any]:
        """Past updates: nobody is asked, so an empty fleet tells them too. `workers` picks of each its rows."""
        snapshot = call.view.snapshot()
        check_pin(snapshot, call.select.epoch, call.select.fingerprint)
        entries = await read_history(
            self.client.bus, call.view.subjects.state, update_requests.ListUpdates.model_validate(call.body).limit
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
        check_engines(call, out.snapshot)  # the last one may have died meanwhile
        return merged(call, out)

    async def check_memory(
        self, op: str, workers: Sequence[str] | None = None, component: str | None = None
    ) -> None:
        """Unsupported unless the engines can do it (`release_memory`, `resume_memory`): by all or by nobody. One that
        can't has released nothing, so it keeps nobody from taking memory back. Nobody is touched."""
        out = await self.client.call_all("describe", workers=workers, component=component, empty="ok")
        told = [row for row in out.rows if row.status == "ok"]
        lacking = {row.instance_id: why for row in told if (why := row.body["capabilities"].get(op)) is not None}
        if lacking and (op == "release_memory" or len(lacking) == len(told)):
            first = next(iter(lacking.values()))
            raise Unsupported(
                f"{len(lacking)} of {len(out.rows)} engines can't {op}: {first}",
                field="op",
                lacking=lacking,
                fix="start the workers with --enable-memory-saver, where the engine has it; or only pause",
            )

    async def _memory(self, call: Call) -> dict[str, Any]:
        """What is wanted is written before anybody is asked, so that a worker which starts meanwhile does it too. A
        call that fails leaves it wanted that the memory is there: that is what a worker is started with."""
        op, workers, subjects = call.op.name, call.select.workers, call.view.subjects
        await self.check_memory(op, workers, subjects.component)
        snapshot = await self._members(call)
        tags = worker_ops.MemoryTags.model_validate(call.body).tags
        async with self.client.lock(call.view) as held:
            earlier = await read_memory(self.client.bus, subjects.state) or DesiredMemory()
            await held.put(MEMORY, earlier.after(op, tags, workers).encode())
            try:
                return await self._on_each(call, op, call.body, held, snapshot)
            except PlaneError:
                if op == "release_memory":
                    with contextlib.suppress(PlaneError):
                        await held.put(MEMORY, earlier.encode())
                raise

    async def _init_transport(self, call: Call) -> dict[str, Any]:
        """A group is formed by every rank of the fleet, each at its own place in it."""
        if call.body["backend"] not in update_requests.PUSHED:
            return await self._change(call)
        await self._updates.whole(call)
        own = call.body.get("form") == "torch"
        async with self.client.lock(call.view, FORM_WAIT_S if own else DEFAULT_LOCK_WAIT_S) as held:
            snapshot = await call.view.barrier()
            check_engines(call, snapshot)
            places = group_places(snapshot, call.body)
            if not own:  # it takes the place of the group that there was, by which another trainer may send now
                await self._updates.check_none_waits(call, held)
            start = time.monotonic()
            body = {**call.body, **places}
            rows = await self.client.ask(call.view, snapshot.members, "init_transport", body, held=held)
            out = FanOut(snapshot, rows, time.monotonic() - start)
            if out.failed:
                error = change_error(call, "init_transport", out)
                if own:
                    await self._keep_out(call, held, out, error)
                raise error
            check_pin(await call.view.barrier(), None, snapshot.fingerprint)
        return merged(call, out, **places)

    async def _keep_out(self, call: Call, held: HeldLock, out: FanOut, error: PlaneError) -> None:
        """A worker that has failed to join a trainer's own group stays out of routing until it is enabled: what is left
        in it of a rendezvous that broke is not known. One that has refused was not touched; one that is gone keeps
        nothing. (The plane's own groups are formed anew by their sender, so nobody would be there to enable it.)"""
        failed = {row.instance_id for row in out.failed if not (row.lost or isinstance(row.error, UNTOUCHED))}
        if not failed:
            return
        with contextlib.suppress(PlaneError):  # the first error is the one that counts
            for instance_id in sorted(failed):
                await held.put(ADMISSION_PREFIX + instance_id, DISABLED)
            error.facts["disabled"] = sorted(failed)
            error.facts["fix"] = "POST /v1/rl/workers/{id}/enable puts a worker back, once it is looked after"
            there = [member for member in (await call.view.barrier()).members if member.instance_id in failed]
            await self.client.ask(call.view, there, "set_admission", {"open": False}, held=held)

    async def _pause(self, call: Call) -> dict[str, Any]:
        pause = worker_ops.Pause.model_validate(call.body)
        now = await self.client.bus.server_time(call.view.subjects.state)
        desired = DesiredPause(True, pause.mode, now + pause.lease_s)
        return await self._on_all(call, "pause", call.body, desired=desired)

    async def _resume(self, call: Call) -> dict[str, Any]:
        return await self._on_all(call, "resume", call.body, desired=DesiredPause(False))

    async def _abort(self, call: Call) -> dict[str, Any]:
        """Of the frontends first: what waits there for a worker is known to none."""
        if "min_workers" not in call.select.model_fields_set:
            call.select = call.select.model_copy(update={"min_workers": 0})  # there is nobody to wait for
        await self._members(call)
        waiting, silent = (0, []) if call.select.workers is not None else await self._abort_waiting(call)
        reply = {**await self._change(call), "waiting": waiting}
        if silent:
            raise Unavailable(
                f"{len(silent)} frontends did not answer within {FRONTENDS_S:g} s; what waits there goes on",
                frontends=silent,
                fix="ask again: what has ended stays so",
                retry_after_s=1.0,
                **{key: value for key, value in reply.items() if key != "status"},
            )
        return reply

    async def _abort_waiting(self, call: Call) -> tuple[int, list[str]]:
        """How many choices, and the frontends that did not answer. One that is dead has nobody subscribed."""
        frontends = await read_frontends(self.client.bus, call.view.subjects.state)
        request = encode(Request("abort_requests", body=call.body).to_wire())
        targets = [(call.view.subjects.frontend(each), request) for each in frontends]
        answers = await self.client.gather(targets, FRONTENDS_S)
        told = {each: decode(one) for each, one in zip(frontends, answers, strict=True) if isinstance(one, bytes)}
        good = {each: one for each, one in told.items() if one.get("status") == "ok"}
        lost = {each for each, one in zip(frontends, answers, strict=True) if one is Missing.LOST}
        count = sum(int(one["body"]["aborted"]) for one in good.values())
        return count, [each for each in frontends if each not in good.keys() | lost]

    async def _admission(self, call: Call) -> dict[str, Any]:
        if not call.select.workers:
            raise InvalidRequest("name the workers", field="workers", fix="workers: [instance_id]")
        is_open = call.op.name == "enable"
        body = {"open": is_open}
        return await self._on_all(call, "set_admission", body, admission=b"" if is_open else DISABLED)

    async def finish(self) -> WeightVersion:
        """Finishes or drops what a dead coordinator has left; nothing, while one is alive."""
        return await self._updates.finish()
