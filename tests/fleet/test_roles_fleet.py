"""A whole fleet by `rl-plane up --keys`: every process has its own role's key, and everything works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rl_plane.bus.credentials import NatsCredentials
from rl_plane.bus.key_folder import KeyFolder
from rl_plane.cli import main
from rl_plane.errors import PermissionDenied, Unauthorized, Unavailable
from rl_plane.publish import WeightPublisher
from rl_plane.sync import SyncRlClient
from tests.support.paths import ROOT
from tests.support.range_server import RangeServer
from tests.support.started_command import BACK_S, READY_S, Started, eventually
from worker.engines.fake.adapter import make_fake_model
from worker.receive.staging import model_digest

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

if sys.platform != "linux":
    pytest.skip("reads /proc, and relies on PR_SET_PDEATHSIG", allow_module_level=True)

LARGE = 1 << 18
"""Bytes of each tensor: more than the first request of a file brings."""


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    folder.init("demo", ["engine"])
    return folder


@pytest.fixture
def up(tmp_path: Path, folder: KeyFolder) -> Iterator[tuple[Started, dict[str, Any]]]:
    (tmp_path / "weights").mkdir()
    argv = ["--keys", str(folder.path), "--weight-root", str(tmp_path / "weights"), "--workers", "2", "--restart"]
    argv += ["--store", str(tmp_path / "store"), "--rl-port", "0", "--http-port", "0"]
    started = Started(tmp_path, "up", "--engine", "fake", *argv, RL_PLANE_ADMIN_KEY="admin-geheim")
    try:
        yield started, started.line(READY_S, ready="up")
    finally:
        started.end()


def client(ready: dict[str, Any], folder: KeyFolder, role: str) -> SyncRlClient:
    return SyncRlClient.connect(ready["nats_url"], credentials=NatsCredentials(nkey=folder.seed_of(role)))


def serving(fleet: SyncRlClient, label: str, count: int = 2) -> Callable[[], bool]:
    def check() -> bool:
        workers = fleet.run("state", {"min_workers": 0})["workers"]
        return len(workers) == count and all(
            row["status"] == "ok" and row["admission"]["open"] and row["applied_weight_version"] == label
            for row in workers
        )

    return check


def generate(ready: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps({"prompt_token_ids": [5, 6, 7], "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"{ready['http_url']}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=BACK_S) as response:
        reply: dict[str, Any] = json.loads(response.read())
    return reply


def test_a_fleet_with_roles_does_everything(
    up: tuple[Started, dict[str, Any]],
    folder: KeyFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started, ready = up
    trainer_key = NatsCredentials(nkey=folder.seed_of("trainer"))
    with client(ready, folder, "service") as service, client(ready, folder, "trainer") as trainer:
        eventually(serving(service, "initial"), READY_S, "sequence 0 is not served")
        assert generate(ready)["choices"]

        # A trainer publishes by three transports.
        for seed, transport in enumerate(("filesystem", "object_store", "gloo"), 1):
            model = make_fake_model(tmp_path / f"step_{seed}", seed=seed)
            root = tmp_path / "weights" / "published" if transport == "filesystem" else None
            with WeightPublisher(
                model, ready["nats_url"], transport=transport, root=root, workers=2, credentials=trainer_key
            ) as publisher:
                reply = publisher.publish(f"step_{seed}").result()
            assert reply["version"]["digest"] == model_digest(model), transport
            eventually(serving(service, f"step_{seed}"), BACK_S, transport)
            assert generate(ready)["choices"]

        # It steers, and a service can't.
        assert trainer.run("pause", {})["status"] == "ok"
        with pytest.raises(PermissionDenied, match=r"service may not publish to .*lock"):
            service.run("resume", {})
        assert trainer.run("resume", {})["status"] == "ok"

        # A killed worker heals, from an object that outlives its publisher.
        last = make_fake_model(tmp_path / "step_4", seed=4)
        argv = ["publish", str(last), "--transport", "object_store", "--version", "step_4"]
        keys = ["--nats-url", ready["nats_url"], "--nats-nkey", str(folder.seed_of("trainer"))]
        assert main.run([*argv, *keys]) == 0, capsys.readouterr().err
        killed = ready["workers"][0]
        os.kill(killed["pid"], signal.SIGKILL)
        started.line(READY_S, event="back", name=killed["name"])
        eventually(serving(service, "step_4"), READY_S, "the worker has not healed")

        # So does the whole fleet after nats-server and the frontend are killed.
        os.kill(ready["nats_pid"], signal.SIGKILL)
        started.line(READY_S, event="back", name="nats")
        os.kill(ready["frontend_pid"], signal.SIGKILL)
        started.line(READY_S, event="back", name="frontend")
        eventually(serving(service, "step_4"), READY_S, "the fleet has not recovered")
        assert generate(ready)["choices"]


def test_an_update_commits_while_nats_reads_its_keys_again(tmp_path: Path, folder: KeyFolder) -> None:
    """NATS forgets then who may answer: the worker's answer to what it was asked before is refused."""
    weights = tmp_path / "weights"
    model = make_fake_model(weights / "new", seed=1, tensors=4, nbytes=LARGE)
    served = make_fake_model(tmp_path / "served", seed=0, tensors=4, nbytes=LARGE)
    server = RangeServer(weights)
    argv = ["--keys", str(folder.path), "--model", str(served), "--weight-url", server.url]
    argv += ["--store", str(tmp_path / "store"), "--rl-port", "0", "--http-port", "0"]
    started = Started(tmp_path, "up", "--engine", "fake", *argv)
    try:
        ready = started.line(READY_S, ready="up")
        server.behaviour.hold_after = LARGE
        with client(ready, folder, "trainer") as trainer, ThreadPoolExecutor() as pool:
            eventually(serving(trainer, "initial", 1), READY_S, "sequence 0 is not served")
            body = {
                "transport": {"backend": "http", "url": f"{server.url}/{model.name}"},
                "policy": {"prepare_timeout_s": BACK_S},
            }
            update = pool.submit(trainer.run, "update_weights", body)
            assert server.behaviour.held.wait(BACK_S)
            added = folder.add("trainer", "run-7")
            os.kill(ready["nats_pid"], signal.SIGHUP)
            eventually(lambda: knows(ready, folder, added.name), BACK_S, "NATS has not read the new key")
            server.behaviour.go.set()
            assert update.result(READY_S)["version"]["digest"] == model_digest(model)
    finally:
        started.end()
        server.close()


