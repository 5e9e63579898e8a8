"""What the fleet's ops answer: the merged replies and errors of `Fleet`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plane.client import FanOut, select_members
from rl_plane.commit.history import UpdateEntry
from rl_plane.commit.rules import serves
from rl_plane.commit.steps import Outcome
from rl_plane.errors import Conflict, DeadlineExceeded, InvalidRequest, NoWorkers, PlaneError, Unsupported
from rl_plane.membership.core import Member, Snapshot
from rl_plane.membership.view import MembershipView
from rl_plane.membership.worker_reply import WorkerReply, skipped_reply
from rl_plane.protocol.fleet_ops import FleetOp, Select
from rl_plane.protocol.record import DecisionRecord

MAX_OFFSET = 1 << 16
"""Ranks of a trainer's own in a group."""


@dataclass(slots=True)
class Call:
    """One call under way, on one component."""

    op: FleetOp
    select: Select
    body: dict[str, Any]
    view: MembershipView
    request_id: str
    """The caller's, or one that nobody else knows."""
    may_repeat: bool
    """The caller gave a request id: it may have asked before."""
    start: float


def is_serving(row: WorkerReply, record: DecisionRecord | None) -> bool:
    """Does this worker take requests, and answer them by exactly the committed weights?"""
    return record is not None and bool(row.body.get("ready")) and serves(row, record)


def common(values: Sequence[Any], otherwise: Any) -> Any:
    return values[0] if values and all(value == values[0] for value in values) else otherwise


def adapters_of(record: DecisionRecord | None) -> dict[str, Any]:
    return {name: one.version.to_wire() for name, one in record.adapters.items()} if record is not None else {}


def head(call: Call, snapshot: Snapshot) -> dict[str, Any]:
    return {
        "status": "ok",
        "epoch": snapshot.epoch,
        "fingerprint": snapshot.fingerprint,
        "elapsed_s": time.monotonic() - call.start,
    }


def merged(call: Call, out: FanOut, **fields: Any) -> dict[str, Any]:
    return {**head(call, out.snapshot), **fields, "workers": [row.to_wire() for row in out.rows]}


def listed(call: Call, member: Member | None) -> dict[str, Any]:
    """What `workers` tells of a member."""
    subjects, info = call.view.subjects, member.info if member is not None else {}
    return {"namespace": subjects.namespace, "component": subjects.component, **info}


def with_stages(call: Call, reply: dict[str, Any]) -> dict[str, Any]:
    """A reply names every worker: those that are beside a stage, too."""
    if call.op.name == "updates":  # it tells of the past
        return reply
    rows = [
        {**skipped_reply(stage).to_wire(), **(listed(call, stage) if call.op.name == "workers" else {})}
        for stage in _stages(call, call.view.snapshot())
    ]
    return {**reply, "workers": [*reply["workers"], *rows]}


def _stages(call: Call, snapshot: Snapshot) -> list[Member]:
    named = call.select.workers
    return [stage for stage in snapshot.stages if named is None or stage.instance_id in named]


def check_engines(call: Call, snapshot: Snapshot) -> None:
    """An error where only stages are meant: each would skip the op, and what nobody has done is no success."""
    stages, named = _stages(call, snapshot), call.select.workers
    if not stages or select_members(snapshot, named):
        return
    if named is None and call.op.name == "abort_requests":
        return  # what waits in the frontends ends all the same
    kind = NoWorkers if named is None else Unsupported
    raise kind(
        f"{call.op.name} is for engines, and only stages are meant, which skip it: "
        f"{stages[0].instance_id}: {stages[0].stage}",
        field="workers",
        fix="start a worker beside an engine" if kind is NoWorkers else "leave workers out, or name engines",
        epoch=snapshot.epoch,
        fingerprint=snapshot.fingerprint,
        workers=[skipped_reply(stage).to_wire() for stage in stages],
    )


