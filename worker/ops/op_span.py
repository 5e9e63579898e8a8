"""Facts in the trace span of an op: its answer."""

from __future__ import annotations

from rl_plane._util.tracing import OFF, Span
from rl_plane.protocol.envelope import Reply

SHOWN = (
    "bytes",
    "model_bytes",
    "tensors",
    "missing",
    "digest",
    "swap_s",
    "cache_flushed",
    "sequence",
    "discarded",
    "aborted",
    "pause_state",
    "listening",
)
"""The fields of an answer that a span shows, if they are there."""


def note_answer(span: Span, reply: Reply) -> None:
    """Notes the facts of an answer, and ends the span."""
    if span is OFF:
        return
    found = {name: reply.body[name] for name in SHOWN if reply.body.get(name) is not None}
    span.set(status=reply.status, **found)
    span.end(reply.error)
