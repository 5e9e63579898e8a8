"""Tests the state of a worker without a worker."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plane.errors import FenceRequired, InvalidRequest, NotAdmitted, StaleFence, WrongIncarnation
from rl_plane.protocol.envelope import Request
from rl_plane.protocol.generation import names_of
from rl_plane.protocol.versions import WeightVersion
from worker.reconcile.worker_state import Reason, TokenLoad, TokenShare, WorkerState

V0 = WeightVersion("run", 0, "initial", "blake3:" + "0" * 64)
V1 = WeightVersion("run", 1, "one", "blake3:" + "1" * 64)


def opened() -> WorkerState:
    state = WorkerState("0" * 16, "me", fence=5)
    state.hold(V0)
    state.sequence = 0
    state.open("starting")
    return state


def changing(**fields: Any) -> Request:
    return Request("pause", **{"fence": 5, "incarnation": "me", **fields})


@pytest.mark.parametrize("missing", ["fence", "incarnation"])
def test_a_change_without_fence_or_incarnation_is_refused_with_the_way_to_do_it(missing: str) -> None:
    with pytest.raises(FenceRequired) as caught:
        opened().check_changing(changing(**{missing: None}))
    assert isinstance(caught.value, InvalidRequest)
    assert caught.value.facts["field"] == missing
    assert "RlClient" in caught.value.facts["fix"]
    assert ".fleet" in caught.value.facts["fix"]


def test_an_older_fence_is_refused() -> None:
    state = opened()
    state.fence = 9
    state.check_fence(9)
    with pytest.raises(StaleFence) as caught:
        state.check_fence(8)
    assert caught.value.facts["fence"] == 9


def test_another_process_is_not_changed_and_learns_no_fence() -> None:
    state = opened()
    with pytest.raises(WrongIncarnation) as caught:
        state.check_changing(changing(fence=99, incarnation="the one before"))
    assert caught.value.facts["incarnation"] == "me"
    assert state.fence == 5


def test_a_new_worker_is_closed() -> None:
    state = WorkerState("0" * 16, "me")
    assert state.admission()["reasons"] == ["starting"]
    with pytest.raises(NotAdmitted):
        state.check_admitted(None, None)


REASONS: list[Reason] = [
    "starting",
    "behind",
    "updating",
    "disabled",
    "draining",
    "leaving",
    "memory",
    "checking",
    "engine",
]


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("other", REASONS)
def test_opening_takes_back_only_its_own_reason(reason: Reason, other: Reason) -> None:
    state = opened()
    assert state.close(reason, "because")
    assert not state.close(reason, "because"), "nothing has changed"
    assert state.admission()["reasons"] == [f"{reason}: because"]
    if other != reason:
        assert not state.open(other)
        state.close(other)
        assert state.open(other)
    assert not state.admission()["open"]
    with pytest.raises(NotAdmitted) as caught:
        state.check_admitted(0, "me")
    assert reason in caught.value.message
    assert caught.value.facts["retry_after_s"] > 0
    assert state.open(reason)
    assert state.admission()["open"]
    state.check_admitted(0, "me")


def test_a_request_of_another_version_or_process_is_not_admitted() -> None:
    state = opened()
    state.check_admitted(None, None)
    state.check_admitted(0, "me")
    with pytest.raises(NotAdmitted) as caught:
        state.check_admitted(1, "me")
    assert caught.value.facts["sequence"] == 0
    with pytest.raises(NotAdmitted):
        state.check_admitted(0, "the one before")


def test_a_pause_ends_with_its_lease() -> None:
    state = opened()
    assert not state.pause_state(0.0)["paused"]
    assert not state.pause_ran_out(1e9)
    state.pause("wait", now=10.0, lease_s=5.0)
    shown = state.pause_state(12.0)
    assert (shown["paused"], shown["mode"], shown["lease_left_s"]) == (True, "wait", 3.0)
    assert not state.pause_ran_out(14.9)
    assert state.pause_ran_out(15.0)
    assert state.pause_state(99.0)["lease_left_s"] == 0
    state.pause("keep", now=15.0, lease_s=5.0)
    assert not state.pause_ran_out(15.0), "a lease is renewed by another pause"
    state.resume()
    assert not state.pause_ran_out(1e9)
    assert state.admission()["open"], "a pause is no reason against admission"


def test_lost_weights_are_no_version_and_close() -> None:
    state = opened()
    state.lose_weights("reset")
    assert (state.digest, state.sequence, state.wire_version()) == (None, None, None)
    assert state.admission()["reasons"] == ["behind: reset"]
    state.hold(V1)
    assert not state.admission()["open"], "holding is not yet the committed version"


# ---- load ----


def test_a_request_counts_its_prompt_and_then_its_tokens_too() -> None:
    load = TokenLoad()
    one, other, never = TokenShare(load, 100), TokenShare(load, 7), TokenShare(load, 3)
    assert (load.running, load.waiting) == (0, 110)
    one.made(1, 90)  # a guess was put right
    other.made(2, None)
    assert (load.running, load.waiting) == (100, 3)
    one.made(5, None)
    assert load.running == 105
    one.gone()
    never.gone()
    assert (load.running, load.waiting) == (9, 0)
    other.gone()
    assert (load.running, load.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("stream_id", "names"),
    [
        ("cmpl-ab", {"cmpl-ab"}),
        ("cmpl-ab-3", {"cmpl-ab-3", "cmpl-ab"}),
        ("cmpl-ab-3.12", {"cmpl-ab-3.12", "cmpl-ab-3", "cmpl-ab"}),
        ("cmpl-ab.1", {"cmpl-ab.1", "cmpl-ab"}),
        ("r1", {"r1"}),
        (".1", {".1"}),
    ],
)
def test_the_ids_of_a_reply_and_of_a_choice_name_their_tries(stream_id: str, names: set[str]) -> None:
    assert set(names_of(stream_id)) == names
