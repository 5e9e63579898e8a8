"""`rl-plane up` and `rl-plane nats` as processes: what they say, what survives, and that nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_plane.bus.connection import Bus
from rl_plane.bus.server import NatsServer
from rl_plane.cli import main
from rl_plane.cli.children import Printer
from rl_plane.cli.output import exit_words
from rl_plane.cli.serve import FRONTEND
from rl_plane.cli.supervisor import MAX_PAUSE_S, SupervisedProcess, Supervisor, pause_before
from rl_plane.cli.up import HERE, Up
from rl_plane.cli.up import SETTINGS as UP_SETTINGS
from rl_plane.errors import BusUnreachable
from rl_plane.protocol.subjects import Subjects
from tests.support.full_disk import full_disk
from tests.support.settings import values_of
from tests.support.started_command import BACK_S, READY_S, Started, eventually, start
from worker import process
from worker.engines.fake.adapter import make_fake_model
from worker.exit_codes import COME_BACK, ENGINE_DEAD
from worker.worker_options import WorkerOptions

__all__ = ["start"]

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

GONE_S = 30.0

if sys.platform != "linux":
    pytest.skip("reads /proc, and relies on PR_SET_PDEATHSIG", allow_module_level=True)


@pytest.fixture
def fleet(start: Callable[..., Started]) -> Callable[..., tuple[Started, dict[str, Any]]]:
    def make(*argv: str, **environ: str) -> tuple[Started, dict[str, Any]]:
        up = start("up", "--engine", "fake", "--rl-port", "0", "--http-port", "0", *argv, **environ)
        return up, up.line(READY_S, ready="up")

    return make


def asked(capsys: pytest.CaptureFixture[str], ready: dict[str, Any], *argv: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main.run([*argv, "--url", ready["rl_url"], "--json"])
    reply: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, reply


def test_a_fleet_is_brought_up_steered_and_ended(
    fleet: Callable[..., tuple[Started, dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "weights"
    new = make_fake_model(root / "step_1", seed=1)
    up, ready = fleet("--workers", "2", "--weight-root", str(root))
    assert [row["name"] for row in ready["workers"]] == ["worker-1", "worker-2"]
    ids = sorted(row["instance_id"] for row in ready["workers"])

    code, state = asked(capsys, ready, "state")
    assert code == 0
    assert state["ready"] is True
    assert [row["instance_id"] for row in state["workers"]] == ids
    code, workers = asked(capsys, ready, "workers")
    assert {row["pid"] for row in workers["workers"]} == {row["pid"] for row in ready["workers"]}

    assert asked(capsys, ready, "pause")[0] == 0
    assert asked(capsys, ready, "state")[1]["pause_state"] == "paused"
    code, updated = asked(capsys, ready, "update", str(new), "--version", "step_1")
    assert code == 0, updated
    assert updated["version"]["label"] == "step_1"
    assert asked(capsys, ready, "state")[1]["pause_state"] == "paused"  # as it was found
    assert asked(capsys, ready, "resume")[0] == 0
    code, state = asked(capsys, ready, "state")
    assert (state["pause_state"], state["applied_weight_version"]) == ("running", "step_1")

    code, refused = asked(capsys, ready, "update", str(tmp_path))
    assert code == 1
    assert refused["error"]["code"] == "invalid_request"
    assert asked(capsys, ready, "disable", ids[0])[0] == 0
    assert asked(capsys, ready, "enable", ids[0])[0] == 0
    assert asked(capsys, ready, "check")[0] == 0
    # The same over NATS, with the same reply.
    code, state = asked(capsys, ready, "state", "--nats-url", ready["nats_url"])
    assert state["applied_weight_version"] == "step_1"

    assert len(up.marked()) == 5  # up, nats-server, two workers, the frontend
    up.process.terminate()
    up.line(event="ended")
    assert up.process.wait(GONE_S) == 0
    assert up.marked() == set()


def test_a_file_of_engine_arguments_is_of_every_worker(
    fleet: Callable[..., tuple[Started, dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "engine.yaml").write_text("vocab-size: 300\nmax-model-len: 100\n")
    _, ready = fleet("--workers", "2", "--engine-args-file", "engine.yaml", "--engine-arg", "max_model_len=200")
    with urllib.request.urlopen(f"{ready['rl_url']}/v1/rl/describe", timeout=GONE_S) as reply:
        rows = json.load(reply)["workers"]
    assert [(row["vocab_size"], row["max_model_len"]) for row in rows] == [(300, 200)] * 2


def test_a_bad_file_of_engine_arguments_ends_it(start: Callable[..., Started], tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("speed: 3\n")
    up = start(
        "up", "--engine", "fake", "--rl-port", "0", "--http-port", "0", RL_PLANE_ENGINE_ARGS_FILE="engine.yaml"
    )
    assert up.process.wait(READY_S) == 1
    assert f"{tmp_path / 'engine.yaml'}: the engine has no argument 'speed'" in up.errors.read_text()
    assert up.marked() == set()


def test_up_restarts_each_process_that_dies(
    fleet: Callable[..., tuple[Started, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    up, ready = fleet("--workers", "2", "--restart")
    victim = ready["workers"][0]
    os.kill(victim["pid"], signal.SIGKILL)
    died = up.line(event="died", name="worker-1")
    assert died["exit_code"] == -signal.SIGKILL
    back = up.line(event="back", name="worker-1")
    assert back["instance_ids"] == [victim["instance_id"]]

    def is_told() -> bool:
        left = asked(capsys, ready, "workers")[1].get("left") or ()
        return [(one["pid"], one["exit_code"]) for one in left] == [(victim["pid"], -signal.SIGKILL)]

    eventually(is_told, BACK_S, "the exit code of the killed worker is not listed")
    assert back["pid"] != victim["pid"]

    def all_ready() -> bool:
        code, state = asked(capsys, ready, "state")
        return code == 0 and state["ready"] is True and len(state["workers"]) == 2

    eventually(all_ready, BACK_S, "the restarted worker is not ready")

    os.kill(ready["nats_pid"], signal.SIGKILL)
    up.line(event="back", name="nats")
    eventually(all_ready, BACK_S, "the fleet is not there after the restart of nats-server")

    os.kill(ready["frontend_pid"], signal.SIGKILL)
    assert up.line(event="back", name="frontend")["rl_url"] == ready["rl_url"]
    eventually(all_ready, BACK_S, "the facade is not there after its restart")

    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(GONE_S) == 0
    assert up.marked() == set()


def test_the_death_of_a_worker_ends_no_other_and_a_killed_up_leaves_no_process(
    fleet: Callable[..., tuple[Started, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    up, ready = fleet("--workers", "2", RL_PLANE_ADMIN_KEY="geheim")
    for pid in up.marked():
        assert b"geheim" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    os.kill(ready["workers"][1]["pid"], signal.SIGKILL)
    assert up.line(event="died", name="worker-2")["restart"] is False
    assert asked(capsys, ready, "state")[1]["error"]["code"] == "unauthorized"

    def one_left() -> bool:
        state = asked(capsys, ready, "state", "--admin-key", "geheim")[1]
        return [row["instance_id"] for row in state["workers"]] == [ready["workers"][0]["instance_id"]]

    eventually(one_left, BACK_S, "the dead worker is still listed")
    up.process.kill()
    up.process.wait()
    eventually(lambda: up.marked() == set(), GONE_S, "a child has outlived its parent")


def test_a_second_signal_kills_at_once(fleet: Callable[..., tuple[Started, dict[str, Any]]]) -> None:
    up, ready = fleet("--drain-s", "600")
    os.kill(ready["workers"][0]["pid"], signal.SIGSTOP)  # it can't drain
    up.process.send_signal(signal.SIGINT)
    up.line(event="ending")
    up.process.send_signal(signal.SIGINT)
    up.process.wait(GONE_S)
    assert up.marked() == set()


FIRST = """
import json, sys, time
from pathlib import Path
if not Path(sys.argv[1]).exists():
    Path(sys.argv[1]).touch()
    sys.exit(int(sys.argv[2]))
