"""Tests one worker's numeric canary without an engine: when it scores, serves, waits and fetches again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_plane.errors import WrongNumerics
from rl_plane.protocol.canary import CanaryRecord, Vectors, engine_kind
from rl_plane.protocol.record import TAKEOVER_S, DecisionRecord, VersionSource
from rl_plane.protocol.versions import WeightVersion
from worker.reconcile.instructions import Fetch, Relabel, ScoreCanary, StagedVersion, Swap, Wait
from worker.reconcile.numerics import HEAL_TRIES, NOT_SCORED
from worker.reconcile.worker_core import GATE_S, WorkerCore
from worker.reconcile.worker_state import Scores, WorkerState

KIND = engine_kind("hf", "5.0", "float32", "cpu", 1)
SEQUENCES = ((1, 2, 3),)
RIGHT: Vectors = ((-1.0, -2.0),)
WRONG: Vectors = ((-1.0, -7.0),)
CANARY = CanaryRecord(SEQUENCES)
TRAINED = replace(CANARY, expected=RIGHT)
OVERRULED = replace(CANARY, references={KIND: WRONG}, overruled="every worker failed the canary")


def version(sequence: int) -> WeightVersion:
    return WeightVersion("run", sequence, f"v{sequence}", f"d{sequence}")


def record(sequence: int, canary: CanaryRecord | None = TRAINED, open: bool = False) -> DecisionRecord:
    made = version(sequence)
    source = VersionSource({"backend": "filesystem", "path": f"/{sequence}"})
    return DecisionRecord(made, source, f"u{sequence}", made, canary=canary, open=open, decided_at=0.0)


def serving(kind: str | None = KIND) -> WorkerCore:
    """Makes a worker that serves version 0, which has no canary."""
    core = WorkerCore(WorkerState("w", "i", digest="d0"), "d0", kind)
    core.learnt(record(0, None, open=True), 1, 0.0)
    relabel = core.next(0.0)
    assert isinstance(relabel, Relabel)
    core.relabelled(relabel.record)
    assert not core.state.closed
    return core


def swapped(core: WorkerCore, decided: DecisionRecord, now: float = 0.0) -> None:
    """Stages the version for a coordinator, and commits it."""
    core.is_staged(StagedVersion(decided.update_id, None, decided.version.digest, 5))
    core.learnt(decided, decided.sequence + 10, now)
    swap = core.commit_step(decided)
    assert isinstance(swap, Swap)
    core.swapping(swap)
    core.swapped(swap, now)


def scored(core: WorkerCore, vectors: Vectors, now: float = 0.0) -> None:
    core.scored(Scores(SEQUENCES, [list(vector) for vector in vectors]), now)


def closed(core: WorkerCore) -> set[str]:
    return {str(reason) for reason in core.state.closed}


def test_a_worker_scores_after_a_swap_before_a_token_goes_out() -> None:
    core = serving()
    swapped(core, record(1))
    assert closed(core) == {"updating", "numerics"}
    assert core.state.closed["numerics"] == NOT_SCORED
    assert core.next(0.0) == ScoreCanary(TRAINED)
    assert not core.numerics.delivers(0)
    scored(core, RIGHT)
    assert closed(core) == {"updating"}
    assert core.numerics.delivers(0), "the trainer's values say enough"
    assert core.next(0.0) == Wait()
    core.learnt(record(1, open=True), 12, 0.0)
    assert closed(core) == set()


def test_tokens_of_weights_that_miss_the_trainers_values_do_not_go_out() -> None:
    core = serving()
    swapped(core, record(1))
    scored(core, WRONG)
    assert closed(core) == {"updating", "numerics"}
    with pytest.raises(WrongNumerics):
        core.numerics.delivers(0)
    core.learnt(record(1, open=True), 12, 0.0)
    assert "numerics" in closed(core), "it is open for the others"


def test_a_worker_whose_failure_is_overruled_delivers_the_tokens_of_new_requests() -> None:
    core = serving()
    before = core.numerics.cuts
    swapped(core, record(1))
    scored(core, WRONG)
    assert core.numerics.flow == "cut"
    core.learnt(record(1, OVERRULED, open=True), 12, 0.0)
    assert closed(core) == set()
    assert core.numerics.delivers(core.numerics.cuts)
    with pytest.raises(WrongNumerics):
        core.numerics.delivers(before)


def test_with_nothing_to_compare_with_tokens_wait_for_the_other_workers() -> None:
    core = serving()
    swapped(core, record(1, CANARY))
    scored(core, WRONG)
    assert closed(core) == {"updating"}
    assert not core.numerics.delivers(0)
    agreed = replace(CANARY, references={KIND: RIGHT})
    core.learnt(record(1, agreed, open=True), 12, 0.0)
    assert "numerics" in closed(core)
    with pytest.raises(WrongNumerics):
        core.numerics.delivers(0)


def test_a_worker_with_no_other_to_wait_for_delivers_its_tokens() -> None:
    core = serving()
    swapped(core, record(1, CANARY))
    scored(core, RIGHT)
    core.ticked(GATE_S - 0.1)
    assert not core.numerics.delivers(0)
    core.ticked(GATE_S)
    assert not core.numerics.delivers(0), "a coordinator still collects what the others have scored"
    core.coordinator_holds(5, False, GATE_S)
    core.ticked(GATE_S)
    assert not core.numerics.delivers(0), "a frontend may take over"
    late = GATE_S + TAKEOVER_S
    core.coordinator_holds(6, True, late)
    core.coordinator_holds(6, False, late)
    core.ticked(late)
    assert not core.numerics.delivers(0), "one has taken over, and has ended too"
    core.coordinator_holds(6, False, late + TAKEOVER_S)
    core.ticked(late + TAKEOVER_S)
    assert core.numerics.delivers(0)
    assert closed(core) == set()


def test_a_worker_waits_again_for_a_coordinator_that_seals_the_record() -> None:
    core = serving()
    swapped(core, record(1, CANARY))
    scored(core, RIGHT)
    core.coordinator_holds(5, False, GATE_S - TAKEOVER_S)
    core.learnt(replace(record(1, CANARY), seal=9), 12, GATE_S)
    core.coordinator_holds(9, False, GATE_S)
    core.ticked(GATE_S)
    assert not core.numerics.delivers(0)


def test_a_request_that_ran_on_weights_that_failed_delivers_nothing_after_they_have_healed() -> None:
    core = serving()
    before = core.numerics.cuts
    swapped(core, record(1, open=True))
    scored(core, WRONG)
    assert core.ticked(0.0)
    wait = core.next(0.0)
    assert isinstance(wait, Wait)
    assert wait.until is not None
    now = wait.until
    fetch = core.next(now)
    assert isinstance(fetch, Fetch)
    core.is_staged(StagedVersion(fetch.update_id, None, "d1", None))
    swap = core.next(now)
    assert isinstance(swap, Swap)
    core.swapping(swap)
    core.swapped(swap, now)
    scored(core, RIGHT, now)
    assert core.numerics.delivers(core.numerics.cuts), "a request that began since"
    with pytest.raises(WrongNumerics):
        core.numerics.delivers(before)


def test_a_decision_before_the_verdict_cuts_waiting_tokens() -> None:
    core = serving()
    swapped(core, record(1, CANARY))
    core.learnt(record(2), 13, 0.0)
    with pytest.raises(WrongNumerics):
        core.numerics.delivers(0)


def test_waiting_tokens_are_cut_while_other_weights_come_in() -> None:
    core = serving()
    swapped(core, record(1, CANARY))
    core.state.lose_weights("swapping")
    with pytest.raises(WrongNumerics):
        core.numerics.delivers(0)


def test_weights_that_fail_the_canary_are_fetched_again_a_few_times() -> None:
    core = serving()
    swapped(core, record(1, open=True))
    now = 0.0
    for _ in range(HEAL_TRIES):
        scored(core, WRONG, now)
        assert not core.ticked(now, busy=True), "a commit still has to report what they scored"
        assert not core.numerics.gave_up
        assert core.ticked(now)
        assert not core.numerics.gave_up, "the weights are on their way"
        assert core.state.digest is None
        assert "behind" in closed(core)
        wait = core.next(now)
        assert isinstance(wait, Wait), "not at once, again and again"
        assert wait.until is not None
        now = wait.until
        fetch = core.next(now)
        assert isinstance(fetch, Fetch)
        core.is_staged(StagedVersion(fetch.update_id, None, "d1", None))
        swap = core.next(now)
        assert isinstance(swap, Swap)
        core.swapping(swap)
        core.swapped(swap, now)
    scored(core, WRONG, now)
    assert core.numerics.gave_up
    assert not core.ticked(now)
    assert core.state.digest == "d1"
    assert closed(core) == {"numerics"}
    assert core.next(now + 1e6) == Wait()
    core.enabled()
    assert not core.numerics.gave_up
    core.ticked(now)
    assert core.state.digest is None, "an operator has it tried again"


def test_a_worker_keeps_failed_weights_while_a_rolling_update_may_still_serve_them_all_the_same() -> None:
    rolling = replace(record(1, open=True), rolling_from=record(0).held, on_canary_failure="warn")
    overruled = replace(rolling.opened(), canary=OVERRULED)
    for ended, dropped in ((overruled, False), (rolling.opened(), True)):
        core = serving()
        swapped(core, rolling)
        scored(core, WRONG)
        assert core.depends_on_coordinator()
        assert not core.ticked(0.0)
        assert closed(core) == {"numerics"}
        core.learnt(ended, 12, 0.0)
        assert core.ticked(0.0) == dropped


def test_a_worker_heals_once_no_coordinator_is_left_that_could_overrule_its_failure() -> None:
    core = serving()
    swapped(core, replace(record(1, open=True), rolling_from=record(0).held, on_canary_failure="warn"))
    scored(core, WRONG)
    core.coordinator_holds(5, False, 1.0)
    assert not core.ticked(1.0), "a frontend may take over"
    core.coordinator_holds(5, False, 1.0 + TAKEOVER_S)
    assert core.ticked(1.0 + TAKEOVER_S)


def test_no_worker_heals_after_a_tie() -> None:
    core = serving()
    swapped(core, record(1, replace(CANARY, undecided=True), open=True))
    scored(core, RIGHT)
    assert closed(core) == {"numerics"}
    assert core.numerics.gave_up
    assert not core.ticked(1.0)
    assert core.state.digest == "d1"


def test_a_worker_that_failed_stays_closed_until_other_weights_are_here() -> None:
    core = serving()
    swapped(core, record(1))
    scored(core, WRONG)
    core.learnt(record(2), 13, 0.0)
    assert "numerics" in closed(core)
    swapped(core, record(2))
    assert core.state.closed["numerics"] == NOT_SCORED
    scored(core, RIGHT)
    assert "numerics" not in closed(core)


def test_an_engine_that_can_not_score_is_not_asked() -> None:
    core = serving(kind=None)
    swapped(core, record(1))
    assert closed(core) == {"updating"}
    assert core.numerics.wanted(core.record) is None
    assert core.numerics.delivers(0)


def test_an_engine_that_could_not_score_serves_no_request() -> None:
    core = serving()
    swapped(core, record(1))
    core.scored(Scores(SEQUENCES, [], "out of memory"), 0.0)
    assert core.state.closed["numerics"] == "out of memory"


def test_released_memory_is_not_scored() -> None:
    core = serving()
    swapped(core, record(1))
    core.state.release(["kv_cache"])
    core.ticked(0.0)
    assert core.numerics.wanted(core.record) is None
    assert "numerics" not in closed(core)
    core.took_back(["kv_cache"], 0.0)
    assert core.state.closed["numerics"] == NOT_SCORED
    assert core.next(0.0) == ScoreCanary(TRAINED)


def test_scores_of_other_sequences_are_ignored() -> None:
    core = serving()
    swapped(core, record(1, open=True))
    scored(core, RIGHT)
    assert closed(core) == set()
    same_bytes = replace(version(1), sequence=2)
    other = record(2, replace(TRAINED, sequences=((4, 5, 6),)), open=True)
    core.learnt(replace(other, version=same_bytes, made=same_bytes), 14, 0.0)
    core.ticked(0.0)
    assert core.state.closed["numerics"] == NOT_SCORED


def test_a_worker_that_fetches_failed_weights_again_still_reports_what_they_gave() -> None:
    core = serving()
    decided = record(1)
    core.state.scores = Scores(SEQUENCES, [list(vector) for vector in RIGHT])
    assert core.numerics.scores_for(decided) is None, "other weights gave that"
    swapped(core, decided)
    scored(core, WRONG)
    assert core.ticked(GATE_S, busy=False)
    assert core.state.scores is None
    found = core.numerics.scores_for(decided)
    assert found is not None
    assert found.vectors == [list(vector) for vector in WRONG]
    assert core.numerics.scores_for(record(1, replace(TRAINED, sequences=((4, 5, 6),)))) is None
    core.is_staged(StagedVersion("heal-1", None, decided.version.digest, None))
    swap = core.commit_step(decided)
    assert isinstance(swap, Swap)
    core.swapping(swap)
    core.swapped(swap, GATE_S)
    scored(core, RIGHT, GATE_S)
    assert core.numerics.failed is None, "they have healed"
    scored(core, WRONG, GATE_S)
    core.learnt(record(2), 20, GATE_S)
    assert core.numerics.failed is None, "another decision has other weights"
