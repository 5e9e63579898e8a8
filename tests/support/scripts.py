"""Runs scripts as a user does, by a Python of their own, and as several ranks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.free_port import free_port
from tests.support.paths import ROOT
from tests.support.zygote import Forked, fork_module


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


def told_by_ranks(ranks: int, module: str, *args: str, timeout_s: float, **environ: str) -> list[dict[str, Any]]:
    """Runs a module on several ranks, each with the environment that torchrun gives it. Returns the lines of JSON that
    the ranks print."""
    port = str(free_port())
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    give_up = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in map(str, range(ranks)):
            env = {**os.environ, "OMP_NUM_THREADS": "1", **environ, **common, "RANK": rank, "LOCAL_RANK": rank}
            process = fork_module("trainer", module, args, env=env, stderr_pipe=True, text=True)
            processes.append(process)
            stack.callback(process.kill)

        def ended(process: Forked) -> tuple[str, str]:
            try:
                printed, errors = process.communicate(timeout=give_up - time.monotonic())
            except subprocess.TimeoutExpired:
                process.kill()
                printed, errors = process.communicate()
            if process.returncode:
                for other in processes:  # it would wait for this one
                    other.kill()
            return printed, errors

        with ThreadPoolExecutor(ranks) as readers:
            outputs = list(readers.map(ended, processes))
    failed = [errors[-3000:] for (_, errors), one in zip(outputs, processes, strict=True) if one.returncode]
    assert not failed, "\n".join(failed)
    return [json.loads(line) for printed, _ in outputs for line in printed.splitlines() if line.startswith('{"')]
