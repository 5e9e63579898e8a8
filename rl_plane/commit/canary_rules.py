"""Decides which workers pass the numeric canary. Pure functions of vectors, without I/O.

`evaluate_worker` evaluates one worker by the committed record: a worker that starts, heals or joins late uses it on its
own vectors. `settle` evaluates all workers that have swapped one update in: the coordinator uses it before it opens
the version. Three things decide, as far as they are known:

1. the trainer's values (`CanaryRecord.expected`), within the tolerance across kinds;
2. the values that this version had before (`CanaryRecord.references`), within the tolerance of the engine kind;
3. the other workers: more than half of an engine kind must agree, and then more than half of the kinds.

If two workers differ and none of the three decides which one is right, it is a *tie*, and both fail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median_low
from typing import Any, Literal

from rl_plane.protocol.canary import (
    LOGPROB_EPSILON,
    MIN_LOGPROB,
    CanaryAction,
    CanaryReason,
    CanaryRecord,
    CanaryReference,
    CanarySummary,
    OnCanaryFailure,
    Tolerance,
    Vectors,
    first_kinds,
    rounded,
)

MAX_KL_EXPONENT = 50.0
"""exp(50) nats is far beyond any working model; without the bound one wrong token would overflow a float."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One worker's result of the canary."""

    passed: bool
    against: CanaryReference
    """The other side of the comparison below."""
    reason: CanaryReason | None = None
    """Why the worker failed. None: it passed."""
    message: str = ""
    """The failure as a sentence. Empty: the worker passed."""
    difference: float | None = None
    """The largest absolute difference of a log probability."""
    tolerance: float | None = None
    """The largest difference that is allowed at the place below."""
    sequence: int | None = None
    token: int | None = None
    """The place at which the difference is the largest share of its tolerance: the number of the sequence, and of the
    token in it."""
    expected: float | None = None
    measured: float | None = None
    """The expected and the measured log probability at that place."""
    mismatch_kl: float | None = None
    """The mean of exp(d) - 1 - d over all tokens, where d is the expected minus the measured log probability."""
    warning: str = ""
    """Why the worker serves although these weights failed: `on_canary_failure` is `warn`. Empty: they have not."""

    def to_wire(self) -> dict[str, Any]:
        """The fields that are known."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class CanaryScore:
    """The report of one worker after a swap."""

    kind: str
    """Its engine kind (`rl_plane.protocol.canary.engine_kind`)."""
    vectors: object
    """The vectors as they came from the engine or over the wire: not checked yet."""


@dataclass(frozen=True, slots=True)
class Consensus:
    """The verdicts on all workers that have scored one version."""

    verdicts: Mapping[str, Verdict]
    """instance_id → verdict."""
    references: Mapping[str, Vectors]
    """Engine kind → the vectors that a worker of this kind must give from now on."""

    @property
    def failed(self) -> list[str]:
        return [worker for worker, verdict in self.verdicts.items() if not verdict.passed]

    @property
    def failed_by_all(self) -> bool:
        return bool(self.verdicts) and len(self.failed) == len(self.verdicts)


@dataclass(frozen=True, slots=True)
class Settlement:
    """The result of the canary for one update."""

    action: CanaryAction
    """`open`: serve the version, without the excluded workers. `rollback`: return to the version before. `exclude`: the
    version stays committed, and no worker serves it."""
    verdicts: Mapping[str, Verdict]
    excluded: Sequence[str]
    """The workers that may not serve the version."""
    record: CanaryRecord
    """For the decision record of this version, unless the action is `rollback`."""
    warning: str = ""
    """Why the fleet serves the version although every worker failed (`warn`), or why it can't return to the version
    before. Empty: neither is so."""

    @property
    def passed(self) -> bool:
        """Reports whether a worker has passed, by values that were not overruled."""
        return self.action == "open" and not self.warning

    def summary(self) -> CanarySummary:
        """Returns what an update's answer says of all workers together: the worst values that were compared."""
        compared = [verdict for verdict in self.verdicts.values() if verdict.difference is not None]
        served = [verdict for worker, verdict in self.verdicts.items() if worker not in self.excluded]
        worst = max(
            (verdict for verdict in served if verdict.difference is not None)
            if self.action == "open"
            else compared,
            key=lambda verdict: verdict.difference or 0.0,
            default=None,
        )
        reasons = Counter(verdict.reason for verdict in self.verdicts.values() if verdict.reason is not None)
        failed = sum(reasons.values())
        wire: CanarySummary = {
            "action": self.action,
            "scored": len(self.verdicts),
            "failed": failed,
            "origin": self.record.origin,
        }
        if reasons:
            wire["reasons"] = dict(reasons)
        if worst is not None:
            wire |= {
                "against": worst.against,
                "difference": worst.difference,
                "mismatch_kl": worst.mismatch_kl,
                "tolerance": worst.tolerance,
            }
        if self.warning:
            wire["warning"] = self.warning
        return wire


