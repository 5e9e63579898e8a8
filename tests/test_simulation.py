"""A share of the simulation runs with the tests; `make sim SEEDS=n` runs more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.guards import GUARDS

ROOT = Path(__file__).parent.parent


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.sim", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)


def test_seeds_are_clean() -> None:
    done = simulate("--seeds", "100")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_same_seed_is_the_same_run() -> None:
    one, two = (simulate("--seeds", "2", "--without", "decision") for _ in range(2))
    timeless = [
        line for line in one.stdout.splitlines() if "updates to" not in line
    ]  # it names a temporary folder
    assert timeless == [line for line in two.stdout.splitlines() if "updates to" not in line]


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_the_simulation_finds_the_fault(guard: str) -> None:
    done = simulate("--seeds", "60", "--without", guard)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-2000:]
    assert "again: python -m tests.sim" in done.stdout
