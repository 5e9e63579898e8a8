"""A fleet of an `hf` and a `vllm` worker, each in its own process: the trainer can't tell them apart."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

pytest.importorskip("torch")
from rl_plane.errors import InvalidWeights, PlaneError
from tests.faults import Stream
from tests.test_frontend_generation import frontend
from tests.test_hf_fleet import HEAL_S, PROMPT, chain, proven
from tests.test_plane_update import all_serve, states, update_of
from worker.process import EXIT_ENGINE_DEAD
from worker.tiny_model import make_witness_model

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

pytestmark = [pytest.mark.engines("vllm"), pytest.mark.timeout(600)]

START_S = 180.0
VLLM = {"kv_cache_memory_bytes": 32 << 20, "max_model_len": 2048, "max_lora_rank": 8}


def spawn(plane: Plane, engine: str, **options: Any) -> Spawned:
    return plane.spawn(ready=False, engine=engine, model=base(plane, 1), **options)


def base(plane: Plane, seed: int) -> Path:
    return make_witness_model(plane.tmp / "weights" / f"witness{seed}", seed, dtype="bfloat16")


async def test_a_mixed_fleet(plane: Plane) -> None:
    client = await plane.client()
    workers = {"hf": spawn(plane, "hf"), "vllm": spawn(plane, "vllm", **VLLM)}
    ids = [(await asyncio.to_thread(one.wait_ready, START_S)).instance_id for one in workers.values()]
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        await proven(http, ids, 1)
        streams = [Stream(client, one, PROMPT, 1500, temperature=0.0) for one in ids]
        for one in streams:
            await one.more()
        await client.run("update_weights", update_of(base(plane, 2), "two"))
        await proven(http, ids, 2)
        for one in streams:
            await one.end()
            last, place = PROMPT[-1], 0
            for span, seed in zip(one.spans, (1, 2), strict=True):
                assert one.tokens[place : span["end"]] == chain(last, span["end"] - place, seed)
                last, place = one.tokens[span["end"] - 1], span["end"]
        await client.run("update_weights", update_of(base(plane, 3), "three", staging="none"))
        await proven(http, ids, 3)
        # A bad one between: nobody is touched.
        narrow = make_witness_model(plane.tmp / "weights" / "narrow", 4, dtype="bfloat16", intermediate_size=128)
        with pytest.raises(InvalidWeights):
            await client.run("update_weights", update_of(narrow, "bad"))
        await proven(http, ids, 3)
        body = {**update_of(base(plane, 4), "four", staging="none"), "digest": "blake3:" + "0" * 64}
        with pytest.raises(PlaneError, match="blake3"):
            await client.run("update_weights", body)
        await plane.until(lambda: all_serve(client, "three"), HEAL_S)
        await proven(http, ids, 3)
        # A child of vLLM's is killed: the worker ends, and a new one fetches what is committed.
        doomed = workers["vllm"]
        family = psutil.Process(doomed.process.pid).children(recursive=True)
        victim = next(one for one in family if one.name().startswith("VLLM::Worker"))
        os.kill(victim.pid, signal.SIGKILL)
        assert await asyncio.to_thread(doomed.process.wait, 20.0) == EXIT_ENGINE_DEAD
        await plane.until(lambda: not any(one.is_running() for one in family))
        again = spawn(plane, "vllm", instance_id=doomed.instance_id, **VLLM)
        await asyncio.to_thread(again.wait_ready, START_S)
        await plane.until(lambda: all_serve(client, "three"), HEAL_S)
        await proven(http, ids, 3)
        await client.run("update_weights", {"rollback": {"sequence": 1}})
        await proven(http, ids, 2)
        # The worker itself is killed: it takes its engine with it.
        family = psutil.Process(again.process.pid).children(recursive=True)
        again.kill()
        await plane.until(lambda: not any(one.is_running() for one in family))
    assert {state["sequence"] for state in (await states(client)).values()} == {3}
