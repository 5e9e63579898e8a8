"""Records the spans of this process by OpenTelemetry, and sends them to a collector by OTLP over HTTP.

It needs the extra `otel`. Its provider is its own, so that it changes nothing of what an engine or a program does with
OpenTelemetry in the same process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from rl_plane._util import tracing
from rl_plane._util.own_version import own_version
from rl_plane._util.tracing import Span, TraceContext, Value
from rl_plane.errors import PlaneError

log = logging.getLogger("rl_plane._util.otel")

SEND_S = 4.0
"""The longest wait for the collector's answer to one batch, with all repetitions."""
MAX_TEXT_CHARS = 1024
"""The characters of an attribute. The rest is cut off."""
MAX_QUEUED_SPANS = 8192
"""Spans that may wait for the collector: some minutes of a busy frontend, and about 20 MB."""
BATCH_SPANS = 512
"""Spans in one request: about half a megabyte."""
BATCH_S = 0.5
"""The longest wait for a batch to fill. An operator waits as long for a trace to appear."""
CLOSE_S = 2.0
"""The time in which the queue is sent at the end of the process. It is part of no drain."""

PREFIX = "rl_plane."
EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
PATH = "/v1/traces"

Send = Callable[[Sequence[Any]], str | None]
"""Sends one batch, within a bound. Returns None, or the reason why the collector has not taken it."""


