"""The rules of a coordinator: what follows from the workers' replies. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rl_plane.commit.steps import Members, Needs, Outcome, Prepared, Surveyed
from rl_plane.errors import (
    Conflict,
    InvalidRequest,
    NotAtBase,
    NotFound,
    NoWorkers,
    PlaneError,
    Unsupported,
    UpdateAborted,
    WorkerLost,
)
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.canary import CanaryRecord
from rl_plane.protocol.envelope import MAX_INTEGER, encode
from rl_plane.protocol.record import (
    MAX_DELTAS,
    CommittedAdapter,
    DecisionRecord,
    UpdateSession,
    VersionSource,
    newer,
)
from rl_plane.protocol.update_requests import LoraTarget, UpdatePolicy, UpdateWeights
from rl_plane.protocol.validation import MAX_LEASE_S
from rl_plane.protocol.versions import WeightVersion, algorithm_of

SHOWN = 3
"""The number of workers that an error message names."""
MAX_RECORD_BYTES = 800_000
"""The size of a decision record. The rest of a message (`envelope.MAX_MESSAGE_BYTES`) is for the scores that the canary
adds to the record."""
CLOSED_BY_CHOICE = frozenset({"disabled", "draining", "leaving", "memory", "checking"})
"""Reasons that close a worker's admission although its weights are right."""


def newest(
    stored: DecisionRecord | None, witness: DecisionRecord | None, reports: Sequence[WorkerReply]
) -> DecisionRecord | None:
    """The newest record that the store, this process or any worker has. A store may have lost a write that it had
    acknowledged."""
    reported = [reply.body["record"] for reply in reports if reply.ok]
    best = stored
    for record in [witness, *(DecisionRecord.from_wire(wire) for wire in reported if wire is not None)]:
        if record is not None and newer(record, best):
            best = record
    return best


def label_of(base: DecisionRecord, body: UpdateWeights) -> str:
    return body.version or str(base.sequence + 1)


def next_record(
    base: DecisionRecord,
    body: UpdateWeights,
    update_id: str,
    prepared: Prepared,
    now: float,
    before: VersionSource | None = None,
    canary: CanaryRecord | None = None,
) -> DecisionRecord:
    """The decision record of the update that was prepared, on top of the committed one. `before`: the source of the
    version that a delta or a partial version changes."""
    policy = body.policy
    made = WeightVersion(base.version.run, base.sequence + 1, label_of(base, body), prepared.digest)
    source = body.source(prepared.refetchable, before)
    if before is not None and body.base == prepared.digest:
        source = replace(before, keep_staged=source.keep_staged)  # equal bytes: the chain does not grow
    source = replace(source, sent_bytes=prepared.sent_bytes, model_bytes=prepared.model_bytes)
    adapters = dict(base.adapters)
    version, base_source = base.version, base.source
    if isinstance(body.target, LoraTarget):
        adapters.pop(body.target.name, None)
        if body.target.op != "unload":
            adapters[body.target.name] = CommittedAdapter(made, source)
    else:
        version, base_source = made, source
        adapters = adapters if body.target.adapters == "keep" else {}
    rolling = policy.barrier == "rolling"
    on_failure = policy.on_canary_failure
    returns = canary is not None and version is made and on_failure == "rollback" and base.restorable
    return DecisionRecord(
        version,
        base_source,
        update_id,
        made,
        adapters,
        base.run_number,
        base.held if rolling else None,
        policy.pause_mode,
        policy.keep_pause,
        policy.kv if version is made else "recompute",
        policy.commit_timeout_s,
        canary=canary,
        on_canary_failure=on_failure,
        fallback=replace(base, missed=None, fallback=None) if returns else None,
        open=rolling,
        decided_at=now,
    )


def check_against(base: DecisionRecord, body: UpdateWeights, before: VersionSource | None = None) -> None:
    """Refuses an update that can't become the next version, before any worker is asked. `before`: the source of the
    version that a delta or a partial version changes."""
    target, policy = body.target, body.policy
    if isinstance(target, LoraTarget):
        there = ", ".join(sorted(base.adapters)) or "none"
        if target.op == "load" and target.name in base.adapters:
            raise Conflict(
                f"the adapter {target.name!r} is already loaded",
                field="target.op",
                fix="use op swap, or unload it",
            )
        if target.op != "load" and target.name not in base.adapters:
            raise NotFound(
                f"there is no adapter {target.name!r}; loaded are: {there}",
                field="target.name",
                fix="load it first",
            )
    if before is not None:
        _check_delta(base, body, before)
    if policy.staging == "none" and not base.source.from_scratch:
        raise InvalidRequest(
            "an unstaged update that fails must restore the committed weights, and these can't be fetched again",
            field="policy.staging",
            fix="use staging host, or publish from a source that stays",
        )


