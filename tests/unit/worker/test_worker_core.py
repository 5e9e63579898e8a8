"""Tests a worker's own actions by events and expected instructions: no loop, no clock, no engine."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from rl_plane.errors import Conflict, NotAdmitted, NotPrepared
from rl_plane.protocol.record import (
    LEASE_MARGIN_S,
    SERVING_LEASE_S,
    CommittedAdapter,
    DecisionRecord,
    VersionSource,
    first_record,
)
from rl_plane.protocol.versions import WeightVersion
from worker.reconcile.instructions import (
    CoordinatedUpdate,
    Drop,
    Fetch,
    Instruction,
    Read,
    Relabel,
    Restore,
    StagedVersion,
    Swap,
    Unload,
    Wait,
)
from worker.reconcile.worker_core import COMMIT_GRACE_S, GATE_S, HEAL_RETRY_S, MAX_HEAL_RETRY_S, WorkerCore, why
from worker.reconcile.worker_state import WorkerState

RUN, MODEL = "run-1", "d0"
LINE = ("server", 1)
"""The connection on which the leader answers."""


def version(sequence: int, digest: str = "", run: str = RUN) -> WeightVersion:
    return WeightVersion(run, sequence, f"step_{sequence}", digest or f"d{sequence}")


def source(sequence: int, refetchable: bool = True) -> VersionSource:
    return VersionSource({"backend": "filesystem", "path": f"/{sequence}"}, refetchable=refetchable)


def first(digest: str = MODEL, run: str = RUN, run_number: int = 0) -> DecisionRecord:
    made = version(0, digest, run)
    return DecisionRecord(made, VersionSource(None), "", made, run_number=run_number)


def after(
    base: DecisionRecord,
    *,
    digest: str = "",
    open: bool = False,
    rolling: bool = False,
    refetchable: bool = True,
    load: str | None = None,
    unload: str | None = None,
) -> DecisionRecord:
    """Makes the next decision: on the base, or on one adapter."""
    made = version(base.sequence + 1, digest, base.version.run)
    adapters = dict(base.adapters)
    whence = source(made.sequence, refetchable)
    if load is not None:
        adapters[load] = CommittedAdapter(made, whence)
    if unload is not None:
        del adapters[unload]
    is_base = load is None and unload is None
    return DecisionRecord(
        made if is_base else base.version,
        whence if is_base else base.source,
        f"u{made.sequence}",
        made,
        adapters,
        base.run_number,
        base.held if rolling else None,
        open=open or rolling,
        decided_at=0.0,
    )


R0 = first()
R1 = after(R0)
R2 = after(R1)


def fresh(model: str = MODEL) -> WorkerCore:
    return WorkerCore(WorkerState("w", "i", digest=model), model)


def reasons(core: WorkerCore) -> dict[str, str]:
    return {str(reason): detail for reason, detail in core.state.closed.items()}


def valid(core: WorkerCore) -> None:
    """Checks the invariants, which hold after every event."""
    state, record = core.state, core.record
    if not state.closed:
        assert record is not None
        assert state.sequence is not None
        assert state.version is not None
        held = (state.version, dict(state.adapters))
        old = record.rolling_from
        committed = (record.version, dict(record.held.adapters))
        assert held == committed or (old is not None and held == (old.version, dict(old.adapters)))
        if held == committed:
            assert state.sequence == record.sequence
    if state.digest is None:
        assert "behind" in state.closed
    assert bool(state.released) == ("memory" in state.closed)
    assert (state.digest is None) == (state.version is None) or (state.digest, state.sequence) == (
        core.model_digest,
        None,
    )


def serving(*records: DecisionRecord, now: float = 0.0) -> WorkerCore:
    """Makes a worker that has followed these records and holds the last."""
    core = fresh()
    for written, record in enumerate(records or (R0,), 1):
        assert core.learnt(record.opened(), written, now)
        hold(core, now)
    assert not core.state.closed
    return core


def hold(core: WorkerCore, now: float) -> None:
    """Carries out all instructions, successfully."""
    for _ in range(20):
        did = core.next(now)
        valid(core)
        if not act(core, did, now):
            return
        valid(core)
    raise AssertionError("it finds no end")


def act(core: WorkerCore, did: Instruction, now: float) -> bool:
    match did:
        case Fetch(update_id, name, made):
            core.is_staged(StagedVersion(update_id, name, made.digest, None))
        case Drop():
            core.is_staged(None)
        case Relabel(record):
            core.relabelled(record)
        case Swap() | Unload():
            core.swapping(did)
            valid(core)
            core.swapped(did, now)
        case _:
            return False
    return True


def gone(core: WorkerCore, fence: int, held: bool, waiting_for: str | None) -> str | None:
    """Returns the update that the worker drops, by the leader's lock and session."""
    if core.coordinator_holds(fence, held, 0.0):
        return None
    given_up = core.given_up(waiting_for)
    return given_up.update_id if given_up is not None else None


