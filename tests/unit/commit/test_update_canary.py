"""The numeric canary of an update, by events and expected instructions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rl_plane.commit.steps import (
    Announce,
    Answered,
    Failed,
    SendOp,
    UpdateCommand,
    Watch,
    Write,
)
from rl_plane.errors import (
    CanaryFailed,
    Conflict,
    InvalidRequest,
    NotPrepared,
    PlaneError,
    Unavailable,
    Unsupported,
)
from rl_plane.protocol.canary import CanaryRecord, engine_kind
from rl_plane.protocol.record import (
    DecisionRecord,
)
from rl_plane.protocol.subjects import CANARY_HISTORY
from rl_plane.protocol.update_requests import Part
from tests.support.update_machine import (
    FENCE,
    FENCED,
    LOST,
    MEMBERS,
    NEW,
    R0,
    R1,
    R1_OPEN,
    V0,
    WHOLE,
    Driver,
    bad,
    body,
    lora,
    ok,
    prepare,
    report,
    serving,
    session_of,
    silent,
    update,
    with_session,
)

# ---- the numeric canary ----

CANARY = {"sequences": [[1, 2, 3]], "expected": [[-1.0, -2.0]]}
KIND = engine_kind("hf", "5.0", "float32", "cpu", 1)


def scored(*values: float) -> Callable[[SendOp], Answered]:
    """The replies with each worker's first score. The trainer expects -1 and -2."""
    replies = [
        ok(key, canary={"kind": KIND, "vectors": [[one, -2.0]]}) for key, one in zip("abc", values, strict=True)
    ]
    return lambda ask: Answered([reply for reply in replies if reply.instance_id in ask.workers])


def with_canary(commit: Any, /, base: DecisionRecord = R0, on_failure: str = "rollback", **answers: Any) -> Driver:
    canary, barrier = answers.pop("canary", CANARY), answers.pop("barrier", "strict")
    policy = {"canary": canary, "on_canary_failure": on_failure, "barrier": barrier, **answers.pop("policy", {})}
    driver = Driver(update(policy=policy), base, **{"commit": commit, "roll": commit, **answers})
    driver.reports = [report(key, base, canary={"vocab_size": 10, "max_model_len": 10}) for key in MEMBERS]
    return driver


def written(driver: Driver) -> list[CanaryRecord]:
    """The canary of each record that was written."""
    canaries = [one.record.canary for one in driver.all(Write)]
    return [one for one in canaries if one is not None]


BACK = [*WHOLE[:6], "decide", "gate", "commit", "open", "open", "watch"]


@pytest.mark.parametrize("kind", ["update", "complete"])
def test_a_record_that_does_not_fit_in_a_message_with_the_version_before_is_never_decided(kind: str) -> None:
    def by_urls(step: int) -> dict[str, Any]:
        urls = {f"{number}.safetensors": f"https://a.example/{step}/" + "x" * 1900 for number in range(260)}
        return {"backend": "http", "urls": urls}

    base = replace(R1_OPEN, source=replace(R1.source, transport=by_urls(1)))
    fields: dict[str, Any] = {"transport": by_urls(2), "policy": {"canary": CANARY}}
    waiting = prepare(**fields)
    call = update(**fields) if kind == "update" else UpdateCommand("complete", waiting.update_id)
    driver = Driver(call, base)
    driver.session = None if kind == "update" else session_of(waiting)
    driver.reports = [report(key, R1_OPEN, canary={"vocab_size": 10, "max_model_len": 10}) for key in MEMBERS]
    assert driver.error(InvalidRequest).facts["field"] == "transport"
    assert not driver.all(Write)
    assert driver.phases[-1] == "abort"


def test_a_worker_with_other_canary_scores_is_excluded_and_the_version_opens_with_the_others_scores() -> None:
    driver = with_canary(scored(-1.0, -1.0, -5.0), watch=serving("ab"))
    outcome = driver.outcome()
    assert driver.phases == [*WHOLE[:7], "open", "open", "watch"]
    assert outcome.excluded == ["c"]
    assert [reply.error and reply.error.code for reply in outcome.replies] == [None, None, "numerics"]
    opened = driver.one(Write, "open").record
    assert opened.canary is not None
    assert opened.canary.references == {KIND: ((-1.0, -2.0),)}
    assert driver.one(Announce, "open").record == opened
    (history,) = driver.put(CANARY_HISTORY)
    assert history.values(NEW, opened.canary.sequences) == opened.canary.references