def updated(call: Call, outcome: Outcome, phases: Mapping[str, float]) -> dict[str, Any]:
    return {
        **head(call, call.view.snapshot()),
        "version": outcome.version.to_wire(),
        "workers": [row.to_wire() for row in outcome.replies],
        "excluded": list(outcome.excluded),
        "phases": dict(phases),
        **({"canary": dict(outcome.canary)} if outcome.canary is not None else {}),
    }


def answered(call: Call, entry: UpdateEntry) -> dict[str, Any]:
    """What an update was answered with, again: nobody is asked for it."""
    if entry.version is None or entry.error is not None:
        raise entry.first_error()
    return {
        **head(call, call.view.snapshot()),
        "version": entry.version.to_wire(),
        "workers": entry.replies(),
        "excluded": list(entry.excluded),
        "phases": dict(entry.phases),
        **({"canary": dict(entry.canary)} if entry.canary is not None else {}),
    }


def ended(entry: UpdateEntry) -> PlaneError:
    """The answer to a repeated prepare of an update that has ended."""
    if entry.version is None:
        return entry.first_error()
    return Conflict(
        f"the update {entry.update_id!r} is committed as {entry.label}",
        fix="prepare the next one under a new id",
        version=entry.version.to_wire(),
    )


def facts_of(call: Call, out: FanOut) -> dict[str, Any]:
    head = merged(call, out)
    del head["status"]
    return head


def in_order(snapshot: Snapshot, out: FanOut) -> list[Any]:
    by_id = {member.instance_id: member for member in snapshot}
    by_id.update({member.instance_id: member for member in out.snapshot})
    return [by_id.get(row.instance_id) for row in out.rows]


def change_error(call: Call, op: str, out: FanOut) -> PlaneError:
    """One kind of error from every worker is the call's error; anything else is a conflict that names each."""
    facts = facts_of(call, out)
    errors = [row.error for row in out.failed if row.error is not None]
    first = errors[0]
    unanimous = len(errors) == len(out.rows) and all(type(error) is type(first) for error in errors)
    if unanimous and not isinstance(first, DeadlineExceeded):  # which may have been done, or half done
        return type(first)(first.message, **{**first.facts, **facts})
    return Conflict(
        f"{op} was not done on {len(errors)} of {len(out.rows)} workers: {out.failed[0].instance_id}: {first.message}",
        fix="see each worker's row; repeating the call is safe",
        **facts,
    )


def group_places(snapshot: Snapshot, body: Mapping[str, Any]) -> dict[str, Any]:
    """The places in a group of the trainer, rank 0, and every rank of these workers: refused before anybody joins
    if the caller counts otherwise. A trainer that forms the group by itself (`form: torch`) says how many ranks of its
    own come first."""
    own, base = body.get("form") == "torch", 1
    if own:
        base = body.get("rank_offset", 1)
        if type(base) is not int or not 1 <= base <= MAX_OFFSET:
            raise InvalidRequest(
                f"rank_offset is {base!r}", field="rank_offset", fix="the trainer's ranks, 1 or more"
            )
        if "world_size" not in body:
            raise InvalidRequest(
                "a trainer's own group has a size", field="world_size", fix="say the world_size that it waits for"
            )
    offsets, size = {}, base
    for member in sorted(snapshot, key=lambda each: each.instance_id):
        offsets[member.instance_id] = size
        size += int(member.info["world_size"])
    for name in ("rank_offset", "rank_offsets", "fleet_ranks"):
        if name in body and not (own and name == "rank_offset"):
            raise InvalidRequest(
                f"{name}: each worker's place follows from the fleet", field=name, fix="leave it out"
            )
    if body.get("world_size", size) != size:
        raise InvalidRequest(
            f"world_size is {body['world_size']!r}; the trainer and the ranks of {len(offsets)} workers are {size}",
            field="world_size",
            fix=f"say {size}" + ("" if own else ", or leave it out"),
            epoch=snapshot.epoch,
            fingerprint=snapshot.fingerprint,
        )
    ranks = {"rank_offset": base, "fleet_ranks": size - base} if own else {}
    return {"world_size": size, "rank_offsets": offsets, **ranks}


def join(names: Sequence[str], replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
