"""One worker of three can't read the new weights: an operator's calls by curl, against real processes."""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_plane._util.processes import die_with_parent
from rl_plane.cli.children import python
from worker.engines.fake.adapter import fake_token, make_fake_model
from worker.receive.staging import model_digest

pytestmark = pytest.mark.slow

START_S = 60.0
STOP_S = 60.0
"""A worker ends within 30 s of SIGTERM."""
CURL_S = 70.0
HEAL_S = 60
"""A worker that can't heal tries again at least every 30 s."""

BAD = "bad0bad0bad0bad0"
GOOD = ["600d600d600d6001", "600d600d600d6002"]
PROMPT = [5, 6, 7]


class Curl:
    """Runs the commands that the docs give, against this fleet."""

    def __init__(self, rl_url: str, http_url: str, cwd: Path) -> None:
        self._urls = {"localhost:8002": rl_url.rstrip("/"), "localhost:8000": http_url.rstrip("/")}
        self._cwd = cwd

    def __call__(self, command: str) -> tuple[int, dict[str, Any]]:
        """The HTTP status and the reply."""
        for shown, url in self._urls.items():
            command = command.replace(shown, url)
        command = command.replace("curl -s", r"curl -s -w '\n%{http_code}'")
        argv = ["bash", "-e", "-o", "pipefail", "-c", command]
        done = subprocess.run(argv, cwd=self._cwd, capture_output=True, text=True, timeout=CURL_S, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        body, status = done.stdout.rsplit("\n", 1)
        return int(status), json.loads(body)


@pytest.fixture
def curl(tmp_path: Path) -> Iterator[Curl]:
    """The bad worker's weight root is a symlink, which leads elsewhere than the others'."""
    model = make_fake_model(tmp_path / "model", 0)
    make_fake_model(tmp_path / "checkpoints" / "step_1", 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mount").symlink_to("elsewhere")
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        with (tmp_path / f"{len(started)}.log").open("w") as log:
            argv = python("rl_plane.cli.main", *arguments, "--json")
            started.append(
                subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=die_with_parent())
            )
        return started[-1]

    def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], START_S)[0], "no ready line"
        facts: dict[str, Any] = json.loads(process.stdout.readline())
        return facts

    try:
        bus = ("--nats-url", ready(start("nats", "--port", "0"))["nats_url"])
        fleet = [start("frontend", *bus, "--rl-port", "0", "--http-port", "0")]
        for instance_id, root in [(BAD, "mount"), *((key, "checkpoints") for key in GOOD)]:
            own = ("--engine", "fake", "--model", str(model), "--instance-id", instance_id)
            fleet.append(start("worker", *bus, *own, "--weight-root", str(tmp_path / root)))
        facts = [ready(process) for process in fleet]
        yield Curl(facts[0]["rl_url"], facts[0]["http_url"], tmp_path)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            process.communicate(timeout=STOP_S)


def rows(reply: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["instance_id"]: row for row in reply["workers"]}


def generate(curl: Curl, instance_id: str) -> tuple[int, dict[str, Any]]:
    return curl(
        "curl -s localhost:8000/v1/completions -d '"
        + json.dumps(
            {
                "prompt_token_ids": PROMPT,
                "max_tokens": 4,
                "return_token_ids": True,
                "nvext": {"instance_id": instance_id},
            }
        )
        + "'"
    )


def check_serves(curl: Curl, instance_id: str, digest: str) -> None:
    status, reply = generate(curl, instance_id)
    assert status == 200, reply
    choice = reply["choices"][0]
    assert choice["token_ids"] == [fake_token(digest, PROMPT, position) for position in range(4)]
    assert [span["digest"] for span in choice["weight_versions"]] == [digest]


def test_a_worker_that_can_not_read_weights_aborts_or_is_excluded(curl: Curl, tmp_path: Path) -> None:
    first, second = model_digest(tmp_path / "model"), model_digest(tmp_path / "checkpoints" / "step_1")
    status, reply = curl("curl -s 'localhost:8002/v1/rl/ready?min_workers=3&wait_s=30'")
    assert status == 200, reply

    # All or none: no worker changes, even if it could.
    status, reply = curl(
        """curl -s localhost:8002/v1/rl/update_weights -d '{
          "transport": {"backend": "filesystem", "path": "'"$PWD"'/checkpoints/step_1"},
          "version": "step_1"}'"""
    )
    assert status in (400, 409), reply
    assert rows(reply).keys() == {BAD, *GOOD}
    assert "outside the weight roots" in rows(reply)[BAD]["error"]["message"]
    for instance_id in GOOD:  # it was ready, or got the order to stop
        assert rows(reply)[instance_id].get("error", {}).get("code") in (None, "update_aborted")
    status, state = curl("curl -s localhost:8002/v1/rl/state")
    assert status == 200
    assert state["ready"] is True
    assert state["version"]["sequence"] == 0
    for row in state["workers"]:
        assert (row["version"]["sequence"], row["staged"], row["pause_state"]) == (0, None, "running")
        check_serves(curl, row["instance_id"], first)
    status, history = curl("curl -s localhost:8002/v1/rl/updates")
    assert [entry["outcome"] for entry in history["updates"] if entry["label"] == "step_1"] == ["aborted"]

    # Without it: the others continue, and it is closed until it can follow.
    status, reply = curl(
        """curl -s localhost:8002/v1/rl/update_weights -d '{
          "transport": {"backend": "filesystem", "path": "'"$PWD"'/checkpoints/step_1"},
          "version": "step_1",
          "policy": {"on_prepare_failure": "exclude", "min_ready": 2}}'"""
    )
    assert status == 200, reply
    assert reply["excluded"] == [BAD]
    version = reply["version"]
    assert (version["sequence"], version["label"], version["digest"]) == (1, "step_1", second)
    for instance_id in GOOD:
        check_serves(curl, instance_id, second)
    status, state = curl("curl -s localhost:8002/v1/rl/state")
    admission = rows(state)[BAD]["admission"]
    assert admission["open"] is False
    assert any("outside the weight roots" in reason for reason in admission["reasons"]), admission
    assert (state["ready"], state["version"]) == (False, version)
    status, reply = generate(curl, BAD)
    assert status == 503, reply
    status, reply = curl("curl -s 'localhost:8002/v1/rl/ready?min_workers=2'")
    assert status == 200, reply

    # The cause is removed; no call announces it.
    status, reply = curl(
        f"""ln -sfn checkpoints mount
        curl -s 'localhost:8002/v1/rl/ready?min_workers=3&wait_s={HEAL_S}'"""
    )
    assert status == 200, reply
    status, state = curl("curl -s localhost:8002/v1/rl/state")
    assert state["ready"] is True
    assert [row["version"] for row in state["workers"]] == [version] * 3
    check_serves(curl, BAD, second)