def knows(ready: dict[str, Any], folder: KeyFolder, name: str) -> bool:
    try:
        client(ready, folder, name).close()
    except (Unauthorized, Unavailable):  # NATS may also forget a connection that comes while it reads its keys
        return False
    return True


def test_the_health_check_of_a_container_takes_a_key_of_its_own(
    up: tuple[Started, dict[str, Any]], folder: KeyFolder
) -> None:
    _, ready = up

    def check(role: str | None) -> tuple[int, str]:
        env = {"PATH": os.environ["PATH"], "RL_PLANE_NATS_URL": ready["nats_url"]}
        if role is not None:
            env["RL_PLANE_HEALTH_NATS_NKEY"] = str(folder.seed_of(role))
        argv = [sys.executable, str(ROOT / "deploy" / "worker_health.py")]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=BACK_S)
        return done.returncode, done.stdout.strip()

    assert check("service") == (0, "ok")
    code, reason = check(None)
    assert (code, "wants a key" in reason) == (1, True), reason


def test_no_secret_is_in_a_command_line_or_in_an_environment_that_does_not_need_it(
    up: tuple[Started, dict[str, Any]], folder: KeyFolder
) -> None:
    started, ready = up
    seeds = [
        line
        for file in folder.path.glob("*.nk")
        for line in file.read_text().splitlines()
        if line.startswith("SU")
    ]
    assert seeds
    may_have_key = {started.process.pid, ready["frontend_pid"]}
    pids = started.marked()
    assert {ready["nats_pid"], *(row["pid"] for row in ready["workers"])} <= pids
    for pid in pids:
        argv, env = (Path(f"/proc/{pid}/{what}").read_text(errors="replace") for what in ("cmdline", "environ"))
        assert not [seed for seed in seeds if seed in argv + env]
        assert "admin-geheim" not in argv
        assert "admin-geheim" not in env or pid in may_have_key


def test_a_password_in_the_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["state", "--nats-url", "nats://user:geheim@127.0.0.1:4222"]) == 2
    error = capsys.readouterr().err
    assert "RL_PLANE_NATS_URL" in error
    assert "geheim" not in error