def evaluate_worker(record: CanaryRecord, kind: str, vectors: object) -> Verdict:
    """The verdict on a worker of this engine kind, by the committed record alone. `vectors` may be anything; a value
    that is not a log probability fails."""
    checked = _checked(record, vectors)
    if isinstance(checked, str):
        return _unusable(checked)
    if record.undecided:
        return Verdict(
            False,
            "nothing",
            "tie",
            "the workers' values for this version differed, and nothing showed which ones are right",
        )
    verdict = _by_record(record, kind, checked)
    if record.overruled and verdict.passed:
        return Verdict(True, "nothing", warning=record.overruled)  # what it agrees with are values that failed
    return verdict


def consensus(record: CanaryRecord, scores: Mapping[str, CanaryScore]) -> Consensus:
    """The verdicts on workers (instance_id → score) that have all swapped in the version of `record`. Workers whose
    engine can't score are left out of `scores`."""
    verdicts: dict[str, Verdict] = {}
    left: dict[str, dict[str, Vectors]] = {}  # engine kind → worker → vectors that pass by the record
    known: dict[tuple[str, Vectors], Verdict] = {}  # most workers of a kind give the very same vectors
    for worker, score in sorted(scores.items()):
        checked = _checked(record, score.vectors)
        if isinstance(checked, str):
            verdicts[worker] = _unusable(checked)
            continue
        if (score.kind, checked) not in known:
            known[score.kind, checked] = _by_record(record, score.kind, checked)
        verdicts[worker] = known[score.kind, checked]
        if verdicts[worker].passed and score.kind not in record.references:
            left.setdefault(score.kind, {})[worker] = checked
    fresh = {kind: _majority(of_kind, record.within(kind)) for kind, of_kind in left.items()}
    agreed = {kind: vectors for kind, vectors in fresh.items() if vectors is not None}
    if record.expected is None and not record.references:
        agreed = _agreeing_kinds(record, left, agreed, verdicts)
    for kind in [kind for kind, vectors in fresh.items() if vectors is None]:
        chosen = _chosen(record, kind, left[kind], agreed)
        if chosen is not None:
            agreed[kind] = chosen
        else:
            verdicts |= _tied(left[kind], f"the {len(left[kind])} workers of {kind}", left[kind])
    for kind, reference in agreed.items():
        if len(left[kind]) > 1:
            verdicts |= _within_kind(record, kind, left[kind], reference, verdicts)
    return Consensus(
        verdicts, first_kinds({**{kind: rounded(one) for kind, one in agreed.items()}, **record.references})
    )


def settle(record: CanaryRecord, scores: Mapping[str, CanaryScore], on_failure: OnCanaryFailure) -> Settlement:
    """Decides about the version of `record`, which these workers have swapped in and do not serve yet.

    Workers that fail are excluded. `on_failure` decides only where every worker fails. For a version that is itself a
    roll-back give `exclude`, or two versions that both fail would replace each other forever."""
    found = consensus(record, scores)
    if not found.failed_by_all:
        measured = replace(record, references=found.references)
        return Settlement("open", found.verdicts, found.failed, measured, record.overruled)
    nothing_known = record.expected is None and not record.references
    if on_failure != "warn":
        action: CanaryAction = "rollback" if on_failure == "rollback" else "exclude"
        return Settlement(action, found.verdicts, found.failed, replace(record, undecided=nothing_known))
    without_trainer = replace(record, expected=None)
    again = consensus(without_trainer, scores)
    if again.failed_by_all:
        without_trainer = replace(without_trainer, references={})
        again = consensus(without_trainer, scores)
    excluded = [] if again.failed_by_all else again.failed
    first = next(iter(found.verdicts.values()))
    warning = f"every worker failed the canary: {first.message}"
    served = replace(without_trainer, references=again.references, overruled=warning)
    return Settlement("open", found.verdicts, excluded, served, warning)


