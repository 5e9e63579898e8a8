"""Rollout records of a real frontend, and their replay by the command."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from frontend.server.options import FrontendOptions
from rl_plane.errors import InvalidRequest
from rl_plane.rollouts.replay import read_records
from tests.conftest import Plane
from tests.support.frontend_here import started
from tests.support.plain_client import plain_client

BOUND_S = 60.0


async def replayed(folder: Path, url: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the answer of `rl-plane replay`."""
    command = [sys.executable, "-m", "rl_plane.cli.main", "replay", str(folder), "--http-url", url, "--json"]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


async def test_completions_are_recorded_and_come_again(plane: Plane, tmp_path: Path) -> None:
    plane.spawn_many(2)
    folder = tmp_path / "records"
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=0, record=folder)
    async with started(options) as urls, plain_client(timeout=BOUND_S) as http:
        rl, generation = urls["rl_url"], urls["http_url"]
        assert (await http.get(f"{rl}/v1/rl/ready", params={"wait_s": BOUND_S})).status_code == 200
        prompt = {"prompt_token_ids": [5, 6, 7], "max_tokens": 12}
        bodies: list[dict[str, Any]] = [
            {**prompt, "temperature": 0, "logprobs": 1},
            {**prompt, "seed": 3, "n": 2},
            {**prompt, "temperature": 0, "stream": True},
            prompt,
        ]
        for body in bodies:
            assert (await http.post(f"{generation}/v1/completions", json=body)).status_code == 200

        async def written(count: int) -> None:
            line = f'rl_plane_records_total{{outcome="written"}} {float(count)}'

            async def told() -> bool:
                return line in (await http.get(f"{rl}/metrics")).text

            await plane.until(told)

        await written(5)
        records = list(read_records(folder))
        first = records[0]
        assert first["prompt_token_ids"] == [5, 6, 7]
        assert len(first["token_ids"]) == len(first["logprobs"]) == 12
        assert first["weight_versions"][0]["sequence"] == 0
        assert first["instance_id"] in {worker.instance_id for worker in plane.spawned}
        assert 0 < first["first_token_s"] <= first["seconds"]
        assert [(one["outcome"], one["finish_reason"]) for one in records] == [("ok", "length")] * 5

        code, found = await replayed(folder, generation)
        verdicts = [one["verdict"] for one in found["replayed"]]
        assert (code, verdicts) == (0, ["equal"] * 4 + ["skipped"])
        assert found["replayed"][0]["largest_difference"] == 0
        assert found["replayed"][0]["tokens"] == 12
        await written(9)  # a replay's own completions are recorded too

        transport = {"backend": "filesystem", "path": str(plane.model(1))}
        assert (await http.post(f"{rl}/v1/rl/update_weights", json={"transport": transport})).status_code == 200
        code, found = await replayed(folder, generation)
        assert (code, found["other_weights"], found["skipped"], found["records"]) == (0, 8, 1, 9)

        with pytest.raises(InvalidRequest, match="another frontend records in"):
            async with started(options):
                pass
    code, found = await replayed(folder, generation)
    assert (code, found["failed"]) == (1, found["records"] - 1)


async def test_an_error_and_an_abort_are_recorded_with_their_tokens(plane: Plane, tmp_path: Path) -> None:
    worker = plane.spawn(token_delay_s=0.05)
    options = FrontendOptions(
        plane.url, plane.namespace, plane.component, rl_port=None, http_port=0, record=tmp_path / "records"
    )
    async with started(options) as urls, plain_client(base_url=urls["http_url"], timeout=BOUND_S) as http:
        body = {"prompt_token_ids": [5, 6, 7], "max_tokens": 1000, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            worker.kill()
            async for _ in lines:
                continue

        def recorded() -> list[dict[str, Any]]:
            try:
                return list(read_records(tmp_path / "records"))
            except InvalidRequest:
                return []  # there is no file yet

        (record,) = await plane.until(recorded)
    assert record["outcome"] == "worker_lost"
    assert record["token_ids"]
