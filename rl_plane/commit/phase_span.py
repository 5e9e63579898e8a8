"""Facts in the trace span of a phase: its instruction, and the event that answers it."""

from __future__ import annotations

from itertools import islice

from rl_plane._util.tracing import OFF, Span
from rl_plane.commit.steps import Announce, Answered, Event, Instruction, RecordAcks, SendOp

MAX_FAILED = 32
"""Workers whose errors a span tells. A viewer shows no more at once, and the reply has all of them."""


def asked_of(instruction: Instruction) -> dict[str, str | int]:
    """Returns the op, and the number of workers that the coordinator asks."""
    match instruction:
        case SendOp():
            return {"op": instruction.op, "workers": len(instruction.workers)}
        case Announce():
            return {"op": "follow_record"}
    return {}


def note_event(span: Span, event: Event) -> None:
    """Notes the bytes that the workers took, and an event for each worker that failed."""
    if span is OFF or not isinstance(event, (Answered, RecordAcks)):
        return
    failed = [reply for reply in event.replies if not reply.ok]
    nbytes = sum(int(reply.body.get("bytes", 0)) for reply in event.replies if reply.ok)
    span.set(failed=len(failed), bytes=nbytes or None)
    if isinstance(event, RecordAcks):
        span.set(workers=len(event.members), silent_frontends=len(event.silent_frontends))
    for reply in islice(failed, MAX_FAILED):
        error = reply.error
        span.event(
            "worker failed",
            worker=reply.instance_id,
            code=error.code if error is not None else None,
            message=error.message if error is not None else None,
        )