def test_a_version_that_all_workers_fail_is_never_opened_and_the_version_before_returns() -> None:
    driver = with_canary(scored(-5.0, -5.0, -5.0))
    error = driver.error(CanaryFailed)
    assert driver.phases == BACK
    failed, back = (one.record for one in driver.all(Write, "decide"))
    assert failed.fallback == R0
    assert not failed.open
    assert (back.version.digest, back.sequence, back.update_id) == (V0.digest, 2, "u9")
    assert back.missed is not None
    assert [one.record.made for one in driver.all(Write, "open")] == [back.made]
    assert [one.record.made for one in driver.all(Announce)] == [failed.made, back.made, back.made]
    assert error.facts["failed_version"] == failed.made.to_wire()
    assert [row["error"]["code"] for row in error.facts["workers"]] == ["numerics"] * 3
    assert error.facts["serving"] == ["a", "b", "c"]


@pytest.mark.parametrize("kind", ["prepare", "receive_part", "label", "complete", "abort"])
def test_a_later_call_for_an_update_that_its_canary_took_back_reports_the_canary(kind: Any) -> None:
    first = with_canary(scored(-5.0, -5.0, -5.0))
    first.run()
    part = Part(names=[], dtypes=[], shapes=[]) if kind == "receive_part" else None
    driver = Driver(UpdateCommand(kind, "u9", body(), part=part), first.record)
    assert "the fleet is back at initial" in driver.error(CanaryFailed).message
    assert driver.phases == ["survey"]


@pytest.mark.parametrize("keys", ["", "ab"])
def test_the_answer_counts_the_workers_that_serve_the_restored_version(keys: str) -> None:
    error = with_canary(scored(-5.0, -5.0, -5.0), watch=serving(keys)).error(CanaryFailed)
    assert error.facts["serving"] == [*keys]
    if keys:
        assert "the fleet is back at initial on 2 of 3 workers" in error.message
        assert "warning" not in error.facts["canary"]
    else:
        assert "no worker serves initial, which is committed again (behind: it fetches them)" in error.message
        assert "no worker could bring it back: behind: it fetches them" in error.facts["canary"]["warning"]


def test_a_rolling_update_that_fails_its_canary_reaches_only_the_first_worker() -> None:
    driver = with_canary(scored(-5.0, -1.0, -1.0), barrier="rolling")
    driver.error(CanaryFailed)
    assert [list(one.workers) for one in driver.all(SendOp, "roll")] == [["a"]]
    assert driver.all(Write, "decide")[1].record.version.digest == V0.digest


@pytest.mark.parametrize("values", [(-5.0, -1.0, -1.0), (-5.0, -5.0, -1.0)])
def test_in_a_rolling_update_with_warn_the_first_failed_workers_do_not_judge_the_next_ones(
    values: tuple[float, ...],
) -> None:
    right = "".join(key for key, one in zip("abc", values, strict=True) if one == -1.0)
    driver = with_canary(scored(*values), on_failure="warn", barrier="rolling", watch=serving(right))
    outcome = driver.outcome()
    assert outcome.excluded == [key for key in "abc" if key not in right]
    assert outcome.canary is not None
    assert "warning" not in outcome.canary
    assert [one.expected for one in written(driver)] == [((-1.0, -2.0),)] * len(driver.all(Write))
    (history,) = driver.put(CANARY_HISTORY)
    assert history.values(NEW, ((1, 2, 3),)) == {KIND: ((-1.0, -2.0),)}


def test_a_rolling_update_that_every_worker_fails_is_served_with_a_warning_if_the_policy_says_so() -> None:
    driver = with_canary(scored(-5.0, -5.0, -5.0), on_failure="warn", barrier="rolling")
    outcome = driver.outcome()
    assert outcome.excluded == []
    assert outcome.canary is not None
    assert outcome.canary["failed"] == 3
    assert "every worker failed the canary" in outcome.canary["warning"]
    *before, last = (one.overruled for one in written(driver))
    assert not any(before)
    assert last
    assert not driver.put(CANARY_HISTORY), "values that failed are no measure for later"


def test_an_adapter_over_weights_whose_failure_was_overruled_saves_none_of_their_values() -> None:
    first = with_canary(scored(-5.0, -5.0, -5.0), on_failure="warn")
    warned = first.outcome()
    base = replace(first.all(Write)[-1].record, update_id="u8")
    driver = Driver(lora("load"), base, commit=scored(-5.0, -5.0, -5.0))
    outcome = driver.outcome()
    assert not driver.put(CANARY_HISTORY)
    assert outcome.canary is not None
    assert warned.canary is not None
    assert outcome.canary["warning"] == warned.canary["warning"]


