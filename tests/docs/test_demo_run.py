"""The main job, for real: a fleet of engines, a trainer, a death and a join."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ENGINES = ("vllm", "sglang")
RL_PLANE = Path(sys.executable).with_name("rl-plane")
RUN_S = 240
"""The bound that the demo promises."""
ENGINE_RUN_S = 630
"""The bound in seconds of a run with an engine that takes long to start. On two cores of its own a run takes about a
minute."""
ENGINE_STEPS = 20
"""The reward rises by 0.2 or more within them, the demo asks for 0.1; it asks for at least 10 steps."""
INTERRUPT_S = 75
"""The bound in seconds of an interrupt. Before the first worker one process imports torch."""


@contextmanager
def demo(cwd: Path, *arguments: str, tmp: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Runs the demo. Its temporary folders go to `tmp`, or to `cwd`/tmp."""
    tmp = tmp or cwd / "tmp"
    tmp.mkdir(exist_ok=True)
    with subprocess.Popen(
        [str(RL_PLANE), "demo", "--out", str(cwd / "out"), *arguments],
        cwd=cwd,
        env={**os.environ, "TMPDIR": str(tmp)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def processes_in(cwd: Path) -> list[str]:
    """The processes that run in the demo's folder, as its own do, or name it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, where = (entry / "cmdline").read_text(), (entry / "cwd").readlink()
        except OSError:
            continue
        if str(cwd) in command or where == cwd:
            found.append(command.replace("\0", " "))
    return found


def left_behind(cwd: Path, tmp: Path | None = None) -> list[str]:
    """Processes, and what is in the temporary folder."""
    return processes_in(cwd) + [path.name for path in (tmp or cwd / "tmp").iterdir()]


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Engines' sockets lie in it. A socket's path may have 107 bytes: pytest's own folder is too deep, and they would
    be put where no test looks for leftovers."""
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        yield Path(folder)


@pytest.mark.timeout(RUN_S + 60)
def test_the_demo_learns_through_a_kill_and_a_join(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        printed, errors = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, printed + errors
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["ok"] is True
    assert report["steps"] == report["planned_steps"] > 20
    assert report["reward_last"] - report["reward_first"] > 0.3 * report["reward_range"]
    assert 0 < report["max_logprob_diff"] < 1e-4
    assert 0 < report["canary_updates"] <= report["steps"]
    assert 0 < report["max_canary_difference"] < 1e-4
    assert 0 <= report["max_mismatch_kl"] < 1e-8
    assert report["completions"] == 64 * report["steps"] == sum(report["completions_by_worker"].values())
    assert report["mixed_version_completions"] == 0
    [killed], [joined] = report["killed"], report["joined"]
    assert report["killed_in_flight"] > 0
    assert report["killed_at_step"] < report["joined_at_step"] <= report["steps"]
    assert joined in report["completions_by_worker"]
    ids = {worker["instance_id"] for worker in report["workers"]}
    assert len(ids) == 2
    assert joined in ids
    assert killed not in ids
    assert {(worker["version"], worker["digest"]) for worker in report["workers"]} == {
        (f"step_{report['steps']}", report["digest"])
    }
    assert 0 < report["update_seconds"]["median"] <= report["update_seconds"]["max"]
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert len([line for line in printed.splitlines() if line.lstrip()[:1].isdigit()]) >= report["steps"]
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("engine", [pytest.param(name, marks=pytest.mark.engines(name)) for name in ENGINES])
@pytest.mark.docs  # of docs/engines.md: two engines and a trainer start, which takes two cores some minutes
@pytest.mark.timeout(ENGINE_RUN_S + 60)
def test_the_demo_learns_with_another_engine(tmp_path: Path, short_tmp: Path, engine: str) -> None:
    with demo(tmp_path, "--engine", engine, "--steps", str(ENGINE_STEPS), tmp=short_tmp) as process:
        printed, errors = process.communicate(timeout=ENGINE_RUN_S)
    assert process.returncode == 0, printed + errors
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["ok"] is True
    assert report["steps"] == ENGINE_STEPS
    assert report["killed_in_flight"] > 0
    assert report["killed_at_step"] < report["joined_at_step"]
    started = [path.read_text() for path in (tmp_path / "out" / "logs").glob("worker-*.out")]
    assert len(started) == 3
    assert all(json.loads(ready)["engine"] == engine for ready in started)
    assert left_behind(tmp_path, short_tmp) == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.docs)])
def test_an_interrupt_clears_everything_away(tmp_path: Path, number: signal.Signals) -> None:
    with demo(tmp_path) as process:
        give_up = time.monotonic() + INTERRUPT_S
        while not list((tmp_path / "out").glob("logs/worker-*.log")):
            assert time.monotonic() < give_up
            time.sleep(0.002)
        process.send_signal(number)
        _, errors = process.communicate(timeout=INTERRUPT_S)
    assert process.returncode == 130, errors
    assert f"interrupted by {number.name}" in errors
    assert left_behind(tmp_path) == []


def test_wrong_arguments_start_nothing(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    for arguments, why in (
        (["--steps", "3"], "at least 10"),
        (["--model", str(tmp_path)], "config.json"),
        ([], "can't write"),
    ):
        with demo(tmp_path, *arguments) as process:
            _, errors = process.communicate(timeout=INTERRUPT_S)
        assert process.returncode in (1, 2)
        assert why in errors
        assert len(errors.strip().splitlines()) == 1
    assert left_behind(tmp_path) == []