def mismatch_kl(expected: Vectors, measured: Vectors) -> float:
    """The mean of k3 = exp(d) - 1 - d over all tokens, with d = expected - measured: an estimate, never negative, of
    the divergence between two models from tokens alone."""
    return fmean(
        math.expm1(min(one - other, MAX_KL_EXPONENT)) - min(one - other, MAX_KL_EXPONENT)
        for ones, others in zip(expected, measured, strict=True)
        for one, other in zip(ones, others, strict=True)
    )


def _checked(record: CanaryRecord, vectors: object) -> Vectors | str:
    """The checked vectors, or an error message. They come from a worker, which may send anything."""
    if not isinstance(vectors, (list, tuple)) or len(vectors) != len(record.sequences):
        count = len(vectors) if isinstance(vectors, (list, tuple)) else "no"
        return f"the engine gave {count} vectors for {len(record.sequences)} sequences"
    for number, (tokens, vector) in enumerate(zip(record.sequences, vectors, strict=True)):
        if not isinstance(vector, (list, tuple)) or len(vector) != len(tokens) - 1:
            count = len(vector) if isinstance(vector, (list, tuple)) else "no"
            return f"the engine gave {count} values for the {len(tokens) - 1} scored tokens of sequence {number}"
        for place, value in enumerate(vector, 1):
            # `not … <=` because a NaN is neither above nor below.
            if type(value) not in (int, float) or not MIN_LOGPROB <= value <= LOGPROB_EPSILON:
                return (
                    f"the engine gave {str(value)[:32]} for token {place} of sequence {number}: no log probability"
                )
    return tuple(tuple(map(float, vector)) for vector in vectors)


def _unusable(what: str) -> Verdict:
    return Verdict(False, "nothing", "unusable", what)


def _compared(
    against: Literal["trainer", "reference", "fleet"], tolerance: Tolerance, expected: Vectors, measured: Vectors
) -> Verdict:
    """The verdict by one comparison."""
    share, sequence, token = max(
        (abs(one - other) / tolerance.at(one), -number, -place)  # of equal shares the first
        for number, (ones, others) in enumerate(zip(expected, measured, strict=True))
        for place, (one, other) in enumerate(zip(ones, others, strict=True), 1)
    )
    sequence, token = -sequence, -token
    want, got = expected[sequence][token - 1], measured[sequence][token - 1]
    passed = share <= 1.0
    whose = {
        "trainer": "the trainer's value",
        "reference": "the value that this version had before",
        "fleet": "the other workers' value",
    }[against]
    message = (
        f"the log probability of token {token} of sequence {sequence} is {got:.4f}, and {whose} is {want:.4f}: "
        f"they differ by {abs(want - got):.4f}, more than {tolerance.at(want):.4g}"
    )
    return Verdict(
        passed,
        against,
        None if passed else against,
        "" if passed else message,
        max(_differences(expected, measured)),
        tolerance.at(want),
        sequence,
        token,
        want,
        got,
        mismatch_kl(expected, measured),
    )


def _by_record(record: CanaryRecord, kind: str, vectors: Vectors) -> Verdict:
    """The verdict by what the record knows. A worker that passes by the trainer's values and by the references shows
    its difference from the trainer's."""
    by_trainer = by_reference = None
    if record.expected is not None:
        by_trainer = _compared("trainer", record.across([kind]), record.expected, vectors)
        if not by_trainer.passed:
            return by_trainer
    if kind in record.references:
        by_reference = _compared("reference", record.within(kind), record.references[kind], vectors)
    elif record.references:
        nearest = min(record.references.values(), key=lambda one: _mean(one, vectors))
        by_reference = _compared("reference", record.across([kind, *record.references]), nearest, vectors)
    if by_reference is not None and not by_reference.passed:
        return by_reference
    return by_trainer or by_reference or Verdict(True, "nothing")


