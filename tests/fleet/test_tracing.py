"""Traces of a real fleet, as a collector gets them: updates, completions, a killed worker, and no collector at all."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nats
import pytest
from opentelemetry import trace

from rl_plane._util.otel import trace_id_of
from rl_plane.client import RlClient
from rl_plane.fleet.http_client import call_facade
from rl_plane.sync import SyncRlClient
from tests.support.http_calls import CALL_S
from tests.support.otlp_receiver import Collector, Received, collector
from tests.support.paths import ROOT
from tests.support.started_command import eventually
from tests.support.trace_picture import picture
from tests.support.traced_fleet import TracedFleet, check_tree, each, fresh, one
from worker.engines.fake.adapter import make_fake_model

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

ENDED_S = 20.0
"""Far below the sum of the drains, and far above what a loaded machine needs."""
SCREENSHOTS = "RL_PLANE_SCREENSHOTS"
"""With this variable the tests write the pictures of docs/tracing.md."""
IMAGES = ROOT / "docs" / "images"
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def spans() -> Iterator[Collector]:
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def kept(spans: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": "x-key=secret", "OTEL_RESOURCE_ATTRIBUTES": "deployment=test"}
    slow = ("--engine-arg", "token_delay_s=0.02")
    made = TracedFleet(folder, spans.url, "--workers", "2", "--expect", "2", "--restart", *slow, environ=headers)
    yield made
    made.started.end()


@pytest.fixture
def fleet(kept: TracedFleet) -> TracedFleet:
    """The fleet, with both workers: a test may have killed one before."""
    assert kept.get(f"/v1/rl/ready?min_workers=2&wait_s={CALL_S:g}")["ready"] is True
    return kept


def update_body(fleet: TracedFleet, label: str) -> dict[str, Any]:
    directory = make_fake_model(fleet.root / label, seed=sum(label.encode()))
    return {"transport": {"backend": "filesystem", "path": str(directory)}, "version": label}


def draw(name: str, title: str, spans: list[Received], folder: Path) -> None:
    """Draws the trace; with RL_PLANE_SCREENSHOTS=1 as a picture of docs/tracing.md."""
    path = (IMAGES if os.environ.get(SCREENSHOTS) else folder) / name
    path.write_text(picture(title, spans))
    texts = [element.text or "" for element in ElementTree.parse(path).iter() if element.tag.endswith("text")]
    for span in spans:
        assert any(text.startswith(span.name) for text in texts)


PHASES = ("lock", "survey", "begin", "prepare", "decide", "gate", "commit", "open")


def test_an_update_is_one_trace_of_the_caller_and_all_processes(
    fleet: TracedFleet, spans: Collector, tmp_path: Path
) -> None:
    trace_id, caller, header = fresh()
    body = update_body(fleet, "one")
    reply = fleet.post("/v1/rl/update_weights", body, traceparent=header, **{"Idempotency-Key": "the-id"})
    assert reply["version"]["label"] == "one", reply
    works = ("prepare_update", "receive", "commit_update", "freeze", "swap")
    found = spans.trace(trace_id, caller, "update_weights", *PHASES, *works, *works)
    check_tree(found, caller)

    root = one(found, "update_weights")
    assert (root.parent_id, root.service, root.failed) == (caller, "rl_plane.frontend", False)
    assert (root["update_id"], root["label"], root["transport"]) == ("the-id", "one", "filesystem")
    assert (root["workers"], root["workers_ok"], root["sequence"]) == (2, 2, reply["version"]["sequence"])
    assert root["digest"] == reply["version"]["digest"]
    assert root["caller"] == "127.0.0.1"
    for name in PHASES:
        assert {span.parent_id for span in each(found, name)} == {root.span_id}, name

    prepare = one(found, "prepare")
    assert (prepare["op"], prepare["workers"], prepare["failed"]) == ("prepare_update", 2, 0)
    prepared = each(found, "prepare_update")
    assert {span.parent_id for span in prepared} == {prepare.span_id}
    assert {span["worker"] for span in prepared} == fleet.workers.keys()
    assert {span.service for span in prepared} == {"rl_plane.worker"}
    assert sum(span["bytes"] for span in prepared) == prepare["bytes"] > 0
    for span in each(found, "receive"):
        assert span.parent_id in {one.span_id for one in prepared}
        assert span["bytes"] == prepared[0]["bytes"]

    committed = each(found, "commit_update")
    assert {span.parent_id for span in committed} == {one(found, "commit").span_id}
    assert {span.parent_id for span in each(found, "swap")} == {span.span_id for span in committed}
    assert all(span["swap_s"] > 0 for span in committed)

    worker = prepared[0].resource
    assert (worker["rl_plane.component"], worker["deployment"]) == ("engine", "test")
    assert worker["service.instance.id"] == prepared[0]["worker"]
    assert spans.headers["x-key"] == "secret"
    draw("trace-update.svg", "An update of two workers", found, tmp_path)


def test_an_update_without_a_caller_s_trace_has_one_by_its_id(fleet: TracedFleet, spans: Collector) -> None:
    update_id = secrets.token_hex(8)
    body = update_body(fleet, "two")
    bad = {"traceparent": "00-not-a-trace-01", "Idempotency-Key": update_id}
    assert fleet.post("/v1/rl/prepare_weights_update", body, **bad)["ready"] is True
    completed = fleet.post("/v1/rl/complete_weights_update", {"update_id": update_id})
    assert completed["version"]["label"] == "two", completed
    found = spans.trace(
        trace_id_of(update_id), "", "prepare_weights_update", "complete_weights_update", "swap", "swap"
    )
    check_tree(found, "")
    first, second = one(found, "prepare_weights_update"), one(found, "complete_weights_update")
    assert first.parent_id == second.parent_id == ""
    assert (first["update_id"], second["update_id"]) == (update_id, update_id)
    assert first.ended_ns <= second.began_ns
    assert one(found, "commit").parent_id == second.span_id


def test_the_trace_of_a_failed_update_shows_the_error_and_the_worker(fleet: TracedFleet, spans: Collector) -> None:
    trace_id, caller, header = fresh()
    body = {"transport": {"backend": "filesystem", "path": str(fleet.root / "nothing")}, "version": "bad"}
    assert "error" in fleet.post("/v1/rl/update_weights", body, traceparent=header)
    found = spans.trace(trace_id, caller, "update_weights", "prepare", "prepare_update", "prepare_update")
    check_tree(found, caller)
    for span in (one(found, "update_weights"), *each(found, "prepare_update")):
        assert span.failed
        assert span.attributes["error.type"] == "invalid_request"
    assert one(found, "prepare").events == ["worker failed"] * 2
    assert each(found, "commit") == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_completion_is_one_trace(fleet: TracedFleet, spans: Collector, stream: bool) -> None:
    trace_id, caller, header = fresh()
    body = {"prompt_token_ids": PROMPT, "max_tokens": 6, "stream": stream}
    fleet.text("/v1/completions", body, traceparent=header)
    found = spans.trace(trace_id, caller, "completion", "route", "attempt", "generate")
    check_tree(found, caller)
    call, route, attempt, generate = (one(found, name) for name in ("completion", "route", "attempt", "generate"))
    assert len(found) == 4
    assert call.parent_id == caller
    assert route.parent_id == attempt.parent_id == call.span_id
    assert generate.parent_id == attempt.span_id
    assert (call.service, generate.service) == ("rl_plane.frontend", "rl_plane.worker")
    assert (call["stream"], call["tokens"], call["outcome"]) == (stream, 6, "ok")
    assert (call["prompt_tokens"], call["choices"], call["finish_reasons"]) == (3, 1, "length")
    assert 1 <= call["deliveries"] <= 6
    assert call.events == ["first token"]
    assert attempt["worker"] == generate["worker"] == call["workers"]
    assert call["request_id"] == attempt["request_id"] == generate["request_id"]
    assert (attempt["tokens"], generate["tokens"]) == (6, 6)
    assert attempt["label"] == call["versions"]
    assert attempt.events == ["accepted", "first token"]
    assert generate.events == ["first token", "last token"]
    assert not any(span.failed for span in found)


def test_without_a_trace_of_the_caller_a_completion_begins_one(fleet: TracedFleet, spans: Collector) -> None:
    reply = fleet.post("/v1/completions", {"prompt_token_ids": PROMPT, "max_tokens": 2, "n": 2})

    def ended(found: list[Received]) -> bool:
        return any(span.name == "completion" and span["request_id"] == reply["id"] for span in found)

    (call,) = [
        span for span in spans.wait_for(ended) if span.name == "completion" and span["request_id"] == reply["id"]
    ]
    found = spans.trace(call.trace_id, "", "generate", "generate")
    check_tree(found, "")
    assert call.parent_id == ""
    assert (call["choices"], call["tokens"]) == (2, 4)
    assert {span["request_id"] for span in each(found, "attempt")} == {f"{reply['id']}-0", f"{reply['id']}-1"}


def test_spans_that_the_caller_does_not_sample_are_not_sent(fleet: TracedFleet, spans: Collector) -> None:
    unsampled, _, header = fresh()
    fleet.post("/v1/completions", {"prompt_token_ids": PROMPT}, traceparent=header.removesuffix("01") + "00")
    sampled, caller, header = fresh()
    fleet.post("/v1/completions", {"prompt_token_ids": PROMPT}, traceparent=header)
    spans.trace(sampled, caller, "completion", "generate")  # sent after those of the first call would have been
    fleet.post("/v1/rl/pause", {}, traceparent=header)
    fleet.post("/v1/rl/resume", {}, traceparent=header)
    spans.trace(sampled, caller, "pause", "resume", "pause", "pause")
    assert not [span for span in spans.spans if span.trace_id == unsampled]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_killed_worker_leaves_two_attempts(
    fleet: TracedFleet, spans: Collector, stream: bool, tmp_path: Path
) -> None:
    trace_id, caller, header = fresh()
    body = {"prompt_token_ids": PROMPT, "max_tokens": 100, "stream": stream, "nvext": {"migrate": True}}
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(fleet.text, "/v1/completions", body, traceparent=header)

        def begun() -> dict[str, Any] | None:
            running = fleet.get("/v1/rl/requests")["requests"]
            return next((each for each in running if each["tokens"]), None)

        eventually(lambda: begun() is not None, CALL_S, "no token came")
        killed = (begun() or {})["worker"]
        (pid,) = [row["pid"] for row in fleet.get("/v1/rl/workers")["workers"] if row["instance_id"] == killed]
        os.kill(pid, signal.SIGKILL)
        assert '"length"' in call.result(CALL_S)
    found = spans.trace(trace_id, caller, "completion", "attempt", "attempt", "generate")
    check_tree(found, caller)
    root, (first, second) = one(found, "completion"), each(found, "attempt")
    assert (root.failed, root["tokens"]) == (False, 100)
    assert root["workers"] == f"{killed}, {second['worker']}"
    assert (first["worker"], first.failed, first["attempt"]) == (killed, True, 0)
    assert first.attributes["error.type"] == "worker_lost"
    assert second["worker"] in fleet.workers.keys() - {killed}
    assert (second["attempt"], second.failed) == (1, False)
    assert first["tokens"] + second["tokens"] == 100
    assert first["tokens"] > 0
    generate = one(found, "generate")  # the killed worker could send none
    assert (generate.parent_id, generate["tokens"]) == (second.span_id, second["tokens"])
    assert len(each(found, "route")) == 2
    draw("trace-completion.svg", "A completion whose first worker is killed", found, tmp_path)


# ---- a trainer that makes spans of its own ----


@contextmanager
def own_span() -> Iterator[tuple[str, str]]:
    """A span of the trainer's program, as its OpenTelemetry has it: the ids of the trace and of the span."""
    trace_id, span_id, _ = fresh()
    context = trace.SpanContext(int(trace_id, 16), int(span_id, 16), False, trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(context)):
        yield trace_id, span_id