def stage(core: WorkerCore, record: DecisionRecord, fence: int = 5) -> None:
    """Notes that a coordinator has prepared the update here."""
    name = next((name for name, one in record.adapters.items() if one.version == record.made), None)
    core.is_staged(StagedVersion(record.update_id, name, record.made.digest, fence))


# ---- the start ----


def test_the_first_worker_fixes_sequence_0_by_its_model() -> None:
    core = fresh("mine")
    assert core.next(0.0) == Read()
    restore = core.leader_said(None, 0, 1.0, LINE, 1.0)
    assert restore is not None
    record = restore.record
    assert (record.sequence, record.version.digest, record.source, record.open) == (
        0,
        "mine",
        VersionSource(None),
        True,
    )
    assert reasons(core) == {"starting": ""}
    assert core.state.lease.until == 0, "no lease before the leader has it"
    assert core.leader_said(record, 1, 2.0, LINE, 2.0) is None
    assert core.state.closed, "told, and not yet labelled"
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
    assert swap == Swap("heal-1", None, R1.version, "keep"), "nobody else will tell it to"
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
    assert not core.learnt(R1, 2, 10.1), "told twice"
    assert not core.learnt(R0, 1, 10.1), "read before"
    assert not core.learnt(R0.opened(), 99, 10.1), "a store that went back is the leader's to tell of"
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


def test_the_answers_to_a_commit() -> None:
    core = serving()
    with pytest.raises(Conflict, match="another update was committed since"):
        core.commit_step(R1)  # the record is told with the commit, so it is another that counts
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


# ---- healing ----


def failing(core: WorkerCore, now: float) -> float:
    """Fails one fetch, and returns the time of the next try."""
    did = core.next(now)
    assert isinstance(did, Fetch), did
    core.fetch_failed("no such file", now)
    wait = core.next(now)
    assert isinstance(wait, Wait)
    assert wait.until is not None
    return wait.until


def test_failed_fetches_are_repeated_with_growing_pauses() -> None:
    core = serving()
    core.learnt(R1.opened(), 2, 0.0)
    now, pauses = 0.0, []
    for _ in range(8):
        again = failing(core, now)
        assert reasons(core)["behind"] == "no such file"
        assert core.next(again - 0.01) == Wait(again)
        pauses.append(again - now)
        now = again
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert (HEAL_RETRY_S, MAX_HEAL_RETRY_S) == (1, 30)


def test_an_operator_or_a_new_decision_brings_the_next_try_at_once() -> None:
    core = serving()
    core.learnt(R1.opened(), 2, 0.0)
    for _ in range(4):
        now = failing(core, 100.0)
        core.enabled()
        assert now > 100.0
        assert failing(core, 100.0) == 101.0, "the pauses begin anew"
        core.enabled()
    failing(core, 100.0)
    assert isinstance(core.next(100.0), Wait)
    assert core.learnt(R2.opened(), 3, 100.0)
    assert core.next(100.0) == Fetch("heal-2", None, R2.version, R2.source)
    failing(core, 100.0)
    assert isinstance(core.next(100.0), Wait)
    core.learnt(replace(R2.opened(), decided_at=9.0), 4, 100.0)
    assert isinstance(core.next(100.0), Wait), "the same decision, written again"


