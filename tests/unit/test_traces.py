"""The header of traces, spans that are off, spans as the SDK makes them, and the queue to the collector."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry import trace

from rl_plane._util import tracing
from rl_plane._util.otel import MAX_QUEUED_SPANS, MAX_TEXT_CHARS, SpanSender, exported_spans, trace_id_of
from rl_plane._util.tracing import OFF, TraceContext, read_traceparent
from rl_plane.errors import Conflict
from rl_plane.publish.threads import on_thread
from tests.support.otlp_receiver import Collector, collector

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"
BOUND_S = 30.0


@pytest.mark.parametrize(
    ("text", "flags"),
    [(GOOD, "01"), (f"00-{TRACE}-{SPAN}-00", "00"), (f"cc-{TRACE}-{SPAN}-01-what-comes-later", "01")],
)
def test_a_traceparent_is_read(text: str, flags: str) -> None:
    assert read_traceparent(text) == TraceContext(TRACE, SPAN, flags)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "nonsense",
        GOOD.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}",
        GOOD + "\n",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 1000}",
    ],
)
def test_a_bad_traceparent_is_none(text: str | None) -> None:
    assert read_traceparent(text) is None


def test_a_header_is_read_as_it_is_written() -> None:
    context = TraceContext(TRACE, SPAN, "01")
    assert read_traceparent(context.header["traceparent"]) == context


def test_spans_are_off_by_default_and_do_nothing() -> None:
    assert not tracing.is_on()
    assert tracing.begin("update", read_traceparent(GOOD), worker="a") is OFF
    assert tracing.parent_in({"traceparent": GOOD}) is None
    with tracing.child("swap") as span:
        assert span is OFF
        assert span.child("more") is OFF
        span.set(bytes=1)
        span.event("first token")
        span.past("receive", 0, 1)
        span.end(ValueError())
    assert tracing.outgoing() is None


def test_importing_the_plane_does_not_import_opentelemetry() -> None:
    code = (
        "import sys, rl_plane, rl_plane.client, rl_plane.cli.main, worker.process, frontend.main; "
        "print([name for name in sys.modules if name.startswith('opentelemetry.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=dict(os.environ), check=True
    )
    assert done.stdout.strip() == "[]"


def test_without_own_spans_the_program_s_span_is_carried() -> None:
    found = trace.SpanContext(int(TRACE, 16), int(SPAN, 16), False, trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(found)):
        assert tracing.outgoing() == {"traceparent": GOOD}
        seen: list[Any] = []
        done = threading.Event()

        def work() -> None:
            seen.append(tracing.outgoing())
            done.set()

        on_thread(work)
        assert done.wait(BOUND_S)
        assert seen == [{"traceparent": GOOD}]
    assert tracing.outgoing() is None


# ---- spans as the SDK makes them ----


@pytest.fixture
def spans() -> Iterator[Collector]:
    with collector() as found:
        yield found


def test_spans_carry_their_parents_attributes_and_errors(spans: Collector) -> None:
    with exported_spans(spans.url + "/", "a.service", "me", component="engine"):
        root = tracing.begin("update", read_traceparent(GOOD), label="x" * 5000, nothing=None)
        with tracing.within(root):
            assert tracing.current() is root
            assert root.context is not None
            assert tracing.outgoing() == root.context.header
            with pytest.raises(Conflict), tracing.child("swap", bytes=7):
                raise Conflict("no")
            with pytest.raises(asyncio.CancelledError), tracing.child("wait"):
                raise asyncio.CancelledError
            root.past("receive", 2_000, 1_000)
            root.event("first token", after_s=0.5)
        assert tracing.current() is OFF
        root.set(label="late")
        root.event("late")
        root.end(code="late")
    assert not tracing.is_on()
    names = ("receive", "swap", "update", "wait")
    receive, swap, update, wait = sorted(spans.spans, key=lambda span: names.index(span.name))
    assert (update.trace_id, update.parent_id) == (TRACE, SPAN)
    assert update["label"] == "x" * MAX_TEXT_CHARS
    assert "rl_plane.nothing" not in update.attributes
    assert (update.failed, update.events) == (False, ["first token"])
    assert {swap.parent_id, wait.parent_id, receive.parent_id} == {update.span_id}
    assert (swap.failed, swap.attributes["error.type"], swap["bytes"]) == (True, "conflict", 7)
    assert (wait.failed, wait["cancelled"]) == (False, True)
    assert receive.began_ns == receive.ended_ns == 1_000
    resource = update.resource
    assert (resource["service.name"], resource["service.instance.id"]) == ("a.service", "me")
    assert resource["rl_plane.component"] == "engine"


def test_a_text_names_a_trace_unless_there_is_a_caller(spans: Collector) -> None:
    with exported_spans(spans.url, "a.service"):
        for _ in range(2):
            tracing.begin("named", None, "the-id").end()
        tracing.begin("called", read_traceparent(GOOD), "the-id").end()
        tracing.begin("random").end()
    found = {
        name: {one.trace_id for one in spans.spans if one.name == name} for name in ("named", "called", "random")
    }
    assert found["named"] == {trace_id_of("the-id")}
    assert found["called"] == {TRACE}
    assert found["random"].isdisjoint({TRACE, trace_id_of("the-id")})


def test_the_environment_names_the_service(spans: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with exported_spans(spans.url + "/v1/traces", "a.service"):
        tracing.begin("update").end()
    assert [one.service for one in spans.spans] == ["mine"]


# ---- the queue ----


class Slow:
    """An exporter that answers when it may."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def send(self, spans: Sequence[Any]) -> None:
        self.entered.set()
        assert self.go.wait(BOUND_S)
        self.sent += spans

    def stop(self) -> None:
        self.go.set()


def test_spans_that_do_not_fit_into_the_queue_are_dropped_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "rl_plane._util.otel")
    export = Slow()
    sender = SpanSender(export.send, export.stop, "http://there")
    sender.put(0)
    assert export.entered.wait(BOUND_S)
    for number in range(1, MAX_QUEUED_SPANS + 5):
        sender.put(number)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        f"trace spans are lost: the collector http://there does not take them: more than {MAX_QUEUED_SPANS} wait"
    )
    export.go.set()
    sender.close()
    assert export.sent == list(range(MAX_QUEUED_SPANS + 1))
    assert caplog.messages[-1] == "the collector http://there takes trace spans again: 4 were lost"
    sender.put(MAX_QUEUED_SPANS + 5)
    assert export.sent == list(range(MAX_QUEUED_SPANS + 1))


def test_a_collector_that_hangs_does_not_hold_up_the_end() -> None:
    export = Slow()
    sender = SpanSender(export.send, export.stop, "http://there")
    sender.put(0)
    assert export.entered.wait(BOUND_S)
    sender.close(0.05)  # and not after BOUND_S
    assert export.go.is_set()


def test_failures_are_one_warning_until_the_collector_is_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rl_plane._util.otel")
    tried: queue.Queue[int] = queue.Queue()

    def send(spans: Sequence[Any]) -> str | None:
        number: int = spans[0]
        tried.put(number)
        if number == 1:
            raise OSError("gone")
        return "it is full" if number == 0 else None

    sender = SpanSender(send, lambda: None, "http://there")
    for number in range(3):
        sender.put(number)
        assert tried.get(timeout=BOUND_S) == number
    sender.close()
    warning, info = caplog.messages
    assert "http://there does not take them: it is full; fix: start it" in warning
    assert info == "the collector http://there takes trace spans again: 2 were lost"
