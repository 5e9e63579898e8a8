"""An engine that is installed from a package of its own passes the conformance suite and serves in a fleet."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from blake3 import blake3

from tests.support.fleet_updates import update_of
from tests.support.frontend_process import frontend
from tests.support.packages import install
from tests.support.paths import ROOT
from worker.engines.fake.adapter import make_fake_model

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PACKAGE = ROOT / "examples" / "echo_engine"
JOIN_S = 60.0
CONTRACT_S = 120.0
PROMPT = [5, 6, 7]

CONTRACT = """
import asyncio, sys
from pathlib import Path
from importlib.metadata import entry_points
from worker.engines.base import EngineOptions
from worker.testing.engine_contract import check_engine

(point,) = [one for one in entry_points(group="rl_plane.engines") if one.name == "echo"]
asyncio.run(check_engine(point.load(), EngineOptions(Path(sys.argv[1])), Path(sys.argv[2])))
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that find the package."""
    install(PACKAGE, tmp_path / "package")
    path = [str(tmp_path / "package" / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def shifted(model: Path, prompt: list[int], count: int) -> list[int]:
    """The tokens that the engine makes by these weights."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "numpy") as file:
        data = b"".join(file.get_tensor(name).tobytes() for name in sorted(file.keys()))
    shifts = blake3(data).digest()
    return [(prompt[at % len(prompt)] + shifts[at % len(shifts)]) % 256 for at in range(count)]


def test_the_installed_engine_passes_the_conformance_suite(installed: dict[str, str], tmp_path: Path) -> None:
    models = [str(make_fake_model(tmp_path / f"model{seed}", seed)) for seed in (1, 2)]
    command = [sys.executable, "-c", CONTRACT, *models]
    done = subprocess.run(
        command, env=installed, capture_output=True, text=True, timeout=CONTRACT_S, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def start_worker(plane: Plane, model: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rl_plane.cli.main", "worker", "--engine", "echo", "--model", str(model)]
    command += ["--nats-url", plane.url, "--namespace", plane.namespace, "--component", plane.component]
    command += ["--weight-root", str(model.parent)]
    with (plane.tmp / "echo.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


async def test_the_installed_engine_serves_in_a_fleet(plane: Plane, installed: dict[str, str]) -> None:
    first, second = plane.model(1), plane.model(2)
    worker = start_worker(plane, first, installed)
    try:
        fleet = await plane.fleet()

        async def joined() -> bool:
            assert worker.poll() is None, (plane.tmp / "echo.log").read_text()
            return len((await fleet.run("workers"))["workers"]) == 1

        await plane.until(joined, JOIN_S)
        (row,) = (await fleet.run("describe"))["workers"]
        assert row["engine"] == "echo"
        assert {"score", "tokenize", "check_weights", "release_memory"} <= row["lacks"].keys()
        async with frontend(plane) as http:

            async def made() -> tuple[list[int], str]:
                body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True}
                reply = await http.post("/v1/completions", json=body)
                assert reply.status_code == 200, reply.text
                (choice,) = reply.json()["choices"]
                return choice["token_ids"], choice["weight_versions"][0]["version"]

            assert (await made())[0] == shifted(first, PROMPT, 5)
            await fleet.run("update_weights", update_of(second, "two"))
            assert await made() == (shifted(second, PROMPT, 5), "two")
    finally:
        worker.terminate()
        await asyncio.to_thread(worker.wait, JOIN_S)
