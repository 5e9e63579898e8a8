"""One call to the fleet, and the members that it means."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel

from rl_plane.errors import InvalidRequest, NoWorkers, Unsupported
from rl_plane.membership.core import Member, Snapshot
from rl_plane.membership.view import MembershipView
from rl_plane.membership.worker_calls import check_pin, select_members
from rl_plane.membership.worker_reply import skipped_reply
from rl_plane.protocol.fleet_ops import FleetOp, Select

ASKED_BY: ContextVar[str | None] = ContextVar("asked_by", default=None)
"""The caller of the frontend, for the call under way: the id of an HTTP key, or a NATS key as `said` returns it. Empty:
a caller without a key. None: this process is no frontend, and coordinates for itself."""

CALLED_FROM: ContextVar[str] = ContextVar("called_from", default="")
"""The process that has made the call under way, such as `train.py@gpu3:4711`, or its address. A listener sets it.
Empty: this process made the call itself."""

B = TypeVar("B", bound=BaseModel)
C = TypeVar("C", bound=BaseModel)


def said(key: str | None) -> str:
    """Returns a public NATS key as the history and the events name it: the caller says that the key is its own, and
    nothing proves it. Empty: the caller has no key."""
    return f"{key} (said)" if key else ""


@dataclass(frozen=True, slots=True)
class FleetCall(Generic[B]):
    """One call under way, on one component. Its body has been checked, and is handed on as it is."""

    op: FleetOp
    select: Select
    body: B
    """The op's own fields (`FleetOp.own`)."""
    view: MembershipView
    request_id: str
    """The caller's id, or a fresh one."""
    may_repeat: bool
    """The caller gave the request id, so it may have made this call before."""
    start: float
    """Monotonic seconds."""
    asked_by: str = ""
    """The id of the caller's HTTP key, or its NATS key as `said` returns it. Empty: it has none."""
    caller: str = ""
    """The caller's process or address. Empty: this process."""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that the caller has given, as a worker's request carries them."""
        return self.body.model_dump(exclude_unset=True)

    def with_body(self, body: C) -> FleetCall[C]:
        """This call with another body."""
        call: FleetCall[C] = replace(cast(Any, self), body=body)
        return call

    @property
    def pinned(self) -> bool:
        """The call names the exact fleet that it means."""
        return self.select.epoch is not None or self.select.fingerprint is not None


async def members_of(call: FleetCall[Any]) -> Snapshot:
    """Returns the fleet that the call means, once it has `min_workers` members. NoWorkers: `wait_s` were too few."""
    select, view = call.select, call.view
    if len(view.snapshot()) < select.min_workers:
        left_s = call.start + select.wait_s - time.monotonic()
        await view.wait_until(lambda now: len(now) >= select.min_workers, max(0.0, left_s))
    # A read uses the members that this view knows. A change, and a call that names its fleet, ask the store's leader.
    snapshot = await view.barrier() if call.pinned or call.op.method == "POST" else view.snapshot()
    if len(snapshot) < select.min_workers:
        beside = (
            f", and {len(snapshot.pipeline_stages)} pipeline stages, which are no engines"
            if snapshot.pipeline_stages
            else ""
        )
        raise NoWorkers(
            f"{len(snapshot)} of {select.min_workers} workers have joined{beside}",
            field="min_workers",
            fix=f"start workers ({view.subjects.start_worker}), or wait longer (wait_s)",
            epoch=snapshot.epoch,
            fingerprint=snapshot.fingerprint,
            retry_after_s=1.0,
        )
    check_pin(snapshot, select.epoch, select.fingerprint)
    select_members(snapshot, select.workers)
    if not call.op.describes_stages:
        check_engines(call, snapshot)
    return snapshot


async def whole_fleet(call: FleetCall[Any]) -> Snapshot:
    """The fleet, for an op that must not select workers."""
    if call.select.workers is not None:
        raise InvalidRequest(
            "an update is of the whole fleet", field="workers", fix="leave it out; disable a worker instead"
        )
    return await members_of(call)


def selected_pipeline_stages(call: FleetCall[Any], snapshot: Snapshot) -> list[Member]:
    """The stages among the workers that the call means."""
    named = call.select.workers
    return [stage for stage in snapshot.pipeline_stages if named is None or stage.instance_id in named]


def check_engines(call: FleetCall[Any], snapshot: Snapshot) -> None:
    """Raises an error if the call means pipeline stages only: every stage would skip the op, which is no success."""
    stages, named = selected_pipeline_stages(call, snapshot), call.select.workers
    if not stages or select_members(snapshot, named):
        return
    if named is None and call.op.name == "abort_requests":
        return  # requests that wait in the frontends end all the same
    kind = NoWorkers if named is None else Unsupported
    raise kind(
        f"{call.op.name} is for engines, and the call means pipeline stages only, which skip it: "
        f"{stages[0].instance_id}: {stages[0].pipeline_stage}",
        field="workers",
        fix="start a worker beside an engine" if kind is NoWorkers else "leave workers out, or name engines",
        epoch=snapshot.epoch,
        fingerprint=snapshot.fingerprint,
        workers=[skipped_reply(stage).to_wire() for stage in stages],
    )