def test_a_version_that_other_workers_keep_is_fetched_from_them() -> None:
    core = serving()
    gone = after(R0, refetchable=False)
    kept = replace(gone, source=replace(gone.source, keep_staged=True))
    core.learnt(kept.opened(), 2, 0.0)
    assert core.next(0.0) == Fetch("heal-1", None, kept.version, kept.source)


def test_a_version_that_can_not_be_fetched_again_waits_for_the_next_update() -> None:
    core = serving()
    gone = after(R0, refetchable=False)
    core.learnt(gone.opened(), 2, 0.0)
    assert core.next(0.0) == Wait(HEAL_RETRY_S)
    assert reasons(core)["behind"].startswith("source_gone")
    assert core.next(0.5) == Wait(HEAL_RETRY_S)
    better = after(gone)
    core.learnt(better.opened(), 3, 0.5)
    hold(core, 0.5)
    assert reasons(core) == {}
    core = serving()
    core.learnt(gone, 2, 0.0)
    stage(core, gone)
    assert isinstance(core.commit_step(gone), Swap), "staged, it needs no source"


def test_a_worker_waits_for_another_update_that_is_being_prepared() -> None:
    core = serving()
    core.learnt(R1.opened(), 2, 0.0)
    core.is_staged(StagedVersion("u9", None, "d9", 5))
    for now in (0.0, 100.0, 200.0, 300.0, 400.0):
        assert core.next(now) == Wait(now + HEAL_RETRY_S)
        assert "u9" in reasons(core)["behind"]
    assert gone(core, 6, True, None) == "u9", "its coordinator is not the newest"
    core.is_staged(None)
    assert isinstance(core.next(400.0), Fetch), "waiting was no failure"


def test_a_worker_waits_for_released_memory() -> None:
    core = serving()
    core.state.released = {"weights"}
    assert core.next(0.0) == Wait(), "the committed weights are here"
    core.learnt(R1.opened(), 2, 0.0)
    assert core.next(0.0) == Wait()
    assert "resume_memory" in reasons(core)["behind"]
    with pytest.raises(Conflict, match="released"):
        core.commit_step(R1)
    core.state.released = {"kv_cache"}
    assert core.next(0.0) == Wait(), "it is closed anyway"
    core.state.released = set()
    assert isinstance(core.next(0.0), Fetch)


def test_weights_that_are_back_take_an_update_while_the_kv_cache_is_released() -> None:
    """Trainers on the same GPU do this. The worker serves no request before the KV cache is back."""
    core = serving()
    core.state.release(["weights", "kv_cache"])
    core.state.take_back(["weights"])
    core.state.lose_weights("the weights were released")
    assert core.next(0.0) == Wait(), "it is closed, and an update is about to come: nothing is fetched for that"
    core.learnt(R1, 2, 0.0)
    assert core.next(0.0) == Wait()
    stage(core, R1)
    swap = core.commit_step(R1)
    assert isinstance(swap, Swap)
    core.swapping(swap)
    core.swapped(swap, 0.0)
    assert core.learnt(R1.opened(), 3, 0.0)
    assert reasons(core) == {"memory": "released: kv_cache"}
    assert (core.state.version, core.state.sequence, core.state.may_run) == (R1.version, 1, False)
    core.state.take_back(["kv_cache"])
    assert (reasons(core), core.state.may_run) == ({}, True)
    core.state.release(["weights", "kv_cache"])
    core.state.take_back(["weights"])
    core.state.lose_weights("the weights were released")
    core.state.take_back(["kv_cache"])
    assert isinstance(core.next(0.0), Fetch), "no update has come"


def test_a_decision_during_the_release_of_the_kv_cache_is_swapped_in_without_its_coordinator() -> None:
    core = serving()
    core.state.release(["kv_cache"])
    stage(core, R1)
    core.learnt(R1, 2, 0.0)
    assert core.next(0.0) == Wait(COMMIT_GRACE_S)
    assert gone(core, 6, True, None) is None, "it is decided"
    assert isinstance(core.next(COMMIT_GRACE_S), Swap)
    hold(core, COMMIT_GRACE_S)
    core.learnt(R1.opened(), 3, COMMIT_GRACE_S)
    core.ticked(COMMIT_GRACE_S)
    assert (reasons(core), core.state.version) == ({"memory": "released: kv_cache"}, R1.version)


