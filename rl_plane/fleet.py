"""The fleet's ops: what the HTTP facade, the fleet subject, RlClient and the command line all answer.

`Fleet.run(op, body)` takes the same body and gives the same merged reply everywhere. It raises a PlaneError for
everything that is not a complete success; the error's facts then name every worker.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, create_model, field_validator

from rl_plane import ops
from rl_plane.client import FanOut, RlClient, WorkerRow, check_pin, select_members
from rl_plane.coordinator import Outcome, abort_fleet, complete_fleet, prepare_fleet, update_fleet
from rl_plane.errors import Conflict, InvalidRequest, MembershipChanged, NoWorkers, PlaneError, Unavailable
from rl_plane.membership import Snapshot
from rl_plane.record import DecisionRecord, DesiredPause
from rl_plane.subjects import ADMISSION_PREFIX, PAUSE, check_name
from rl_plane.view import MembershipView

DEFAULT_WAIT_S = 5.0
"""How long a call waits for a fleet that is still coming up."""
MAX_WAIT_S = 3600.0
LOST_RETRIES = 3
"""A changing call repeats itself on the rest when a member dies under it; so many deaths in a row are a storm."""


class Select(ops.Body):
    """Which workers a call means, beside the op's own fields. An HTTP query may carry these too."""

    component: list[str] | None = None
    """Names; a plain string is one. Default: the configured component."""
    workers: list[str] | None = None
    """Instance ids. Default: all."""
    epoch: int | None = Field(None, ge=0)
    fingerprint: str | None = Field(None, max_length=64)
    """The call fails with membership_changed unless the fleet is this one."""
    min_workers: int = Field(1, ge=0)
    """Wait until so many are there; 0: an empty fleet is a fleet."""
    wait_s: float = Field(DEFAULT_WAIT_S, ge=0, le=MAX_WAIT_S)

    @field_validator("component", "workers", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [part for part in value.split(",") if part] if isinstance(value, str) else value


class WorkerReply(BaseModel):
    """One worker's part of a reply; the op's own reply fields stand beside these."""

    instance_id: str
    incarnation: str
    status: Literal["ok", "error", "skipped"]
    error: dict[str, Any] | None = None


class FleetReply(BaseModel):
    """Every reply names every worker. Ops add their own fields."""

    status: Literal["ok"]
    epoch: int
    fingerprint: str
    workers: list[WorkerReply]
    version: ops.Version | None = None
    excluded: list[str] | None = None
    """After an update: members that do not serve the new version; they heal by themselves."""
    elapsed_s: float


class LoadLora(ops.Body):
    lora_name: str = Field(min_length=1, max_length=ops.LABEL_CHARS)
    lora_path: str = Field(min_length=1)


class UnloadLora(ops.Body):
    lora_name: str = Field(min_length=1, max_length=ops.LABEL_CHARS)


class UpdateId(ops.Body):
    update_id: str | None = Field(None, min_length=1, max_length=128)
    """As `prepare_weights_update` gave it; None: the one that is prepared."""


@dataclass(frozen=True, slots=True)
class FleetOp:
    name: str
    method: Literal["GET", "POST"]
    path: str
    """Beneath /v1/rl/."""
    request: type[Select]
    doc: str
    own: type[BaseModel]
    """The op's own fields, without the selection."""


def _fleet_op(
    name: str, own: type[BaseModel], doc: str, method: Literal["GET", "POST"] = "POST", path: str = ""
) -> FleetOp:
    title = f"{name.title().replace('_', '')}Call"
    make: Any = create_model  # its own types allow only bases of one type
    return FleetOp(name, method, path or name, make(title, __base__=(Select, own)), doc, own)


FLEET_OPS: dict[str, FleetOp] = {
    op.name: op
    for op in (
        _fleet_op("liveness", ops.Empty, "Each engine answers a real round trip, or 503.", "GET"),
        _fleet_op("ready", ops.Empty, "Alive, and enough admitted workers at the committed version.", "GET"),
        _fleet_op("state", ops.Empty, "The fleet and each worker, now.", "GET"),
        _fleet_op("workers", ops.Empty, "Who is in the fleet.", "GET"),
        _fleet_op("weight_version", ops.Empty, "The one version that is served; 409 if there are two.", "GET"),
        _fleet_op("describe", ops.Empty, "What each engine is and can do.", "GET"),
        _fleet_op("pause", ops.Pause, "Stop generation, with a lease."),
        _fleet_op("resume", ops.Empty, "Go on."),
        _fleet_op("flush_cache", ops.Empty, "Drop the prefix caches."),
        _fleet_op("abort_requests", ops.AbortRequests, "End requests now, with their tokens so far."),
        _fleet_op("init_transport", ops.InitTransport, "Set up a weight transport."),
        _fleet_op("destroy_transport", ops.DestroyTransport, "Take it down."),
        _fleet_op("update_weights", ops.UpdateWeights, "New weights on the whole fleet, or on none."),
        _fleet_op("prepare_weights_update", ops.UpdateWeights, "Stage and verify; generation goes on."),
        _fleet_op("complete_weights_update", UpdateId, "Commit what was prepared."),
        _fleet_op("abort_weights_update", UpdateId, "Drop what was prepared."),
        _fleet_op("release_memory", ops.MemoryTags, "Give memory back (sleep)."),
        _fleet_op("resume_memory", ops.MemoryTags, "Take it again (wake)."),
        _fleet_op("check_weights", ops.CheckWeights, "Checksum, snapshot or compare the weights."),
        _fleet_op("load_lora_adapter", LoadLora, "Load or replace a LoRA adapter."),
        _fleet_op("unload_lora_adapter", UnloadLora, "Unload a LoRA adapter."),
        _fleet_op("enable", ops.Empty, "Admit a worker again.", path="workers/{id}/enable"),
        _fleet_op("disable", ops.Empty, "Take a worker out of routing.", path="workers/{id}/disable"),
    )
}

Handler = Callable[["Call"], Awaitable[dict[str, Any]]]


@dataclass(slots=True)
class Call:
    """One call under way, on one component."""

    op: FleetOp
    select: Select
    body: dict[str, Any]
    view: MembershipView
    request_id: str
    start: float


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
            "pause": self._pause,
            "resume": self._resume,
            "update_weights": self._update,
            "prepare_weights_update": self._prepare,
            "complete_weights_update": self._complete,
            "abort_weights_update": self._abort,
            "load_lora_adapter": self._load_lora,
            "unload_lora_adapter": self._unload_lora,
            "enable": self._admission,
            "disable": self._admission,
        }

    async def run(self, op: str, body: dict[str, Any] | None = None, request_id: str = "") -> dict[str, Any]:
        """The merged reply. `request_id` makes updates idempotent: asked again, the first answer comes back."""
        spec = FLEET_OPS.get(op)
        if spec is None:
            raise InvalidRequest(f"unknown op {op!r}", field="op", fix=f"the ops are {', '.join(FLEET_OPS)}")
        parsed = ops.parse_body(spec.request, body or {})
        assert isinstance(parsed, Select)
        own = parsed.model_dump(exclude=set(Select.model_fields), exclude_unset=True)
        names = list(dict.fromkeys(parsed.component or [self.client.component]))
        calls = []
        for name in names:  # every name is checked before anybody is asked
            check_name("component", name)
            view = await self.client.view(name)
            calls.append(Call(spec, parsed, own, view, request_id or uuid.uuid4().hex, time.monotonic()))
        handler = self._handlers.get(op, self._change)
        replies = [await handler(call) for call in calls]
        return replies[0] if len(replies) == 1 else _join(names, replies)

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
        return _merged(call, await self._ask(call, call.op.name))

    async def _liveness(self, call: Call) -> dict[str, Any]:
        await self._members(call)
        out = await self._ask(call, "liveness", timeout_s=self.liveness_timeout_s)
        if out.failed:
            raise Unavailable(
                f"{len(out.failed)} of {len(out.rows)} engines did not answer", **_facts(call, out), alive=False
            )
        return _merged(call, out, alive=True)

    async def _ready(self, call: Call) -> dict[str, Any]:
        reply = await self._liveness(call)
        record = call.view.record
        out = await self._ask(call, "state")
        serving = [row for row in out.rows if row.status == "ok" and _serves(row, record)]
        wanted = max(1, call.select.min_workers)
        if len(serving) < wanted:
            raise Unavailable(
                f"{len(serving)} admitted workers hold the committed version; {wanted} are wanted",
                **_facts(call, out),
                ready=False,
            )
        return {**_merged(call, out, ready=True), "alive": reply["alive"]}

    async def _state(self, call: Call) -> dict[str, Any]:
        await self._members(call)
        record = call.view.record
        out = await self._ask(call, "state")
        bodies = [row.body for row in out.rows if row.status == "ok"]
        return _merged(
            call,
            out,
            ready=bool(bodies) and not out.failed and all(_serves(row, record) for row in out.rows),
            engine_alive=bool(bodies) and not out.failed and all(body["engine_alive"] for body in bodies),
            pause_state=_common([body["pause_state"] for body in bodies], "mixed"),
            applied_weight_version=_common([body["applied_weight_version"] for body in bodies], None),
            loras=sorted({name for body in bodies for name in body["loras"]}),
            version=record.version.to_wire() if record else None,
        )

    async def _workers(self, call: Call) -> dict[str, Any]:
        snapshot = await self._members(call)
        out = await self._ask(call, "state")
        reply = _merged(call, out)
        for row, member in zip(reply["workers"], _in_order(snapshot, out), strict=True):
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
                served.setdefault(row.body["version"]["digest"], []).append(row.instance_id)
        if len(served) > 1:
            raise Conflict("the fleet serves several versions", versions=served, **_facts(call, out))
        record = call.view.record
        return _merged(call, out, version=record.version.to_wire() if record else None)

    # ---- changing ----

    async def _change(self, call: Call) -> dict[str, Any]:
        """An op that is the same on every worker: done on all of them, or an error that names each."""
        return await self._on_all(call, call.op.name, call.body)

    async def _on_all(
        self, call: Call, op: str, body: dict[str, Any], before: Callable[[Any], Awaitable[None]] | None = None
    ) -> dict[str, Any]:
        await self._members(call)
        async with self.client.lock(call.view) as held:
            if before is not None:
                await before(held)
            for _ in range(LOST_RETRIES):
                out = await self._ask(call, op, body, held=held, request_id=call.request_id)
                if not any(row.lost for row in out.rows):
                    break
                # A member died under the call. An unpinned call means the fleet, whoever is in it: again on
                # the rest, which costs them nothing.
                if call.select.workers is not None:
                    break
                if not (await self._members(call)).members:
                    break
        failed = out.failed
        if not failed:
            return _merged(call, out)
        raise _change_error(call, op, out, failed)

    async def _pause(self, call: Call) -> dict[str, Any]:
        pause = ops.Pause.model_validate(call.body)
        desired = DesiredPause(True, pause.mode, time.time() + pause.lease_s)
        return await self._on_all(call, "pause", call.body, self._desire(call, desired))

    async def _resume(self, call: Call) -> dict[str, Any]:
        return await self._on_all(call, "resume", call.body, self._desire(call, DesiredPause(False)))

    def _desire(self, call: Call, desired: DesiredPause) -> Callable[[Any], Awaitable[None]] | None:
        """Written before the fan-out, so that a worker which joins meanwhile does as the fleet does."""
        if call.select.workers is not None:
            return None

        async def write(held: Any) -> None:
            await held.put(PAUSE, desired.encode())

        return write

    async def _admission(self, call: Call) -> dict[str, Any]:
        if not call.select.workers:
            raise InvalidRequest("name the workers", field="workers", fix="workers: [instance_id]")
        is_open = call.op.name == "enable"

        async def remember(held: Any) -> None:
            for instance_id in call.select.workers or []:
                await held.put(ADMISSION_PREFIX + instance_id, b"" if is_open else b"disabled")

        return await self._on_all(call, "set_admission", {"open": is_open, "reason": "disabled"}, remember)

    # ---- updates ----

    async def _update(self, call: Call) -> dict[str, Any]:
        snapshot = await self._whole_fleet(call)
        body = ops.UpdateWeights.model_validate(call.body)
        pinned = call.select.epoch is not None or call.select.fingerprint is not None
        async with self.client.lock(call.view) as held:
            outcome = await update_fleet(
                self.client, call.view, held, body, call.request_id, snapshot if pinned else None
            )
        return _updated(call, outcome)

    async def _prepare(self, call: Call) -> dict[str, Any]:
        await self._whole_fleet(call)
        body = ops.UpdateWeights.model_validate(call.body)
        async with self.client.lock(call.view) as held:
            session, prepared, snapshot = await prepare_fleet(self.client, call.view, held, body, call.request_id)
        rows = [
            {"instance_id": key, "incarnation": incarnation, "status": "ok"}
            for key, incarnation in sorted(prepared.ready.items())
        ]
        return {
            **_head(call, snapshot),
            "update_id": session.update_id,
            "digest": session.digest,
            "workers": rows,
            "excluded": prepared.excluded,
        }

    async def _complete(self, call: Call) -> dict[str, Any]:
        await self._whole_fleet(call)
        async with self.client.lock(call.view) as held:
            outcome = await complete_fleet(self.client, call.view, held, call.body.get("update_id"))
        return _updated(call, outcome)

    async def _abort(self, call: Call) -> dict[str, Any]:
        snapshot = await self._whole_fleet(call)
        async with self.client.lock(call.view) as held:
            session = await abort_fleet(self.client, call.view, held, call.body.get("update_id"))
        return {**_head(call, snapshot), "update_id": session.update_id, "workers": []}

    async def _whole_fleet(self, call: Call) -> Snapshot:
        if call.select.workers is not None:
            raise InvalidRequest(
                "an update is of the whole fleet", field="workers", fix="leave it out; disable a worker instead"
            )
        return await self._members(call)

    async def _load_lora(self, call: Call) -> dict[str, Any]:
        transport = {"backend": "filesystem", "path": call.body["lora_path"]}
        call.body = {
            "target": {"kind": "lora", "op": "load", "name": call.body["lora_name"]},
            "transport": transport,
        }
        return await self._update(call)

    async def _unload_lora(self, call: Call) -> dict[str, Any]:
        target = {"kind": "lora", "op": "unload", "name": call.body["lora_name"]}
        call.body = {"target": target, "transport": {"backend": "none"}}
        return await self._update(call)