def _check_delta(base: DecisionRecord, body: UpdateWeights, before: VersionSource) -> None:
    if before is base.source and body.base != base.version.digest:
        raise NotAtBase(
            f"the {body.encoding} changes {body.base}, but the committed version {base.version.label} is "
            f"{base.version.digest}",
            field="base",
            base=base.version.digest,
            fix="build it on the committed version, or publish the full one",
        )
    if before.deltas >= MAX_DELTAS or before.cast:
        why = "was cast" if before.cast else f"is {before.deltas} deltas away from a full one"
        raise NotAtBase(
            f"the version that this {body.encoding} changes {why}", field="encoding", fix="publish a full version"
        )


def evaluate_prepare(
    replies: Sequence[WorkerReply], counted: set[str], policy: UpdatePolicy, stated_digest: str | None
) -> Prepared:
    """Returns the prepared update if it may be decided, else raises the error that it ends with.

    `counted`: the workers whose failure can fail the update."""
    ready = {reply.instance_id: reply for reply in replies if reply.ok}
    failed = _failed(replies)
    digests = Counter(reply.body["digest"] for reply in ready.values())
    if len(digests) > 1:
        raise UpdateAborted(
            "the workers received different bytes: "
            + ", ".join(f"{digest} on {count}" for digest, count in digests.most_common()),
            fix="write the checkpoint completely, then publish it under a new path",
        )
    blocking = [reply for reply in failed if reply.instance_id in counted]
    able = len(replies) - len(failed)
    if not able or (blocking and policy.on_prepare_failure == "abort"):
        raise prepare_error(blocking or failed, len(replies), in_place=policy.staging == "none")
    if able < policy.min_ready:
        raise too_few(able, policy)
    assert len(ready) == able, "the coordinator stops workers only if one of these errors is certain"
    digest = next(iter(digests))
    if stated_digest is not None and digest != stated_digest:
        algorithm = algorithm_of(stated_digest)
        raise UpdateAborted(
            f"the workers received {digest}, the caller stated {stated_digest}",
            field="digest",
            fix="publish the weights again, and don't change them meanwhile"
            if algorithm == algorithm_of(digest)
            else f"prepare the update with digest_algorithm {algorithm}",
        )
    return Prepared(
        digest,
        {key: reply.incarnation for key, reply in ready.items()},
        [reply.instance_id for reply in failed],
        all(reply.body["refetchable"] for reply in ready.values()),
        failed,
        replies=list(ready.values()),
        sent_bytes=_most(ready.values(), "bytes"),
        model_bytes=_most(ready.values(), "model_bytes") or _most(ready.values(), "bytes"),
    )


def _most(replies: Iterable[WorkerReply], field: str) -> int | None:
    return max((reply.body[field] for reply in replies if field in reply.body), default=None)


def evaluate_listening(replies: Sequence[WorkerReply]) -> Prepared:
    """Returns the prepared update if every worker listens. A sender waits for each rank of its group, so no worker can
    be excluded."""
    failed = _failed(replies)
    if failed or not replies:
        fix = "mend these workers or stop them, then send the update again: a push needs every worker"
        raise prepare_error(failed, len(replies), fix=fix)
    return Prepared("", {reply.instance_id: reply.incarnation for reply in replies}, [], refetchable=False)


def _failed(replies: Sequence[WorkerReply]) -> list[WorkerReply]:
    """Returns the replies of workers that failed by themselves. It leaves out workers that the coordinator stopped."""
    return [reply for reply in replies if not (reply.ok or reply.stopped)]


def needs_of(update_id: str, counted: Iterable[str], policy: UpdatePolicy) -> Needs:
    """The workers that must prepare an update. `counted`: the workers whose failure can fail it."""
    each = frozenset(counted) if policy.on_prepare_failure == "abort" else frozenset[str]()
    return Needs(update_id, each, max(1, policy.min_ready))


