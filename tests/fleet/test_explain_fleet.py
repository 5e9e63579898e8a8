"""`rl-plane ready` and `rl-plane explain` over real fleets whose parts are stopped, killed, paused and misplaced."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from frontend.server.options import FrontendOptions
from rl_plane.cli import main
from rl_plane.cli.settings import SETTINGS
from tests.conftest import Plane, stop_process
from tests.support.frontend_here import started
from tests.support.plain_client import plain_client

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

BOUND_S = 30.0
TRAINER = """
import json, sys
from rl_plane.fleet.http_client import call_facade
url, body = sys.argv[1], json.loads(sys.argv[2])
call_facade(url, None, "prepare_weights_update", body, 30.0, "the-update")
print("prepared", flush=True)
sys.stdin.readline()
"""
"""A trainer that prepares an update, and then makes no further call."""


class Operator:
    """Runs commands against one frontend."""

    def __init__(self, url: str, http_url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self.http_url = http_url
        self._capsys = capsys

    async def run(self, *argv: str) -> tuple[int, dict[str, Any]]:
        """The exit code and the JSON of a command."""
        self._capsys.readouterr()
        code = await asyncio.to_thread(main.run, [*argv, "--url", self.url, "--json"])
        reply: dict[str, Any] = json.loads(self._capsys.readouterr().out)
        return code, reply

    async def explain(self, *argv: str) -> dict[str, Any]:
        code, reply = await self.run("explain", *argv)
        assert code == 0, reply
        return reply


@pytest_asyncio.fixture
async def operator(
    plane: Plane, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Operator]:
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    options = FrontendOptions(
        plane.url, plane.namespace, plane.component, rl_port=0, http_port=0, expect=2, dialects=()
    )
    async with started(options) as urls:
        yield Operator(urls["rl_url"], urls["http_url"], capsys)


async def test_ready_waits_for_the_workers_and_then_says_which_one_is_missing(
    plane: Plane, operator: Operator
) -> None:
    code, reply = await operator.run("ready")
    assert code == 1
    assert [one["kind"] for one in reply["reasons"]] == ["fleet"]
    waiting = asyncio.create_task(operator.run("ready", "--wait", "60s"))
    one, two = await asyncio.to_thread(plane.spawn_many, 2)
    code, reply = await waiting
    assert (code, reply["ready"], reply["serving"]) == (0, True, 2)
    assert (await operator.run("ready", "--expect", "3"))[0] == 1
    one.kill()

    async def is_missed() -> dict[str, Any] | None:
        code, reply = await operator.run("ready")
        reasons = [each for each in reply["reasons"] if each["subject"] == one.instance_id]
        return reasons[0] if code == 1 and reasons and "left" in reasons[0]["cause"] else None

    missed = await plane.until(is_missed)
    assert "it was killed" in missed["cause"]
    assert (await operator.run("ready", "--expect", "1"))[0] == 0, "the operator's number counts"
    past = (await operator.explain(one.instance_id[:6]))["past"]
    assert any(line.endswith(f"worker {one.instance_id} joined") for line in past)
    assert any("it left: " in line for line in past)
    assert two.process.poll() is None


async def test_a_trace_has_the_updates_of_a_fleet(plane: Plane, operator: Operator) -> None:
    await asyncio.to_thread(plane.spawn_many, 2)
    update = ("update", str(plane.model(1)), "--version", "step_1")
    assert (await operator.run(*update))[0] == 0
    path = plane.tmp / "trace.json"
    code, reply = await operator.run("trace", "--output", str(path))
    assert (code, reply) == (0, {"file": str(path), "updates": ["step_1"]})
    whole, *phases = [one for one in json.loads(path.read_text())["traceEvents"] if one["ph"] == "X"]
    assert whole["name"] == "step_1 (committed)"
    assert whole["args"]["sequence"] == 1
    assert {"wait", "prepare", "commit", "open"} <= {one["name"] for one in phases}
    assert sum(one["dur"] for one in phases) == pytest.approx(whole["dur"], abs=100), "in microseconds"


async def test_a_stopped_worker_is_found_before_and_after_it_has_left(plane: Plane, operator: Operator) -> None:
    one, _ = await asyncio.to_thread(plane.spawn_many, 2)
    assert (await operator.run("ready", "--wait", "20"))[0] == 0
    stop_process(one.process.pid)

    async def with_cause(words: str) -> dict[str, Any] | None:
        found = (await operator.explain())["findings"]
        mine = [each for each in found if each["subject"] == one.instance_id and words in each["cause"]]
        return mine[0] if mine else None

    silent = await plane.until(lambda: with_cause("does not answer"))
    assert "its process is stopped by a signal" in silent["cause"]
    assert silent["fix"].startswith(f"`kill -CONT {one.process.pid}`")
    left = await plane.until(lambda: with_cause(" ago: "))
    assert left["waits_for"] == "its process to run again"
    one.go_on()
    assert (await operator.run("ready", "--wait", "30"))[0] == 0
    assert (await operator.explain())["findings"] == []


async def test_a_stopped_trainer_a_pause_and_an_admission_are_explained(plane: Plane, operator: Operator) -> None:
    one, _ = await asyncio.to_thread(plane.spawn_many, 2)
    assert (await operator.run("ready", "--wait", "20"))[0] == 0
    body = {"transport": {"backend": "filesystem", "path": str(plane.model(1))}, "version": "step_1"}
    trainer = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-c", TRAINER, operator.url, json.dumps(body)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert trainer.stdout is not None
        assert await asyncio.to_thread(trainer.stdout.readline) == b"prepared\n"
        stop_process(trainer.pid)
        found = await operator.explain("step_1")
        assert (found["kind"], found["id"]) == ("update", "the-update")
        (why,) = found["findings"]
        assert "the trainer's next call" in why["waits_for"]
        assert "is stopped by a signal" in why["cause"]
        assert f"kill -CONT {trainer.pid}" in why["fix"]
        assert "rl-plane complete the-update" in why["fix"]
        os.kill(trainer.pid, signal.SIGCONT)
        assert (await operator.run("abort", "the-update"))[0] == 0
        ended = await operator.explain("the-upd")
        assert "is aborted" in ended["now"]
        assert "aborted by an operator" in ended["findings"][0]["cause"]
        assert any(line.split(" ", 1)[1].startswith("update the-update (step_1) began") for line in ended["past"])
    finally:
        trainer.kill()
        trainer.communicate()
    await operator.run("pause", "--lease-s", "300")
    (why,) = [each for each in (await operator.explain())["findings"] if each["kind"] == "pause"]
    assert why["until"].startswith("in 5 min")
    assert f":{os.getpid()} at 127.0.0.1" in why["cause"], "the process that asked"
    await operator.run("resume")
    await operator.run("disable", one.instance_id)
    (why,) = (await operator.explain(one.instance_id))["findings"]
    assert (why["cause"].rpartition(": ")[2], why["fix"]) == ("disabled", f"`rl-plane enable {one.instance_id}`")
    code, reply = await operator.run("ready")
    assert (code, [each["subject"] for each in reply["reasons"]]) == (1, [one.instance_id])


async def test_a_worker_whose_weights_are_gone_says_which(plane: Plane, operator: Operator) -> None:
    first = await asyncio.to_thread(plane.spawn)
    model = plane.model(1)
    body = {"transport": {"backend": "filesystem", "path": str(model)}, "version": "step_1"}
    async with plain_client(base_url=f"{operator.url}/v1/rl/", timeout=BOUND_S) as rl:
        assert (await rl.post("update_weights", json=body)).status_code == 200
    shutil.rmtree(model)
    first.kill()  # else the second worker would fetch the version from the first one
    second = await asyncio.to_thread(plane.spawn, ready=False)

    async def is_behind() -> dict[str, Any] | None:
        found = (await operator.explain())["findings"]
        mine = [each for each in found if each["subject"] == second.instance_id and "behind: " in each["cause"]]
        return mine[0] if mine else None

    why = await plane.until(is_behind)
    assert "seed1" in why["cause"]
    assert "bring the files back" in why["fix"]


async def test_a_running_request_is_explained(plane: Plane, operator: Operator) -> None:
    worker = await asyncio.to_thread(plane.spawn, token_delay_s=0.05)
    assert (await operator.run("ready", "--wait", "20", "--expect", "1"))[0] == 0
    async with plain_client(base_url=operator.url, timeout=BOUND_S) as rl:
        about = (await rl.get("/v1/rl/about")).json()
        assert about["nats"]["connected"]
        assert about["key"] == {"id": "", "role": "admin"}
        generate = asyncio.create_task(
            rl.post(
                f"{operator.http_url}/v1/completions",
                json={"prompt_token_ids": [5, 6], "max_tokens": 4000},
                headers={"X-Request-Id": "rollout 7"},
            )
        )

        async def runs() -> dict[str, Any] | None:
            rows = (await rl.get("/v1/rl/requests")).json()["requests"]
            return rows[0] if rows and rows[0]["tokens"] else None

        row = await plane.until(runs)
        assert row["worker"] == worker.instance_id
        found = await operator.explain(row["id"][:12])
        assert (found["kind"], found["id"]) == ("request", row["id"])
        assert f"is on worker {worker.instance_id}" in found["findings"][0]["cause"]
        assert row["names"] == ["rollout 7"]
        assert (await operator.explain("rollout 7"))["id"] == row["id"]
        assert (await rl.post("/v1/rl/abort_requests")).status_code == 200
        assert (await generate).status_code == 200
        assert (await rl.get("/v1/rl/requests")).json() == {"status": "ok", "requests": [], "count": 0}
        refused = await rl.get("/v1/rl/requests?worker=x")
        assert (refused.status_code, refused.json()["error"]["field"]) == (400, "worker")


async def test_an_unknown_id_says_what_was_searched(
    plane: Plane, operator: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    await asyncio.to_thread(plane.spawn)
    code, reply = await operator.run("explain", "nothing-like-it")
    assert code == 1
    assert "searched: 1 workers" in reply["error"]["message"]
    assert "rl-plane workers" in reply["error"]["fix"]
