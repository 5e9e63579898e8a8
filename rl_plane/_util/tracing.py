"""The spans of this process, and the header that carries them to another one. `rl_plane._util.otel` switches them on.

While they are off, every span is `OFF`, whose methods do nothing. So the code that makes spans never asks whether they
are on, and pays a call for each of its few spans.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

TRACEPARENT = "traceparent"
"""The header of HTTP requests and NATS messages, as https://www.w3.org/TR/trace-context/ defines it."""
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
MAX_TRACEPARENT_CHARS = 256
"""Version 00 has 55 characters. Later versions may add some."""

Value = str | bool | int | float


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span as other processes know it. Both ids are hex digits."""

    trace_id: str
    span_id: str
    flags: str = "01"
    """`01`: the span is recorded."""

    @property
    def header(self) -> dict[str, str]:
        """The header that makes this span the parent of what the receiver does."""
        return {TRACEPARENT: f"00-{self.trace_id}-{self.span_id}-{self.flags}"}


def read_traceparent(text: str | None) -> TraceContext | None:
    """The caller's span. None: there is none, or the header is not well-formed, which changes nothing else."""
    if text is None or len(text) > MAX_TRACEPARENT_CHARS:
        return None
    found = _TRACEPARENT.fullmatch(text)
    if found is None or (found[1] == "00" and found[5] is not None):
        return None
    return TraceContext(found[2], found[3], found[4])


def parent_in(headers: Mapping[str, str] | None) -> TraceContext | None:
    """The caller's span in the headers of a NATS message. None: there is none, or this process makes no spans."""
    if _begin is None or not headers:
        return None
    return read_traceparent(headers.get(TRACEPARENT))


class Span:
    """A span that is not recorded, so its methods do nothing.

    Attributes are text, numbers or booleans. None leaves an attribute out. A viewer shows their names after
    `rl_plane.`."""

    @property
    def context(self) -> TraceContext | None:
        """The span as other processes know it. None: it is not recorded."""
        return None

    def child(self, name: str, **attributes: Value | None) -> Span:
        """Begins a span within this one."""
        return self

    def past(self, name: str, began_ns: int, ended_ns: int, **attributes: Value | None) -> None:
        """Adds a span below this span, for work that has ended already. Both times are Unix nanoseconds."""

    def set(self, **attributes: Value | None) -> None:
        """Adds attributes, until the span ends."""

    def event(self, name: str, **attributes: Value | None) -> None:
        """Adds something that happens now."""

    def end(self, error: BaseException | None = None, code: str = "") -> None:
        """Ends the span. A second call does nothing. `error`, or the `code` of one: why it failed."""


OFF = Span()


Begin = Callable[[str, TraceContext | None, str, Mapping[str, Value | None]], Span]
"""Begins a span that is recorded: its name, and `parent`, `trace_of` and `attributes` of `begin`."""

_begin: Begin | None = None
_current: ContextVar[Span] = ContextVar("span", default=OFF)
_heard: ContextVar[TraceContext | None] = ContextVar("traceparent", default=None)


def switch(begin: Begin | None) -> None:
    """Makes `begin` begin all spans from now on. None: no span is recorded."""
    global _begin
    _begin = begin


def is_on() -> bool:
    """Whether this process records spans."""
    return _begin is not None


def hear(traceparent: str | None) -> None:
    """Notes the caller's span for the rest of this task, which serves one request."""
    _heard.set(read_traceparent(traceparent))


def heard() -> TraceContext | None:
    """The caller's span, which `hear` has noted."""
    return _heard.get()


def begin(name: str, parent: TraceContext | None = None, trace_of: str = "", **attributes: Value | None) -> Span:
    """Begins the first span of this process in a trace.

    Args:
        parent: The caller's span. None: the span begins a trace.
        trace_of: A text. All spans that begin a trace with this text begin the same trace. Empty: a random one."""
    return OFF if _begin is None else _begin(name, parent, trace_of, attributes)


def current() -> Span:
    """The span that surrounds the present call. OFF: none does."""
    return _current.get()


@contextmanager
def using(span: Span) -> Iterator[Span]:
    """Makes the span the current one within the block, and does not end it."""
    token = _current.set(span)
    try:
        yield span
    finally:
        _current.reset(token)


@contextmanager
def within(span: Span) -> Iterator[Span]:
    """Makes the span the current one within the block, and ends it with the block, or with the error that leaves it."""
    if span is OFF:
        yield span
        return
    try:
        with using(span):
            yield span
    except BaseException as error:
        span.end(error)
        raise
    span.end()


def child(name: str, **attributes: Value | None) -> AbstractContextManager[Span]:
    """Surrounds a block by a span within the current one: `with child("swap") as span`."""
    return within(_current.get().child(name, **attributes))


def outgoing() -> dict[str, str] | None:
    """The header that carries the current span to another process. None: there is no span.

    Where this process makes no spans, it is the span of the program around it, if that uses OpenTelemetry."""
    context = _current.get().context
    if context is not None:
        return context.header
    api: Any = sys.modules.get("opentelemetry.trace")
    if not hasattr(api, "get_current_span"):  # not imported, or still being imported
        return None
    found = api.get_current_span().get_span_context()
    if not found.is_valid:
        return None
    return TraceContext(f"{found.trace_id:032x}", f"{found.span_id:016x}", f"{found.trace_flags:02x}").header