def test_a_trainer_s_span_is_the_parent_of_its_calls_over_http(fleet: TracedFleet, spans: Collector) -> None:
    body = update_body(fleet, "by-http")
    with own_span() as (trace_id, caller):
        call_facade(fleet.rl_url, None, "update_weights", body, CALL_S)
    found = spans.trace(trace_id, caller, "update_weights", "commit_update", "commit_update")
    check_tree(found, caller)
    assert one(found, "update_weights").parent_id == caller


@pytest.mark.parametrize("client", ["async", "sync"])
async def test_a_trainer_s_span_is_the_parent_of_the_workers_spans_over_nats(
    fleet: TracedFleet, spans: Collector, client: str
) -> None:
    body, url = update_body(fleet, f"by-{client}"), fleet.ready["nats_url"]

    def blocking() -> None:
        with SyncRlClient.connect(url, "demo") as found:
            found.run("update_weights", body)

    with own_span() as (trace_id, caller):
        if client == "sync":
            await asyncio.to_thread(blocking)
        else:
            async with await RlClient.connect(url, "demo") as found:
                await found.run("update_weights", body)
    came = spans.trace(trace_id, caller, *("prepare_update", "swap", "commit_update") * 2)
    check_tree(came, caller)
    # The trainer's process coordinates, and makes no spans of the plane's.
    assert {span.parent_id for span in each(came, "prepare_update")} == {caller}
    assert {span.service for span in came} == {"rl_plane.worker"}