def test_a_first_worker_without_a_usable_value_does_not_fail_the_next_ones() -> None:
    unusable = Answered([ok("a", canary={"kind": KIND, "vectors": None})])
    rolls = [unusable, scored(-1.0, -1.0, -1.0)]
    driver = with_canary(rolls, on_failure="exclude", barrier="rolling", canary={"sequences": [[1, 2, 3]]})
    outcome = driver.outcome()
    assert outcome.canary is not None
    assert (outcome.canary["scored"], outcome.canary["failed"]) == (3, 1)
    assert not any(one.undecided for one in written(driver))


def test_if_no_earlier_version_can_return_the_failed_one_stays_and_no_worker_serves_it() -> None:
    for base, on_failure in (
        (R0, "exclude"),
        (replace(R1_OPEN, source=replace(R1.source, refetchable=False)), "rollback"),
    ):
        driver = with_canary(scored(-5.0, -5.0, -5.0), base, on_failure, watch=serving(""))
        error = driver.error(CanaryFailed)
        assert "no worker serves it" in error.message
        assert "publish another version" in error.facts["fix"]
        assert len(driver.all(Write, "decide")) == 1
        assert driver.one(Write, "decide").record.fallback is None
        assert error.facts["excluded"] == ["a", "b", "c"]
        assert [one.timeout_s for one in driver.all(Watch)] == [0.0], "no worker heals from that"


@pytest.mark.parametrize("found", [True, False])
def test_a_rollback_decision_with_a_lost_answer_is_resolved_by_the_version_in_the_record(found: bool) -> None:
    """Both records have one update id. The stored record may be the version that all workers fail."""
    driver = with_canary(scored(-5.0, -5.0, -5.0), decide=[None, LOST], watch=serving(""))
    driver.answers["resolve"] = [
        lambda _: replace(
            driver.surveyed(), record=replace(driver.all(Write, "decide")[int(found)].record, fence=FENCE)
        )
    ]
    if found:
        driver.error(CanaryFailed)
        assert driver.phases == [*BACK[:7], "resolve", *BACK[7:]]
        return
    driver.error(Conflict)
    again = ["watch", "survey", "decide", "resolve"]
    assert driver.phases == [*BACK[:7], "resolve", *again, "watch"], "the next coordinator brings it back"


@pytest.mark.parametrize("why", [LOST, FENCED])
def test_an_update_that_is_lost_before_its_canary_is_judged_is_left_to_the_next_coordinator(
    why: PlaneError,
) -> None:
    driver = with_canary(why, watch=serving(""))
    driver.error(Conflict)
    again = [] if why is FENCED else ["watch", "survey", "gate", "commit"]
    assert driver.phases == [*WHOLE[:6], *again, "watch"]
    driver = with_canary(scored(-1.0, -1.0, -1.0), open=[why, None])
    driver.outcome()
    again = (
        ["watch", "open"] if why is FENCED else ["watch", "survey", *FINISHED, "open", "open", "recheck", "watch"]
    )
    assert driver.phases == [*WHOLE[:7], *again]
    opened = driver.all(Write, "open")[-1].record
    assert opened.canary is not None
    assert opened.canary.references == {KIND: ((-1.0, -2.0),)}


AGAIN = ["watch", "survey"]
FINISHED = ["gate", "commit", "open"]


@pytest.mark.parametrize("barrier", ["strict", "rolling"])
@pytest.mark.parametrize("phase", ["gate", "commit"])
def test_an_update_whose_verdict_an_outage_cuts_off_is_finished_by_its_own_call(barrier: str, phase: str) -> None:
    swap = "roll" if barrier == "rolling" else "commit"
    lost: dict[str, Any] = {"gate": [LOST, None]} if phase == "gate" else {swap: [LOST, scored(-5.0, -5.0, -5.0)]}
    driver = with_canary(scored(-5.0, -5.0, -5.0), barrier=barrier, **lost)
    error = driver.error(CanaryFailed)
    assert error.facts["version"]["digest"] == V0.digest
    before = [*WHOLE[:4], "gate", *([swap] if phase == "commit" else [])]
    assert driver.phases == [*before, *AGAIN, "gate", "commit", "decide", *FINISHED, "open", "watch", "recheck"]
    assert NEW not in [one.record.version.digest for one in driver.all(Write, "open")]
    driver = with_canary(scored(-1.0, -1.0, -1.0), barrier=barrier, gate=[LOST, None])
    outcome = driver.outcome()
    assert outcome.canary is not None
    assert outcome.canary["scored"] == 3
    assert driver.phases == [*WHOLE[:5], *AGAIN, *FINISHED, "open", "open", "recheck", "watch"]


