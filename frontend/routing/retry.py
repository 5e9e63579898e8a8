"""Decides what follows a try of a choice at one worker. Pure: the shell is `EngineClient.generate`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from frontend.routing.demands import Demands, Unmet
from rl_plane.errors import (
    EngineDied,
    EngineFailed,
    InvalidRequest,
    NotAdmitted,
    Overloaded,
    PayloadTooLarge,
    PlaneError,
    StaleWeights,
    Unavailable,
    Unsupported,
    WorkerLost,
    WrongIncarnation,
    WrongNumerics,
)
from rl_plane.membership.core import Member
from rl_plane.protocol.generation import FinishReason

MAX_LOST = 4
"""The number of workers that may die under one choice, one after another and without a token, before it fails."""

Lost = WorkerLost | WrongIncarnation | EngineFailed | StaleWeights
"""Errors of a worker that another worker may make good."""


@dataclass(frozen=True, slots=True)
class StaleStop:
    """The choice ends with its tokens so far, because weights that meet its demands make no more of them."""

    demand: str
    message: str


@dataclass(frozen=True, slots=True)
class Tries:
    """The losses and refusals that the tries of one choice have met so far."""

    lost: tuple[Member, ...] = ()
    """The workers that were lost since the last token."""
    refusal: Unavailable | None = None
    """The last worker's refusal. The caller gets it if no other worker is found."""
    failure: EngineFailed | StaleWeights | None = None
    """The failure of a worker that lives. The caller gets it if no other worker can serve the choice."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a choice, and its caller's terms."""

    made: int
    """Tokens so far."""
    fresh: int
    """Tokens of the worker that was tried."""
    is_full: bool
    can_move: bool
    """Another worker can continue the tokens so far."""
    is_pinned: bool
    demands: Demands


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Try another worker."""

    tries: Tries
    how: Literal["retried", "migrated", "rerun", "refused"]


@dataclass(frozen=True, slots=True)
class FindRoom:
    """Try a worker with more room for the prompt and `max_tokens`, or fail if there is none."""

    otherwise: PlaneError


@dataclass(frozen=True, slots=True)
class Finish:
    """End the choice with its tokens so far."""

    reason: FinishReason
    stop: StaleStop | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """End the choice with an error."""

    error: PlaneError


Decision = TryAgain | FindRoom | Finish | Fail


def after_error(error: PlaneError, member: Member, tries: Tries, standing: Standing) -> Decision:
    """The try at this worker failed."""
    if isinstance(error, Lost):
        return _after_loss(error, member, tries, standing)
    if isinstance(error, WrongNumerics) and standing.fresh:
        return _after_failed_canary(error, standing)
    if isinstance(error, Unavailable):
        # A full or closed worker. Other causes (NATS, a label) are no better at another worker.
        is_refusal = isinstance(error, (NotAdmitted, Overloaded)) or type(error) is Unavailable
        if standing.fresh or not is_refusal:
            return Fail(error)
        return TryAgain(replace(tries, refusal=error), "refused")
    if isinstance(error, (InvalidRequest, Unsupported, PayloadTooLarge)):
        failed: PlaneError = error
        if standing.made:
            failed = WorkerLost(f"no other worker can continue: {error.message}", retry_after_s=1.0)
        return FindRoom(failed) if error.facts.get("field") == "max_tokens" else Fail(failed)
    return Fail(error)


def _after_loss(error: Lost, member: Member, tries: Tries, standing: Standing) -> Decision:
    lost = (member,) if standing.fresh else (*tries.lost, member)
    may_continue = not standing.made or (standing.demands.migrate and standing.can_move)
    if standing.is_pinned or len(lost) >= MAX_LOST or not may_continue:
        return Fail(_told_to_caller(error, member))
    if standing.is_full:
        return Finish("length")
    failure = tries.failure
    if isinstance(error, (EngineFailed, StaleWeights)) and not isinstance(error, EngineDied):
        failure = error
    elif standing.fresh:
        failure = None
    return TryAgain(Tries(lost, None, failure), "migrated" if standing.made else "retried")


def _after_failed_canary(error: WrongNumerics, standing: Standing) -> Decision:
    """The worker is closed until it has other weights, for example those of the version before. It may continue the
    choice itself then, so it does not count as lost. The choice needs no `migrate`: it ran across an update, so its
    next tokens are of other weights in any case."""
    if standing.is_pinned or not standing.can_move:
        return Fail(error)
    return Finish("length") if standing.is_full else TryAgain(Tries(refusal=error), "migrated")


def after_unmet(unmet: Unmet, tries: Tries, standing: Standing, may_wait: bool) -> TryAgain | Finish | Fail:
    """The worker's weights do not meet the demands. `may_wait`: there is time left to wait for others."""
    on_stale = standing.demands.on_stale
    if standing.made and on_stale == "cut":
        return Finish("abort", StaleStop(unmet.demand, unmet.message))
    if standing.made or on_stale == "refuse" or not may_wait:
        return Fail(unmet.error())
    return TryAgain(tries, "rerun")


def _told_to_caller(error: Lost, member: Member) -> PlaneError:
    if not isinstance(error, (WorkerLost, WrongIncarnation, EngineDied)):
        return error
    fix = "send it again; if error.partial has tokens, after those (migrate: true does so)"
    facts = {"instance_id": member.instance_id, "retry_after_s": 1.0, "fix": fix, **error.facts}
    return WorkerLost(error.message, **facts)
