"""The spans of the bytes that came, made after they have come: the engine counts and times them anyway."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from rl_plane._util.tracing import OFF, Span
from rl_plane.protocol.update_requests import PreparedReply
from worker.receive.received_bytes import ByteCount

MAX_SOURCES = 32
"""Sources with a span of their own. A worker of a relay has nine at most."""


def add_received(span: Span, received: Callable[[], ByteCount | None], reply: PreparedReply, now_ns: int) -> None:
    """Adds a span from the first bytes to the last ones, and one for each source.

    The time at which a source began is not known, so each of these spans begins with the first bytes.

    Args:
        received: Counts the bytes. It is asked only if the span is recorded.
        now_ns: Unix nanoseconds."""
    if span is OFF or (count := received()) is None:
        return
    ended = now_ns - int(count.since_progress_s * 1e9)
    began = ended - int(count.receiving_s * 1e9)
    span.past("receive", began, ended, bytes=count.received, expected_bytes=count.expected)
    for source in islice(reply.get("sources", ()), MAX_SOURCES):
        until = began + int(source["seconds"] * 1e9)
        span.past("read", began, until, source=source["source"], bytes=source["bytes"])
