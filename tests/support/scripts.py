"""Runs scripts as a user does, by a Python of their own, and as several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.support.paths import ROOT


def run(*command: str, timeout_s: float, **environ: str) -> str:
    """Runs a Python command to its successful end, and returns its output."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def torchrun(ranks: int) -> tuple[str, ...]:
    """Returns the arguments that start a script on several ranks."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


def told_by_ranks(ranks: int, script: str, *args: str, timeout_s: float, **environ: str) -> list[dict[str, Any]]:
    """Runs a script on several ranks, and returns the lines of JSON that the ranks print."""
    printed = run(*torchrun(ranks), script, *args, timeout_s=timeout_s, **environ)
    return [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]
