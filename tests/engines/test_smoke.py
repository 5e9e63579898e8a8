"""The smoke profiles of docker-compose.yml, without containers: the same process against a fleet of real workers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deploy.smoke.updates import KILL_NOW
from frontend.server.options import FrontendOptions
from tests.support.frontend_here import started
from tests.support.hf_fleet import START_S
from tests.support.zygote import fork_module
from worker.testing.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.docs]  # of docs/containers.md: a minute of processor time

SMOKE_S = 150.0
PROFILES = {"sft-file-2w": False, "lora-file": True, "tito-multiturn": True, "sft-group": True}
"""Whether a worker is killed in the middle of its update. A run with a kill has all that a run without one has."""
KEYS = {"RL_PLANE_ADMIN_KEY": "admin", "RL_PLANE_API_KEY": "api"}


def run_smoke(arguments: list[str], log: Path, on_kill: Callable[[], None] | None = None) -> str:
    """Runs `python -m deploy.smoke` to its end, and returns what it prints. `on_kill` answers its wait for a kill."""
    environment = {**os.environ, **KEYS, **({"RL_PLANE_SMOKE_KILL": "1"} if on_kill else {})}
    process = fork_module("hf", "deploy.smoke", arguments, log, env=environment, text=True)
    assert process.stdout is not None
    timer = threading.Timer(SMOKE_S, process.kill)
    timer.start()
    printed = ""
    with process.stdout:
        for line in process.stdout:
            printed += line
            if on_kill is not None and KILL_NOW in line:
                on_kill()
    code = process.wait()
    timer.cancel()
    assert code == 0, printed + log.read_text()
    return printed


@pytest.mark.timeout(600)
async def test_each_profile_ends_well_though_a_worker_is_killed(plane: Plane) -> None:
    weights = plane.tmp / "weights"
    first = make_tiny_model(weights / "model", 0)

    def spawn() -> None:
        plane.spawn(ready=False, engine="hf", model=first)

    def kill_one() -> None:
        """Does what `kill -9` and compose's `restart` policy do."""
        plane.spawned[-1].kill()
        spawn()

    for _ in range(2):
        spawn()
    for one in plane.spawned:
        await asyncio.to_thread(one.wait_ready, START_S)
    options = FrontendOptions(
        plane.url,
        plane.namespace,
        plane.component,
        rl_port=0,
        http_port=0,
        admin_key=KEYS["RL_PLANE_ADMIN_KEY"],
        api_key=KEYS["RL_PLANE_API_KEY"],
    )
    async with started(options) as urls:
        common = ["--rl-url", urls["rl_url"], "--http-url", urls["http_url"], "--weights", str(weights)]
        for profile, killed in PROFILES.items():
            on_kill = kill_one if killed else None
            printed = await asyncio.to_thread(run_smoke, [profile, *common], plane.tmp / f"{profile}.log", on_kill)
            assert "mismatch_kl" in printed
            assert printed.endswith("smoke: passed\n")
            assert ("is dead, 1 of 2 workers are left" in printed) is killed
