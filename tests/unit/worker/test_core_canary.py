"""Tests by events when a worker opens after the numeric canary: the core alone, without loop, clock or engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_plane.commit.canary_steps import goes_back, settled
from rl_plane.errors import DeadlineExceeded
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.canary import CanaryRecord
from rl_plane.protocol.record import TAKEOVER_S, DecisionRecord, VersionSource
from rl_plane.protocol.versions import WeightVersion
from worker.reconcile.instructions import Fetch, ScoreCanary, StagedVersion, Swap
from worker.reconcile.worker_core import GATE_S, WorkerCore
from worker.reconcile.worker_state import Scores, WorkerState

KIND = "fake-1/float32/cpu/tp1"
SEQUENCES = ((1, 2, 3),)
RIGHT, WRONG = [[-1.0, -2.0]], [[-1.0, -5.0]]
FIRST = DecisionRecord(
    WeightVersion("run", 0, "step_0", "d0"), VersionSource(None), "", WeightVersion("run", 0, "step_0", "d0")
)
MADE = WeightVersion("run", 1, "step_1", "d1")
NEXT = replace(
    FIRST,
    version=MADE,
    made=MADE,
    source=VersionSource({"backend": "filesystem", "path": "/1"}),
    update_id="u1",
    open=False,
    seal=1,
    canary=CanaryRecord(SEQUENCES),
)
EXPECTED = replace(NEXT, canary=CanaryRecord(SEQUENCES, ((-1.0, -2.0),)))


def swapped(record: DecisionRecord, at: float) -> WorkerCore:
    """Makes a worker that has just swapped in the version of `record`."""
    core = WorkerCore(WorkerState("w", "i", digest="d0"), "d0", KIND)
    core.learnt(FIRST, 1, 0.0)
    core.relabelled(FIRST)
    core.learnt(record, 2, at)
    core.is_staged(StagedVersion("u1", None, "d1", 7))
    swap = core.commit_step(record)
    assert isinstance(swap, Swap)
    core.swapping(swap)
    core.swapped(swap, at)
    assert core.next(at) == ScoreCanary(record.canary) if record.canary else True
    return core


def test_a_worker_that_only_others_can_judge_waits_for_them_as_long_as_a_coordinator_collects_scores() -> None:
    core = swapped(NEXT, 10.0)
    core.scored(Scores(SEQUENCES, RIGHT), 10.0)
    assert not core.depends_on_coordinator(), "the gate has its own time"
    late = 10.0 + GATE_S
    core.ticked(late)
    assert core.depends_on_coordinator()
    assert core.coordinator_holds(7, True, late)
    core.ticked(late + 1)
    assert "updating" in core.state.closed
    assert not core.numerics.delivers(0)
    core.coordinator_holds(7, False, late + 1)
    core.coordinator_holds(7, False, late + 1 + TAKEOVER_S)
    core.ticked(late + 1 + TAKEOVER_S)
    assert core.state.closed == {}
    assert core.numerics.delivers(0)


def test_a_worker_that_the_record_judges_opens_when_the_gate_ends() -> None:
    core = swapped(EXPECTED, 10.0)
    core.scored(Scores(SEQUENCES, RIGHT), 10.0)
    core.ticked(10.0 + GATE_S)
    assert core.state.closed == {}


def test_a_commit_reports_the_failure_before_the_weights_are_fetched_again() -> None:
    core = swapped(replace(EXPECTED, open=True, rolling_from=FIRST.held), 10.0)
    core.scored(Scores(SEQUENCES, WRONG), 10.0)
    assert not core.ticked(10.5, busy=True)
    assert core.state.scores is not None
    assert core.commit_step(NEXT) is None, "the commit is complete"
    assert core.ticked(11.0)
    assert core.state.digest is None
    assert isinstance(core.next(60.0), Fetch)


@pytest.mark.parametrize("told", [7, [], {"vectors": RIGHT, "kind": [1]}, {"kind": "x"}, {}])
def test_no_report_of_a_worker_breaks_a_coordinator(told: object) -> None:
    good = WorkerReply("a", "i", "ok", {"canary": {"kind": KIND, "vectors": RIGHT}})
    settlement, rows = settled(EXPECTED, [good, WorkerReply("b", "i", "ok", {"canary": told})])
    assert settlement is not None
    assert settlement.verdicts["a"].passed
    assert settlement.action == "open"
    if told != {"vectors": RIGHT, "kind": [1]}:
        assert settlement.excluded == ["b"]
        assert [row.ok for row in rows] == [True, False]


def test_the_answer_says_if_no_version_can_be_restored() -> None:
    row = WorkerReply("w", "i", "ok", {"canary": {"kind": KIND, "vectors": WRONG}})
    pushed = replace(EXPECTED, on_canary_failure="rollback")
    settlement, _ = settled(pushed, [row])
    assert settlement is not None
    assert not goes_back(pushed, settlement)
    assert settlement.summary()["action"] == "exclude"
    assert "can't be fetched again" in settlement.summary()["warning"]
    settlement, _ = settled(restorable := replace(pushed, fallback=FIRST), [row])
    assert goes_back(restorable, settlement)


def test_the_few_workers_that_answer_in_time_do_not_say_what_the_others_must_compute() -> None:
    def silent(key: str) -> WorkerReply:
        return WorkerReply(key, "i", "error", error=DeadlineExceeded("no answer"))

    wrong = WorkerReply("a", "i", "ok", {"canary": {"kind": KIND, "vectors": WRONG}})
    late, _ = settled(NEXT, [wrong, silent("b"), silent("c")])
    assert late is not None
    assert (late.action, late.record.references) == ("open", {})
    unusable = WorkerReply("a", "i", "ok", {"canary": {"kind": KIND, "vectors": None}})
    lone, _ = settled(replace(NEXT, on_canary_failure="rollback", fallback=FIRST), [unusable, silent("b")])
    assert lone is not None
    assert (lone.action, lone.excluded) == ("open", ["a"])
    right = WorkerReply("d", "i", "ok", {"canary": {"kind": KIND, "vectors": RIGHT}})
    most, _ = settled(NEXT, [right, replace(right, instance_id="e"), silent("b")])
    assert most is not None
    assert set(most.record.references) == {KIND}
    by_trainer, _ = settled(EXPECTED, [wrong, silent("b")])
    assert by_trainer is not None
    assert by_trainer.action == "exclude", "the trainer's values need no majority"
