"""A change of an adapter that fails on one of an engine's two ranks, and is done on the other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from rl_plane.errors import EngineFailed, InvalidRequest
from tests.support.cores import bound_cores
from tests.support.engine_kinds import Kind
from tests.support.engine_models import Models, is_of, kind, models
from tests.support.engine_runs import (
    Run,
    adapter_version,
    ask,
    load_adapter,
    receive,
    reception,
    run,
    unload_adapter,
    update,
)
from tests.support.rank_faults import PLACES, Change, fault, faults_for_good, install
from worker.engines.base import AdapterLost
from worker.engines.capabilities import FullEngine

__all__ = ["kind", "models"]

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::(torch|vllm|sglang|transformers|multiprocessing)"),  # theirs, not ours
]

RANKS = {"vllm": {"tensor_parallel_size": "2"}, "sglang": {"tp_size": "2"}}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(
    kind: Kind, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[FullEngine]:
    with bound_cores() as patched:
        site = tmp_path_factory.mktemp("site")
        install(site)
        engine = kind.build(kind.options(models.tiny[1], **RANKS[kind.name]))
        patched.syspath_prepend(site)  # of its ranks too
        patched.setenv("PYTHONPATH", str(site), prepend=os.pathsep)  # and of its host agent
        info = await engine.start()
    assert (info.world_size, "faults" in info.transports) == (2, True)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: FullEngine, models: Models) -> AsyncIterator[FullEngine]:
    """A running engine with the adapter `x`."""
    await update(shared, models.tiny[1], 1)
    await load_adapter(shared, "x", models.adapters[1])
    yield shared
    await shared.pause("abort", False)
    await shared.swap_adapter("x", None, None)
    await shared.resume()


async def _fails(
    engine: FullEngine, change: Change, models: Models, why: str, *faults: dict[str, Any]
) -> EngineFailed:
    await engine.pause("keep", False)  # or what runs may end meanwhile
    staging, fresh = None, None
    if change == "swap":
        staging, _ = await receive(engine, reception(models.adapters[2], kind="lora"))
        fresh = adapter_version(2, models.adapters[2])
    for one in faults:
        await asyncio.to_thread(engine.receiver.init_transport, one)
    with pytest.raises(EngineFailed, match=why) as failed:
        await engine.swap_adapter("x", staging, fresh)
    await engine.resume()
    return failed.value


def _of_x(**more: Any) -> Any:
    return ask([9], adapter="x", logprobs=True, **more)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", ["swap", "unload"])
async def test_a_change_that_fails_on_one_rank_is_undone_on_all(
    kind: Kind, engine: FullEngine, models: Models, change: Change, done: bool, rank: int
) -> None:
    base, adapter = models.tiny[1], models.adapters[1]
    before = await run(engine, _of_x())
    assert is_of(before, base, adapter)
    plain = Run(engine, ask([20], logprobs=True, max_tokens=60))
    running = Run(engine, _of_x(max_tokens=60))
    for one in (plain, running):
        await one.reach(3)
    place = PLACES[kind.name][change]
    why = f"no {place.rpartition('.')[2]}"
    failed = await _fails(engine, change, models, why, fault(rank, place, done=done))
    told = failed.facts["rank_results"]
    assert [(row["rank"], "error" in row) for row in told] == [(each, each == rank) for each in (0, 1)]
    assert is_of(await plain.end(), base)
    result = await running.end()
    assert (len(result.tokens) == 60) if change == "swap" or kind.name == "vllm" else result.finish == "abort"
    assert is_of(result, base, adapter)
    result = await run(engine, _of_x())
    assert result.tokens == before.tokens
    assert is_of(result, base, adapter)
    assert is_of(await run(engine, ask([9], logprobs=True)), base)
    await unload_adapter(engine, "x")
    with pytest.raises(InvalidRequest):
        await run(engine, _of_x())
    await load_adapter(engine, "x", models.adapters[2], 3)
    assert is_of(await run(engine, _of_x()), base, models.adapters[2])


@pytest.mark.parametrize("change", ["swap", "unload"])
async def test_an_adapter_that_can_t_be_put_back_is_gone(
    kind: Kind, engine: FullEngine, models: Models, change: Change
) -> None:
    base = models.tiny[1]
    plain, running = (Run(engine, ask([20], max_tokens=60, logprobs=True, adapter=name)) for name in (None, "x"))
    for one in (plain, running):
        await one.reach(3)
    faults = faults_for_good(kind.name, change, 1)
    failed = await _fails(engine, change, models, "could not be put back", *faults)
    assert isinstance(failed, AdapterLost)
    assert ["error" in row for row in failed.facts["rank_results"]] == [False, True]
    assert is_of(await plain.end(), base)
    assert (await running.end()).finish == "abort"
    with pytest.raises(InvalidRequest, match="no adapter"):
        await run(engine, _of_x())
    if change == "unload":
        await unload_adapter(engine, "x")
    await load_adapter(engine, "x", models.adapters[2], 3)
    assert is_of(await run(engine, _of_x()), base, models.adapters[2])
    assert is_of(await run(engine, ask([9], logprobs=True)), base)