print(json.dumps({"ready": "worker"}), flush=True)
time.sleep(600)
"""
"""A process that ends so the first time, before it is ready."""


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize(("code", "restart_helps"), [*((code, True) for code in COME_BACK), (1, False)])
async def test_an_engine_that_fails_at_the_first_start_is_started_again(
    tmp_path: Path, code: int, restart_helps: bool, restart: bool
) -> None:
    printer = Printer()
    supervisor = Supervisor(
        printer, lambda words, **facts: None, lambda name, line, fd: None, lambda restarts: 0.0
    )
    argv = [sys.executable, "-c", FIRST, str(tmp_path / "was here"), str(code)]
    kept = SupervisedProcess("worker-1", argv, dict(os.environ), restart=restart)
    supervisor.supervise(kept)
    over = [asyncio.create_task(event.wait()) for event in (kept.ready, supervisor.end)]
    try:
        await asyncio.wait(over, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
        assert kept.ready.is_set() is (restart_helps and restart)
        assert (supervisor.failed is None) is (restart_helps and restart)
    finally:
        for task in over:
            task.cancel()
        await supervisor.stop([([kept.name], GONE_S)])
        printer.flush()


def test_a_liveness_time_out_is_the_workers_as_the_frontends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_fake_model(tmp_path / "m", 0)
    values = values_of(UP_SETTINGS, [f"--model={model}", "--liveness-timeout-s=20"])
    up = Up(values | {"engines": ["fake"]})
    own = {**values, "engine": "fake", "instance_id": "0" * 16, "copies": 1}
    argv = up._process("worker-1", "worker", own, HERE, False).argv
    assert "--liveness-timeout-s=20.0" in up._process("frontend", "frontend", values, FRONTEND, True).argv
    told: list[WorkerOptions] = []

    def run(options: WorkerOptions, ready: object) -> int:
        told.append(options)
        return 0

    monkeypatch.setattr(process, "run", run)
    assert main.run(argv[argv.index("worker") :]) == 0
    assert told[0].liveness_timeout_s == 20.0
    up.printer.flush()


FIRST_DIES = """
import sys
from pathlib import Path
import worker.engines.fake.adapter as fake
from rl_plane.cli.main import run
from rl_plane.errors import EngineDied
async def start(self):
    if not Path(sys.argv[1]).exists():
        Path(sys.argv[1]).touch()
        raise EngineDied("as it started")
    return await really(self)
