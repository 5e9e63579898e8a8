"""Traces of real engines: the bytes and the tokens in a trace equal those of the engine."""

from __future__ import annotations

import json
import secrets
import select
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.otlp_receiver import collector
from tests.support.started_command import BACK_S, eventually, without_settings
from tests.support.traced_fleet import TracedFleet, check_tree, each, fresh, one
from tests.support.zygote import fork_module
from worker.testing.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START_S = 400.0
"""The seconds within which an engine with processes of its own starts, on two busy cores."""


@contextmanager
def fleet_of(engine: str, model: Path, folder: Path, endpoint: str) -> Iterator[TracedFleet]:
    """A fleet of `rl-plane up`, and one `rl-plane worker` beside it, forked where the engine's packages are
    imported already."""
    log = folder / "worker.log"
    with ExitStack() as ends:
        fleet = TracedFleet(folder, endpoint, "--workers", "0")
        ends.callback(fleet.started.end)
        argv = ["worker", "--engine", engine, "--model", str(model), "--weight-root", str(fleet.root)]
        argv += ["--nats-url", fleet.ready["nats_url"], "--otel-endpoint", endpoint, "--json"]
        worker = fork_module(engine, "rl_plane.cli.main", argv, log, env=without_settings(), text=True)
        assert worker.stdout is not None
        ends.callback(lambda: sys.stderr.write(log.read_text(errors="replace")))  # shown if the test fails
        ends.callback(worker.stdout.close)
        ends.callback(worker.wait)
        ends.callback(worker.kill)
        assert select.select([worker.stdout], [], [], START_S)[0], f"not ready within {START_S:g} s"
        line = worker.stdout.readline()
        assert line, "the worker ended before it was ready"
        ready = json.loads(line)
        fleet.workers = {ready["instance_ids"][0]: ready["pid"]}
        eventually(lambda: bool(fleet.get("/v1/rl/state")["workers"]), BACK_S, "the frontend sees no worker")
        yield fleet


@pytest.mark.parametrize(
    "engine",
    [
        "hf",
        pytest.param("vllm", marks=pytest.mark.engines("vllm")),
        pytest.param("sglang", marks=pytest.mark.engines("sglang")),
    ],
)
def test_a_real_engine_traces_an_update_and_a_completion(engine: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "served", seed=0, dtype="bfloat16")
    with collector() as spans, fleet_of(engine, model, tmp_path, spans.url) as fleet:
        published = make_tiny_model(fleet.root / "step_1", seed=1, dtype="bfloat16")
        trace_id, caller, header = fresh()
        update_id = secrets.token_hex(8)
        body = {"transport": {"backend": "filesystem", "path": str(published)}, "version": "step_1"}
        reply = fleet.post("/v1/rl/update_weights", body, traceparent=header, **{"Idempotency-Key": update_id})
        assert reply["version"]["label"] == "step_1", reply
        found = spans.trace(trace_id, caller, "update_weights", "prepare_update", "commit_update", "swap")
        check_tree(found, caller)
        prepared, received = one(found, "prepare_update"), one(found, "receive")
        assert prepared["digest"] == reply["version"]["digest"]
        size = sum(file.stat().st_size for file in published.glob("*.safetensors"))
        assert 0 < prepared["bytes"] < size  # the file has a header too
        assert size - prepared["bytes"] < 100_000
        assert received["bytes"] == prepared["bytes"]
        assert one(found, "commit_update")["swap_s"] > 0

        asked = {"prompt_token_ids": [5, 6, 7], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        completed = fleet.post("/v1/completions", asked, traceparent=header)
        assert completed["usage"]["completion_tokens"] == 5, completed
        found = spans.trace(trace_id, caller, "completion", "attempt", "generate")
        check_tree(found, caller)
        for name in ("completion", "attempt", "generate"):
            assert one(found, name)["tokens"] == 5
        assert one(found, "attempt")["label"] == "step_1"
        assert not any(span.failed for span in found)
        assert each(found, "attempt")[0]["worker"] in fleet.workers
