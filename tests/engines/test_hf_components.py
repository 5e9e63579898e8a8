"""Two components of real models behind one frontend: the tokens prove which weights each one serves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("torch")

from tests.conftest import Plane
from tests.support.component_fleets import Fleets, labels, ready, serving
from tests.support.frontend_process import ask, error_of
from tests.support.hf_fleet import ENDLESS, HEAL_S, START_S
from tests.support.reference import greedy, logprobs_of
from tests.support.streaming_client import Streaming
from worker.testing.tiny_model import VOCAB_SIZE, make_witness_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]
TOKENS = 24
LARGER = 2 * VOCAB_SIZE
"""The vocabulary of the reference."""


async def makes(http: httpx.AsyncClient, path: Path, label: str, sequence: int, **body: Any) -> list[int]:
    """Checks that a request gets the tokens of plain transformers, labelled with the version. Returns them."""
    asked = {"prompt_token_ids": PROMPT, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
    reply = await ask(http, **asked, **body)
    tokens: list[int] = reply["choices"][0]["token_ids"]
    assert tokens == greedy(path, PROMPT, TOKENS)[0]
    assert labels(reply) == [(label, sequence)]
    return tokens


async def ends_as_it_began(fleets: Fleets, stream: Streaming, component: str, path: Path, label: str) -> None:
    """Checks that a stream continues, and that one version made all of its tokens: those of plain transformers."""
    seen = len(stream.tokens)
    await stream.until(lambda it: len(it.tokens) > seen + TOKENS)
    await fleets.end(stream, component)
    assert [one["version"] for one in stream.spans] == [label]
    assert logprobs_of(path, PROMPT, stream.tokens)[1] == 0


@pytest.mark.timeout(300)
async def test_one_frontend_serves_a_policy_and_a_larger_reference(plane: Plane) -> None:
    policy, reference = plane, Plane(plane.url, plane.namespace, plane.tmp, "reference")
    weights = plane.tmp / "weights"
    first, second = (make_witness_model(weights / f"policy{seed}", seed) for seed in (1, 2))
    frozen, thawed = (make_witness_model(weights / f"large{seed}", seed, vocab_size=LARGER) for seed in (3, 4))
    policy.component = "policy"
    try:
        workers = [
            policy.spawn(ready=False, engine="hf", model=first),
            reference.spawn(ready=False, engine="hf", model=frozen),
        ]
        for one in workers:
            await asyncio.to_thread(one.wait_ready, START_S)
        async with serving(policy, "reference") as (http, rl):
            fleets = Fleets(policy, reference, http, rl)
            for name in ("policy", "reference"):
                await ready(rl, name)
            await makes(http, first, "initial", 0)
            tokens = await makes(http, frozen, "initial", 0, model="large3")
            assert max(tokens) >= VOCAB_SIZE
            beyond = {"prompt_token_ids": [max(tokens)], "max_tokens": 1}
            assert (await ask(http, **beyond, model="reference"))["usage"]["completion_tokens"] == 1
            error_of(await http.post("/v1/completions", json={**beyond, "model": "policy"}), 400)
            async with fleets.stream("reference", ENDLESS, temperature=0) as stream:
                await stream.until(lambda it: len(it.tokens) > 3)
                await fleets.update(policy, second, "step_1")
                await makes(http, second, "step_1", 1, model="policy")
                await ends_as_it_began(fleets, stream, "reference", frozen, "initial")
            async with fleets.stream("policy", ENDLESS, temperature=0) as stream:
                await stream.until(lambda it: len(it.tokens) > 3)
                await fleets.update(reference, thawed, "thawed")
                await makes(http, thawed, "thawed", 1, model="reference/large3")
                workers[1].kill()
                dead = await http.post("/v1/completions", json={"prompt_token_ids": PROMPT, "model": "large3"})
                assert error_of(dead, 503)["code"] == "no_workers"
                await ends_as_it_began(fleets, stream, "policy", second, "step_1")
            await makes(http, second, "step_1", 1)
            again = reference.spawn(ready=False, engine="hf", model=frozen)
            await asyncio.to_thread(again.wait_ready, START_S)
            healed = await rl.get("/v1/rl/ready", params={"component": "reference", "wait_s": HEAL_S})
            assert healed.status_code == 200, healed.text
            await makes(http, thawed, "thawed", 1, model="reference")
            await makes(http, second, "step_1", 1)
    finally:
        await reference.close()