@pytest.mark.parametrize("fence", [5, None])
def test_staged_weights_that_no_coordinator_will_swap_in_are_dropped(fence: int | None) -> None:
    core = serving(R0, R1)
    core.is_staged(StagedVersion("u1" if fence else "heal-1", None, "d1", fence))
    assert core.next(0.0) == Drop("u1" if fence else "heal-1")
    core.is_staged(StagedVersion("u9", None, "d9", 5))
    assert core.next(0.0) == Wait(), "undecided: its coordinator's to say"


@pytest.mark.parametrize("left", [StagedVersion("heal-2", None, "d9", None), StagedVersion("u2", "b", "d9", 5)])
def test_old_staged_weights_do_not_keep_a_worker_from_healing(left: StagedVersion) -> None:
    """The weights were fetched for a version that is no longer committed, or came by a late copy of a prepare."""
    core = serving(R0, R1)
    core.learnt(R2.opened(), 3, 0.0)
    core.is_staged(left)
    assert core.next(0.0) == Drop(left.update_id)
    core.is_staged(None)
    assert isinstance(core.next(0.0), Fetch)


# ---- adapters ----


def test_adapters_are_unloaded_first_then_the_base_changes_then_the_other_adapters() -> None:
    core = serving(R0, (a := after(R0, load="a")), (b := after(a, load="b")), after(b, load="c"))
    made = {name: version(10 + number) for number, name in enumerate("bcd")}
    wanted = replace(
        R1.opened(),
        made=version(20),
        version=version(20),
        adapters={name: CommittedAdapter(made[name], source(made[name].sequence)) for name in ("d", "c", "b")},
    )
    core.learnt(wanted, 9, 0.0)
    did = []
    while act(core, step := core.next(0.0), 0.0):
        did.append(step)
    assert did == [
        Unload("a", "keep"),
        Fetch("heal-20", None, version(20), wanted.source),
        Swap("heal-20", None, version(20), "keep"),
        Fetch("heal-10", "b", made["b"], source(10)),
        Swap("heal-10", "b", made["b"], "keep"),
        Fetch("heal-11", "c", made["c"], source(11)),
        Swap("heal-11", "c", made["c"], "keep"),
        Fetch("heal-12", "d", made["d"], source(12)),
        Swap("heal-12", "d", made["d"], "keep"),
    ]
    assert (reasons(core), core.state.sequence) == ({}, 20)


def test_a_staged_adapter_is_swapped_first_where_the_base_is_missing_too() -> None:
    """Staging has room for one version. Otherwise each would wait for the other, for ever."""
    core = fresh()
    loading = after(R1, load="a", refetchable=False)
    core.learnt(R1.opened(), 1, 0.0)
    stage(core, loading)
    core.learnt(loading.opened(), 2, 0.0)
    assert core.next(COMMIT_GRACE_S) == Swap("u2", "a", loading.made, "keep")
    hold(core, COMMIT_GRACE_S)
    assert (reasons(core), core.state.sequence) == ({}, 2)


def test_an_unload_that_fails_is_repeated_later() -> None:
    core = serving(R0, (loaded := after(R0, load="a")))
    unloading = after(loaded, unload="a")
    core.learnt(unloading.opened(), 3, 0.0)
    unload = core.next(0.0)
    assert unload == Unload("a", "keep")
    assert isinstance(unload, Unload)
    core.swapping(unload)
    core.swap_failed(unload, "busy", 0.0)
    assert core.next(0.0) == Wait(HEAL_RETRY_S)
    assert reasons(core) == {"behind": "busy"}
    hold(core, HEAL_RETRY_S)
    assert (reasons(core), core.state.adapters, core.state.sequence) == ({}, {}, 2)


