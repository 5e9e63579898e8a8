"""Tests what a coordinator finishes that a dead one has left, and a new run, by events and expected instructions."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from rl_plane.commit.rules import newest
from rl_plane.commit.steps import (
    Announce,
    Answered,
    Outcome,
    SendOp,
    UpdateCommand,
    Watch,
    Write,
)
from rl_plane.errors import (
    Conflict,
    NotPrepared,
    UpdateAborted,
)
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.record import (
    DecisionRecord,
    DesiredPause,
    VersionSource,
)
from rl_plane.protocol.subjects import PAUSE
from rl_plane.protocol.worker_ops import DEFAULT_PAUSE_LEASE_S
from tests.support.update_machine import (
    MEMBERS,
    NOW,
    R0,
    R1,
    R1_OPEN,
    SESSION,
    V1,
    WHOLE,
    Driver,
    bad,
    body,
    lost,
    ok,
    prepared_rows,
    report,
    serving,
    silent,
    state,
    states,
    update,
    with_session,
)

# ---- what a dead coordinator has left ----


def test_the_newest_record_is_whichever_is_newest_in_the_store_here_or_at_a_worker() -> None:
    sealed = [replace(R1, seal=seal, update_id=f"u{seal}") for seal in (1, 2, 3)]
    for stored, witness, known in permutations(sealed):
        reports = [report("a", None), report("b", R0), report("c", known), silent("d")]
        assert newest(stored, witness, reports) == sealed[2]
    assert newest(None, None, []) is None
    assert newest(R0, None, []) == R0
    assert newest(None, R1, [report("a", R0)]) == R1


FINISH = ["gate", "commit", "open", "open", "recheck"]


def test_an_update_that_a_dead_coordinator_had_decided_is_finished_first() -> None:
    driver = Driver(update(), R1)
    outcome = driver.outcome()
    assert driver.phases == ["survey", *FINISH, *WHOLE[1:]]
    assert driver.all(Announce, "gate")[0].record == R1
    assert driver.all(Announce, "gate")[0].sequence == 10
    assert list(driver.all(SendOp, "commit")[0].workers) == ["a", "b", "c"]
    assert driver.all(Write, "open")[0].record == R1_OPEN
    assert outcome.version.sequence == 2


def test_a_worker_that_only_the_unfinished_update_closed_counts_again_once_it_is_finished() -> None:
    driver = Driver(update(), R1, prepare=prepared_rows(lost("b")))
    driver.reports = [report(key, R1, admitted=False) for key in MEMBERS]
    driver.answers["recheck"] = [
        lambda _: replace(driver.surveyed(), reports=[report(key, R1_OPEN) for key in MEMBERS])
    ]
    driver.error(UpdateAborted)
    assert driver.phases[-3:] == ["begin", "prepare", "abort"]


def test_a_repeated_update_returns_the_outcome_of_the_decided_update_with_its_id() -> None:
    commit = Answered([ok("a"), ok("b"), lost("c")])
    driver = Driver(UpdateCommand("update", "u1", body()), R1, commit=commit, watch=serving("ab"))
    outcome = driver.outcome()
    assert driver.phases == ["survey", *FINISH, "watch"]
    assert (outcome.version, outcome.excluded) == (V1, ["c"])
    driver = Driver(UpdateCommand("update", "u1", body()), R1_OPEN)
    outcome = driver.outcome()
    assert driver.phases == ["survey", "watch"], "it was opened: the workers are asked once"
    assert driver.one(Watch) == Watch(R1_OPEN, 0.0)
    assert (outcome.version, outcome.excluded) == (V1, [])
    assert [reply.instance_id for reply in outcome.replies] == ["a", "b", "c"]


def test_a_coordinator_finishes_an_update_within_the_time_of_its_policy() -> None:
    first = Driver(update(policy={"commit_timeout_s": 600.0}))
    first.outcome()
    driver = Driver(UpdateCommand("finish", ""), first.decided)
    driver.outcome()
    assert driver.one(SendOp, "commit").timeout_s == 600.0


@pytest.mark.parametrize(
    "call",
    [UpdateCommand("update", "u1", body()), UpdateCommand("complete", "u1"), UpdateCommand("new_run", "u1")],
    ids=lambda call: call.kind,
)
@pytest.mark.parametrize("record", [R1, R1_OPEN], ids=["decided", "opened"])
def test_a_repeated_update_is_a_conflict_if_too_few_workers_serve_its_version(
    call: UpdateCommand, record: DecisionRecord
) -> None:
    failed = Answered([bad(key, NotPrepared("no")) for key in MEMBERS])
    nobody = states(R0, "abc")
    driver = Driver(call, record, commit=failed, watch=nobody)
    error = driver.error(Conflict)
    assert "one is committed, but 0 workers serve it" in error.message
    assert error.facts["excluded"] == ["a", "b", "c"]
    assert driver.all(Watch)[-1] == Watch(R1_OPEN, 60.0), "they may heal meanwhile"
    driver = Driver(call, record, commit=failed, watch=[nobody, states(R1, "abc")])
    assert driver.outcome().excluded == []


def test_a_prepare_call_for_a_decided_update_finishes_it_and_is_a_conflict() -> None:
    driver = Driver(UpdateCommand("prepare", "u1", body()), R1)
    assert "is committed as one" in driver.error(Conflict).message
    assert driver.phases == ["survey", *FINISH]


def test_a_repeated_complete_call_applies_its_own_policy() -> None:
    one = Answered([state("a", R1), state("b", R0), state("c", R0)])
    assert Driver(UpdateCommand("complete", "u1"), R1_OPEN, watch=one).outcome().excluded == ["b", "c"]
    call = UpdateCommand("complete", "u1", min_ready=2)
    assert "1 workers serve it" in Driver(call, R1_OPEN, watch=one).error(Conflict).message
    another = replace(SESSION, update_id="u2")
    assert "1 workers serve it" in with_session(call, another, R1_OPEN, watch=one).error(Conflict).message


def test_a_finish_call_finishes_the_decided_update_and_checks_nothing_else() -> None:
    driver = Driver(
        UpdateCommand("finish", ""), R1, commit=Answered([bad(key, NotPrepared("no")) for key in MEMBERS])
    )
    assert driver.outcome() == Outcome(V1), "who serves it is not asked"
    assert driver.phases == ["survey", *FINISH]
    driver = Driver(UpdateCommand("finish", ""), R1_OPEN)
    assert driver.outcome() == Outcome(V1)
    assert driver.phases == ["survey"]


def test_a_rolling_update_that_was_left_is_ended_on_all_at_once() -> None:
    rolling = replace(R1, open=True, rolling_from=R0.held)
    driver = Driver(UpdateCommand("finish", ""), rolling)
    driver.outcome()
    assert driver.phases == ["survey", *FINISH]
    assert driver.one(Write, "open").record.rolling_from is None


def test_a_coordinator_that_finishes_a_keep_pause_update_saves_the_pause() -> None:
    left = replace(R1, keep_pause=True, pause_mode="wait", fence=8)
    for written in (3, 7):
        driver = Driver(UpdateCommand("finish", ""), left)
        driver.pause = DesiredPause(False), written
        driver.outcome()
        assert driver.phases == ["survey", "pause", *FINISH]
        assert driver.put(PAUSE) == [DesiredPause(True, "wait", NOW + DEFAULT_PAUSE_LEASE_S)]
    for written in (9, 200):  # after the lock of its coordinator was taken
        resumed = Driver(UpdateCommand("finish", ""), left)
        resumed.pause = DesiredPause(False), written
        resumed.outcome()
        assert not resumed.put(PAUSE), "another call has resumed the fleet since"


def test_a_pause_outlives_an_update_by_the_longer_lease() -> None:
    driver = Driver(update(policy={"keep_pause": True}))
    driver.pause = DesiredPause(True, "wait", NOW + 3600.0), 3
    driver.outcome()
    assert driver.put(PAUSE) == [DesiredPause(True, "keep", NOW + 3600.0)]
    assert driver.one(SendOp, "commit").body["pause_s"] == 3600.0
    driver = Driver(update())
    driver.pause = DesiredPause(True, "wait", NOW + 5.0), 3
    driver.outcome()
    assert driver.one(SendOp, "commit").body["pause_s"] == 5.0
    assert not driver.put(PAUSE)


# ---- a new run ----


def new_run(record: DecisionRecord | None = R1_OPEN, **answers: Any) -> Driver:
    return Driver(UpdateCommand("new_run", "n1"), record, **answers)


def test_a_new_run_begins_by_the_model_of_all() -> None:
    driver = new_run()
    outcome = driver.outcome()
    assert driver.phases == ["survey", "begin", *WHOLE[3:]]
    record = driver.decided
    assert (record.sequence, record.version.digest, record.run_number) == (0, "model", 1)
    assert (record.source, record.adapters, record.open, record.update_id) == (
        VersionSource(None),
        {},
        False,
        "n1",
    )
    assert record.version.run != V1.run
    assert list(driver.one(SendOp, "commit").workers) == []
    assert outcome.excluded == []
    again = new_run(driver.record)
    assert again.outcome().version == record.made
    assert again.phases == ["survey", "watch"], "under its id there is one"


@pytest.mark.parametrize("other", [report("c", model="another"), silent("c")])
def test_a_new_run_needs_every_workers_word(other: WorkerReply) -> None:
    driver = new_run()
    driver.reports = [report("a"), report("b"), other]
    error = driver.error(Conflict)
    assert len(error.facts["workers"]) == 3
    assert driver.phases == ["survey"]
    driver = new_run()
    driver.members, driver.reports = {}, []
    driver.error(Conflict)


def test_a_new_run_that_no_worker_serves_is_no_success() -> None:
    driver = new_run(watch=states(R1, "abc"))
    driver.error(Conflict)