def test_an_update_that_its_own_call_finishes_keeps_the_time_of_its_policy() -> None:
    slow = {"commit_timeout_s": 600.0}
    driver = with_canary(scored(-5.0, -5.0, -5.0), gate=[LOST, None], policy=slow)
    driver.error(CanaryFailed)
    assert [one.timeout_s for one in driver.all(SendOp, "commit")] == [600.0, 600.0]
    assert driver.all(Watch)[-1].timeout_s == 600.0


def test_a_call_that_loses_nats_again_after_the_way_back_does_not_open_the_failed_version() -> None:
    driver = with_canary(scored(-5.0, -5.0, -5.0), gate=[LOST, None], recheck=LOST, watch=serving(""))
    driver.error(Conflict)
    assert [one.record.version.digest for one in driver.all(Write, "open")] == [V0.digest]


def test_a_call_whose_nats_stays_away_before_the_verdict_still_watches_the_workers() -> None:
    away = Unavailable("NATS does not answer")
    driver = with_canary(scored(-1.0, -1.0, -1.0), gate=LOST, watch=[away, serving("abc")])
    assert driver.outcome().excluded == []
    assert [one.timeout_s for one in driver.all(Watch)] == [0.0, 60.0]


def test_a_completed_update_that_an_outage_delays_keeps_its_warning_though_its_call_names_no_id() -> None:
    canary = {"canary": CANARY, "on_canary_failure": "warn"}
    driver = with_session(
        UpdateCommand("complete", ""),
        session_of(prepare(policy=canary)),
        R0,
        gate=[LOST, None],
        commit=scored(-5.0, -5.0, -5.0),
    )
    driver.reports = [report(key, R0, canary={"vocab_size": 10, "max_model_len": 10}) for key in MEMBERS]
    outcome = driver.outcome()
    assert outcome.canary is not None
    assert outcome.canary["warning"]


def test_a_rolling_update_whose_way_back_is_lost_goes_back_and_asks_no_further_worker() -> None:
    driver = with_canary(scored(-5.0, -1.0, -1.0), barrier="rolling", decide=[None, LOST, None])
    driver.answers["resolve"] = [
        lambda _: replace(driver.surveyed(), record=replace(driver.all(Write, "decide")[0].record, fence=FENCE))
    ]
    error = driver.error(CanaryFailed)
    assert error.facts["version"]["digest"] == V0.digest
    assert [list(one.workers) for one in driver.all(SendOp, "roll")] == [["a"]]
    assert not [one for one in driver.all(SendOp, "commit") if one.workers]
    assert NEW not in [one.record.version.digest for one in driver.all(Write, "open")]


@pytest.mark.parametrize("why", [LOST, FENCED])
def test_a_roll_that_is_lost_for_good_before_its_verdict_is_not_opened(why: PlaneError) -> None:
    driver = with_canary(why, barrier="rolling", watch=serving(""))
    driver.error(Conflict)
    assert not driver.all(Write, "open"), "the next coordinator needs the version before"
    driver = with_canary([scored(-5.0, -1.0, -1.0), why], on_failure="warn", barrier="rolling", commit=why)
    driver.run()
    assert not driver.all(Write, "open"), "the workers that are still to come may pass"


def test_a_lost_roll_is_opened_once_a_worker_has_passed() -> None:
    driver = with_canary([scored(-1.0, -1.0, -1.0), LOST], barrier="rolling")
    driver.outcome()
    assert driver.phases[-7:] == ["roll", "open", "roll", "survey", "open", "watch", "open"]


def test_a_roll_whose_lost_write_stands_is_opened_with_the_scores_of_the_first_workers() -> None:
    driver = with_canary(scored(-1.0, -1.0, -1.0), barrier="rolling", canary={"sequences": [[1, 2, 3]]})
    stands: list[DecisionRecord] = []

    def late(write: Write) -> Failed:
        stands.append(write.record)
        return Failed(LOST)

    driver.answers["open"] = [late, None]
    driver.answers["survey"] = [None, lambda _: replace(driver.surveyed(), record=stands[0])]
    driver.outcome()
    assert driver.phases[-5:] == ["open", "survey", "open", "watch", "open"]
    opened = [one.record for one in driver.all(Write, "open")]
    assert [one.final for one in opened] == [False, True, True]
    assert [one.canary and one.canary.references for one in opened] == [{KIND: ((-1.0, -2.0),)}] * 3