def with_a_swap_that_failed(why: str, **how: bool) -> tuple[WorkerCore, DecisionRecord, DecisionRecord]:
    """Returns the record that loaded the adapter `a`, and the record of its swap."""
    core = serving(R0, (loaded := after(R0, load="a")))
    swapping = after(loaded, load="a")
    stage(core, swapping)
    core.learnt(swapping.opened(), 3, 0.0)
    swap = core.commit_step(swapping)
    assert isinstance(swap, Swap)
    core.swapping(swap)
    core.swap_failed(swap, why, 0.0, **how)
    return core, loaded, swapping


def test_a_change_of_an_adapter_that_was_cut_short_may_have_ended_either_way() -> None:
    core, loaded, swapping = with_a_swap_that_failed("the deadline has passed", cut=True)
    unloading = after(swapping, unload="a")  # the engine may have either
    core.learnt(unloading.opened(), 4, 0.0)
    unload = core.next(0.0)
    assert unload == Unload("a", "keep")
    assert isinstance(unload, Unload)
    core.swapping(unload)
    core.swap_failed(unload, "the deadline has passed", 0.0, cut=True)
    back = replace(after(unloading, load="a"), adapters=loaded.adapters)  # the engine may have none
    core.learnt(back.opened(), 5, 0.0)
    fetch = core.next(0.0)
    assert fetch == Fetch("heal-1", "a", loaded.made, loaded.adapters["a"].source)
    hold(core, 0.0)
    assert (reasons(core), core.state.adapters) == ({}, {"a": loaded.made})


def test_an_adapter_that_is_lost_in_a_change_is_forgotten() -> None:
    """The next committed version may equal the lost one."""
    core, loaded, swapping = with_a_swap_that_failed("broken", lost=True)
    back = replace(after(swapping, load="a"), adapters=loaded.adapters)
    core.learnt(back.opened(), 4, 0.0)
    assert core.next(0.0) == Fetch("heal-1", "a", loaded.made, loaded.adapters["a"].source)
    hold(core, 0.0)
    unloading = after(back, unload="a")
    core.learnt(unloading.opened(), 5, 0.0)
    unload = core.next(0.0)
    assert isinstance(unload, Unload)
    core.swapping(unload)
    core.swap_failed(unload, "broken", 0.0, lost=True)
    assert core.next(0.0) == Relabel(unloading.opened())
    hold(core, 0.0)
    assert (reasons(core), core.state.adapters) == ({}, {})


def test_staged_weights_outlast_an_unload() -> None:
    core = serving(R0, (loaded := after(R0, load="a")))
    dropping = replace(after(loaded, refetchable=False), adapters={})
    stage(core, dropping)
    core.learnt(dropping.opened(), 3, 0.0)
    hold(core, COMMIT_GRACE_S)
    assert (reasons(core), core.state.adapters, core.state.sequence) == ({}, {}, 2)


def test_a_worker_takes_no_requests_while_an_adapter_is_swapped() -> None:
    core = serving()
    loading = after(R0, load="a", rolling=True)
    stage(core, loading)
    core.learnt(loading, 2, 0.0)
    assert reasons(core) == {}, "it serves the old until its turn"
    swap = core.commit_step(loading)
    assert isinstance(swap, Swap)
    core.swapping(swap)
    for now in (0.0, 1.0):
        core.ticked(now)
        with pytest.raises(NotAdmitted):
            core.state.check_admitted(None, None)
    core.swap_failed(swap, "too many", 1.0)
    core.ticked(1.5)
    assert reasons(core) == {"behind": "too many"}
    assert core.next(1.5) == Wait(2.0)
    assert core.next(2.0) == Fetch("heal-1", "a", loading.made, loading.adapters["a"].source)
    hold(core, 2.0)
    assert (reasons(core), core.state.sequence) == ({}, 1)


def test_a_swap_that_fails_leaves_no_base_weights() -> None:
    core = serving()
    core.learnt(R1.opened(), 2, 0.0)
    core.is_staged(StagedVersion("heal-1", None, "d1", None))
    swap = core.next(0.0)
    assert isinstance(swap, Swap)
    core.swapping(swap)
    core.swap_failed(swap, "broken", 0.0)
    assert (core.state.digest, core.state.version, reasons(core)) == (None, None, {"behind": "broken"})
    assert core.next(0.0) == Wait(HEAL_RETRY_S)
    hold(core, HEAL_RETRY_S)
    assert reasons(core) == {}


