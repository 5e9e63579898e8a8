"""The examples train against real engines, which then say what transformers says with the trained weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from frontend.server.options import FrontendOptions
from tests.support.frontend_here import started
from tests.support.plain_client import plain_client
from tests.support.reference import greedy
from tests.support.scripts import run, torchrun
from worker.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from tests.conftest import Plane

START_S = 150.0
EXAMPLE_S = 150.0
PROMPT = [5, 6, 7]
TOKENS = 8
LOGPROB = 2e-3
"""The tolerance in nats between two ways to compute the same float32 model."""


async def says(http: httpx.AsyncClient, ids: list[str], base: Path, adapter: Path | None = None) -> None:
    """Every worker's tokens and logprobs are those of plain transformers."""
    tokens, logprobs = await asyncio.to_thread(greedy, base, PROMPT, TOKENS, adapter)
    for one in ids:
        body = {"prompt_token_ids": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1}
        body |= {"return_token_ids": True, "ignore_eos": True, "nvext": {"instance_id": one}}
        reply = await http.post("/v1/completions", json=body | ({"model": "policy"} if adapter else {}))
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        assert choice["token_ids"] == tokens, one
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=LOGPROB)


@pytest.mark.timeout(600)
async def test_the_examples_train_a_fleet(plane: Plane) -> None:
    first = make_tiny_model(plane.tmp / "weights" / "model", 0)
    spawned = [plane.spawn(ready=False, engine="hf", model=first) for _ in range(2)]
    ids = [(await asyncio.to_thread(one.wait_ready, START_S)).instance_id for one in spawned]
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=0)
    async with started(options) as urls, plain_client(base_url=urls["http_url"], timeout=60) as http:
        await says(http, ids, first)
        common = ["--fleet", urls["rl_url"], "--root", str(plane.tmp / "weights" / "published")]
        plain, sharded, adapter = (plane.tmp / name for name in ("plain", "sharded", "adapter"))

        def example(*command: str, model: Path, out: Path) -> str:
            return run(*command, "--model", str(model), "--out", str(out), *common, timeout_s=EXAMPLE_S)

        output = await asyncio.to_thread(example, "examples/plain_torch.py", model=first, out=plain)
        assert "the fleet serves step_3, xxh3:" in output
        await says(http, ids, plain)
        output = await asyncio.to_thread(example, *torchrun(2), "examples/fsdp2.py", model=plain, out=sharded)
        assert output.count("the fleet serves sharded_") == 2  # rank 0 alone
        await says(http, ids, sharded)
        output = await asyncio.to_thread(example, "examples/peft_lora.py", model=sharded, out=adapter)
        assert "the fleet serves policy_2" in output
        await says(http, ids, sharded, adapter)
        await says(http, ids, sharded)
    assert greedy(first, PROMPT, TOKENS) != greedy(plain, PROMPT, TOKENS)
    assert greedy(sharded, PROMPT, TOKENS, adapter) != greedy(sharded, PROMPT, TOKENS)
    # On the disk: the two newest of the base and of the adapter.
    assert len(list((plane.tmp / "weights" / "published").iterdir())) == 4
