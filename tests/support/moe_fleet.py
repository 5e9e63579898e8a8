"""Helpers of `tests/engines/test_vllm_moe.py` and of other tests."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from rl_plane.client import RlClient
from rl_plane.protocol.versions import ADAPTER_CONFIG_NAME
from tests.conftest import Plane
from tests.support import weight_faults
from tests.support.frontend_process import ask, frontend
from tests.support.moe import MOE_TOLERANCE, float32_logprobs, make_glm_moe, make_qwen_moe
from worker.testing.tiny_adapter import make_tiny_adapter

START_S = 240.0

HEAL_S = 90.0

PROMPT = list(range(3, 11))

TOKENS = 12

SEQUENCES = [list(range(first, first + 32)) for first in (30, 130, 230)]
"""The canary's sequences. They reach all experts."""

ATTENTION = ("q_proj", "v_proj", "o_proj")

ADAPTER_STD = 0.05
"""The standard deviation of an adapter's weights. Their effect is more than ten times the tolerance."""

MAKERS = {"qwen": make_qwen_moe, "glm": make_glm_moe}


@dataclass
class MoeFleet:
    plane: Plane
    model: str
    ids: dict[str, str]
    """Engine → instance id."""

    def base(self, seed: int, dtype: str = "bfloat16") -> Path:
        path = self.plane.tmp / "weights" / f"{self.model}{seed}-{dtype}"
        return path if path.exists() else MAKERS[self.model](path, seed, dtype)

    def stepped(self) -> Path:
        """The second version with the routers of the first one, and with one of its experts."""
        path = self.plane.tmp / "weights" / "stepped"
        if not path.exists():
            shutil.copytree(self.base(2), path)
            changed = {
                name: tensor
                for name, tensor in load_file(self.base(1) / "model.safetensors").items()
                if ".mlp.gate." in name or ".experts.1." in name
            }
            tensors = load_file(path / "model.safetensors") | changed
            save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path

    def adapter(self, seed: int) -> Path:
        """The second one has modules of several ranks and scalings."""
        path = self.plane.tmp / "weights" / f"adapter{seed}"
        if path.exists():
            return path
        ranks = {"q_proj": 2, "layers.1.self_attn.o_proj": 6} if seed == 2 else {}
        make_tiny_adapter(self.base(1), path, seed, targets=ATTENTION, std=ADAPTER_STD, ranks=ranks)
        config = json.loads((path / ADAPTER_CONFIG_NAME).read_text())
        patterns = {"alpha_pattern": {"v_proj": 3}, "use_rslora": True} if seed == 2 else {}
        (path / ADAPTER_CONFIG_NAME).write_text(json.dumps(config | patterns))
        return path


@contextmanager
def moe_fleet(
    plane: Plane, model: str, engines: tuple[str, ...], ranks: int, *, install: Callable[[Path], None], **more: Any
) -> Iterator[MoeFleet]:
    """`ranks`: of vLLM. `install`: puts a plugin for its processes into the directory. `more`: arguments of vLLM."""
    if len(os.sched_getaffinity(0)) < ranks:
        pytest.skip("two ranks need two cores")
    found = MoeFleet(plane, model, {})
    arguments: dict[str, dict[str, Any]] = {"vllm": {"max_lora_rank": 8, "max_model_len": 2048, **more}, "hf": {}}
    with pytest.MonkeyPatch.context() as patched:
        install(plane.tmp / "site")
        patched.setenv("PYTHONPATH", str(plane.tmp / "site"), prepend=os.pathsep)
        started = {
            engine: plane.spawn(ready=False, engine=engine, model=found.base(1), **arguments[engine])
            for engine in engines
        }
        found.ids = {engine: one.wait_ready(START_S).instance_id for engine, one in started.items()}
        yield found
    plane.kill_all()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("qwen", 1, ("vllm", "hf"), {}), id="qwen-tp1"),
        pytest.param(("glm", 2, ("vllm",), {"enable_expert_parallel": "true"}), id="glm-tp2-ep"),
        pytest.param(("glm", 1, ("vllm", "hf"), {}), id="glm-tp1"),
        pytest.param(("qwen", 2, ("vllm",), {}), id="qwen-tp2"),
    ],
)
def fleet(make_plane: Callable[[], Plane], request: pytest.FixtureRequest) -> Iterator[MoeFleet]:
    model, tp, engines, more = request.param
    with moe_fleet(
        make_plane(), model, engines, tp, install=weight_faults.install, tensor_parallel_size=tp, **more
    ) as found:
        yield found


@pytest_asyncio.fixture
async def client(fleet: MoeFleet) -> AsyncIterator[RlClient]:
    client = await RlClient.connect(fleet.plane.url, fleet.plane.namespace, fleet.plane.component)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def http(fleet: MoeFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with frontend(fleet.plane, admission_wait_s=HEAL_S) as http:
        yield http


async def proven(
    http: httpx.AsyncClient, fleet: MoeFleet, label: str, base: Path, adapter: tuple[str, Path] | None = None
) -> None:
    """The logprobs of every engine's tokens, and of its prompt, are those of transformers in float32."""
    name, path = adapter if adapter is not None else (None, None)
    for engine, instance_id in fleet.ids.items():
        body: dict[str, Any] = {
            "prompt_token_ids": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 1,
            "nvext": {"instance_id": instance_id},
        }
        (choice,) = (await ask(http, **body, **({"model": name} if name else {})))["choices"]
        (span,) = choice["weight_versions"]
        assert (span["version"], span["end"]) == (label, TOKENS), engine
        expected = await asyncio.to_thread(float32_logprobs, base, PROMPT + choice["token_ids"], path)
        found = choice["logprobs"]["token_logprobs"]
        assert found == pytest.approx(expected[-TOKENS:], abs=MOE_TOLERANCE), (engine, label)
        if path is not None:
            plain = float32_logprobs(base, PROMPT + choice["token_ids"])[-TOKENS:]
            off = max(abs(one - other) for one, other in zip(expected[-TOKENS:], plain, strict=True))
            assert off > 10 * MOE_TOLERANCE, "the tolerance shows the adapter"


def canary_of(base: Path) -> dict[str, Any]:
    return {"sequences": SEQUENCES, "expected": [float32_logprobs(base, tokens) for tokens in SEQUENCES]}