def test_a_swap_that_could_not_begin_is_tried_again_with_the_staged_weights() -> None:
    core = serving()
    stage(core, R1)
    core.learnt(R1, 2, 0.0)
    core.fetch_failed("the engine is not paused", 0.0)
    assert (core.state.digest, reasons(core)["behind"]) == ("d0", "the engine is not paused")
    swap = Swap("u1", None, R1.version, "keep")
    assert core.next(0.0) == Wait(COMMIT_GRACE_S), "its coordinator may say so again"
    assert core.next(COMMIT_GRACE_S) == swap
    core.fetch_failed("the engine is not paused", COMMIT_GRACE_S)
    assert core.next(COMMIT_GRACE_S) == Wait(COMMIT_GRACE_S + 2 * HEAL_RETRY_S), "not at once, again and again"
    assert core.next(COMMIT_GRACE_S + 2 * HEAL_RETRY_S) == swap


# ---- rolling ----


def test_in_a_rolling_update_a_worker_serves_the_old_version_until_its_turn() -> None:
    core = serving()
    rolling = after(R0, rolling=True)
    stage(core, rolling)
    core.learnt(rolling, 2, 0.0)
    for now in (0.0, COMMIT_GRACE_S, GATE_S, 1000.0):
        core.ticked(now)
        assert core.next(now) == Wait()
    assert (reasons(core), core.state.sequence) == ({}, 0)
    core.state.check_admitted(0, None)
    step = core.commit_step(rolling)
    assert step == Swap("u1", None, rolling.version, "keep")
    act(core, step, 0.0)
    assert (reasons(core), core.state.sequence) == ({}, 1)


def test_the_end_of_a_rolling_update_ends_the_old_version() -> None:
    core = serving()
    rolling = after(R0, rolling=True)
    core.learnt(rolling, 2, 0.0)
    assert reasons(core) == {}
    core.learnt(rolling.opened(), 3, 0.0)
    assert reasons(core).keys() == {"behind"}
    assert isinstance(core.next(0.0), Fetch)


def test_without_its_coordinator_a_worker_finishes_a_rolling_update_by_itself() -> None:
    core = serving()
    rolling = after(R0, rolling=True)
    stage(core, rolling)
    core.learnt(rolling, 2, 0.0)
    assert core.depends_on_coordinator()
    assert gone(core, 5, True, None) is None
    assert core.next(0.0) == Wait()
    assert gone(core, 5, False, None) is None, "decided: it is not dropped"
    assert core.next(COMMIT_GRACE_S) == Swap("u1", None, rolling.version, "keep")
    core.ticked(1.0)
    assert reasons(core).keys() == {"behind"}
    assert gone(core, 6, True, None) is None  # the next holder goes on with it
    core.ticked(1.5)
    assert reasons(core) == {}, "it may serve the old again, and holds it"


def test_a_worker_that_joins_during_a_rolling_update_takes_the_new_version() -> None:
    core = fresh()
    core.learnt(after(R0, rolling=True), 2, 0.0)
    assert isinstance(core.next(0.0), Fetch)


# ---- over the served weights ----


def test_overwritten_weights_are_of_no_version_until_the_commit() -> None:
    core = serving()
    core.overwriting()
    assert core.state.digest is None
    assert reasons(core).keys() == {"behind"}
    core.is_staged(StagedVersion("u1", None, "d1", 5, in_place=True))
    core.learnt(R1.opened(), 2, 0.0)
    swap = core.commit_step(R1)
    assert swap == Swap("u1", None, R1.version, "keep")
    act(core, swap, 0.0)
    assert (reasons(core), core.state.sequence) == ({}, 1)
    assert core.in_place, "what heals it has no room beside it either"
    core.is_staged(StagedVersion("u2", None, "d2", 5))
    assert not core.in_place


