"""`--log-format json`: each line of a worker, of a frontend and of `up` is one JSON object."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_plane.cli import main
from rl_plane.cli.up import log_line
from tests.support.started_command import BACK_S, READY_S, Started, eventually, start
from worker.engines.fake.adapter import make_fake_model

__all__ = ["start"]

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


def lines_of(started: Started) -> list[dict[str, Any]]:
    """The lines that have come so far. Each of them is a JSON object with the four common fields."""
    text = started.errors.read_text()
    lines: list[dict[str, Any]] = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    return lines


def test_each_line_of_the_services_is_an_object_and_a_lost_connection_is_a_warning(
    start: Callable[..., Started], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nats = start("nats", "--port", "0")
    url = nats.line(READY_S, ready="nats")["nats_url"]
    model = make_fake_model(tmp_path / "weights" / "step_1", seed=1)
    common = ("--nats-url", url, "--log-format", "json")
    worker = start("worker", "--engine", "fake", "--weight-root", str(tmp_path / "weights"), *common)
    frontend = start("frontend", "--rl-port", "0", "--http-port", "off", *common)
    worker.line(READY_S, ready="worker")
    rl_url = frontend.line(READY_S, ready="frontend")["rl_url"]
    assert main.run(["update", str(model), "--version", "step_1", "--url", rl_url, "--json"]) == 0
    reply = json.loads(capsys.readouterr().out)

    changes = {line["change"]: line for line in lines_of(frontend) if "change" in line}
    assert changes.keys() == {"began", "committed", "ended"}
    began, committed, ended = (changes[name] for name in ("began", "committed", "ended"))
    assert began["level"] == "info"
    assert len({line["update_id"] for line in changes.values()}) == 1
    assert {line["label"] for line in changes.values()} == {"step_1"}
    assert began["transport"] == "filesystem"
    assert (
        began["message"]
        == f"update {began['update_id']} (step_1) began: by filesystem, asked by {began['caller']}"
    )
    assert committed["sequence"] == reply["version"]["sequence"]
    assert (ended["outcome"], ended["workers"], ended["workers_ok"], ended["error"]) == ("committed", 1, 1, None)
    assert ended["phases"]["commit_s"] > 0
    assert ended["seconds"] > 0

    nats.process.terminate()
    for process in (worker, frontend):

        def warned(process: Started = process) -> bool:
            return any(
                line["level"] == "warning" and "the connection to NATS is lost" in line["message"]
                for line in lines_of(process)
            )

        eventually(warned, BACK_S, "no warning of the lost connection")


def test_up_puts_the_lines_of_its_processes_into_objects(start: Callable[..., Started]) -> None:
    up = start("up", "--engine", "fake", "--rl-port", "0", "--http-port", "off", "--log-format", "json")
    ready = up.line(READY_S, ready="up")
    os.kill(ready["nats_pid"], signal.SIGKILL)

    def warned() -> bool:
        lost = [line for line in lines_of(up) if "the connection to NATS is lost" in line["message"]]
        return {line["process"] for line in lost if line["level"] == "warning"} == {"worker-1", "frontend"}

    eventually(warned, BACK_S, "no warning of the lost connection")


def test_an_error_is_an_object_too(tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-m", "rl_plane.cli.main", "worker", "--engine", "fake", "--log-format", "json"]
    done = subprocess.run(
        [*argv, "--model", str(tmp_path), "--instance-id", "0" * 16, "--copies", "2"],
        capture_output=True,
        text=True,
        timeout=READY_S,
        check=False,
    )
    assert done.returncode == 2
    (line,) = map(json.loads, done.stderr.splitlines())
    assert line["level"] == "error"
    assert line["message"].startswith("rl-plane: error: copies is 2")


def test_a_line_of_a_child_that_is_text_is_put_into_an_object() -> None:
    text = json.loads(log_line("worker-1", b"INFO 09:41 loading \xff"))
    assert (text["process"], text["message"], text["level"]) == ("worker-1", "INFO 09:41 loading �", "info")
    own = {"time": "t", "level": "warning", "logger": "worker", "message": "m"}
    assert json.loads(log_line("worker-1", json.dumps(own).encode())) == {**own, "process": "worker-1"}
    for other in ("3", '{"message": "of an engine"}', "[" * 60_000):
        assert json.loads(log_line("worker-1", other.encode()))["message"] == other
