"""One component of `hf`, `vllm` and `sglang`: after each update all three say what plain transformers says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rl_plane.errors import PlaneError  # noqa: E402
from tests.engine_runs import witnessed  # noqa: E402
from tests.test_frontend_generation import ask, frontend  # noqa: E402
from tests.test_plane_update import all_serve, states, update_of  # noqa: E402
from worker.process import EXIT_ENGINE_DEAD  # noqa: E402
from worker.tiny_adapter import make_tiny_adapter  # noqa: E402
from worker.tiny_model import make_witness_model  # noqa: E402

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
        self.first = self.base(1)
        self.workers: dict[str, Spawned] = {}

    def base(self, seed: int) -> Path:
        return make_witness_model(self.weights / f"witness{seed}", seed, "bfloat16")

    def adapter(self, seed: int) -> Path:
        return make_tiny_adapter(self.first, self.weights / f"adapter{seed}", seed, r=8)

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

    async def proven(self, http: httpx.AsyncClient, sequence: int, seed: int, adapter: int | None = None) -> None:
        """Each engine serves this base, and this adapter as `a`."""
        for engine in self.workers:
            choice = await self.says(http, engine)
            assert choice["token_ids"] == witnessed(seed, PROMPT[-1], TOKENS), engine
            self.check_logprobs(choice, engine, seed, None)
            (span,) = choice["weight_versions"]
            assert span["sequence"] == sequence, engine
            if adapter is not None:
                adapted = await self.says(http, engine, model="a")
                self.check_logprobs(adapted, engine, seed, adapter)
                assert adapted["weight_versions"][0]["adapter"]["name"] == "a"

    def check_logprobs(self, choice: dict[str, Any], engine: str, seed: int, adapter: int | None) -> None:
        expected = self.reference(seed, adapter, choice["token_ids"])
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=LOGPROBS), engine
        if adapter is not None:  # the bound tells adapters apart
            assert expected != pytest.approx(self.reference(seed, None, choice["token_ids"]), abs=2 * LOGPROBS)

    def reference(self, seed: int, adapter: int | None, tokens: list[int]) -> list[float]:
        import peft
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.base(seed), dtype="auto", local_files_only=True)
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, self.adapter(adapter))
        with torch.no_grad():
            logits = model.eval()(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].float()
        made = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        values: list[float] = made.tolist()
        return values

    def kill_model_process(self, engine: str) -> None:
        worker = psutil.Process(self.workers[engine].process.pid)
        named = {"vllm": "EngineCore", "sglang": "scheduler"}[engine]
        (victim,) = [
            child for child in worker.children(recursive=True) if any(named in part for part in child.cmdline())
        ]
        victim.kill()


async def test_three_engines_say_the_same(plane: Plane) -> None:
    mixed = Mixed(plane)
    client = await plane.client()
    await mixed.start(*ENGINES)
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        await mixed.proven(http, 0, 1)
        await client.run("update_weights", update_of(mixed.base(2), "two"))
        await mixed.proven(http, 1, 2)
        await client.run("update_weights", update_of(mixed.base(1), "one", barrier="rolling"))
        await mixed.proven(http, 2, 1)
        for sequence, seed in ((3, 1), (4, 2)):
            adapter = {"lora_name": "a", "lora_path": str(mixed.adapter(seed))}
            await client.run("load_lora_adapter", adapter)
            await mixed.proven(http, sequence, 1, seed)
        # None of them takes a checkpoint that does not fit, and all go on.
        broken = mixed.weights / "broken"
        broken.mkdir()
        whole = (mixed.base(2) / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(whole[:-64])
        with pytest.raises(PlaneError, match="truncated"):
            await client.run("update_weights", update_of(broken, "broken"))
        await mixed.proven(http, 4, 1, 2)
        await client.run("update_weights", update_of(mixed.base(3), "three", staging="none"))
        await mixed.proven(http, 5, 3, 2)
        await client.run("update_weights", {"rollback": {"sequence": 1}})
        await mixed.proven(http, 6, 2)
        # An engine that loses a process ends its worker; a new one fetches what is committed.
        for engine in ("vllm", "sglang"):
            mixed.kill_model_process(engine)
        for engine in ("vllm", "sglang"):
            assert await asyncio.to_thread(mixed.workers[engine].process.wait, 30) == EXIT_ENGINE_DEAD
        await mixed.start("vllm", "sglang")
        await plane.until(lambda: all_serve(client, "two"), HEAL_S)
        await mixed.proven(http, 6, 2)
    assert {state["engine"] for state in (await states(client)).values()} == set(ENGINES)