def test_an_aborted_overwriting_is_healed_in_place() -> None:
    core = serving()
    core.overwriting()
    core.overwrite_failed()
    assert reasons(core).keys() == {"behind"}
    assert core.next(0.0) == Fetch("heal-0", None, R0.version, R0.source)
    assert core.in_place
    core.is_staged(StagedVersion("u1", None, "d1", 5, in_place=True))
    assert gone(core, 5, False, None) == "u1"
    core.is_staged(None)
    hold(core, 100.0)
    assert (reasons(core), core.state.version) == ({}, R0.version)


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
    assert core.leader_said(R0, 1, 6.0, LINE, 6.0) == Restore(R1)
    assert lease_until(core) == 3.0 + SERVING_LEASE_S, "the leader is behind: no lease"
    assert core.leader_said(R1, 2, 7.0, LINE, 7.0) is None
    assert lease_until(core) == 7.0 + SERVING_LEASE_S
    assert core.leader_said(R2, 3, 8.0, LINE, 8.0) is None
    assert core.record == R2
    assert "behind" in reasons(core), "the lease is of what the leader says"


def test_a_lost_store_gets_the_record_of_this_worker_back() -> None:
    core = serving(R0, R1, R2)
    assert core.leader_said(None, 0, 0.0, LINE, 0.0) == Restore(R2.opened())
    assert core.leader_said(R1.opened(), 40, 0.0, LINE, 0.0) == Restore(R2.opened())
    assert core.leader_said(R2, 41, 0.0, LINE, 0.0) == Restore(R2.opened()), "it was open already"
    assert reasons(core) == {}
    assert core.leader_said(R2.opened(), 2, 0.0, LINE, 0.0) is None, "a store made anew counts from 1"
    assert core.learnt(R2, 3, 0.0) is False


def test_the_leaders_decision_wins_among_two_of_one_rank() -> None:
    core = serving(R0, R1)
    other = replace(after(R0, digest="dx"), update_id="ux").opened()
    assert not core.learnt(other, 2, 0.0), "not written after the one that is known"
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
    assert core.leader_said(replace(R1.opened(), seal=8), 5, 0.0, LINE, 0.0) == Restore(sealed)
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
    assert core.leader_said(younger, 9, 0.0, LINE, 0.0) == Restore(R0)
    further = after(younger).opened()
    asked_for = first(run="run-9", run_number=1)
    for record in (elder, further, asked_for):
        assert core.leader_said(record, 9, 0.0, LINE, 0.0) is None
        assert core.record == record
        hold(core, 0.0)
        assert core.state.version == record.version
    assert core.leader_said(further, 10, 0.0, LINE, 0.0) == Restore(asked_for)


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


def test_the_words_of_an_error() -> None:
    assert why(Conflict("so")) == "so"
    assert why(ValueError("so")) == "ValueError: so"


# ---- any order ----


