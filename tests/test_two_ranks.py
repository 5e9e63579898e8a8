"""Engines of two ranks, each of which receives by itself. One process for each engine; what each rank does with weights
from files: tests/test_engine_adapters.py."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

pytest.importorskip("torch")
pytest.importorskip("peft")

from rl_plane.client import RlClient
from tests import ipc_trainer
from tests import test_ipc_transport as ipc
from tests.conftest import Plane
from tests.group_trainer import Trainer
from tests.test_frontend_generation import frontend
from tests.test_group_transport import LORA, Pushing
from tests.test_ipc_transport import trainer_of
from tests.test_mixed_fleet import ARGUMENTS, HEAL_S, START_S, Mixed, proven
from worker.tiny_model import make_witness_model

__all__ = ["trainer_of"]

pytestmark = pytest.mark.timeout(600)

RANKS: dict[str, dict[str, Any]] = {"vllm": {"tensor_parallel_size": 2}, "sglang": {"tp_size": 2}}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.engines(name)) for name in RANKS])
def mixed(make_plane: Callable[[], Plane], request: pytest.FixtureRequest) -> Iterator[Mixed]:
    """A fleet of one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    engine, plane = request.param, make_plane()
    first = make_witness_model(plane.tmp / "weights" / "witness1", 1, "bfloat16")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
        worker = plane.spawn(ready=False, engine=engine, model=first, **ARGUMENTS[engine], **RANKS[engine])
    yield Mixed(plane, first, {engine: worker.wait_ready(START_S).instance_id})
    plane.kill_all()


@pytest_asyncio.fixture
async def client(mixed: Mixed) -> AsyncIterator[RlClient]:
    client = await RlClient.connect(mixed.plane.url, mixed.plane.namespace, mixed.plane.component)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def http(mixed: Mixed) -> AsyncIterator[httpx.AsyncClient]:
    async with frontend(mixed.plane, admission_wait_s=HEAL_S) as http:
        yield http


async def test_what_is_broadcast(mixed: Mixed, client: RlClient, http: httpx.AsyncClient) -> None:
    with Trainer(mixed.plane) as trainer:
        pushing = Pushing(client, trainer)
        await pushing.push(mixed.tiny(1), "group")
        await pushing.push(mixed.adapter(1), "a1", **LORA)
    await proven(http, mixed, "group", mixed.tiny(1), ("a", mixed.adapter(1)))
    await client.run("unload_lora_adapter", {"lora_name": "a"})


async def test_what_is_shared_on_one_machine(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, trainer_of: Callable[..., ipc_trainer.Trainer]
) -> None:
    await ipc.published(client, trainer_of(mixed.tiny(2), 2), {"version": "ipc"})
    await ipc.published(client, trainer_of(mixed.adapter(2), 2, kind="lora"), ipc.LOAD)
    await proven(http, mixed, "ipc", mixed.tiny(2), ("a", mixed.adapter(2)))