really, fake.FakeEngine.start = fake.FakeEngine.start, start
sys.exit(run(sys.argv[2:]))
"""


async def test_a_worker_is_restarted_if_its_engine_dies_at_its_first_start(
    nats: NatsServer, tmp_path: Path
) -> None:
    printer, died = Printer(), []
    supervisor = Supervisor(
        printer,
        lambda words, **facts: died.append(facts["exit_code"]),
        lambda name, line, fd: None,
        lambda restarts: 0.0,
    )
    argv = [sys.executable, "-P", "-c", FIRST_DIES, str(tmp_path / "was here"), "worker", "--engine", "fake"]
    argv += ["--model", str(make_fake_model(tmp_path / "model", 0)), "--nats-url", nats.url, "--json"]
    supervisor.supervise(SupervisedProcess("worker-1", argv, dict(os.environ), restart=True))
    over = [
        asyncio.create_task(event.wait()) for event in (supervisor.processes["worker-1"].ready, supervisor.end)
    ]
    try:
        await asyncio.wait(over, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
        assert supervisor.failed is None
        assert supervisor.processes["worker-1"].ready.is_set()
        assert died == [ENGINE_DEAD]
    finally:
        for task in over:
            task.cancel()
        await supervisor.stop([(["worker-1"], GONE_S)])
        printer.flush()


def test_a_process_that_can_not_start_ends_up_with_the_reason(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    up = start("up", "--engine", "fake", "--model", "empty", "--rl-port", "0", "--http-port", "off")
    error = up.line(READY_S, status="error")["error"]
    assert "worker-1" in error["message"]
    assert "before it was ready" in error["message"]
    assert up.process.wait(GONE_S) == 1
    assert up.marked() == set()
    lines = up.errors.read_text().splitlines()
    assert any(line.startswith("worker-1 | rl-plane: error: ") for line in lines)
    assert lines[-1].startswith("rl-plane: error: worker-1 ")


def test_the_command_nats_serves_until_it_or_its_server_ends(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    nats = start("nats", "--port", "0", "--store", str(tmp_path / "store"))
    ready = nats.line(READY_S, ready="nats")
    assert ready["nats_url"].startswith("nats://127.0.0.1:")
    nats.process.terminate()
    assert nats.process.wait(GONE_S) == 0
    assert nats.marked() == set()
    assert (tmp_path / "store").is_dir()

    nats = start("nats", "--port", "0")
    os.kill(nats.line(READY_S, ready="nats")["pid"], signal.SIGKILL)
    assert nats.process.wait(GONE_S) == 1
    assert "nats-server ended with exit code -9" in nats.errors.read_text()


def test_the_command_nats_says_that_the_disk_was_full_and_restarts_its_server(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    nats = start("nats", "--port", "0", "--store", str(tmp_path / "store"))
    ready = nats.line(READY_S, ready="nats")
    state = Subjects("demo", "engine").state

    async def write() -> None:
        bus = await Bus.connect(ready["nats_url"])
        try:
            await bus.ensure_bucket(state)
            await bus.put(state, "lock", b"x" * 5000)
        finally:
            await bus.close()

    asyncio.run(write())
    with full_disk(ready["pid"]), pytest.raises(BusUnreachable):
        asyncio.run(write())
    with pytest.raises(BusUnreachable):  # there is room again
        asyncio.run(write())

    def restarted() -> bool:
        return "nats-server starts again" in nats.errors.read_text()

    eventually(restarted, BACK_S, "nats-server was not restarted")
    asyncio.run(write())
    assert "failed to store a msg" in nats.errors.read_text()


def test_pauses_grow_and_are_bounded() -> None:
    pauses = [pause_before(number) for number in range(100)]
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.2
    assert pauses[-1] == MAX_PAUSE_S
    assert (exit_words(-9), exit_words(3), exit_words(-250)) == ("SIGKILL", "exit code 3", "signal 250")
