"""Healing, changes of adapters, rolling updates and overwritings in the core of a worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_plane.errors import Conflict, NotAdmitted
from rl_plane.protocol.record import (
    CommittedAdapter,
    DecisionRecord,
)
from worker.reconcile.instructions import (
    Drop,
    Fetch,
    Relabel,
    StagedVersion,
    Swap,
    Unload,
    Wait,
)
from worker.reconcile.worker_core import (
    CHECK_S,
    COMMIT_GRACE_S,
    GATE_S,
    HEAL_RETRY_S,
    MAX_HEAL_RETRY_S,
    WorkerCore,
)

RUN, MODEL = "run-1", "d0"
from tests.support.worker_core_runs import (  # noqa: E402
    R0,
    R1,
    R2,
    act,
    after,
    fresh,
    gone,
    hold,
    reasons,
    serving,
    source,
    stage,
    version,
)

# ---- checks ----


def reset(core: WorkerCore, now: float) -> bool:
    waits = core.weights_reset(now)
    core.state.lose_weights("reset")
    return waits


def test_a_reset_worker_without_a_snapshot_heals_at_once() -> None:
    core = serving(R0, R1)
    assert not reset(core, 5.0)
    assert isinstance(core.next(5.0), Fetch)


@pytest.mark.parametrize("ends", ["time", "compare", "enable", "another version"])
def test_healing_waits_while_a_check_is_open(ends: str) -> None:
    core = serving(R0, R1)
    core.snapshot_taken()
    assert core.next(5.0) == Wait(), "a snapshot alone changes nothing"
    assert reset(core, 5.0)
    assert core.next(5.0) == Wait(5.0 + CHECK_S)
    now = 6.0
    match ends:
        case "time":
            assert core.next(5.0 + CHECK_S - 0.1) == Wait(5.0 + CHECK_S)
            now = 5.0 + CHECK_S
        case "compare":
            core.check_ended()
        case "enable":
            core.enabled()
        case _:
            core.learnt(R2, 3, now)
    assert isinstance(core.next(now), Fetch)
    hold(core, now)
    core.state.lose_weights("released")
    assert isinstance(core.next(now), Fetch), "the next loss is no check"


def test_an_update_ends_the_wait_of_a_check_and_a_healing_does_not() -> None:
    core = serving(R0, R1)
    core.snapshot_taken()
    reset(core, 5.0)
    core.is_staged(StagedVersion("heal-1", None, R1.version.digest, None))
    assert core.next(5.0) == Drop("heal-1"), "it was fetched before the reset"
    core.is_staged(None)
    assert core.next(5.0) == Wait(5.0 + CHECK_S)
    again = after(R1, digest=R1.version.digest)
    stage(core, again)
    assert core.next(5.0) == Wait(5.0 + CHECK_S), "it is not decided"
    core.learnt(again, 3, 6.0)
    swap = core.commit_step(again)
    assert isinstance(swap, Swap)
    core.swapping(swap)
    core.swapped(swap, 6.0)
    core.learnt(again.opened(), 4, 6.0)
    assert reasons(core) == {}


def test_an_adapters_update_does_not_end_the_wait_of_a_check() -> None:
    core = serving(R0, R1)
    core.snapshot_taken()
    reset(core, 5.0)
    core.learnt(after(R1, load="a"), 3, 6.0)
    assert core.next(6.0) == Wait(5.0 + CHECK_S)


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
    assert gone(core, 6, True, None) is None  # the next holder continues it
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