class Walk:
    """Drives a worker with a store that may lose writes, coordinators that come and go, and an engine that fails."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core = fresh()
        self.now = 0.0
        self.written = 1
        self.known = [first_record(MODEL) if seed % 2 else R0]
        self.under_way: Swap | Unload | None = None

    def step(self) -> None:
        rng = self.rng
        self.now += rng.choice([0.0, 0.1, 1.0, 7.0])
        if self.under_way is not None and rng.random() < 0.7:
            swap, self.under_way = self.under_way, None
            if rng.random() < 0.7:
                self.core.swapped(swap, self.now)
            else:
                self.core.swap_failed(swap, "failed", self.now, lost=rng.random() < 0.3)
            return
        actions = [self.decide, self.hear, self.ask_leader, self.coordinate, self.stage, self.tick]
        rng.choice([*actions, self.obey, self.obey, self.commit, self.operate])()

    def decide(self) -> None:
        rng, base = self.rng, self.known[-1].opened()
        kind = rng.choice(["base", "base", "lora", "unload", "same", "run"])
        how = rng.choice(["open", "strict", "rolling"])
        more: dict[str, Any] = {
            "open": how == "open",
            "rolling": how == "rolling",
            "refetchable": rng.random() < 0.8,
        }
        if kind == "run":
            made = first(run=f"run-{rng.randrange(5)}", run_number=base.run_number + rng.choice([0, 1]))
        elif kind == "lora":
            made = after(base, load=rng.choice("ab"), **more)
        elif kind == "unload" and base.adapters:
            made = after(base, unload=rng.choice(sorted(base.adapters)), **more)
        else:
            made = after(base, digest=base.version.digest if kind == "same" else "", **more)
        self.known.append(made)

    def some(self) -> DecisionRecord:
        record = self.known[-1] if self.rng.random() < 0.7 else self.rng.choice(self.known)
        return record.opened() if self.rng.random() < 0.5 else record

    def hear(self) -> None:
        self.written += self.rng.choice([0, 1, 3])
        self.core.learnt(self.some(), self.written, self.now)

    def ask_leader(self) -> None:
        record = self.some() if self.rng.random() < 0.9 else None
        before, mine = self.core.state.lease.until, self.core.record
        restore = self.core.leader_said(record, self.rng.randrange(1, 50), self.now, LINE, self.now)
        if restore is not None:
            assert restore.record == mine or mine is None
            assert self.core.state.lease.until == before
        else:
            assert self.core.record == record

    def coordinate(self) -> None:
        waiting = self.core.staged.update_id if self.core.staged and self.rng.random() < 0.3 else None
        if gone(self.core, self.rng.randrange(10), self.rng.random() < 0.5, waiting) is not None:
            self.core.is_staged(None)

    def stage(self) -> None:
        if self.rng.random() < 0.2:
            self.core.is_staged(None)
        elif self.under_way is None:
            record = self.known[-1]
            in_place = self.rng.random() < 0.2
            if in_place:
                self.core.overwriting()
            stage(self.core, record, self.rng.randrange(10))

    def tick(self) -> None:
        self.core.ticked(self.now)

    def obey(self) -> None:
        did = self.core.next(self.now)
        if self.under_way is not None:
            return
        if isinstance(did, (Swap, Unload)):
            self.begin(did)
        elif isinstance(did, Fetch) and self.rng.random() < 0.4:
            self.core.fetch_failed("no", self.now)
        else:
            act(self.core, did, self.now)

    def commit(self) -> None:
        if self.under_way is not None:
            return
        try:
            step = self.core.commit_step(self.known[-1])
        except Conflict:
            return
        if isinstance(step, Relabel):
            self.core.relabelled(step.record)
        elif step is not None:
            self.begin(step)

    def begin(self, swap: Swap | Unload) -> None:
        self.core.swapping(swap)
        self.under_way = swap

    def operate(self) -> None:
        state, tag = self.core.state, self.rng.choice(["weights", "kv_cache"])
        match self.rng.randrange(3):
            case 0:
                self.core.enabled()
            case 1:
                state.release([tag])
            case _:
                state.take_back([tag])
        if self.rng.random() < 0.1:
            state.lose_weights("reset")

    def check(self) -> None:
        valid(self.core)
        one = self.core.next(self.now)
        other = self.core.next(self.now)
        if one != other:
            assert isinstance(one, Wait), "what is to be done stays so until something happens"
        valid(self.core)

    def calm(self) -> None:
        """Ends all faults. In bounded time the worker holds the newest version and is open."""
        core, last = self.core, replace(after(self.known[-1].opened()).opened(), adapters={})  # all can be fetched
        self.under_way = None
        core.state.take_back(["weights", "kv_cache"])
        if core.record is not None and core.record.run_number >= last.run_number:
            last = replace(last, run_number=core.record.run_number + 1)
        assert core.leader_said(last, 1000, self.now, LINE, self.now) is None
        given_up = gone(core, 99, False, None)
        if given_up is not None:
            core.is_staged(None)
        for _ in range(10):
            hold(core, self.now)
            self.now += MAX_HEAL_RETRY_S
        assert (reasons(core), core.state.version, core.state.sequence) == ({}, last.version, last.sequence)


@pytest.mark.parametrize("seed", range(300))
def test_after_any_events_a_worker_serves_only_the_committed_weights_and_recovers(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(120):
        walk.step()
        walk.check()
    walk.calm()
