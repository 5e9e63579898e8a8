"""The numeric canary without a fleet: request bodies, the record, the history, and who passes."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from typing import Any, Literal

import pytest

from rl_plane.commit.canary_rules import CanaryScore, Verdict, consensus, evaluate_worker, mismatch_kl, settle
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.canary import (
    ACROSS_KINDS,
    DECIMALS,
    MAX_HISTORY_BYTES,
    MAX_KINDS,
    MAX_RECORD_BYTES,
    MAX_SEQUENCE_TOKENS,
    MAX_SEQUENCES,
    MAX_TOKEN_ID,
    MAX_VERSIONS,
    MIN_LOGPROB,
    ROUNDING_ACROSS_KINDS,
    ROUNDING_WITHIN_KIND,
    WITHIN_KIND_FLOAT32,
    WITHIN_KIND_HALF,
    Canary,
    CanaryHistory,
    CanaryRecord,
    Tolerance,
    Vectors,
    check_vocabulary,
    default_canary,
    engine_kind,
    parse_canary,
)
from rl_plane.protocol.update_requests import UpdatePolicy, UpdateWeights
from rl_plane.protocol.validation import parse_body

HF = engine_kind("hf", "5.0", "float32", "cpu", 1)
VLLM = engine_kind("vllm", "0.32.0", "torch.bfloat16", "cuda:1", 2)
SGLANG = engine_kind("sglang", "0.5", "bfloat16", "cuda", 1)

SEQUENCES = ((5, 6, 7, 8), (9, 10, 11))
RIGHT: Vectors = ((-1.0, -2.0, -3.0), (-4.0, -5.0))
DIGEST = "blake3:" + "0" * 64
RECORD = CanaryRecord(SEQUENCES)
TRAINED = replace(RECORD, expected=RIGHT)

TIGHT, FAR, ACROSS = 0.005, 1.0, 0.04
"""Differences: of two engines of a kind that are right, of weights that are wrong, and of two kinds that are right."""


OWN = Tolerance(WITHIN_KIND_HALF, ROUNDING_WITHIN_KIND)
OTHERS = Tolerance(ACROSS_KINDS, ROUNDING_ACROSS_KINDS)


def _place(seed: int) -> tuple[int, int]:
    return random.Random(seed).choice([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)])


def chosen(seed: int) -> float:
    """The right value that `off` moves."""
    number, place = _place(seed)
    return RIGHT[number][place]


def off(by: float, seed: int = 0) -> Vectors:
    """The right vectors with one value, chosen by the seed, that far below."""
    number, place = _place(seed)
    moved = [list(vector) for vector in RIGHT]
    moved[number][place] -= by
    return tuple(map(tuple, moved))


def shifted(by: float) -> Vectors:
    return tuple(tuple(value + by for value in vector) for vector in RIGHT)


def scores(**by_worker: tuple[str, Any]) -> dict[str, CanaryScore]:
    return {worker: CanaryScore(*one) for worker, one in by_worker.items()}


def passed(verdicts: Any) -> set[str]:
    return {worker for worker, verdict in verdicts.items() if verdict.passed}


# ---- the request ----


def body(canary: Any, **more: Any) -> dict[str, Any]:
    return {"transport": {"backend": "filesystem", "path": "/w"}, "policy": {"canary": canary}, **more}


@pytest.mark.parametrize(
    ("canary", "field"),
    [
        ({}, "sequences"),
        ({"sequences": []}, "sequences"),
        ({"sequences": [[1, 2]] * (MAX_SEQUENCES + 1)}, "sequences"),
        ({"sequences": [[1]]}, "sequences.0"),
        ({"sequences": [[1, 2], [3] * (MAX_SEQUENCE_TOKENS + 1)]}, "sequences.1"),
        ({"sequences": [[1, -2]]}, "sequences.0.1"),
        ({"sequences": [[1, True]]}, "sequences.0.1"),
        ({"sequences": [[1, "2"]]}, "sequences.0.1"),
        ({"sequences": [[1, 2.0]]}, "sequences.0.1"),
        ({"sequences": [[1, MAX_TOKEN_ID + 1]]}, "sequences.0.1"),
        ({"sequences": [[1, 2]], "expected": []}, "expected"),
        ({"sequences": [[1, 2], [3, 4]], "expected": [[-1.0], [-1.0, -2.0]]}, "expected.1"),
        ({"sequences": [[1, 2]], "expected": [[math.nan]]}, "expected.0.0"),
        ({"sequences": [[1, 2]], "expected": [[-math.inf]]}, "expected.0.0"),
        ({"sequences": [[1, 2]], "expected": [[0.5]]}, "expected.0.0"),
        ({"sequences": [[1, 2]], "expected": [[MIN_LOGPROB - 1]]}, "expected.0.0"),
        ({"sequences": [[1, 2]], "expected": [["-1"]]}, "expected.0.0"),
        ({"sequences": [[1, 2]], "expected": [[True]]}, "expected.0.0"),
        ({"sequences": [[1, 2]], "tolerance": 0}, "tolerance"),
        ({"sequences": [[1, 2]], "tolerance": math.nan}, "tolerance"),
        ({"sequences": [[1, 2]], "tolerence": 1.0}, "tolerence"),
        ("on", ""),
        ([[1, 2]], ""),
        (True, ""),
    ],
)
def test_a_wrong_canary_is_refused_by_the_name_of_its_field(canary: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(UpdateWeights, body(canary))
    assert caught.value.facts["field"] == ".".join(["policy.canary", *filter(None, [field])])
    assert caught.value.facts["fix"]


def test_a_canary_comes_through_as_it_was_given() -> None:
    given = {"sequences": [[1, 2, 3]], "expected": [[-1, -0.0]], "tolerance": 0.1}
    update = parse_body(UpdateWeights, body(given))
    assert isinstance(update, UpdateWeights)
    assert update.policy.canary == Canary.model_validate(given)
    assert parse_body(UpdateWeights, update.model_dump()) == update
    assert UpdateWeights.model_validate(body("off")).policy.canary == "off"
    assert (UpdatePolicy().canary, UpdatePolicy().on_canary_failure) == (None, "rollback")
    with pytest.raises(InvalidRequest, match="on_canary_failure"):
        parse_body(UpdateWeights, {**body("off"), "policy": {"on_canary_failure": "ignore"}})


def test_an_adapter_has_no_canary() -> None:
    lora = {"kind": "lora", "op": "load", "name": "a"}
    with pytest.raises(InvalidRequest, match="base weights") as caught:
        parse_body(UpdateWeights, body({"sequences": [[1, 2]]}, target=lora))
    assert caught.value.facts["field"] == "policy.canary"
    parse_body(UpdateWeights, body("off", target=lora))


def test_ids_and_lengths_must_be_the_models() -> None:
    canary = Canary(sequences=[[0, 1], [2, 99, 3]])
    check_vocabulary(canary, 100, 4)
    with pytest.raises(InvalidRequest, match="token 99 is outside the model's vocabulary of 99") as caught:
        check_vocabulary(canary, 99)
    assert caught.value.facts == {"field": "policy.canary.sequences.1.1", "fix": "use ids from 0 to 98"}
    with pytest.raises(InvalidRequest, match="3 tokens") as caught:
        check_vocabulary(canary, 100, 3)
    assert caught.value.facts["field"] == "policy.canary.sequences.1"
    assert caught.value.facts["fix"] == "use at most 2 tokens"


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 512, 32_000, 151_936, 1 << 20])
def test_the_default_fits_every_vocabulary(vocab_size: int) -> None:
    canary = default_canary(vocab_size)
    assert canary == default_canary(vocab_size)
    check_vocabulary(canary, vocab_size, 33)
    assert [len(tokens) for tokens in canary.sequences] == [32] * 4
    ids = list(itertools.chain(*canary.sequences))
    assert all(vocab_size // 16 <= token for token in ids)
    assert vocab_size < 512 or len(set(ids)) > 100


def test_the_default_never_changes() -> None:
    """A worker of another release must score the same sequences."""
    assert default_canary(512).sequences[0][:8] == [111, 126, 43, 332, 225, 48, 284, 379]


# ---- the record and the history ----


def largest(rng: random.Random) -> Vectors:
    def value() -> float:
        return round(rng.uniform(MIN_LOGPROB, MIN_LOGPROB / 2), DECIMALS)

    return tuple(tuple(value() for _ in range(MAX_SEQUENCE_TOKENS - 1)) for _ in range(MAX_SEQUENCES))


def test_the_canary_record_survives_the_wire_and_is_bounded() -> None:
    rng = random.Random(1)
    ids = [[rng.randrange(MAX_TOKEN_ID // 2, MAX_TOKEN_ID) for _ in range(MAX_SEQUENCE_TOKENS)] for _ in range(8)]
    canary = parse_canary({"sequences": ids, "expected": largest(rng), "tolerance": 0.123456789}, "canary")
    known = {f"{kind:x<120}": largest(rng) for kind in range(MAX_KINDS + 2)}
    history = CanaryHistory().with_values(DIGEST, ids, known)
    record = CanaryRecord.begun(canary, history, DIGEST)
    assert len(record.references) == MAX_KINDS
    data = json.dumps(record.to_wire())
    assert MAX_RECORD_BYTES * 0.7 < len(data) < MAX_RECORD_BYTES
    again = CanaryRecord.from_wire(json.loads(data))
    assert again.to_wire() == record.to_wire()
    assert again.expected == record.expected
    assert len(json.dumps(RECORD.to_wire())) < 200


def test_a_version_that_returns_is_known_by_its_digest_and_sequences() -> None:
    history = CanaryHistory().with_values(DIGEST, SEQUENCES, {HF: RIGHT})
    history = history.with_values(DIGEST, SEQUENCES, {HF: shifted(-1), VLLM: shifted(-2)})
    assert history.values(DIGEST, SEQUENCES) == {HF: RIGHT, VLLM: shifted(-2)}  # the first values of a kind stay
    assert history.values(DIGEST, SEQUENCES[:1]) == {}
    assert history.values("blake3:" + "1" * 64, SEQUENCES) == {}
    assert CanaryHistory.decode(history.encode()) == history
    assert history.with_values("x", SEQUENCES, {}) == history


def test_the_history_keeps_the_newest_versions() -> None:
    history = CanaryHistory()
    for number in range(MAX_VERSIONS + 5):
        history = history.with_values(f"v{number}", SEQUENCES, {HF: RIGHT})
    history = history.with_values("v5", SEQUENCES, {HF: RIGHT})  # it returned: the newest now
    assert len(history.versions) == MAX_VERSIONS
    assert [past.digest for past in history.versions][-2:] == [f"v{MAX_VERSIONS + 4}", "v5"]
    assert not history.values("v4", SEQUENCES)


def test_the_encoded_history_is_bounded() -> None:
    rng = random.Random(2)
    history = CanaryHistory()
    for number in range(MAX_VERSIONS):
        history = history.with_values(f"v{number}", SEQUENCES, {HF: largest(rng)})
    data = history.encode()
    assert len(data) <= MAX_HISTORY_BYTES
    kept = [past.digest for past in CanaryHistory.decode(data).versions]
    assert kept == [f"v{number}" for number in range(MAX_VERSIONS - len(kept), MAX_VERSIONS)]
    assert 10 < len(kept) < MAX_VERSIONS


# ---- one worker by the record ----


@pytest.mark.parametrize(
    "vectors",
    [
        None,
        7,
        "ab",
        [],
        [[-1.0, -2.0, -3.0]],
        [[-1.0, -2.0, -3.0], None],
        [[-1.0, -2.0, -3.0], [-4.0]],
        [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]],
        [[-1.0, math.nan, -3.0], [-4.0, -5.0]],
        [[-1.0, -math.inf, -3.0], [-4.0, -5.0]],
        [[-1.0, math.inf, -3.0], [-4.0, -5.0]],
        [[-1.0, None, -3.0], [-4.0, -5.0]],
        [[-1.0, True, -3.0], [-4.0, -5.0]],
        [[-1.0, "-2", -3.0], [-4.0, -5.0]],
        [[-1.0, 0.5, -3.0], [-4.0, -5.0]],
        [[-1.0, -(10**400), -3.0], [-4.0, -5.0]],
    ],
)
@pytest.mark.parametrize("record", [RECORD, TRAINED, replace(RECORD, references={HF: RIGHT})])
def test_scores_that_are_no_numbers_fail_and_never_raise(record: CanaryRecord, vectors: Any) -> None:
    verdict = evaluate_worker(record, HF, vectors)
    assert (verdict.passed, verdict.reason, verdict.against) == (False, "unusable", "nothing")
    assert verdict.message
    json.dumps(verdict.to_wire(), allow_nan=False)
    found = consensus(record, scores(a=(HF, RIGHT), b=(HF, vectors), c=(HF, RIGHT)))
    assert found.failed == ["b"]
    assert found.references[HF] == RIGHT
    assert consensus(record, scores(b=(HF, vectors))).failed_by_all


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("record", "kind", "tolerance", "reason"),
    [
        (TRAINED, HF, Tolerance(ACROSS_KINDS), "trainer"),
        (TRAINED, VLLM, OTHERS, "trainer"),
        (replace(TRAINED, tolerance=0.3), VLLM, Tolerance(0.3), "trainer"),
        (replace(RECORD, references={HF: RIGHT}), HF, Tolerance(WITHIN_KIND_FLOAT32), "reference"),
        (replace(RECORD, references={VLLM: RIGHT}), VLLM, OWN, "reference"),
        (replace(RECORD, references={VLLM: RIGHT}), HF, OTHERS, "reference"),
        (
            replace(RECORD, references={VLLM: RIGHT}, tolerance=0.001),
            VLLM,
            replace(OWN, absolute=0.001),
            "reference",
        ),
        (replace(RECORD, references={VLLM: RIGHT}, tolerance=0.3), VLLM, OWN, "reference"),
        (replace(RECORD, references={VLLM: shifted(-3), SGLANG: RIGHT}), HF, OTHERS, "reference"),
        (replace(TRAINED, references={HF: RIGHT}), HF, Tolerance(WITHIN_KIND_FLOAT32), "reference"),
    ],
)
def test_one_worker_is_judged_by_what_the_record_knows(
    record: CanaryRecord, kind: str, tolerance: Tolerance, reason: str, seed: int
) -> None:
    at = tolerance.at(chosen(seed))
    assert evaluate_worker(record, kind, off(at * 0.9, seed)).passed
    wrong = off(at * 1.1, seed)
    verdict = evaluate_worker(record, kind, wrong)
    assert not verdict.passed
    assert verdict.reason == reason
    assert verdict.tolerance == at
    assert verdict.difference == pytest.approx(at * 1.1)
    assert verdict.sequence is not None
    assert verdict.token is not None
    place = (verdict.sequence, verdict.token - 1)
    assert verdict.expected == RIGHT[place[0]][place[1]]
    assert verdict.measured == wrong[place[0]][place[1]] != verdict.expected
    assert f"token {verdict.token} of sequence {verdict.sequence}" in verdict.message
    json.dumps(verdict.to_wire(), allow_nan=False)


def test_a_worker_without_anything_to_compare_with_passes_and_says_so() -> None:
    assert evaluate_worker(RECORD, HF, RIGHT) == Verdict(True, "nothing")
    assert evaluate_worker(RECORD, HF, RIGHT).to_wire() == {"passed": True, "against": "nothing"}


def test_an_undecided_version_lets_no_worker_in() -> None:
    verdict = evaluate_worker(replace(RECORD, undecided=True), HF, RIGHT)
    assert (verdict.passed, verdict.reason) == (False, "tie")


def test_mismatch_kl_is_the_mean_of_k3() -> None:
    assert mismatch_kl(RIGHT, RIGHT) == 0.0
    by_hand = (math.exp(0.1) - 1 - 0.1) / 5
    assert mismatch_kl(RIGHT, off(0.1)) == pytest.approx(by_hand)
    assert mismatch_kl(off(0.1), RIGHT) == pytest.approx((math.exp(-0.1) - 1 + 0.1) / 5)
    assert evaluate_worker(TRAINED, HF, off(0.01)).mismatch_kl == pytest.approx((math.exp(0.01) - 1.01) / 5)
    assert math.isfinite(mismatch_kl(((-1.0,),), ((MIN_LOGPROB,),)))


# ---- the fleet ----


@pytest.mark.parametrize("count", [3, 4, 7, 40])
@pytest.mark.parametrize("kind", [HF, VLLM])
@pytest.mark.parametrize("seed", range(5))
def test_fewer_than_half_that_differ_are_found(count: int, kind: str, seed: int) -> None:
    """They may be any workers and differ anywhere, and the others may differ a little too."""
    rng = random.Random(seed)
    wrong = set(rng.sample(range(count), rng.randint(1, (count - 1) // 2)))
    given = {
        f"w{number}": CanaryScore(
            kind, off(FAR * rng.choice([1, -1]), number) if number in wrong else off(TIGHT, number)
        )
        for number in range(count)
    }
    found = consensus(RECORD, given)
    assert set(found.failed) == {f"w{number}" for number in wrong}
    assert {found.verdicts[worker].reason for worker in found.failed} == {"fleet"}
    assert not found.failed_by_all
    # Who joins later is judged by what the fleet has agreed on.
    record = settle(RECORD, given, "rollback").record
    assert evaluate_worker(record, kind, RIGHT).passed
    assert not evaluate_worker(record, kind, off(FAR, seed)).passed


def test_wrong_workers_do_not_pass_by_agreeing_a_little() -> None:
    """Each is near to some other, and none to more than half."""
    found = consensus(RECORD, {f"w{number}": CanaryScore(HF, shifted(-number * 0.009)) for number in range(6)})
    assert found.failed_by_all


@pytest.mark.parametrize("count", [2, 4])
def test_a_tie_fails_all_of_them(count: int) -> None:
    given = {f"w{number}": CanaryScore(HF, RIGHT if number % 2 else off(FAR)) for number in range(count)}
    found = consensus(RECORD, given)
    assert found.failed_by_all
    assert {verdict.reason for verdict in found.verdicts.values()} == {"tie"}
    assert found.references == {}


@pytest.mark.parametrize(
    "knows",
    [
        TRAINED,
        replace(RECORD, references={HF: RIGHT}),
        replace(RECORD, references={SGLANG: shifted(-ACROSS)}),
    ],
)
def test_the_trainer_or_the_past_decides_a_tie(knows: CanaryRecord) -> None:
    found = consensus(knows, scores(a=(HF, RIGHT), b=(HF, off(FAR))))
    assert found.failed == ["b"]


def test_a_tie_that_is_close_to_the_trainer_goes_to_the_nearest() -> None:
    found = consensus(TRAINED, scores(a=(HF, shifted(-0.04)), b=(HF, shifted(-0.004))))
    assert found.failed == ["a"]
    assert found.verdicts["a"].reason == "fleet"
    assert found.verdicts["b"].against == "trainer"
    assert found.references == {HF: shifted(-0.004)}


def test_another_kind_decides_a_tie() -> None:
    given = scores(a=(HF, RIGHT), b=(HF, off(FAR)), c=(VLLM, shifted(-ACROSS)), d=(VLLM, shifted(-ACROSS)))
    assert consensus(RECORD, given).failed == ["b"]
    both_far = scores(a=(HF, off(FAR)), b=(HF, off(2 * FAR)), c=(VLLM, RIGHT))
    assert passed(consensus(RECORD, both_far).verdicts) == {"c"}


def test_kinds_may_differ_by_more_than_workers_of_one_kind() -> None:
    given = scores(a=(HF, RIGHT), b=(VLLM, shifted(-ACROSS)))
    found = consensus(RECORD, given)
    assert passed(found.verdicts) == {"a", "b"}
    assert found.references == {HF: RIGHT, VLLM: shifted(-ACROSS)}
    assert {verdict.against for verdict in found.verdicts.values()} == {"fleet"}
    same = scores(a=(HF, RIGHT), b=(HF, shifted(-ACROSS)))
    assert consensus(RECORD, same).failed_by_all


def test_two_kinds_that_disagree_are_a_tie_however_many_workers_one_has() -> None:
    """An error of an engine is in each worker of its kind."""
    many = {f"v{number}": CanaryScore(VLLM, off(FAR)) for number in range(9)}
    found = consensus(RECORD, {**many, "s": CanaryScore(SGLANG, RIGHT)})
    assert found.failed_by_all
    assert {verdict.reason for verdict in found.verdicts.values()} == {"tie"}


def test_the_kind_that_disagrees_with_two_others_fails() -> None:
    many = {f"v{number}": CanaryScore(VLLM, off(FAR)) for number in range(9)}
    found = consensus(RECORD, {**many, "s": CanaryScore(SGLANG, RIGHT), "h": CanaryScore(HF, shifted(-ACROSS))})
    assert passed(found.verdicts) == {"s", "h"}
    assert set(found.references) == {SGLANG, HF}


def test_the_trainers_values_judge_each_worker() -> None:
    found = consensus(TRAINED, scores(a=(HF, RIGHT), b=(VLLM, off(FAR)), c=(SGLANG, shifted(-ACROSS))))
    assert found.failed == ["b"]
    assert found.verdicts["b"].reason == "trainer"


def test_a_majority_does_not_outvote_the_trainer() -> None:
    found = consensus(TRAINED, scores(a=(HF, RIGHT), b=(HF, off(FAR)), c=(HF, off(FAR))))
    assert found.failed == ["b", "c"]


def test_all_that_pass_the_trainer_still_have_to_agree_within_their_kind() -> None:
    found = consensus(TRAINED, scores(a=(HF, RIGHT), b=(HF, shifted(-0.045)), c=(HF, RIGHT)))
    assert found.failed == ["b"]
    assert found.verdicts["b"].reason == "fleet"


def test_a_version_that_computes_something_else_when_it_returns_fails_on_all() -> None:
    history = CanaryHistory().with_values(DIGEST, SEQUENCES, {VLLM: RIGHT})
    record = CanaryRecord.begun(Canary(sequences=[list(tokens) for tokens in SEQUENCES]), history, DIGEST)
    found = consensus(record, scores(a=(VLLM, off(0.1)), b=(VLLM, off(0.1))))
    assert found.failed_by_all
    assert {verdict.reason for verdict in found.verdicts.values()} == {"reference"}
    assert found.references == {VLLM: RIGHT}


def test_a_single_worker_of_an_unknown_version_makes_its_reference() -> None:
    settled = settle(RECORD, scores(a=(HF, RIGHT)), "rollback")
    assert (settled.action, settled.excluded) == ("open", [])
    assert settled.verdicts["a"].against == "nothing"
    assert settled.record.references == {HF: RIGHT}


# ---- what becomes of the update ----


def test_no_scores_change_nothing() -> None:
    settled = settle(RECORD, {}, "rollback")
    assert (settled.action, settled.record, settled.summary()["scored"]) == ("open", RECORD, 0)


def test_workers_that_fail_beside_others_are_excluded_whatever_the_policy() -> None:
    for on_failure in ("rollback", "exclude", "warn"):
        settled = settle(TRAINED, scores(a=(HF, RIGHT), b=(HF, off(FAR))), on_failure)
        assert (settled.action, settled.excluded, settled.warning) == ("open", ["b"], "")
        assert settled.record == replace(TRAINED, references={HF: RIGHT})
        told = settled.summary()
        assert (told["scored"], told["failed"], told["difference"], told["mismatch_kl"]) == (2, 1, 0.0, 0.0)


MISSED = scores(a=(HF, off(FAR)), b=(HF, off(FAR)), c=(HF, off(3 * FAR)))


@pytest.mark.parametrize("action", ["rollback", "exclude"])
def test_a_failure_of_all_follows_the_policy(action: Literal["rollback", "exclude"]) -> None:
    settled = settle(TRAINED, MISSED, action)
    assert settled.action == action
    assert settled.excluded == ["a", "b", "c"]
    assert not settled.record.undecided  # a worker that computes the trainer's values later may come in
    assert evaluate_worker(settled.record, HF, RIGHT).passed
    told = settled.summary()
    assert (told["failed"], told["reasons"]) == (3, {"trainer": 3})
    assert told["difference"] == pytest.approx(3 * FAR)
    json.dumps(told, allow_nan=False)


def test_warn_serves_what_the_fleet_agrees_on() -> None:
    settled = settle(TRAINED, MISSED, "warn")
    assert (settled.action, settled.excluded) == ("open", ["c"])
    assert "the trainer's value" in settled.warning
    assert settled.summary()["warning"] == settled.warning
    assert settled.summary()["failed"] == 3
    assert settled.record == replace(RECORD, references={HF: off(FAR)}, overruled=settled.warning)
    assert evaluate_worker(settled.record, HF, off(FAR)).passed
    assert not evaluate_worker(settled.record, HF, RIGHT).passed


def test_warn_keeps_the_values_of_before_where_only_the_trainers_are_missed() -> None:
    record = replace(TRAINED, references={HF: off(FAR)})
    settled = settle(record, scores(a=(HF, off(FAR)), b=(HF, off(FAR))), "warn")
    assert (settled.action, settled.excluded) == ("open", [])
    assert settled.record == replace(record, expected=None, overruled=settled.warning)


def test_warn_serves_even_a_tie_and_judges_no_worker_by_it() -> None:
    settled = settle(RECORD, scores(a=(HF, RIGHT), b=(HF, off(FAR))), "warn")
    assert (settled.action, settled.excluded) == ("open", [])
    assert "nothing shows" in settled.warning
    assert settled.record == replace(RECORD, overruled=settled.warning)


def test_a_later_update_over_overruled_values_repeats_the_warning() -> None:
    overruled = settle(TRAINED, MISSED, "warn")
    later = settle(overruled.record, scores(a=(HF, off(FAR)), b=(HF, off(FAR))), "rollback")
    assert (later.action, later.excluded, later.warning) == ("open", [], overruled.warning)
    assert not later.passed


def test_after_a_tie_no_worker_serves_until_the_next_version() -> None:
    settled = settle(RECORD, scores(a=(HF, RIGHT), b=(HF, off(FAR))), "exclude")
    assert (settled.action, settled.excluded) == ("exclude", ["a", "b"])
    assert not evaluate_worker(settled.record, HF, RIGHT).passed


def test_a_fleet_of_many_kinds_stores_the_first_few() -> None:
    kinds = [engine_kind("e", str(number), "float32", "cpu", 1) for number in range(MAX_KINDS + 3)]
    settled = settle(RECORD, {kind: CanaryScore(kind, RIGHT) for kind in kinds}, "rollback")
    assert len(settled.record.references) == MAX_KINDS
    assert all(evaluate_worker(settled.record, kind, shifted(-ACROSS / 9)).passed for kind in kinds)


def test_an_engine_kind_names_everything_that_changes_sums() -> None:
    assert HF == "hf-5.0/float32/cpu/tp1"
    assert VLLM == "vllm-0.32.0/bfloat16/cuda/tp2"
    assert len({HF, VLLM, SGLANG, engine_kind("vllm", "0.32.0", "bfloat16", "cuda", 1)}) == 4


def test_the_tolerance_grows_with_the_logits_that_an_unlikely_token_has() -> None:
    """Half precision keeps eight bits of a logit, so at -32 nats two sound engines differ by some tenths."""
    unlikely = ((-30.0, -32.0, -0.5), (-26.0, -40.0))
    rounded_elsewhere = ((-30.2, -31.75, -0.5), (-26.0, -40.25))
    found = consensus(RECORD, scores(a=(HF, unlikely), b=(VLLM, rounded_elsewhere)))
    assert passed(found.verdicts) == {"a", "b"}
    likely_token = ((-30.0, -32.0, -0.7), (-26.0, -40.0))
    assert consensus(RECORD, scores(a=(HF, unlikely), b=(VLLM, likely_token))).failed_by_all
    trained = replace(RECORD, expected=unlikely)
    assert not evaluate_worker(trained, HF, rounded_elsewhere).passed, "float32 has no such rounding"
    verdict = evaluate_worker(trained, VLLM, ((-30.0, -32.3, -0.7), (-26.0, -40.0)))
    assert (verdict.sequence, verdict.token) == (0, 3), "the place where it is the most of what it may be"
    assert verdict.difference == pytest.approx(0.3)


def test_a_worker_that_agrees_with_overruled_values_has_nothing_that_it_passed_against() -> None:
    settled = settle(TRAINED, MISSED, "warn")
    verdict = evaluate_worker(settled.record, HF, off(FAR))
    assert (verdict.passed, verdict.against, verdict.difference) == (True, "nothing", None)
    assert verdict.warning == settled.warning
    assert not evaluate_worker(settled.record, HF, off(3 * FAR)).passed, "it differs from the others"
    assert CanaryRecord.from_wire(json.loads(json.dumps(settled.record.to_wire()))) == settled.record
