"""Builds the merged replies and errors of the fleet's ops from the workers' rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl_plane.commit.history import UpdateEntry, short_sources
from rl_plane.commit.rules import committed_already, serves
from rl_plane.commit.steps import Outcome
from rl_plane.errors import Conflict, DeadlineExceeded, InvalidRequest, PlaneError
from rl_plane.fleet.fleet_call import FleetCall, selected_pipeline_stages
from rl_plane.membership.core import Member, Snapshot
from rl_plane.membership.worker_calls import FanOut
from rl_plane.membership.worker_reply import WorkerReply, skipped_reply
from rl_plane.protocol.record import DecisionRecord, VersionSource
from rl_plane.protocol.relay import SourceUse

MAX_OFFSET = 1 << 16
"""The largest number of ranks that a trainer may have in a group."""
SHOWN_REASONS = 3
"""Workers whose reasons an error's message tells. Its rows have them all."""


def is_serving(row: WorkerReply, record: DecisionRecord | None) -> bool:
    """True if this worker takes requests and answers them with exactly the committed weights."""
    return record is not None and bool(row.body.get("ready")) and serves(row, record)


def common(values: Sequence[Any], otherwise: Any) -> Any:
    """The value that all of `values` have, else `otherwise`."""
    return values[0] if values and all(value == values[0] for value in values) else otherwise


def adapters_of(record: DecisionRecord | None) -> dict[str, Any]:
    """The committed version of each adapter, by name."""
    return {name: one.version.to_wire() for name, one in record.adapters.items()} if record is not None else {}


def head(call: FleetCall[Any], snapshot: Snapshot) -> dict[str, Any]:
    """The fields that every reply begins with."""
    return {
        "status": "ok",
        "epoch": snapshot.epoch,
        "fingerprint": snapshot.fingerprint,
        "elapsed_s": time.monotonic() - call.start,
    }


def merged(call: FleetCall[Any], out: FanOut, **fields: Any) -> dict[str, Any]:
    """A reply with the op's own fields and a row for each worker."""
    return {**head(call, out.snapshot), **fields, "workers": [row.to_wire() for row in out.rows]}


def listed(call: FleetCall[Any], member: Member | None) -> dict[str, Any]:
    """A member's registration, as the op `workers` lists it."""
    subjects, info = call.view.subjects, member.info if member is not None else {}
    return {"namespace": subjects.namespace, "component": subjects.component, **info}


def with_pipeline_stages(call: FleetCall[Any], reply: dict[str, Any]) -> dict[str, Any]:
    """The reply with a row for each stage beside the engines, so that it names every worker."""
    if call.op.name == "updates":  # its rows are of the past
        return reply
    rows = [
        {**skipped_reply(stage).to_wire(), **(listed(call, stage) if call.op.name == "workers" else {})}
        for stage in selected_pipeline_stages(call, call.view.snapshot())
    ]
    return {**reply, "workers": [*reply["workers"], *rows]}


def updated(
    call: FleetCall[Any],
    outcome: Outcome,
    phases: Mapping[str, float],
    sources: Mapping[str, Sequence[SourceUse]],
) -> dict[str, Any]:
    """The reply to an update that was committed now."""
    return {
        **head(call, call.view.snapshot()),
        "version": outcome.version.to_wire(),
        "workers": [row.to_wire() for row in outcome.replies],
        "excluded": list(outcome.excluded),
        "phases": dict(phases),
        **(_sent(outcome.source) if outcome.source is not None else {}),
        **({"sources": short_sources(sources)} if sources else {}),
        **({"canary": dict(outcome.canary)} if outcome.canary is not None else {}),
    }


def answered(call: FleetCall[Any], entry: UpdateEntry) -> dict[str, Any]:
    """Repeats the answer of an update that has ended, from its entry in the history. No worker is asked."""
    if entry.version is None or entry.error is not None:
        raise entry.first_error()
    return {
        **head(call, call.view.snapshot()),
        "version": entry.version.to_wire(),
        "workers": entry.replies(),
        "excluded": list(entry.excluded),
        "phases": dict(entry.phases),
        **_sent(entry),
        **({"sources": dict(entry.sources)} if entry.sources else {}),
        **({"canary": dict(entry.canary)} if entry.canary is not None else {}),
    }


def _sent(version: VersionSource | UpdateEntry) -> dict[str, Any]:
    """The encoding of a version, and the part of the model that was sent."""
    sizes = {"sent_bytes": version.sent_bytes, "model_bytes": version.model_bytes}
    known = {key: value for key, value in sizes.items() if value is not None}
    return {"encoding": version.encoding, **known}


def ended(entry: UpdateEntry) -> PlaneError:
    """The error that answers a repeated prepare of an update that has ended."""
    if entry.version is None:
        return entry.first_error()
    return committed_already(entry.update_id, entry.version, "prepare the next one under a new id")


