"""Everything that rl_plane raises or puts on the wire as an error.

    PlaneError
    ├── InvalidRequest          400  the request is wrong: change it (names the field and the fix)
    │   ├── InvalidWeights      400  the weights do not fit the model: nothing was loaded
    │   └── FenceRequired       400  a changing op without a live fence and the target's incarnation
    ├── Unauthorized            401  no key, or a wrong one
    ├── PermissionDenied        403  the key is right, and its role may not do this
    ├── NotFound                404  no such worker, component, route or version
    ├── Conflict                409  the world is not as the caller thought, or work was undone
    │   ├── MembershipChanged        the fleet is not the one named or pinned
    │   ├── StaleFence               another coordinator has taken over
    │   ├── WrongIncarnation         the worker is a new process since
    │   ├── NotPrepared              commit without a matching prepare
    │   ├── NotAtBase                the version that a delta or partial update changes is not there
    │   └── UpdateAborted            the update was undone everywhere
    ├── PayloadTooLarge         413  a body over its limit
    ├── EngineFailed            500  the engine could not do what it should
    │   └── EngineDied          503  its process is gone
    ├── Unsupported             501  known, but this engine or build lacks it
    ├── Unavailable             503  not now: try again
    │   ├── NoWorkers                no worker to ask
    │   ├── Locked                   another update is under way
    │   ├── NotAdmitted              the worker takes no generation now
    │   │   └── WrongNumerics        the worker's new weights failed the numeric canary
    │   ├── WorkerLost               the worker died or left before it answered
    │   ├── OutcomeUnknown           the decision's answer was lost, and the record can't be read
    │   ├── Overloaded          429  too much is queued here: send less at a time
    │   ├── DemandUnmet              no weights are there that the request demands
    │   ├── Unlabelled               tokens whose weights are not known to have been the committed ones
    │   ├── StaleWeights             tokens of weights that were replaced a while ago
    │   ├── Stalled                  a stream brought no token for too long
    │   ├── FrontendEnding           the frontend had to end before the request did
    │   └── BusUnreachable           NATS does not answer
    └── DeadlineExceeded        504  a bound ran out

An error's facts are attributes, and travel as the keys of its wire form beside `code` and `message`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class PlaneError(Exception):
    """Root of the tree. `facts` are plain values that a caller can act on (`field`, `fix`, epochs, …)."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = {key: value for key, value in facts.items() if value is not None}
        for key in ("field", "fix"):
            if key in self.facts:
                self.add_note(f"{key}: {self.facts[key]}")  # beneath a traceback

    def to_wire(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, **self.facts}


class InvalidRequest(PlaneError):
    """Facts: `field` (dotted path in the request) and `fix` (what to do)."""

    code = "invalid_request"
    http_status = 400


class InvalidWeights(InvalidRequest):
    """Names, shapes, dtypes, lengths or the digest are not what the model needs."""

    code = "invalid_weights"


class FenceRequired(InvalidRequest):
    """The op changes the worker, and the message has no fence."""

    code = "fence_required"


class Unauthorized(PlaneError):
    """The key is missing or unknown."""

    code = "unauthorized"
    http_status = 401


class PermissionDenied(PlaneError):
    """Facts: `subject` (what NATS has refused) and `role` (the key's, where it is known)."""

    code = "permission_denied"
    http_status = 403


class NotFound(PlaneError):
    """Nothing has this name: no worker, update, version or adapter."""

    code = "not_found"
    http_status = 404


class Conflict(PlaneError):
    """The state of the fleet or of the worker does not permit the call."""

    code = "conflict"
    http_status = 409


class MembershipChanged(Conflict):
    """The fleet has other members than the caller named, or than it had when the work began."""

    code = "membership_changed"

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(
            message
            or f"the fleet changed from epoch {facts.get('before_epoch')} to {facts.get('after_epoch')}: "
            "read the members again, then repeat the call",
            **facts,
        )

    @property
    def before_epoch(self) -> int | None:
        return self.facts.get("before_epoch")

    @property
    def after_epoch(self) -> int | None:
        return self.facts.get("after_epoch")