def is_lost(session: UpdateSession, policy: UpdatePolicy, seen: Surveyed) -> bool:
    """Reports whether the session can't be completed any more: too many of its workers have left or failed."""
    failed = {
        reply.instance_id for reply in seen.reports if reply.ok and reply.body["failed"] == session.update_id
    }
    ready = still_there(session.prepared, seen.members).keys() - failed
    needed = len(session.prepared) if policy.on_prepare_failure == "abort" else policy.min_ready
    return len(ready) < needed


def too_few(ready: int, policy: UpdatePolicy) -> UpdateAborted:
    return UpdateAborted(
        f"only {ready} workers could prepare the update, policy.min_ready asks for {policy.min_ready}",
        field="policy.min_ready",
    )


def prepare_error(
    failed: Sequence[WorkerReply],
    asked: int,
    in_place: bool = False,
    fix: str = "repeat it, or exclude them with policy.on_prepare_failure=exclude",
) -> PlaneError:
    """The update's error, made from the workers' errors. A mistake of the caller keeps its type, because the caller may
    then rely on it that no worker was changed. `in_place`: an update that was already written over the weights of some
    worker does not keep it."""
    errors = [reply.error for reply in failed if reply.error is not None]
    if not errors:
        return NoWorkers("no worker is left to prepare the update", retry_after_s=1.0)
    for kind in (InvalidRequest, Unsupported):
        mine = [error for error in errors if isinstance(error, kind)]
        touched = in_place and len(mine) < asked
        if mine and not touched and (kind is InvalidRequest or len(mine) == len(errors)):
            return type(mine[0])(mine[0].message, **mine[0].facts)
    causes = [(reply.instance_id, reply.error) for reply in failed if reply.error is not None]
    # A worker whose group broke only reports that another worker failed. That one's error says why.
    who, why = next((one for one in causes if one[1].facts.get("field") != "transport.group"), causes[0])
    return UpdateAborted(
        f"{len(failed)} of {asked} workers could not prepare the update, so it was undone on all: {who}: {why.message}",
        fix=fix,
    )


def left_early(prepared: Members, ready: Members) -> UpdateAborted:
    """The error of an update of whose prepared workers only `ready` are still there."""
    left = sorted(prepared.keys() - ready.keys())
    replies = [WorkerReply(key, prepared[key], "ok") for key in sorted(ready)]
    replies += [left_reply(key, prepared[key], "it left before the update was complete") for key in left]
    return UpdateAborted(
        f"{', '.join(left[:SHOWN])} had prepared the update, and left before it was complete",
        workers=[reply.to_wire() for reply in replies],
        fix="prepare it again",
    )


def committed_already(update_id: str, version: WeightVersion, fix: str) -> Conflict:
    """The error of a call that comes too late to change an update."""
    return Conflict(
        f"the update {update_id!r} is committed as {version.label}", version=version.to_wire(), fix=fix
    )


def still_there(ready: Members, now: Members) -> dict[str, str]:
    """The workers of `ready` that are still members, as the same process."""
    return {key: incarnation for key, incarnation in ready.items() if now.get(key) == incarnation}


def serves(reply: WorkerReply, record: DecisionRecord) -> bool:
    """Reads from a worker's `state` whether it computes with exactly the committed weights and may take requests.

    A worker that is closed only for reasons in CLOSED_BY_CHOICE counts as serving, because its weights are right."""
    return _holds(reply, record) and all(
        reason.partition(":")[0] in CLOSED_BY_CHOICE for reason in reply.body["admission"]["reasons"]
    )


def gave_up(reply: WorkerReply, record: DecisionRecord) -> bool:
    """Reads from a worker's `state` whether the committed weights have failed the canary there, and the worker does not
    fetch them again."""
    canary = reply.body.get("canary")
    return _holds(reply, record) and bool(canary and canary["gave_up"])


def _holds(reply: WorkerReply, record: DecisionRecord) -> bool:
    """Reads from a worker's `state` whether its engine is alive and has exactly the committed weights."""
    version = reply.body.get("version")
    return bool(
        reply.ok
        and reply.body.get("engine_alive")
        and reply.body.get("sequence") == record.sequence
        and version
        and version["digest"] == record.version.digest
    )