def trace_id_of(text: str) -> str:
    """The id of the trace whose first span has this text, such as an update's id: 32 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextmanager
def exported_spans(collector: str, service: str, instance: str = "", **facts: str) -> Iterator[None]:
    """Records the spans that begin within the block, and sends them.

    Args:
        collector: The address of an OTLP/HTTP collector, such as `http://127.0.0.1:4318`.
        service: The service's name. `OTEL_SERVICE_NAME` wins.
        instance: The id of this process. Empty: its host and process id.
        facts: Further facts of the process, which every span carries. `OTEL_RESOURCE_ATTRIBUTES` adds more."""
    host = socket.gethostname()
    resource = Resource(
        {
            "service.name": service,
            "service.version": own_version(),
            "service.instance.id": instance or f"{host}-{os.getpid()}",
            "host.name": host,
            "process.pid": os.getpid(),
            **{PREFIX + name: value for name, value in facts.items()},
        }
    ).merge(OTELResourceDetector().detect())
    export = _OtlpExport(collector)
    sender = SpanSender(export.send, export.stop, collector)
    provider = TracerProvider(
        resource=resource,
        shutdown_on_exit=False,
        id_generator=_TraceIds(),
        span_limits=SpanLimits(max_attribute_length=MAX_TEXT_CHARS),
    )
    provider.add_span_processor(sender)
    tracing.switch(partial(_begin, provider.get_tracer("rl_plane", own_version())))
    try:
        yield
    finally:
        tracing.switch(None)
        sender.close()


class _OtlpExport:
    """The exporter of the SDK. It reads `OTEL_EXPORTER_OTLP_HEADERS`, `…_CERTIFICATE` and `…_COMPRESSION`."""

    def __init__(self, collector: str) -> None:
        base = collector.rstrip("/")
        self._exporter = OTLPSpanExporter(base if base.endswith(PATH) else base + PATH, timeout=SEND_S)
        self._why = ""
        logging.getLogger(EXPORTER_LOG).addFilter(self._overhear)

    def _overhear(self, record: logging.LogRecord) -> bool:
        """Takes the exporter's words about our own batches as the reason. SpanSender logs it once, instead of a line
        for each batch."""
        if threading.current_thread().name != "spans":
            return True
        self._why = self._why or record.getMessage()
        return False

    def send(self, spans: Sequence[ReadableSpan]) -> str | None:
        self._why = ""
        done = self._exporter.export(spans)
        return None if done is SpanExportResult.SUCCESS else self._why or "it refuses them"

    def stop(self) -> None:
        with contextlib.suppress(Exception):  # the process ends
            self._exporter.shutdown()  # type: ignore[no-untyped-call]
        logging.getLogger(EXPORTER_LOG).removeFilter(self._overhear)


class SpanSender(SpanProcessor):
    """Sends ended spans from a thread of its own, from the first span on until `close`. Any thread may put spans.

    Nothing ever waits for the collector: what does not fit is dropped."""

    def __init__(self, send: Send, stop: Callable[[], None], collector: str) -> None:
        """`stop`: ends a send that is under way. `collector`: its address, for the log."""
        self._send_batch = send
        self._stop_send = stop
        self._collector = collector
        self._queue: queue.Queue[Any] = queue.Queue(MAX_QUEUED_SPANS)
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._warned = False
        self._lost = 0
        """Spans that were lost since the collector took the last batch."""

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is not None and context.trace_flags.sampled:
            self.put(span)

    def put(self, span: Any) -> None:
        """Queues a span, or drops it. Returns at once."""
        if self._closing.is_set():
            return
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self._on_lost(1, f"more than {MAX_QUEUED_SPANS} wait")
            return
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        """Starts the thread, with the first span: an engine that forks while it loads has no copy of it."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
                self._thread.start()

    def close(self, within_s: float = CLOSE_S) -> None:
        """Sends what is queued, for at most `within_s`. It blocks."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(within_s)
        self._stop_send()

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            batch = self._batch()
            if not batch and self._closing.is_set():
                return
            if batch:
                self._send(batch)

    def _batch(self) -> list[Any]:
        """The next spans. Waits BATCH_S for a batch to fill, unless the process ends."""
        batch: list[Any] = []
        until = time.monotonic() + BATCH_S
        while len(batch) < BATCH_SPANS:
            left_s = 0.0 if self._closing.is_set() else until - time.monotonic()
            try:
                batch.append(self._queue.get(timeout=left_s) if left_s > 0 else self._queue.get_nowait())
            except queue.Empty:
                break
        return batch

    def _send(self, batch: list[Any]) -> None:
        try:
            why = self._send_batch(batch)
        except Exception as error:  # the thread must continue
            why = f"{type(error).__name__}: {error}"
        if why is not None:
            self._on_lost(len(batch), why)
        elif self._warned:
            log.info("the collector %s takes trace spans again: %d were lost", self._collector, self._lost)
            self._warned, self._lost = False, 0

    def _on_lost(self, spans: int, why: str) -> None:
        self._lost += spans
        if not self._warned:
            self._warned = True
            log.warning(
                "trace spans are lost: the collector %s does not take them: %.300s; fix: start it, or set "
                "--otel-endpoint. The fleet continues",
                self._collector,
                why,
            )


_trace_id: ContextVar[str] = ContextVar("trace_id", default="")


class _TraceIds(RandomIdGenerator):
    """Random ids, except for the trace that `_trace_id` names."""

    def generate_trace_id(self) -> int:
        named = _trace_id.get()
        return int(named, 16) if named else super().generate_trace_id()


def _begin(
    tracer: trace.Tracer,
    name: str,
    parent: TraceContext | None,
    trace_of: str,
    attributes: Mapping[str, Value | None],
) -> Span:
    """Begins a span of the SDK. The arguments are those of `tracing.begin`."""
    context = Context()
    if parent is not None:
        remote = trace.SpanContext(
            int(parent.trace_id, 16), int(parent.span_id, 16), True, trace.TraceFlags(int(parent.flags, 16))
        )
        context = trace.set_span_in_context(trace.NonRecordingSpan(remote), context)
    token = _trace_id.set(trace_id_of(trace_of) if trace_of and parent is None else "")
    try:
        span = tracer.start_span(name, context, kind=trace.SpanKind.SERVER, attributes=_named(attributes))
    finally:
        _trace_id.reset(token)
    return _SdkSpan(tracer, span)


class _SdkSpan(Span):
    """A span of the SDK."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def context(self) -> TraceContext | None:
        found = self._span.get_span_context()
        if not found.is_valid:
            return None
        return TraceContext(f"{found.trace_id:032x}", f"{found.span_id:016x}", f"{found.trace_flags:02x}")

    def _within(self) -> Context:
        return trace.set_span_in_context(self._span, Context())

    def child(self, name: str, **attributes: Value | None) -> Span:
        span = self._tracer.start_span(name, self._within(), attributes=_named(attributes))
        return _SdkSpan(self._tracer, span)

    def past(self, name: str, began_ns: int, ended_ns: int, **attributes: Value | None) -> None:
        span = self._tracer.start_span(
            name, self._within(), attributes=_named(attributes), start_time=min(began_ns, ended_ns)
        )
        span.end(ended_ns)

    def set(self, **attributes: Value | None) -> None:
        if self._span.is_recording():
            self._span.set_attributes(_named(attributes))

    def event(self, name: str, **attributes: Value | None) -> None:
        if self._span.is_recording():
            self._span.add_event(name, _named(attributes))

    def end(self, error: BaseException | None = None, code: str = "") -> None:
        if not self._span.is_recording():
            return  # it has ended, or is not sampled
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self.set(cancelled=True)  # its caller wants no answer any more, which is no failure
        elif error is not None or code:
            self._span.set_attribute("error.type", code or _code_of(error))
            self._span.set_status(trace.StatusCode.ERROR, str(error or code)[:MAX_TEXT_CHARS])
        self._span.end()


def _code_of(error: BaseException | None) -> str:
    return error.code if isinstance(error, PlaneError) else type(error).__name__


def _named(attributes: Mapping[str, Value | None]) -> dict[str, Any]:
    """The attributes that are there, by the names that the collector gets."""
    return {PREFIX + name: value for name, value in attributes.items() if value is not None}
