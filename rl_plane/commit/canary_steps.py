"""The numeric canary of one update: the sequences that its workers score, and the result of their scores. Pure.

`protocol/canary.py` defines the canary, `canary_rules.py` decides which workers pass. The steps of an update call the
functions here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_plane.commit.canary_rules import CanaryScore, Settlement, settle
from rl_plane.errors import CanaryFailed, DeadlineExceeded, Unsupported
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.canary import (
    MAX_KIND_CHARS,
    Canary,
    CanaryHistory,
    CanaryRecord,
    check_vocabulary,
    default_canary,
    parse_canary,
    shortened,
)
from rl_plane.protocol.record import DecisionRecord
from rl_plane.protocol.update_requests import LoraTarget, UpdateWeights
from rl_plane.protocol.versions import WeightVersion

NOTHING_BEFORE = "the version before can't be fetched again, so the fleet can't go back to it: publish a version"


@dataclass(frozen=True, slots=True)
class Limits:
    """The longest sequence and the highest token id that every engine of the fleet can score."""

    vocab_size: int
    max_model_len: int


def limits_of(reports: Sequence[WorkerReply]) -> Limits | None:
    """The limits that hold on every worker. None: no worker's engine can score."""
    told = [reply.body["canary"] for reply in reports if reply.ok and reply.body.get("canary") is not None]
    if not told:
        return None
    return Limits(min(one["vocab_size"] for one in told), min(one["max_model_len"] for one in told))


def check_canary(body: UpdateWeights, limits: Limits | None) -> None:
    """Refuses a canary that the fleet's engines can't score, before any worker is touched."""
    canary = body.policy.canary
    if not isinstance(canary, Canary):
        return
    if limits is None:
        raise Unsupported(
            "no worker's engine can score token sequences", field="policy.canary", fix="leave it out"
        )
    check_vocabulary(canary, limits.vocab_size, limits.max_model_len)


def canary_of(
    base: DecisionRecord,
    body: UpdateWeights,
    digest: str,
    prepared: Sequence[WorkerReply],
    limits: Limits | None,
    history: CanaryHistory,
) -> CanaryRecord | None:
    """The canary of the version that was prepared: the request's, else the one that a worker has found beside the
    checkpoint, else sequences that follow from the vocabulary."""
    if isinstance(body.target, LoraTarget):
        return base.canary  # the base weights stay as they are
    if body.policy.canary == "off" or limits is None:
        return None
    if isinstance(body.policy.canary, Canary):
        canary = body.policy.canary
    else:
        found = [reply.body["canary"] for reply in prepared if reply.ok and reply.body.get("canary") is not None]
        if found:
            canary = parse_canary(found[0], "canary.json")
            check_vocabulary(canary, limits.vocab_size, limits.max_model_len, "canary.json")
        else:
            canary = shortened(default_canary(limits.vocab_size), limits.max_model_len)
    return CanaryRecord.begun(canary, history, digest)


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


def _score_of(told: object) -> CanaryScore:
    """The score in a worker's report, which may be anything. A report without vectors fails the canary."""
    score = told if isinstance(told, Mapping) else {}
    kind = score.get("kind")
    return CanaryScore(kind[:MAX_KIND_CHARS] if isinstance(kind, str) else "", score.get("vectors"))


def _with_verdict(reply: WorkerReply, settlement: Settlement) -> WorkerReply:
    verdict = settlement.verdicts.get(reply.instance_id)
    if verdict is None:
        return reply
    told = verdict.to_wire()
    if reply.instance_id not in settlement.excluded:
        return replace(reply, body={**reply.body, "canary": told})
    error = CanaryFailed(verdict.message, canary=told)
    return WorkerReply(reply.instance_id, reply.incarnation, "error", error=error)


def goes_back(record: DecisionRecord, settlement: Settlement | None) -> bool:
    """Reports whether the version before comes back."""
    return settlement is not None and settlement.action == "rollback" and record.fallback is not None


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
        on_canary_failure="exclude",  # else two versions that both fail would replace each other forever
        fallback=None,
        missed={"version": record.made.to_wire(), **settlement.summary(), "message": message_of(settlement)},
        open=False,
        decided_at=now,
    )


def message_of(settlement: Settlement) -> str:
    return next((one.message for one in settlement.verdicts.values() if not one.passed), "")


def missed_error(record: DecisionRecord, replies: Sequence[WorkerReply] = ()) -> CanaryFailed:
    """The error of an update that failed the canary. `record` has brought the version before it back."""
    missed: Mapping[str, Any] = record.missed or {}
    return CanaryFailed(
        f"every worker failed the numeric canary of {missed['version']['label']}, so the fleet went back to "
        f"{record.version.label}: {missed['message']}",
        field="policy.canary",
        canary={key: value for key, value in missed.items() if key not in ("version", "message")},
        version=record.version.to_wire(),
        failed_version=missed["version"],
        workers=[reply.to_wire() for reply in replies],
        fix="compare the trainer's model with the engines': the same weights must give the same log probabilities",
    )