def _serving(outcome: Outcome) -> int:
    return sum(reply.ok for reply in outcome.replies if reply.instance_id not in outcome.excluded)


def is_enough(outcome: Outcome, policy: UpdatePolicy) -> bool:
    return _serving(outcome) >= policy.min_ready


def _is_replaced(outcome: Outcome) -> bool:
    """Reports whether some worker serves a later version."""
    made = outcome.version
    return any(
        reply.ok
        and (version := reply.body.get("version")) is not None
        and version["run"] == made.run
        and (reply.body.get("sequence") or 0) > made.sequence
        for reply in outcome.replies
    )


def enough(outcome: Outcome, policy: UpdatePolicy) -> Outcome:
    """Returns the outcome if enough workers serve the version. Conflict: it is committed, and fewer than `min_ready`
    workers serve it."""
    if is_enough(outcome, policy):
        return outcome
    if _is_replaced(outcome):
        raise Conflict(
            f"{outcome.version.label} was committed, and another version has been committed since",
            version=outcome.version.to_wire(),
            workers=[reply.to_wire() for reply in outcome.replies],
            canary=outcome.canary,
            fix="read the state",
        )
    raise Conflict(
        f"{outcome.version.label} is committed, but {_serving(outcome)} workers serve it; the others follow by "
        "themselves",
        version=outcome.version.to_wire(),
        workers=[reply.to_wire() for reply in outcome.replies],
        excluded=list(outcome.excluded),
        canary=outcome.canary,
        fix="read the state until they are ready; don't send it again",
    )


def check_size(record: DecisionRecord) -> None:
    """Refuses a record that is too large to be sent to the workers. It must be checked before the decision: nothing
    undoes a decision that no worker can receive."""
    size = max(len(record.encode()), len(encode(commit_body(record, MAX_INTEGER, MAX_LEASE_S))))
    if size > MAX_RECORD_BYTES:
        raise InvalidRequest(
            f"with this transport the decision record has {size} bytes, more than {MAX_RECORD_BYTES}; it also has the "
            "sources of the version before, of the adapters, and of the versions that a delta changes",
            field="transport",
            fix="give a shorter transport, publish a full version, or unload adapters",
        )


def commit_body(record: DecisionRecord, written: int, pause_s: float) -> dict[str, Any]:
    return {
        "update_id": record.update_id,
        "record": record.to_wire(),
        "sequence": written,
        "pause_s": pause_s,
    }


def outcome_of(
    record: DecisionRecord,
    states: Sequence[WorkerReply],
    replies: Sequence[WorkerReply] = (),
    meant: Iterable[str] = (),
) -> Outcome:
    """The outcome by the workers' `state`: which of them serve the version now.

    `replies`: their replies during the update. A reply that agrees with the state replaces it, because it has more
    details.
    `meant`: the workers that prepared the update. Some of them may have left."""
    serving = {reply.instance_id for reply in states if serves(reply, record)}
    best = {reply.instance_id: reply for reply in states}
    best |= {reply.instance_id: reply for reply in replies if reply.ok == (reply.instance_id in serving)}
    excluded = {reply.instance_id for reply in [*states, *replies]} | set(meant)
    return Outcome(
        record.made, [best[key] for key in sorted(best)], sorted(excluded - serving), source=record.made_source
    )


def left_reply(instance_id: str, incarnation: str, why: str = "it left before the update began") -> WorkerReply:
    error = WorkerLost(why, instance_id=instance_id)
    return WorkerReply(instance_id, incarnation, "error", error=error)


def one_model(reports: Sequence[WorkerReply]) -> str:
    """The digest of the model that every worker was started with, for a new run. Conflict: they differ."""
    silent = [reply for reply in reports if not reply.ok]
    digests = Counter(reply.body["model_digest"] for reply in reports if reply.ok)
    if silent or len(digests) != 1:
        raise Conflict(
            f"in a new run every worker must report the same model; {len(silent)} did not answer, the others have "
            + (", ".join(f"{digest} ({count})" for digest, count in digests.items()) or "none"),
            workers=[reply.to_wire() for reply in reports],
            fix="start all workers with the new model, stop the others",
        )
    return str(next(iter(digests)))
