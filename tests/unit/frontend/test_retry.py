"""The retry policy: the decision after each kind of try at one worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from frontend.routing.demands import Demands, Unmet
from frontend.routing.retry import (
    MAX_LOST,
    Fail,
    FindRoom,
    Finish,
    StaleStop,
    Standing,
    Tries,
    TryAgain,
    after_error,
    after_unmet,
)
from rl_plane.errors import (
    BusUnreachable,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    NotAdmitted,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    PlaneError,
    StaleWeights,
    Unavailable,
    Unlabelled,
    Unsupported,
    WorkerLost,
    WrongIncarnation,
    WrongNumerics,
)
from rl_plane.membership.core import Member

WORKER = Member("aaaaaaaaaaaaaaaa", "one", "server", 1, 1, {})
OTHER = Member("bbbbbbbbbbbbbbbb", "one", "server", 2, 2, {})
FRESH = Standing(made=0, fresh=0, is_full=False, can_move=False, is_pinned=False, demands=Demands())
HALF = replace(FRESH, made=3, fresh=3, can_move=True)
MIGRATES = replace(HALF, demands=Demands(migrate=True))
UNMET = Unmet("max_lag", "too old")


def decide(error: PlaneError, standing: Standing = FRESH, tries: Tries | None = None) -> Any:
    return after_error(error, WORKER, tries or Tries(), standing)


@pytest.mark.parametrize(
    "error", [WorkerLost("x"), WrongIncarnation("x"), EngineDied("x"), EngineFailed("x"), StaleWeights("x")]
)
def test_a_loss_before_the_first_token_is_tried_elsewhere(error: PlaneError) -> None:
    again = decide(error)
    assert (again.how, again.tries.lost) == ("retried", (WORKER,))


def test_tokens_continue_elsewhere_only_on_request() -> None:
    failed = decide(WorkerLost("gone"), HALF)
    assert isinstance(failed, Fail)
    assert failed.error.facts["instance_id"] == WORKER.instance_id
    assert "migrate: true" in failed.error.facts["fix"]
    assert decide(WorkerLost("gone"), MIGRATES).how == "migrated"
    assert isinstance(decide(WorkerLost("gone"), replace(MIGRATES, can_move=False)), Fail)


def test_a_pinned_request_is_tried_nowhere_else() -> None:
    assert isinstance(decide(WorkerLost("gone"), replace(MIGRATES, is_pinned=True)), Fail)


def test_losses_without_a_token_are_bounded_and_tokens_count_anew() -> None:
    tries = Tries()
    for count in range(1, MAX_LOST):
        again = decide(WorkerLost("gone"), FRESH, tries)
        tries = again.tries
        assert len(tries.lost) == count
    assert isinstance(decide(WorkerLost("gone"), FRESH, tries), Fail)
    assert decide(WorkerLost("gone"), MIGRATES, tries).tries.lost == (WORKER,)


def test_a_loss_after_the_last_token_ends_the_choice() -> None:
    assert decide(WorkerLost("gone"), replace(MIGRATES, is_full=True)) == Finish("length")


def test_the_caller_gets_the_failure_of_a_living_worker() -> None:
    failed, stale = EngineFailed("no memory"), StaleWeights("old")
    assert decide(failed).tries.failure is failed
    assert decide(stale).tries.failure is stale
    kept = Tries((OTHER,), None, failed)
    assert decide(WorkerLost("gone"), FRESH, kept).tries.failure is failed
    assert decide(EngineDied("gone"), FRESH, kept).tries.failure is failed
    assert decide(WorkerLost("gone"), MIGRATES, kept).tries.failure is None, "tokens have come since"


def test_a_dead_worker_is_reported_as_lost_and_a_failed_engine_as_itself() -> None:
    pinned = replace(FRESH, is_pinned=True)
    assert type(decide(EngineDied("gone"), pinned).error) is WorkerLost
    assert type(decide(WrongIncarnation("gone"), pinned).error) is WorkerLost
    failed = EngineFailed("no memory")
    assert decide(failed, pinned).error is failed


@pytest.mark.parametrize("error", [NotAdmitted("x"), Overloaded("x"), Unavailable("x")])
def test_a_refusal_is_tried_elsewhere_while_there_is_no_token(error: PlaneError) -> None:
    again = decide(error, FRESH, Tries((OTHER,)))
    assert again == TryAgain(Tries((OTHER,), error), "refused")  # type: ignore[arg-type]
    assert decide(error, HALF) == Fail(error)


@pytest.mark.parametrize("error", [BusUnreachable("x"), Unlabelled("x"), NotFound("x")])
def test_an_error_that_another_worker_would_repeat_fails(error: PlaneError) -> None:
    assert decide(error) == Fail(error)


@pytest.mark.parametrize("kind", [InvalidRequest, Unsupported, PayloadTooLarge])
def test_a_wrong_request_fails_as_it_is_or_as_a_loss(kind: type[PlaneError]) -> None:
    error = kind("wrong", field="seed")
    assert decide(error) == Fail(error)
    lost = decide(error, MIGRATES).error
    assert (type(lost), lost.message) == (WorkerLost, "no other worker can continue: wrong")


def test_too_little_room_asks_for_more_room_first() -> None:
    error = InvalidRequest("too long", field="max_tokens")
    assert decide(error) == FindRoom(error)
    found = decide(error, MIGRATES)
    assert isinstance(found, FindRoom)
    assert type(found.otherwise) is WorkerLost


@pytest.mark.parametrize(
    ("standing", "on_stale", "may_wait", "expected"),
    [
        (FRESH, "wait", True, "rerun"),
        (FRESH, "wait", False, Fail),
        (FRESH, "refuse", True, Fail),
        (FRESH, "cut", True, "rerun"),
        (HALF, "wait", True, Fail),
        (HALF, "refuse", True, Fail),
        (HALF, "cut", True, Finish),
    ],
)
def test_a_choice_waits_fails_or_ends_if_no_weights_meet_its_demands(
    standing: Standing, on_stale: Any, may_wait: bool, expected: Any
) -> None:
    demands = Demands(max_lag=0, on_stale=on_stale)
    found = after_unmet(UNMET, Tries((OTHER,)), replace(standing, demands=demands), may_wait)
    if expected == "rerun":
        assert found == TryAgain(Tries((OTHER,)), "rerun")
    elif expected is Finish:
        assert found == Finish("abort", StaleStop("max_lag", "too old"))
    else:
        assert isinstance(found, Fail)
        assert (found.error.code, found.error.facts["field"]) == ("demand_unmet", "max_lag")


def test_a_choice_whose_worker_fails_the_canary_continues_and_may_return_to_it() -> None:
    error, before = WrongNumerics("x"), Tries(lost=(OTHER,))
    assert decide(error, MIGRATES, before) == TryAgain(Tries(refusal=error), "migrated")
    assert decide(error, FRESH, before) == TryAgain(replace(before, refusal=error), "refused")
    assert decide(error, replace(MIGRATES, is_full=True)) == Finish("length")
    assert decide(error, HALF) == TryAgain(Tries(refusal=error), "migrated")
    for ends in (replace(HALF, can_move=False), replace(MIGRATES, is_pinned=True)):
        assert decide(error, ends) == Fail(error)