# ---- replies ----


def _serves(row: WorkerRow, record: DecisionRecord | None) -> bool:
    version = row.body.get("version")
    return bool(
        row.body.get("ready") and record is not None and version and version["digest"] == record.version.digest
    )


def _common(values: Sequence[Any], otherwise: Any) -> Any:
    return values[0] if values and all(value == values[0] for value in values) else otherwise


def _head(call: Call, snapshot: Snapshot) -> dict[str, Any]:
    return {
        "status": "ok",
        "epoch": snapshot.epoch,
        "fingerprint": snapshot.fingerprint,
        "elapsed_s": time.monotonic() - call.start,
    }


def _merged(call: Call, out: FanOut, **fields: Any) -> dict[str, Any]:
    return {**_head(call, out.snapshot), **fields, "workers": [row.to_wire() for row in out.rows]}


def _updated(call: Call, outcome: Outcome) -> dict[str, Any]:
    return {
        **_head(call, outcome.snapshot),
        "version": outcome.version.to_wire(),
        "workers": [row.to_wire() for row in outcome.rows],
        "excluded": outcome.excluded,
        "phases": outcome.phases,
    }


def _facts(call: Call, out: FanOut) -> dict[str, Any]:
    head = _merged(call, out)
    del head["status"]
    return head


def _in_order(snapshot: Snapshot, out: FanOut) -> list[Any]:
    by_id = {member.instance_id: member for member in snapshot}
    by_id.update({member.instance_id: member for member in out.snapshot})
    return [by_id.get(row.instance_id) for row in out.rows]


