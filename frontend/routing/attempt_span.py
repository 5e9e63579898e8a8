"""The span of one try of a choice at one worker."""

from __future__ import annotations

from frontend.routing.attempts import Accepted
from frontend.routing.demands import Unmet
from frontend.routing.progress import GenerationProgress
from rl_plane._util.tracing import OFF, Span
from rl_plane.errors import PlaneError
from rl_plane.membership.core import Member


def begin_attempt(span: Span, stream_id: str, attempt: int, member: Member) -> Span:
    """Begins the span of a try. `attempt`: the number of tries before it."""
    if span is OFF:
        return OFF
    return span.child("attempt", request_id=stream_id, attempt=attempt, worker=member.instance_id)


def note_accepted(span: Span, accepted: Accepted) -> None:
    """Notes that the worker has taken the request, and which version it serves."""
    if span is OFF:
        return
    span.event("accepted")
    span.set(label=accepted.version.label, sequence=accepted.version.sequence)


def end_attempt(span: Span, progress: GenerationProgress, failure: PlaneError | None, unmet: Unmet | None) -> None:
    """Ends the span with the tokens of this try. `unmet`: the demand that its tokens did not meet."""
    if span is OFF:
        return
    made = progress.spans[-1] if progress.spans else None
    span.set(
        tokens=progress.fresh,
        label=made.version if made is not None else None,
        sequence=made.sequence if made is not None else None,
        unmet=unmet.demand if unmet is not None else None,
    )
    span.end(failure)