async def test_a_service_on_nats_gives_its_trace_in_the_message(fleet: TracedFleet, spans: Collector) -> None:
    trace_id, caller, header = fresh()
    nc = await nats.connect(fleet.ready["nats_url"])
    try:
        request = json.dumps({"op": "flush_cache"}).encode()
        answer = await nc.request("demo.engine.fleet", request, timeout=CALL_S, headers={"traceparent": header})
        assert json.loads(answer.data)["status"] == "ok"
        for bad in ("", "x" * 10_000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
            message = await nc.request("demo.engine.fleet", request, timeout=CALL_S, headers={"traceparent": bad})
            assert json.loads(message.data)["status"] == "ok"
    finally:
        await nc.close()
    found = spans.trace(trace_id, caller, *("flush_cache",) * 3)
    check_tree(found, caller)
    assert [span.parent_id for span in found].count(caller) == 1


# ---- without a collector ----


@contextmanager
def silent_collector() -> Iterator[str]:
    """A collector that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def refusing_collector() -> Iterator[str]:
    with collector(status=503) as found:
        yield found.url


@contextmanager
def absent_collector() -> Iterator[str]:
    """An address at which nothing listens."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))  # bound, so that no other process takes it
        yield f"http://127.0.0.1:{kept.getsockname()[1]}"


@pytest.mark.parametrize("bad", [absent_collector, refusing_collector, silent_collector])
def test_without_a_collector_the_fleet_works_and_ends(
    bad: Callable[[], AbstractContextManager[str]], tmp_path: Path
) -> None:
    with bad() as url:
        fleet = TracedFleet(tmp_path, url, "--workers", "1", "--drain-s", "5")
        try:
            assert fleet.post("/v1/rl/update_weights", update_body(fleet, "one"))["version"]["label"] == "one"
            words = f"trace spans are lost: the collector {url} does not take them"
            # The frontend and the worker.
            eventually(lambda: fleet.log().count(words) == 2, CALL_S, "no warning came")
            for _ in range(3):
                assert "choices" in fleet.post("/v1/completions", {"prompt_token_ids": PROMPT, "max_tokens": 2})
            fleet.started.process.terminate()
            assert fleet.started.process.wait(ENDED_S) == 0
            log = fleet.log()
            assert log.count("spans are lost") == 2
            assert "opentelemetry" not in log
            assert "Traceback" not in log
        finally:
            fleet.started.end()


@pytest.mark.parametrize("command", ["up", "frontend", "worker"])
def test_without_the_extra_one_line_names_it(command: str, tmp_path: Path) -> None:
    package = tmp_path / "opentelemetry"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'opentelemetry'\", name='opentelemetry')\n"
    )
    argv = [
        command,
        "--otel-endpoint",
        "http://127.0.0.1:4318",
        *(() if command == "frontend" else ("--engine", "fake")),
    ]
    run = [sys.executable, "-m", "rl_plane.cli.main", *argv]
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        run, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=CALL_S, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "the Python module opentelemetry is not installed" in line
    assert "pip install 'rl-plane[otel]'" in line