class StaleFence(Conflict):
    """Another coordinator has taken over."""

    code = "stale_fence"


class WrongIncarnation(Conflict):
    """The message is for an earlier process of this worker."""

    code = "wrong_incarnation"


class NotPrepared(Conflict):
    """A commit came without a matching prepare."""

    code = "not_prepared"


class NotAtBase(Conflict):
    """Fact `base`: the digest of the version that a delta or a partial update may change, where there is one."""

    code = "not_at_base"


class UpdateAborted(Conflict):
    """The update has ended without a commit."""

    code = "update_aborted"


class CanaryFailed(Conflict):
    """The engine computes something else with the new weights than it should: see `canary.py`."""

    code = "numerics"


class PayloadTooLarge(PlaneError):
    """The message or the body is larger than its limit."""

    code = "payload_too_large"
    http_status = 413


class EngineFailed(PlaneError):
    """The engine has raised an error."""

    code = "engine_failed"
    http_status = 500


class EngineDied(EngineFailed):
    """The engine's process has ended, and its worker ends. Another worker may take the request."""

    code = "engine_died"
    http_status = 503


class Unsupported(PlaneError):
    """This engine or this transport does not have what the call asks for."""

    code = "unsupported"
    http_status = 501


class Unavailable(PlaneError):
    """Fact `retry_after_s`: when it may be worth asking again."""

    code = "unavailable"
    http_status = 503


class NoWorkers(Unavailable):
    """The fleet has no worker for the call."""

    code = "no_workers"


class Locked(Unavailable):
    """Another coordinator holds the lock: another update or op is under way."""

    code = "locked"


class NotAdmitted(Unavailable):
    """The worker takes no requests."""

    code = "not_admitted"


class WrongNumerics(NotAdmitted):
    """The worker's new weights failed the numeric canary. The tokens so far are good; the rest are not delivered."""

    code = "wrong_numerics"


class WorkerLost(Unavailable):
    """The worker died or left while it had the request."""

    code = "worker_lost"


class OutcomeUnknown(Unavailable):
    """The update may stand or not. Repeating it under the same id is safe."""

    code = "outcome_unknown"


class Overloaded(Unavailable):
    """The maximum of concurrent requests is reached: send fewer at a time."""

    code = "overloaded"
    http_status = 429


class DemandUnmet(Unavailable):
    """Fact `field`: the demand. The tokens so far, where there are some, are as demanded."""

    code = "demand_unmet"


class Unlabelled(Unavailable):
    """The tokens are dropped, not delivered."""

    code = "unlabelled"


class StaleWeights(Unavailable):
    """The stream's worker missed an update. Its tokens so far are good; the rest are not delivered."""

    code = "stale_weights"


class Stalled(Unavailable):
    """No token came for too long, for example because the fleet stays paused. The tokens so far are good."""

    code = "stalled"


class FrontendEnding(Unavailable):
    """No worker has failed the request, and its tokens so far are good: send them to another frontend."""

    code = "frontend_ending"


class BusUnreachable(Unavailable):
    """NATS does not answer."""

    code = "bus_unreachable"


class DeadlineExceeded(PlaneError):
    """The answer did not come in time."""

    code = "deadline_exceeded"
    http_status = 504


def _tree(root: type[PlaneError]) -> dict[str, type[PlaneError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_BY_CODE = _tree(PlaneError)
ERROR_CODES = frozenset(_BY_CODE)


def error_from_wire(wire: dict[str, Any]) -> PlaneError:
    """The typed error for a wire form; an unknown `code` becomes a plain PlaneError that keeps it as a fact."""
    facts = {key: value for key, value in wire.items() if key not in ("code", "message")}
    code, message = str(wire.get("code", "internal")), str(wire.get("message", ""))
    kind = _BY_CODE.get(code)
    if kind is None:
        return PlaneError(message, unknown_code=code, **facts)
    return kind(message, **facts)