def _change_error(call: Call, op: str, out: FanOut, failed: Sequence[WorkerRow]) -> PlaneError:
    """One kind of error from every worker is the call's error; anything else is a conflict that names each."""
    facts = _facts(call, out)
    errors = [row.error for row in failed if row.error is not None]
    first = errors[0]
    if all(type(error) is type(first) for error in errors) and (
        len(failed) == len(out.rows) or isinstance(first, InvalidRequest)
    ):
        return type(first)(first.message, **{**first.facts, **facts})
    if any(row.lost for row in failed) and (call.select.epoch is not None or call.select.fingerprint is not None):
        return MembershipChanged(before_epoch=call.select.epoch, **facts, after_epoch=call.view.snapshot().epoch)
    return Conflict(
        f"{op} was not done on {len(failed)} of {len(out.rows)} workers: {failed[0].instance_id}: {first.message}",
        fix="see each worker's row; repeating the call is safe",
        **facts,
    )


def _join(names: Sequence[str], replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several components in one reply: the rows one after another, the heads by name."""
    rows = [
        {"component": name, **row} for name, reply in zip(names, replies, strict=True) for row in reply["workers"]
    ]
    heads = {
        name: {key: value for key, value in reply.items() if key != "workers"}
        for name, reply in zip(names, replies, strict=True)
    }
    elapsed = sum(reply["elapsed_s"] for reply in replies)
    return {"status": "ok", "components": heads, "workers": rows, "elapsed_s": elapsed}
