"""The numeric canary of one update: the sequences that its workers score, and the result of their scores. Pure.

`protocol/canary.py` defines the canary, `canary_rules.py` decides which workers pass. The steps of an update call the
functions here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_plane.commit.canary_rules import CanaryScore, Settlement, settle
from rl_plane.commit.rules import serves
from rl_plane.commit.steps import Outcome
from rl_plane.errors import CanaryFailed, DeadlineExceeded, NotPrepared, Unsupported
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.canary import (
    MAX_KIND_CHARS,
    Canary,
    CanaryHistory,
    CanaryOrigin,
    CanaryRecord,
    check_vocabulary,
    default_canary,
    parse_canary,
    shortened,
)
from rl_plane.protocol.record import DecisionRecord
from rl_plane.protocol.update_requests import CanaryLimits, LoraTarget, UpdateWeights
from rl_plane.protocol.versions import WeightVersion

NOTHING_BEFORE = "the version before can't be fetched again, so the fleet can't go back to it: publish a version"


def limits_of(reports: Sequence[WorkerReply]) -> CanaryLimits | None:
    """The limits that hold on every worker. None: no worker's engine can score."""
    limits = [reply.body["canary"] for reply in reports if reply.ok and reply.body.get("canary") is not None]
    if not limits:
        return None
    return CanaryLimits(
        vocab_size=min(one["vocab_size"] for one in limits),
        max_model_len=min(one["max_model_len"] for one in limits),
    )


def check_canary(body: UpdateWeights, limits: CanaryLimits | None) -> None:
    """Refuses a canary that the fleet's engines can't score, before any worker is touched."""
    canary = body.policy.canary
    if not isinstance(canary, Canary):
        return
    if limits is None:
        raise Unsupported(
            "no worker's engine can score token sequences", field="policy.canary", fix="leave it out"
        )
    check_vocabulary(canary, limits["vocab_size"], limits["max_model_len"])


def canary_of(
    base: DecisionRecord,
    body: UpdateWeights,
    digest: str,
    prepared: Sequence[WorkerReply],
    limits: CanaryLimits | None,
    history: CanaryHistory,
) -> CanaryRecord | None:
    """Returns the canary of the version that was prepared: the request's canary, else the canary that a worker has
    found beside the checkpoint, else sequences that follow from the vocabulary."""
    if isinstance(body.target, LoraTarget):
        return base.canary  # the base weights stay as they are
    if body.policy.canary == "off" or limits is None:
        return None
    origin: CanaryOrigin = "default"
    if isinstance(body.policy.canary, Canary):
        canary, origin = body.policy.canary, "update"
    else:
        found = [reply.body["canary"] for reply in prepared if reply.ok and reply.body.get("canary") is not None]
        if found:
            canary, origin = parse_canary(found[0], "canary.json"), "canary.json"
            check_vocabulary(canary, limits["vocab_size"], limits["max_model_len"], "canary.json")
        else:
            canary = shortened(default_canary(limits["vocab_size"]), limits["max_model_len"])
    return CanaryRecord.begun(canary, history, digest, origin)


def settled(record: DecisionRecord, replies: Sequence[WorkerReply]) -> tuple[Settlement | None, list[WorkerReply]]:
    """Decides by the scores of the workers that have swapped the version in. Returns the decision (None: no worker has
    scored anything), and the replies with each worker's verdict or error."""
    canary = record.canary
    scores = {
        reply.instance_id: _score_of(reply.body["canary"])
        for reply in replies
        if reply.ok and reply.body.get("canary") is not None
    }
    if canary is None or not scores:
        return None, list(replies)
    settlement = settle(canary, scores, record.on_canary_failure)
    silent = sum(isinstance(reply.error, DeadlineExceeded) for reply in replies)
    if canary.expected is None and not canary.references and silent >= len(scores):
        # Too few workers answered in time to decide what the others must compute.
        settlement = Settlement("open", settlement.verdicts, settlement.excluded, canary)
    if settlement.action == "rollback" and record.fallback is None:
        settlement = replace(settlement, action="exclude", warning=NOTHING_BEFORE)
    return settlement, [_with_verdict(reply, settlement) for reply in replies]


def _score_of(report: object) -> CanaryScore:
    """The score in a worker's report, which may be anything. A report without vectors fails the canary."""
    score = report if isinstance(report, Mapping) else {}
    kind = score.get("kind")
    return CanaryScore(kind[:MAX_KIND_CHARS] if isinstance(kind, str) else "", score.get("vectors"))


def _with_verdict(reply: WorkerReply, settlement: Settlement) -> WorkerReply:
    verdict = settlement.verdicts.get(reply.instance_id)
    if verdict is None:
        return reply
    wire = verdict.to_wire()
    if reply.instance_id not in settlement.excluded:
        return replace(reply, body={**reply.body, "canary": wire})
    error = CanaryFailed(verdict.message, canary=wire)
    return WorkerReply(reply.instance_id, reply.incarnation, "error", error=error)


