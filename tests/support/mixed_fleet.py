"""A fleet of `hf`, vLLM and SGLang on one model, and what its tests have in common."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from rl_plane.client import RlClient
from tests.conftest import Plane
from tests.support.faults import Stream
from tests.support.fleet_updates import states, update_of
from tests.support.frontend_process import ask, error_of, frontend
from tests.support.reference import logprobs_of
from worker.engines.common.finite_logits import NOT_FINITE
from worker.receive.staging import adapter_digest
from worker.testing.tiny_adapter import make_tiny_adapter
from worker.testing.tiny_model import make_tiny_model, make_witness_model, witness_next_token

ENGINES = ("hf", "vllm", "sglang")

ARGUMENTS: dict[str, dict[str, Any]] = {
    "hf": {},
    "vllm": {"max_lora_rank": "8", "max_model_len": "16384", "max_logprobs": "100", "tool_call_parser": "hermes"},
    "sglang": {"max_lora_rank": "8", "tool_call_parser": "hermes"},
}

PROMPT = [5, 6, 7]

TOKENS = 10

ENDLESS = {"hf": 8000, "vllm": 16000, "sglang": 6000}
"""More tokens than each makes meanwhile, and fewer than its cache holds."""

START_S = 240.0
"""Three engines that start side by side on two cores."""

HEAL_S = 90.0

END_S = 30.0

ROUND_TRIPS = 10
"""Round trips to each worker: a running engine makes tokens meanwhile."""

LOGPROB = 0.05
"""A batch of another shape rounds bfloat16 in another way; a wrong adapter is off by far more."""


@dataclass
class Mixed:
    plane: Plane
    first: Path
    ids: dict[str, str]
    """Engine → instance id."""

    def base(self, seed: int) -> Path:
        return make_witness_model(self.plane.tmp / "weights" / f"witness{seed}", seed, "bfloat16")

    def tiny(self, seed: int) -> Path:
        """Makes a tiny random model. It shows an adapter's effect, which a witness hides in the gap to the second
        token."""
        return make_tiny_model(self.plane.tmp / "weights" / f"tiny{seed}", seed, "bfloat16")

    def adapter(self, seed: int) -> Path:
        return make_tiny_adapter(self.first, self.plane.tmp / "weights" / f"adapter{seed}", seed=seed, r=4)

    async def witnessed(self, client: RlClient) -> None:
        """Restores the first witness, with which each test begins."""
        await client.run("update_weights", update_of(self.first, "base 1"))


@pytest.fixture(scope="module")
def mixed(make_plane: Callable[[], Plane]) -> Mixed:
    plane = make_plane()
    first = make_witness_model(plane.tmp / "weights" / "witness1", 1, "bfloat16")
    started = {
        engine: plane.spawn(
            ready=False, engine=engine, model=first, weight_urls=[plane.weight_server.url], **ARGUMENTS[engine]
        )
        for engine in ENGINES
    }
    ids = {engine: one.wait_ready(START_S).instance_id for engine, one in started.items()}
    return Mixed(plane, first, ids)


@pytest_asyncio.fixture
async def client(mixed: Mixed) -> AsyncIterator[RlClient]:
    client = await RlClient.connect(mixed.plane.url, mixed.plane.namespace, mixed.plane.component)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def http(mixed: Mixed) -> AsyncIterator[httpx.AsyncClient]:
    async with frontend(mixed.plane, admission_wait_s=HEAL_S) as http:
        yield http


async def proven(
    http: httpx.AsyncClient,
    mixed: Mixed,
    label: str,
    base: Path,
    adapter: tuple[str, Path] | None = None,
    digest: str | None = None,
) -> None:
    """Each engine generates the tokens that are likeliest by the reference for this version, up to ties, with their
    logprobs, and names the version. `adapter`: over a `tiny` base, or the bound can't show it.
    `digest`: of an adapter that came otherwise than by these files, whose config is part of it to the byte."""
    name, path = adapter if adapter is not None else (None, None)
    made_by = (name, digest or adapter_digest(path)) if path is not None else None
    for engine, instance_id in mixed.ids.items():
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
        tokens = choice["token_ids"]
        expected, gap = await asyncio.to_thread(logprobs_of, base, PROMPT, tokens, path)  # the loop serves NATS
        assert (len(tokens), gap <= LOGPROB) == (TOKENS, True), (engine, gap)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=LOGPROB), engine
        if path is not None:
            assert logprobs_of(base, PROMPT, tokens)[1] > 10 * LOGPROB, "the bound shows the adapter"
        (span,) = choice["weight_versions"]
        assert (span["version"], span["start"], span["end"]) == (label, 0, TOKENS), engine
        found = span.get("adapter")
        assert (found and (found["name"], found["digest"])) == made_by, engine


async def fails_of_no_numbers(http: httpx.AsyncClient, mixed: Mixed, client: RlClient) -> None:
    """Weights that have diverged, as one update, and right ones as the next. Without a canary, which would find them
    first."""
    path = shutil.copytree(mixed.tiny(1), mixed.plane.tmp / "weights" / "diverged")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"].fill_(math.nan)
    save_file(tensors, path / "model.safetensors")
    await client.run("update_weights", update_of(path, "diverged", canary="off"))
    for engine, instance_id in mixed.ids.items():
        body = {"prompt_token_ids": PROMPT, "max_tokens": TOKENS, "nvext": {"instance_id": instance_id}}
        for more in ({"temperature": 0}, {"temperature": 1.0, "n": 2}, {"logprobs": 1}, {"prompt_logprobs": 0}):
            for stream in (False, True):  # which has not begun
                asked = {**body, **more, "stream": stream}
                error = error_of(await http.post("/v1/completions", json=asked), 500)
                assert (error["code"], error["message"]) == ("engine_failed", NOT_FINITE), (engine, asked)
    await client.run("update_weights", update_of(mixed.tiny(2), "healed"))
    await proven(http, mixed, "healed", mixed.tiny(2))


async def standing(mixed: Mixed, client: RlClient, streams: Collection[Stream]) -> list[int]:
    """The number of tokens of each stream, once no more come: tokens on their way at a pause have arrived."""

    def counts() -> list[int]:
        return [len(stream.tokens) for stream in streams]

    async def one() -> list[int] | None:
        before = counts()
        for _ in range(ROUND_TRIPS):
            await states(client)
        return before if counts() == before else None

    found: list[int] = await mixed.plane.until(one, END_S)
    return found


def witnessed(seed: int, count: int, last: int = PROMPT[-1]) -> list[int]:
    """The tokens of the witness model of `seed` after the token `last`."""
    tokens = []
    for _ in range(count):
        last = witness_next_token(seed, last)
        tokens.append(last)
    return tokens


def seed_of(label: str) -> int:
    return 1 if label == "initial" else int(label.split()[-1])


async def begun(client: RlClient, mixed: Mixed, tokens: int | None = None, **request: Any) -> dict[str, Stream]:
    """A stream on each engine, that has its first tokens; without `tokens` it outlasts what comes. The fastest last."""
    streams = {}
    for engine in ("sglang", "vllm", "hf"):
        many = tokens or ENDLESS[engine]
        asked = {"temperature": 0.0, "ignore_eos": True, **request}
        streams[engine] = Stream(client, mixed.ids[engine], PROMPT, many, **asked)
        await streams[engine].more()
    return streams