def _majority(vectors: Mapping[str, Vectors], tolerance: Tolerance) -> Vectors | None:
    """The vectors on which more than half agree; None: there is no such majority.

    They are the low median of each value. If more than half are right, the median lies between right values, whatever
    the others are; and unlike a search for the largest group it takes no time that grows with the square."""
    several = list(vectors.values())
    middle = tuple(
        tuple(median_low(values) for values in zip(*of_sequence, strict=True))
        for of_sequence in zip(*several, strict=True)
    )
    agreeing = sum(_agree(middle, one, tolerance) for one in several)
    return middle if 2 * agreeing > len(several) else None


def _agreeing_kinds(
    record: CanaryRecord,
    left: Mapping[str, Mapping[str, Vectors]],
    agreed: dict[str, Vectors],
    verdicts: dict[str, Verdict],
) -> dict[str, Vectors]:
    """The kinds that more than half of the kinds agree with. A kind counts once, however many workers it has: what is
    wrong in an engine is wrong in each worker of its kind."""
    if len(agreed) < 2:
        return agreed
    tolerance = record.across(agreed)
    middle = _majority(agreed, tolerance)
    if middle is None:
        for kind in agreed:
            verdicts |= _tied(left[kind], f"the engine kinds {', '.join(sorted(agreed))}", agreed)
        return {}
    agreeing = {}
    for kind, vectors in agreed.items():
        by_kinds = _compared("fleet", tolerance, middle, vectors)
        verdicts |= dict.fromkeys(left[kind], by_kinds)
        if by_kinds.passed:
            agreeing[kind] = vectors
    return agreeing


def _chosen(
    record: CanaryRecord, kind: str, of_kind: Mapping[str, Vectors], agreed: Mapping[str, Vectors]
) -> Vectors | None:
    """The vectors of the worker that is nearest to the trainer's values, or to those of other kinds, where the workers
    of one kind disagree. None: there is nothing to be near to."""
    if record.expected is not None:
        anchors = [record.expected]
    else:
        anchors = [*record.references.values(), *(agreed[one] for one in agreed if one != kind)]
    if not anchors:
        return None
    best = min(of_kind.values(), key=lambda vectors: min(_mean(anchor, vectors) for anchor in anchors))
    tolerance = record.across([kind, *record.references, *agreed])
    return best if any(_agree(anchor, best, tolerance) for anchor in anchors) else None


def _within_kind(
    record: CanaryRecord,
    kind: str,
    of_kind: Mapping[str, Vectors],
    reference: Vectors,
    verdicts: Mapping[str, Verdict],
) -> dict[str, Verdict]:
    """The verdicts of a kind by its own reference. A worker that passes keeps its comparison with the trainer's values
    or with other kinds, which tells more."""
    found = {}
    for worker, vectors in of_kind.items():
        by_fleet = _compared("fleet", record.within(kind), reference, vectors)
        if not by_fleet.passed or verdicts[worker].against == "nothing":
            found[worker] = by_fleet
    return found


def _tied(workers: Iterable[str], who: str, differing: Mapping[str, Vectors]) -> dict[str, Verdict]:
    first, *others = differing.values()
    apart = max(max(_differences(first, one)) for one in others)
    message = f"{who} give values that differ by {apart:.4f}, and nothing shows which ones are right"
    return dict.fromkeys(workers, Verdict(False, "fleet", "tie", message))


def _differences(one: Vectors, other: Vectors) -> list[float]:
    return [abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]


def _agree(expected: Vectors, measured: Vectors, tolerance: Tolerance) -> bool:
    return all(
        abs(one - other) <= tolerance.at(one)
        for ones, others in zip(expected, measured, strict=True)
        for one, other in zip(ones, others, strict=True)
    )


def _mean(one: Vectors, other: Vectors) -> float:
    return fmean(_differences(one, other))
