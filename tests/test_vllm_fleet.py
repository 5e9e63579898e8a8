"""A fleet of one `vllm` worker, in a process of its own: what only a process can show."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

pytest.importorskip("torch")

from rl_plane.errors import PlaneError
from tests.test_frontend_generation import frontend
from tests.test_hf_fleet import HEAL_S, proven
from tests.test_plane_update import all_serve, update_of
from worker.exit_codes import ENGINE_DEAD
from worker.tiny_model import make_witness_model

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

pytestmark = [pytest.mark.engines("vllm"), pytest.mark.timeout(600)]

START_S = 180.0


def base(plane: Plane, seed: int) -> Path:
    return make_witness_model(plane.tmp / "weights" / f"witness{seed}", seed, dtype="bfloat16")


async def start(plane: Plane, **options: Any) -> tuple[Spawned, list[psutil.Process]]:
    """A worker, and the processes of its engine."""
    engine_args: dict[str, Any] = {"kv_cache_memory_bytes": 32 << 20, "max_model_len": 512}
    worker = plane.spawn(ready=False, engine="vllm", model=base(plane, 1), **engine_args, **options)
    await asyncio.to_thread(worker.wait_ready, START_S)
    return worker, psutil.Process(worker.process.pid).children(recursive=True)


async def test_a_worker_with_processes(plane: Plane) -> None:
    client = await plane.client()
    worker, family = await start(plane)
    ids = [worker.instance_id]
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        await proven(http, ids, 1)
        await client.run("update_weights", update_of(base(plane, 2), "two"))
        await proven(http, ids, 2)
        body = {**update_of(base(plane, 4), "four", staging="none"), "digest": "blake3:" + "0" * 64}
        with pytest.raises(PlaneError, match="blake3"):
            await client.run("update_weights", body)
        await plane.until(lambda: all_serve(client, "two"), HEAL_S)
        await proven(http, ids, 2)
        worker.kill()  # its engine goes with it
        await plane.until(lambda: not any(one.is_running() for one in family))
        worker, family = await start(plane, instance_id=ids[0])
        await plane.until(lambda: all_serve(client, "two"), HEAL_S)
        await proven(http, ids, 2)
        rank = next(one for one in family if one.name().startswith("VLLM::Worker"))
        os.kill(rank.pid, signal.SIGKILL)
        assert await asyncio.to_thread(worker.process.wait, 20.0) == ENGINE_DEAD
        await plane.until(lambda: not any(one.is_running() for one in family))