def goes_back(record: DecisionRecord, settlement: Settlement | None) -> bool:
    """Reports whether the fleet returns to the version before `record`."""
    return settlement is not None and settlement.action == "rollback" and record.fallback is not None


def lacks_verdict(record: DecisionRecord, settlement: Settlement | None) -> bool:
    """Reports whether the record may not be opened: the scores have decided nothing yet, or that the fleet returns to
    the version before. In a rolling update a worker that is still to come may pass."""
    if record.canary is None:
        return False
    if settlement is None or goes_back(record, settlement):
        return True
    return record.rolling_from is not None and not settlement.passed


def record_back(record: DecisionRecord, settlement: Settlement, now: float) -> DecisionRecord:
    """The decision that brings the version before back, under the update's own id."""
    back = record.fallback
    assert back is not None
    made = WeightVersion(record.version.run, record.sequence + 1, back.version.label, back.version.digest)
    return replace(
        back,
        version=made,
        made=made,
        update_id=record.update_id,
        rolling_from=None,
        pause_mode=record.pause_mode,
        keep_pause=record.keep_pause,
        kv="recompute",
        commit_timeout_s=record.commit_timeout_s,
        on_canary_failure="exclude",  # else two versions that both fail would replace each other forever
        fallback=None,
        missed={"version": record.made.to_wire(), **settlement.summary(), "message": message_of(settlement)},
        open=False,
        decided_at=now,
    )


def message_of(settlement: Settlement) -> str:
    return next((one.message for one in settlement.verdicts.values() if not one.passed), "")


def awaits_scores(
    record: DecisionRecord, replies: Sequence[WorkerReply], settlement: Settlement | None
) -> list[str]:
    """The workers whose scores the verdict still lacks. They fetch the version by themselves, because its first
    coordinator died; or, if no worker has scored anything, the question or its answer was lost on the way. Empty: a
    worker has passed, or nothing is decided by the scores."""
    if record.canary is None or record.version != record.made or record.on_canary_failure == "exclude":
        return []
    if settlement is not None and any(verdict.passed for verdict in settlement.verdicts.values()):
        return []
    awaited = (NotPrepared,) if settlement is not None else (NotPrepared, DeadlineExceeded)
    return [reply.instance_id for reply in replies if isinstance(reply.error, awaited)]


def missed_error(
    record: DecisionRecord, replies: Sequence[WorkerReply] = (), states: Sequence[WorkerReply] = ()
) -> CanaryFailed:
    """The answer of an update in the place of which `record` has brought the version before back. `replies`: how each
    worker fared with the update's own version. `states`: what the workers serve since, if that is known."""
    missed: Mapping[str, Any] = record.missed or {}
    canary = {key: value for key, value in missed.items() if key not in ("version", "message")}
    serving = [reply.instance_id for reply in states if serves(reply, record)]
    label, failed = record.version.label, f"every worker failed the numeric canary of {missed['version']['label']}"
    fix = "compare the trainer's model with the engines': the same weights must give the same log probabilities"
    if states and not serving:
        why = next((reason for reply in states for reason in _reasons(reply)), "no worker answers")
        canary["warning"] = f"{label} is committed again, and no worker could bring it back: {why}"
        message = f"{failed}, and no worker serves {label}, which is committed again ({why}): {missed['message']}"
        fix = f"publish a version, or bring the source of {label} back; then {fix}"
    else:
        of_all = f" on {len(serving)} of {len(states)} workers" if len(serving) < len(states) else ""
        message = f"{failed}, so the fleet is back at {label}{of_all}: {missed['message']}"
    return CanaryFailed(
        message,
        field="policy.canary",
        canary=canary,
        version=record.version.to_wire(),
        failed_version=missed["version"],
        workers=[reply.to_wire() for reply in replies],
        serving=serving if states else None,
        fix=fix,
    )


def _reasons(reply: WorkerReply) -> Sequence[str]:
    return reply.body["admission"]["reasons"] if reply.ok else ()


def unserved_error(record: DecisionRecord, outcome: Outcome, settlement: Settlement) -> CanaryFailed:
    """The answer of an update that every worker fails and that stays committed."""
    return CanaryFailed(
        f"every worker failed the numeric canary of {record.made.label}, which stays committed, and no worker serves "
        f"it: {message_of(settlement)}",
        field="policy.canary",
        canary=settlement.summary(),
        version=record.made.to_wire(),
        workers=[reply.to_wire() for reply in outcome.replies],
        excluded=list(outcome.excluded),
        fix="publish another version, or publish this one with on_canary_failure=warn",
    )
