"""One component of `hf`, `vllm` and `sglang`: after each update all three say what plain transformers says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from rl_plane.errors import PlaneError
from tests.reference import logprobs_of
from tests.test_frontend_generation import ask, frontend
from tests.test_plane_update import all_serve, states, update_of
from worker.exit_codes import ENGINE_DEAD
from worker.tiny_adapter import make_tiny_adapter
from worker.tiny_model import make_tiny_model, make_witness_model

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

pytestmark = [pytest.mark.engines("vllm", "sglang"), pytest.mark.timeout(900)]

START_S = 240.0
"""Three engines side by side on two busy cores."""

HEAL_S = 60.0
TOKENS = 12
PROMPT = [5, 17, 300]

LOGPROBS = 0.05
"""Nats, in bfloat16: each engine batches and rounds in its own way."""

ENGINES: dict[str, dict[str, Any]] = {
    "hf": {},
    "vllm": {"kv_cache_memory_bytes": 32 << 20, "max_model_len": 512, "max_lora_rank": 8, "max_loras": 2},
    "sglang": {"max_total_tokens": 4096, "max_lora_rank": 8},
}


class Mixed:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.weights = plane.tmp / "weights"
        self.first = self.witness(1)
        for seed in (1, 2):
            self.witness(seed)
            self.adapter(seed)
        self.tiny(2)
        self.workers: dict[str, Spawned] = {}

    def witness(self, seed: int) -> Path:
        return make_witness_model(self.weights / f"witness{seed}", seed, "bfloat16")

    def tiny(self, seed: int) -> Path:
        """What an adapter does shows in these: in a witness it is lost in the gap to the second token."""
        return make_tiny_model(self.weights / f"tiny{seed}", seed, "bfloat16")

    def adapter(self, seed: int) -> Path:
        return make_tiny_adapter(self.tiny(1), self.weights / f"adapter{seed}", seed, r=8)

    async def start(self, *engines: str) -> None:
        """Again under the same name where one has been before."""
        for engine in engines:
            before = self.workers.get(engine)
            self.workers[engine] = self.plane.spawn(
                ready=False,
                engine=engine,
                model=self.first,
                instance_id=before.instance_id if before is not None else None,
                **ENGINES[engine],
            )
        for engine in engines:
            await asyncio.to_thread(self.workers[engine].wait_ready, START_S)

    async def says(self, http: httpx.AsyncClient, engine: str, **more: Any) -> dict[str, Any]:
        pinned = {"nvext": {"instance_id": self.workers[engine].instance_id}}
        body = {"max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, "logprobs": 0, **pinned}
        reply = await ask(http, **body, **more, prompt_token_ids=PROMPT)
        choice: dict[str, Any] = reply["choices"][0]
        return choice

    async def proven(
        self, http: httpx.AsyncClient, sequence: int, base: Path, adapter: Path | None = None
    ) -> None:
        """Each engine serves this base, and this adapter as `a`."""
        for engine in self.workers:
            choice = await self.says(http, engine)
            await asyncio.to_thread(self.check, choice, engine, base, None)  # the loop serves NATS
            (span,) = choice["weight_versions"]
            assert span["sequence"] == sequence, engine
            if adapter is not None:
                adapted = await self.says(http, engine, model="a")
                await asyncio.to_thread(self.check, adapted, engine, base, adapter)
                assert adapted["weight_versions"][0]["adapter"]["name"] == "a"

    def check(self, choice: dict[str, Any], engine: str, base: Path, adapter: Path | None) -> None:
        """The tokens are the likeliest, up to ties; by the reference that no engine has touched."""
        tokens = choice["token_ids"]
        expected, gap = logprobs_of(base, PROMPT, tokens, adapter)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=LOGPROBS), engine
        assert gap <= LOGPROBS, engine
        if adapter is not None:
            assert logprobs_of(base, PROMPT, tokens)[1] > 10 * LOGPROBS, "the bound tells the adapter"

    def family(self, engine: str) -> list[psutil.Process]:
        """The engine's processes."""
        worker = psutil.Process(self.workers[engine].process.pid)
        return list(worker.children(recursive=True))


async def test_three_engines_say_the_same(plane: Plane) -> None:
    mixed = Mixed(plane)
    client = await plane.client()
    await mixed.start(*ENGINES)
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        await mixed.proven(http, 0, mixed.first)
        await client.run("update_weights", update_of(mixed.witness(2), "two"))
        await mixed.proven(http, 1, mixed.witness(2))
        await client.run("update_weights", update_of(mixed.tiny(1), "tiny", barrier="rolling"))
        await mixed.proven(http, 2, mixed.tiny(1))
        for seed in (1, 2):  # sequences 3 and 4 are the adapter's
            await client.run("load_lora_adapter", {"lora_name": "a", "lora_path": str(mixed.adapter(seed))})
            await mixed.proven(http, 2, mixed.tiny(1), mixed.adapter(seed))
        # None of them takes a checkpoint that does not fit, and all go on.
        broken = mixed.weights / "broken"
        broken.mkdir()
        whole = (mixed.tiny(2) / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(whole[:-64])
        with pytest.raises(PlaneError, match="truncated"):
            await client.run("update_weights", update_of(broken, "broken"))
        await mixed.proven(http, 2, mixed.tiny(1), mixed.adapter(2))
        await client.run("update_weights", update_of(mixed.tiny(2), "other", staging="none"))
        await mixed.proven(http, 5, mixed.tiny(2), mixed.adapter(2))
        # Nor do they keep one that turns out to be another than was said, when it is half-way in.
        spoilt = {**update_of(mixed.tiny(1), "spoilt", staging="none"), "digest": "blake3:" + "0" * 64}
        with pytest.raises(PlaneError, match="blake3"):
            await client.run("update_weights", spoilt)
        await plane.until(lambda: all_serve(client, "other"), HEAL_S)
        await mixed.proven(http, 5, mixed.tiny(2), mixed.adapter(2))
        await client.run("update_weights", {"rollback": {"sequence": 1}})
        await mixed.proven(http, 6, mixed.witness(2))
        # An engine that loses a process ends its worker; a new one fetches what is committed.
        families = []
        for engine, name in (("vllm", "VLLM::EngineCore"), ("sglang", "sglang::detokenizer")):
            families += mixed.family(engine)
            next(one for one in mixed.family(engine) if one.name().startswith(name)).kill()
        for engine in ("vllm", "sglang"):
            assert await asyncio.to_thread(mixed.workers[engine].process.wait, 30) == ENGINE_DEAD
        await mixed.start("vllm", "sglang")
        await plane.until(lambda: all_serve(client, "two"), HEAL_S)
        await mixed.proven(http, 6, mixed.witness(2))
        # A worker that is killed takes its engine with it.
        for engine in ("vllm", "sglang"):
            families += mixed.family(engine)
            mixed.workers[engine].kill()
        await plane.until(lambda: not any(one.is_running() for one in families))
    assert {state["engine"] for state in (await states(client)).values()} == {"hf"}
