"""A pause of real vLLM that waits for what vLLM has preempted: with little memory, and when it dies meanwhile. All else
that `wait` promises: tests/engines/test_engine_updates.py."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

pytestmark = [
    pytest.mark.engines("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::(torch|vllm|transformers|multiprocessing)"),  # theirs, not ours
]

from rl_plane.errors import EngineDied  # noqa: E402
from tests.support.engine_kinds import VLLM  # noqa: E402
from tests.support.engine_runs import BOUND_S, Run, ask, witnessed  # noqa: E402
from tests.support.zygote import children_forked  # noqa: E402
from worker.testing.tiny_model import make_witness_model  # noqa: E402

TOKENS = 500
PLACES = 768
"""Tokens that the cache has a place for: more than one request's, less than two's."""
TOKEN_BYTES = 512
"""Bytes of the tiny models' KV per token: 2 layers, keys and values, 2 heads of 32 elements of bfloat16."""


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    with children_forked("vllm"):
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    model: Path = make_witness_model(tmp_path_factory.mktemp("models") / "witness", 1, "bfloat16")
    small = {"max_model_len": "512", "kv_cache_memory_bytes": str(PLACES * TOKEN_BYTES)}
    engine = VLLM.build(VLLM.options(model, **small))
    await engine.start()
    yield engine
    await engine.close()


async def test_wait_drains_what_lost_its_place_in_the_cache(engine: Any) -> None:
    cache = engine.process.config.cache_config
    assert TOKENS < cache.num_gpu_blocks * cache.block_size < 2 * TOKENS
    runs = [Run(engine, ask([20 + number], max_tokens=TOKENS)) for number in range(2)]
    for one in runs:
        await one.reach(1)
    await engine.pause("keep", False)
    late = [Run(engine, ask([9 + number])) for number in range(2)]
    await engine.liveness()  # they have come
    assert engine.load() == (2, 2)
    await engine.pause("wait", False)
    assert engine.load() == (0, 2)
    for number, one in enumerate(runs):
        assert (await one.end()).tokens == witnessed(1, 20 + number, TOKENS)
    await engine.resume()
    for number, one in enumerate(late):
        assert (await one.end()).tokens == witnessed(1, 9 + number, 16)


async def test_a_wait_and_its_requests_fail_if_the_engine_dies(engine: Any) -> None:
    """The last one: it kills the engine."""
    one = Run(engine, ask([20], max_tokens=TOKENS))
    await one.reach(1)
    await engine.pause("keep", True)
    waiting = asyncio.create_task(engine.pause("wait", False))
    await one.reach(len(one.result.tokens) + 5)
    (core,) = (pid for pid in VLLM.pids(engine) if psutil.Process(pid).name().startswith("VLLM::Engine"))
    os.kill(core, signal.SIGKILL)
    with pytest.raises(EngineDied):
        async with asyncio.timeout(BOUND_S):
            await waiting
    with pytest.raises(EngineDied):
        await one.end()