def facts_of(call: FleetCall[Any], out: FanOut) -> dict[str, Any]:
    """Returns the rows and the fleet's identity for the facts of an error."""
    head = merged(call, out)
    del head["status"]
    return head


def in_order(snapshot: Snapshot, out: FanOut) -> list[Member | None]:
    """The member of each row, in the rows' order."""
    by_id = {member.instance_id: member for member in snapshot}
    by_id.update({member.instance_id: member for member in out.snapshot})
    return [by_id.get(row.instance_id) for row in out.rows]


def change_error(call: FleetCall[Any], op: str, out: FanOut) -> PlaneError:
    """The error of a change that failed on some workers.

    If every worker gives the same kind of error, the call has that error. Otherwise it is a Conflict that tells the
    reason of each worker, up to SHOWN_REASONS of them: the first one is often only the effect of another."""
    facts = facts_of(call, out)
    errors = [row.error for row in out.failed if row.error is not None]
    first = errors[0]
    unanimous = len(errors) == len(out.rows) and all(type(error) is type(first) for error in errors)
    if unanimous and not isinstance(first, DeadlineExceeded):  # a silent worker may have done it, or half of it
        return type(first)(first.message, **{**first.facts, **facts})
    reasons = [f"{row.instance_id}: {row.error.message}" for row in out.failed if row.error is not None]
    return Conflict(
        f"{op} was not done on {len(errors)} of {len(out.rows)} workers: {'; '.join(reasons[:SHOWN_REASONS])}",
        fix="see each worker's row; repeating the call is safe",
        **facts,
    )


def group_places(snapshot: Snapshot, body: Mapping[str, Any]) -> dict[str, Any]:
    """Each worker's first rank in a group of the trainer (rank 0) and these workers.

    A worker is one rank for each host that its engine spans: a host receives once for all of its ranks. In a group that
    the trainer forms by itself
    (`form: torch`) there is one for each rank of its engine, and the trainer states in `rank_offset` how many ranks of
    its own come first. InvalidRequest before any rank joins if the caller's `world_size` is another one."""
    own, base = body.get("form") == "torch", 1
    if own:
        base = body.get("rank_offset", 1)
        if type(base) is not int or not 1 <= base <= MAX_OFFSET:
            raise InvalidRequest(
                f"rank_offset is {base!r}",
                field="rank_offset",
                fix="give the number of the trainer's ranks, 1 or more",
            )
        if "world_size" not in body:
            raise InvalidRequest(
                "a trainer's own group needs a size",
                field="world_size",
                fix="give the world_size that it waits for",
            )
    offsets, size = {}, base
    for member in sorted(snapshot, key=lambda each: each.instance_id):
        offsets[member.instance_id] = size
        size += int(member.info.get("world_size") or 1) if own else member.hosts
    for name in ("rank_offset", "rank_offsets", "fleet_ranks"):
        if name in body and not (own and name == "rank_offset"):
            raise InvalidRequest(
                f"{name} is given, but each worker's place follows from the fleet", field=name, fix="leave it out"
            )
    if "check_only" in body:
        raise InvalidRequest(
            "check_only is the plane's own question to the workers before they join",
            field="check_only",
            fix="leave it out",
        )
    if body.get("world_size", size) != size:
        raise InvalidRequest(
            f"world_size is {body['world_size']!r}; the trainer and "
            + f"the {'ranks' if own else 'hosts'} of {len(offsets)} workers"
            + f" are {size}",
            field="world_size",
            fix=f"give {size}" + ("" if own else ", or leave it out"),
            epoch=snapshot.epoch,
            fingerprint=snapshot.fingerprint,
        )
    ranks = {"rank_offset": base, "fleet_ranks": size - base} if own else {}
    return {"world_size": size, "rank_offsets": offsets, **ranks}


def error_in(name: str, error: PlaneError, done: Sequence[str], replies: Sequence[dict[str, Any]]) -> PlaneError:
    """The error of a call over several components that failed in the component `name`. It also has the rows of the
    components that were `done` before."""
    mine = [{"component": name, **row} for row in error.facts.get("workers", ())]
    rows = [*join(done, replies)["workers"], *mine]
    return type(error)(f"{name}: {error.message}", **{**error.facts, "component": name, "workers": rows})


def join(names: Sequence[str], replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The replies of several components as one: their rows one after another, their heads by name."""
    rows = [
        {"component": name, **row} for name, reply in zip(names, replies, strict=True) for row in reply["workers"]
    ]
    heads = {
        name: {key: value for key, value in reply.items() if key != "workers"}
        for name, reply in zip(names, replies, strict=True)
    }
    elapsed = sum(reply["elapsed_s"] for reply in replies)
    return {"status": "ok", "components": heads, "workers": rows, "elapsed_s": elapsed}
