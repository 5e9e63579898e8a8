"""The core of a worker: its start, decisions, and what leaders and coordinators say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_plane.errors import Conflict, NotAdmitted, NotPrepared
from rl_plane.protocol.record import (
    LEASE_MARGIN_S,
    SERVING_LEASE_S,
    VersionSource,
)
from worker.reconcile.instructions import (
    CoordinatedUpdate,
    Fetch,
    Read,
    Relabel,
    StagedVersion,
    Swap,
    Unload,
    Wait,
)
from worker.reconcile.worker_core import COMMIT_GRACE_S, GATE_S, HEAL_RETRY_S, WorkerCore, why

RUN, MODEL = "run-1", "d0"
from tests.support.worker_core_runs import (  # noqa: E402
    LINE,
    R0,
    R1,
    R2,
    act,
    after,
    first,
    fresh,
    gone,
    hold,
    reasons,
    serving,
    stage,
)

# ---- the start ----


def test_the_first_worker_fixes_sequence_0_by_its_model() -> None:
    core = fresh("mine")
    assert core.next(0.0) == Read()
    record = core.leader_said(None, 0, 1.0, LINE, 1.0)
    assert record is not None
    assert (record.sequence, record.version.digest, record.source, record.open) == (
        0,
        "mine",
        VersionSource(None),
        True,
    )
    assert reasons(core) == {"starting": ""}
    assert core.state.lease.until == 0, "no lease before the leader has it"
    assert core.leader_said(record, 1, 2.0, LINE, 2.0) is None
    assert core.state.closed, "announced, and not yet labelled"
    assert core.next(2.0) == Relabel(record)
    core.relabelled(record)
    assert reasons(core) == {}
    assert (core.state.sequence, core.state.version) == (0, record.version)
    assert core.next(2.0) == Wait()


def test_a_joiner_with_the_same_model_is_labelled_and_one_with_another_waits() -> None:
    core = fresh()
    assert core.leader_said(R0, 7, 0.0, LINE, 0.0) is None
    hold(core, 0.0)
    assert core.state.version == R0.version
    other = fresh("another")
    assert other.leader_said(R0, 7, 0.0, LINE, 0.0) is None
    assert other.next(0.0) == Wait(HEAL_RETRY_S)
    assert "another" in reasons(other)["behind"]
    assert MODEL in reasons(other)["behind"]
    assert "new-run" in reasons(other)["behind"]


def test_a_joiner_of_a_later_version_fetches_it_from_its_source() -> None:
    core = fresh()
    core.leader_said(R1.opened(), 9, 0.0, LINE, 0.0)
    assert reasons(core).keys() == {"starting", "behind"}
    fetch = core.next(0.0)
    assert fetch == Fetch("heal-1", None, R1.version, R1.source)
    core.is_staged(StagedVersion("heal-1", None, "d1", None))
    swap = core.next(0.0)
    assert swap == Swap("heal-1", None, R1.version, "keep"), "no other process will ask it to"
    assert isinstance(swap, Swap)
    core.swapping(swap)
    assert core.state.digest is None
    core.swapped(swap, 0.0)
    assert (reasons(core), core.state.sequence) == ({}, 1)


# ---- a decision ----


def test_a_learnt_decision_gates_until_it_is_opened() -> None:
    core = serving()
    assert core.learnt(R1, 2, 10.0)
    assert reasons(core).keys() == {"updating", "behind"}
    assert not core.learnt(R1, 2, 10.1), "announced twice"
    assert not core.learnt(R0, 1, 10.1), "read before"
    assert not core.learnt(R0.opened(), 99, 10.1), "only the leader reports a store that went back"
    stage(core, R1)
    swap = core.commit_step(R1)
    assert isinstance(swap, Swap)
    core.swapping(swap)
    core.swapped(swap, 11.0)
    assert core.commit_step(R1) is None
    assert reasons(core).keys() == {"updating"}, "not everybody may know it"
    assert core.learnt(R1.opened(), 3, 11.5)
    assert reasons(core) == {}
    assert not core.learnt(R1, 2, 11.6), "a late copy closes nothing"
    assert reasons(core) == {}


def test_a_gate_that_no_coordinator_lifts_ends_when_no_lease_can_be_left() -> None:
    assert GATE_S >= SERVING_LEASE_S + LEASE_MARGIN_S
    core = serving()
    core.learnt(R1, 2, 10.0)
    core.is_staged(StagedVersion("heal-1", None, "d1", None))
    hold(core, 10.0)
    core.ticked(10.0 + GATE_S - 0.01)
    assert reasons(core).keys() == {"updating"}
    core.ticked(10.0 + GATE_S)
    assert reasons(core) == {}
    core.learnt(R2, 3, 20.0)
    assert "updating" in reasons(core), "the next one has its own time"


def test_a_repeated_record_does_not_lengthen_the_gate() -> None:
    core = serving()
    core.learnt(R1, 2, 10.0)
    core.leader_said(R1, 5, 14.0, LINE, 14.0)
    core.is_staged(StagedVersion("heal-1", None, "d1", None))
    hold(core, 14.0)
    core.ticked(10.0 + GATE_S)
    assert reasons(core) == {}


def test_the_same_bytes_under_another_label_close_until_they_are_labelled() -> None:
    core = serving(R0, R1)
    same = after(R1, digest="d1")
    core.learnt(same.opened(), 3, 0.0)
    assert reasons(core).keys() == {"behind"}
    assert core.next(0.0) == Relabel(same.opened())
    assert core.commit_step(same.opened()) == Relabel(same.opened())
    core.relabelled(same.opened())
    assert (reasons(core), core.state.sequence, core.state.version) == ({}, 2, same.version)
    assert core.commit_step(same.opened()) is None


def test_a_prepared_worker_waits_for_its_commit_and_then_swaps_by_itself() -> None:
    core = serving()
    stage(core, R1)
    assert core.next(9.0) == Wait(), "undecided"
    core.learnt(R1, 2, 10.0)
    assert core.next(10.0) == Wait(10.0 + COMMIT_GRACE_S)
    assert core.next(10.0 + COMMIT_GRACE_S) == Swap("u1", None, R1.version, "keep")


def test_only_a_worker_that_prepared_the_update_keeps_kv() -> None:
    """A worker that heals may have missed an update whose policy forbids older KV."""
    keeping = replace(R1, kv="keep")
    core = serving()
    stage(core, keeping)
    core.learnt(keeping, 2, 10.0)
    assert core.commit_step(keeping) == Swap("u1", None, R1.version, "keep", keep_kv=True)
    assert core.next(10.0 + COMMIT_GRACE_S) == Swap("u1", None, R1.version, "keep", keep_kv=True)
    core.is_staged(StagedVersion("heal-1", None, "d1", None))
    assert core.commit_step(keeping) == Swap("heal-1", None, R1.version, "keep", keep_kv=False)


def test_a_commit_swaps_only_the_weights_that_were_staged_for_it() -> None:
    core = serving()
    with pytest.raises(Conflict, match="another update was committed since"):
        core.commit_step(R1)  # the commit carries its own record, so another record counts
    core.learnt(R1, 2, 0.0)
    with pytest.raises(NotPrepared) as caught:
        core.commit_step(R1)
    assert "staged" not in caught.value.facts
    core.is_staged(StagedVersion("other", None, "d9", 5))
    with pytest.raises(NotPrepared) as caught:
        core.commit_step(R1)
    assert caught.value.facts["staged"] == "other"
    core.is_staged(StagedVersion("other", None, "d1", 5))
    with pytest.raises(NotPrepared):
        core.commit_step(R1)  # the right bytes, and another coordinator's
    core.is_staged(StagedVersion("heal-0", None, "d0", None))
    with pytest.raises(NotPrepared):
        core.commit_step(R1)  # fetched to heal, and other bytes
    core.is_staged(StagedVersion("heal-1", None, "d1", None))
    assert core.commit_step(R1) == Swap("heal-1", None, R1.version, "keep")
    hold(core, 0.0)
    assert core.commit_step(R1) is None
    core.learnt(R2, 3, 0.0)
    with pytest.raises(Conflict, match="step_2"):
        core.commit_step(R1)


def test_a_commit_changes_everything_that_differs() -> None:
    with_a = after(R0, load="a")
    core = serving(R0, with_a)
    dropping = replace(after(with_a), adapters={})
    core.learnt(dropping, 3, 0.0)
    stage(core, dropping)
    steps = []
    while (step := core.commit_step(dropping)) is not None:
        steps.append(step)
        assert act(core, step, 0.0)
    assert steps == [Unload("a", "keep"), Swap("u2", None, dropping.version, "keep")]


# ---- what the leader says ----


def lease_until(core: WorkerCore) -> float:
    return core.state.lease.until


def test_the_lease_is_confirmed_by_a_leader_that_knows_as_much() -> None:
    core = serving()
    assert core.leader_said(R0, 1, 3.0, LINE, 4.0) is None
    assert lease_until(core) == 3.0 + SERVING_LEASE_S, "from when it was asked"
    core.state.check_lease(3.0 + SERVING_LEASE_S - 0.01, LINE)
    with pytest.raises(NotAdmitted):
        core.state.check_lease(3.0 + SERVING_LEASE_S, LINE)
    with pytest.raises(NotAdmitted):
        core.state.check_lease(4.0, ("server", 2))
    core.learnt(R1, 2, 5.0)
    assert core.leader_said(R0, 1, 6.0, LINE, 6.0) == R1
    assert lease_until(core) == 3.0 + SERVING_LEASE_S, "the leader is behind: no lease"
    assert core.leader_said(R1, 2, 7.0, LINE, 7.0) is None
    assert lease_until(core) == 7.0 + SERVING_LEASE_S
    assert core.leader_said(R2, 3, 8.0, LINE, 8.0) is None
    assert core.record == R2
    assert "behind" in reasons(core), "the lease is of what the leader says"


def test_a_lost_store_gets_the_record_of_this_worker_back() -> None:
    core = serving(R0, R1, R2)
    assert core.leader_said(None, 0, 0.0, LINE, 0.0) == R2.opened()
    assert core.leader_said(R1.opened(), 40, 0.0, LINE, 0.0) == R2.opened()
    assert core.leader_said(R2, 41, 0.0, LINE, 0.0) == R2.opened(), "it was open already"
    assert reasons(core) == {}
    assert core.leader_said(R2.opened(), 2, 0.0, LINE, 0.0) is None, "a store made anew counts from 1"
    assert core.learnt(R2, 3, 0.0) is False


def test_the_leaders_decision_wins_among_two_of_one_rank() -> None:
    core = serving(R0, R1)
    other = replace(after(R0, digest="dx"), update_id="ux").opened()
    assert not core.learnt(other, 2, 0.0), "not written after the known record"
    assert core.leader_said(other, 1, 0.0, LINE, 0.0) is None
    assert core.record == other
    assert reasons(core).keys() == {"behind"}
    assert core.leader_said(R1.opened(), 9, 0.0, LINE, 0.0) is None
    assert core.next(0.0) == Wait()
    assert reasons(core) == {}, "that is what it holds"


def test_the_record_that_was_sealed_last_wins() -> None:
    """The coordinator of that record has asked every worker for the newest record, so it knew every decision."""
    core = serving(R0, R1)
    sealed = replace(R0, seal=9)
    assert core.learnt(sealed, 3, 0.0)
    assert core.record == R0
    assert reasons(core).keys() == {"behind"}
    assert not core.learnt(replace(R1.opened(), seal=8), 4, 0.0)
    assert core.leader_said(replace(R1.opened(), seal=8), 5, 0.0, LINE, 0.0) == sealed
    assert core.learnt(replace(R1, seal=9), 6, 0.0), "decided over that seal"
    assert core.learnt(replace(R1.opened(), seal=9), 7, 0.0)
    assert not core.learnt(replace(R1, seal=9), 8, 0.0), "it was open already"


def test_the_seal_of_the_next_coordinator_changes_only_who_may_write() -> None:
    core = serving()
    core.learnt(R1, 2, 10.0)
    assert core.learnt(replace(R1, seal=7), 3, 14.0)
    core.is_staged(StagedVersion("heal-1", None, "d1", None))
    hold(core, 14.0)
    core.ticked(10.0 + GATE_S)
    assert reasons(core) == {}, "the gate is as old as the decision"
    assert core.record is not None
    assert core.record.seal == 7


def test_the_further_of_two_accidental_runs_wins_then_the_older_and_a_new_run_over_both() -> None:
    core = serving(R0)
    younger, elder = first(run="run-2"), first(run="run-0")
    assert core.leader_said(younger, 9, 0.0, LINE, 0.0) == R0
    further = after(younger).opened()
    asked_for = first(run="run-9", run_number=1)
    for record in (elder, further, asked_for):
        assert core.leader_said(record, 9, 0.0, LINE, 0.0) is None
        assert core.record == record
        hold(core, 0.0)
        assert core.state.version == record.version
    assert core.leader_said(further, 10, 0.0, LINE, 0.0) == asked_for


# ---- coordinators ----


def test_staged_weights_are_dropped_with_their_coordinator() -> None:
    core = serving()
    assert not core.depends_on_coordinator()
    core.is_staged(StagedVersion("u1", None, "d1", 5))
    assert core.depends_on_coordinator()
    assert gone(core, 5, True, None) is None, "it lives"
    assert gone(core, 5, False, "u1") is None, "it waits for another call"
    assert gone(core, 9, True, "u1") is None, "which may be under way"
    assert gone(core, 5, False, None) == "u1"
    assert gone(core, 9, True, None) == "u1"
    assert gone(core, 9, True, "u2") == "u1"
    core.learnt(R1, 2, 0.0)
    assert gone(core, 9, False, None) is None, "decided"
    core.is_staged(StagedVersion("heal-1", None, "d1", None))
    assert not core.depends_on_coordinator()
    assert gone(core, 9, False, None) is None, "its own"


def test_the_worker_bars_the_coordinator_that_asked_last() -> None:
    core = serving()
    core.is_staged(StagedVersion("u1", None, "d1", 5))
    assert core.given_up(None) == CoordinatedUpdate("u1", 5)
    core.is_staged(StagedVersion("u1", None, "d1", 8))
    assert core.given_up(None) == CoordinatedUpdate("u1", 8)
    assert core.coordinator_holds(8, True, 0.0)
    assert core.coordinator_holds(7, True, 0.0), "news of the lock may be late"
    assert not core.coordinator_holds(8, False, 0.0)
    assert not core.coordinator_holds(9, True, 0.0)


def test_a_receive_is_dropped_with_its_coordinator() -> None:
    core = serving()
    core.receiving = CoordinatedUpdate("u1", 5)
    assert core.depends_on_coordinator()
    assert gone(core, 5, True, None) is None, "it lives"
    assert gone(core, 5, False, "u1") is None, "it waits for another call"
    assert gone(core, 5, False, None) == "u1"
    assert gone(core, 9, True, None) == "u1"


def test_a_decided_update_is_not_aborted() -> None:
    core = serving()
    core.check_undecided(None)
    core.is_staged(StagedVersion("u1", None, "d1", 5))
    core.check_undecided(None)
    core.check_undecided("u1")
    core.learnt(R1, 2, 0.0)
    for update_id in (None, "u1"):
        with pytest.raises(Conflict, match="u1"):
            core.check_undecided(update_id)
    core.check_undecided("another")


def test_why_names_the_class_of_foreign_errors_only() -> None:
    assert why(Conflict("so")) == "so"
    assert why(ValueError("so")) == "ValueError: so"
