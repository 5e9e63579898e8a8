"""A fleet of `hf`, vLLM and SGLang workers that serve one reward model: a caller can't distinguish them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.fleet_updates import all_serve, update_of
from tests.support.frontend_process import frontend, post
from tests.support.mixed_fleet import ENGINES, HEAL_S, START_S
from tests.support.pooling_models import INPUTS, embedding_of, logits_of, make_classifier
from worker.testing.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.engines("vllm", "sglang"), pytest.mark.timeout(500)]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "hf": {},
    "vllm": {"kv_cache_memory_bytes": str(32 << 20), "max_num_batched_tokens": "64", "max_model_len": "512"},
    "sglang": {"chunked_prefill_size": "64"},
}
"""An input of 200 tokens is computed in parts."""
LONG = [7 + number % 400 for number in range(200)]
PROMPTS = [*INPUTS, LONG]


def near(wanted: Any) -> Any:
    return pytest.approx(wanted, abs=2e-4, rel=1e-3)


async def spawn(plane: Plane, model: Path, task: str) -> dict[str, str]:
    """Engine → instance id."""
    started = {
        engine: plane.spawn(
            ready=False, engine=engine, model=model, task=task, dtype="float32", **ARGUMENTS[engine]
        )
        for engine in ENGINES
    }
    return {
        engine: (await asyncio.to_thread(one.wait_ready, START_S)).instance_id for engine, one in started.items()
    }


async def proven(http: httpx.AsyncClient, ids: dict[str, str], wanted: list[list[float]], sequence: int) -> None:
    """Each engine gives these logits, by this version."""
    for engine, instance_id in ids.items():
        body = {"input": PROMPTS, "use_activation": False, "nvext": {"instance_id": instance_id}}
        reply = await post(http, "/classify", **body)
        assert [row["probs"] for row in reply["data"]] == [near(one) for one in wanted], engine
        assert reply["nvext"]["weight_version"]["sequence"] == sequence, engine


async def test_three_engines_serve_one_reward_model(plane: Plane) -> None:
    models = [make_classifier(plane.tmp / "weights" / f"reward{seed}", seed, 3) for seed in (1, 2)]
    wanted = [[logits_of(model, prompt) for prompt in PROMPTS] for model in models]
    client = await plane.client()
    ids = await spawn(plane, models[0], "classify")
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        await proven(http, ids, wanted[0], 0)
        seen: dict[int, int] = {}
        stop = asyncio.Event()

        async def ask_on() -> None:
            while not stop.is_set():
                answer = await http.post("/classify", json={"input": PROMPTS, "use_activation": False})
                reply = answer.json()
                if answer.status_code == 503 and "aborted" in reply["error"]["message"]:
                    continue  # by a pause in mode `abort`
                assert answer.status_code == 200, reply
                sequence = reply["nvext"]["weight_version"]["sequence"]
                assert [row["probs"] for row in reply["data"]] == [near(one) for one in wanted[sequence % 2]]
                seen[sequence] = seen.get(sequence, 0) + 1

        asking = asyncio.create_task(ask_on())
        for number in (1, 2, 3):
            policy = {"barrier": "rolling"} if number == 2 else {"staging": "none"} if number == 3 else {}
            await client.run("update_weights", update_of(models[number % 2], f"v{number}", **policy))
            await plane.until(lambda number=number: seen.get(number) or asking.done(), HEAL_S)
        for mode in ("wait", "abort"):
            await client.run("pause", {"mode": mode})
            await client.run("resume", {})
        # vLLM dies in the middle: the others compute its inputs.
        next(one for one in plane.spawned if one.instance_id == ids["vllm"]).kill()
        before = seen.get(3, 0)
        await plane.until(lambda: seen.get(3, 0) > before + 1 or asking.done(), HEAL_S)
        stop.set()
        await asyncio.gather(asking)
        left = {engine: one for engine, one in ids.items() if engine != "vllm"}
        await proven(http, left, wanted[1], 3)
        assert await all_serve(client, "v3")


async def test_three_engines_make_the_same_embeddings(plane: Plane) -> None:
    first, other = (make_tiny_model(plane.tmp / "weights" / f"tiny{seed}", seed) for seed in (1, 2))
    client = await plane.client()
    ids = await spawn(plane, first, "embed")
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        for model, label in ((first, ""), (other, "other")):
            if label:
                await client.run("update_weights", update_of(model, label))
            wanted = [embedding_of(model, prompt) for prompt in PROMPTS]
            for engine, instance_id in ids.items():
                reply = await post(http, "/v1/embeddings", input=PROMPTS, nvext={"instance_id": instance_id})
                assert [row["embedding"] for row in reply["data"]] == [near(one) for one in wanted], engine