def test_a_coordinator_that_finishes_a_version_that_all_workers_fail_returns_to_the_one_before() -> None:
    first = with_canary(scored(-5.0, -5.0, -5.0))
    first.run()
    left = replace(first.all(Write, "decide")[0].record, fence=8)
    driver = Driver(UpdateCommand("finish", ""), left, commit=scored(-5.0, -5.0, -5.0))
    outcome = driver.outcome()
    assert driver.phases == ["survey", "gate", "commit", *BACK[6:], "recheck"]
    assert (outcome.version.digest, outcome.version.sequence) == (V0.digest, 2)
    again = Driver(UpdateCommand("update", "u9", body()), driver.record)
    again.error(CanaryFailed)
    assert again.phases == ["survey"]


def left_by_a_dead_coordinator(on_failure: str = "rollback") -> DecisionRecord:
    first = with_canary(scored(-5.0, -5.0, -5.0), on_failure=on_failure)
    first.run()
    return replace(first.all(Write, "decide")[0].record, fence=8)


def fetching(keys: str) -> Answered:
    """These workers swap by themselves, and have nothing to report yet."""
    return Answered([bad(key, NotPrepared("the update is not staged here")) for key in keys])


@pytest.mark.parametrize("kind", ["finish", "update"])
def test_a_coordinator_waits_for_the_scores_of_workers_that_fetch_by_themselves(kind: Any) -> None:
    left = left_by_a_dead_coordinator()
    miss = scored(-5.0, -5.0, -5.0)
    call = UpdateCommand(kind, "u9" if kind == "update" else "", body())
    driver = Driver(call, left, commit=[fetching("abc"), fetching("abc"), miss])
    driver.run()
    assert driver.phases[:6] == ["survey", "gate", "commit", "watch", "commit", "watch"]
    assert driver.one(Write, "decide").record.version.digest == V0.digest
    assert left.made not in [one.record.made for one in driver.all(Write, "open")]


def test_a_coordinator_waits_for_no_more_scores_once_a_worker_has_passed() -> None:
    left = left_by_a_dead_coordinator()
    passed = Answered(
        [*scored(-1.0, -1.0, -1.0)(SendOp("commit", "", {}, ["a"])).replies, *fetching("bc").replies]
    )
    driver = Driver(UpdateCommand("finish", ""), left, commit=passed)
    driver.outcome()
    assert driver.phases == ["survey", "gate", "commit", "open", "open", "open", "recheck"]
    driver = Driver(UpdateCommand("finish", ""), left_by_a_dead_coordinator("exclude"), commit=fetching("abc"))
    driver.outcome()
    assert driver.phases == ["survey", "gate", "commit", "open", "open", "recheck"], "no score would change that"


def test_a_coordinator_waits_for_scores_only_as_long_as_a_commit_may_take() -> None:
    driver = Driver(UpdateCommand("finish", ""), left_by_a_dead_coordinator(), commit=fetching("abc"))
    driver.step_s = 10.0
    driver.outcome()
    assert driver.phases.count("commit") == 5
    assert driver.one(Write, "open").record.fallback is None


def test_a_worker_whose_scores_were_lost_on_the_way_is_asked_again() -> None:
    all_silent = Answered([silent(key) for key in MEMBERS])
    driver = with_canary([all_silent, scored(-5.0, -5.0, -5.0)])
    assert driver.error(CanaryFailed).facts["version"]["digest"] == V0.digest
    assert driver.phases[:9] == [*WHOLE[:6], "watch", "commit", "decide"]
    assert list(driver.all(SendOp, "commit")[1].workers) == ["a", "b", "c"]


def test_a_silent_worker_is_not_asked_again_once_another_one_has_scored() -> None:
    replies = [*scored(-5.0, -5.0, -5.0)(SendOp("commit", "", {}, ["a"])).replies, silent("b"), silent("c")]
    driver = with_canary(Answered(replies))
    driver.error(CanaryFailed)
    assert driver.phases[:7] == [*WHOLE[:6], "decide"]


def test_a_repeated_update_that_no_worker_serves_reports_why() -> None:
    left = left_by_a_dead_coordinator("exclude")
    driver = Driver(
        UpdateCommand("update", "u9", body()), left, commit=scored(-5.0, -5.0, -5.0), watch=serving("")
    )
    error = driver.error(CanaryFailed)
    assert error.facts["canary"]["action"] == "exclude"


def test_a_canary_that_the_engines_can_not_score_changes_no_worker() -> None:
    policy = {"canary": CANARY}
    assert Driver(update(policy=policy)).error(Unsupported).facts["field"] == "policy.canary"
    driver = with_canary(None)
    driver.reports = [report("a", canary={"vocab_size": 3, "max_model_len": 10}), report("b"), silent("c")]
    assert driver.error(InvalidRequest).facts["field"].startswith("policy.canary")
    assert driver.phases == ["survey"]
