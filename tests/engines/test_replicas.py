"""Data parallelism inside an engine: one worker with two replicas of the model, which take and serve each version
together."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rl_plane.client import RlClient
from rl_plane.errors import CanaryFailed, PlaneError, Unavailable
from tests.conftest import Plane, lives
from tests.support import rank_faults, weight_faults
from tests.support.cores import bound_cores
from tests.support.each_transport import Shelf, stepped
from tests.support.faults import Stream
from tests.support.fleet_updates import all_serve, update_of
from tests.support.group_pushes import Pushing, send_all
from tests.support.group_trainer import Trainer as GroupTrainer
from tests.support.mixed_fleet import (
    ARGUMENTS,
    END_S,
    ENDLESS,
    HEAL_S,
    PROMPT,
    START_S,
    Mixed,
    client,
    http,
    proven,
)
from worker.engines.common.shared_names import mapped_files, names_of
from worker.engines.sglang.processes import LOADS
from worker.exit_codes import ENGINE_DEAD
from worker.testing.tiny_model import make_witness_model, witness_next_token

__all__ = ["client", "http"]

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]

REPLICAS = 2
SIZES: dict[str, dict[str, Any]] = {"vllm": {"data_parallel_size": REPLICAS}, "sglang": {"dp_size": REPLICAS}}
PROCESSES = {"vllm": "VLLM::Worker", "sglang": "sglang::scheduler"}
"""The begin of the names of the processes that have the model."""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.engines(name)) for name in SIZES])
def mixed(make_plane: Callable[[], Plane], request: pytest.FixtureRequest) -> Iterator[Mixed]:
    """A fleet of one worker."""
    with bound_cores(REPLICAS) as patched:
        engine, plane = request.param, make_plane()
        first = make_witness_model(plane.tmp / "weights" / "witness1", 1, "bfloat16")
        patched.setenv("TMPDIR", str(plane.tmp))
        rank_faults.install(plane.tmp / "site")
        weight_faults.install(plane.tmp / "site")
        patched.setenv("PYTHONPATH", str(plane.tmp / "site"), prepend=os.pathsep)
        arguments = ARGUMENTS[engine] | SIZES[engine]
        worker = plane.spawn(ready=False, engine=engine, model=first, **arguments)
        yield Mixed(plane, first, {engine: worker.wait_ready(START_S).instance_id})
    plane.kill_all()


async def proven_by_all(http: httpx.AsyncClient, mixed: Mixed, *what: Any) -> None:
    """Both engines give the requests to their replicas in turn."""
    for _ in range(2 * REPLICAS):
        await proven(http, mixed, *what)


async def streams_of(mixed: Mixed, client: RlClient) -> list[Stream]:
    """An endless request on each replica."""
    ((engine, instance_id),) = mixed.ids.items()
    asked = {"temperature": 0.0, "ignore_eos": True}
    found = [Stream(client, instance_id, PROMPT, ENDLESS[engine], **asked) for _ in range(REPLICAS)]
    for one in found:
        await one.until(tokens=2)
    return found


async def test_updates_from_files_reach_each_replica(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    (state,) = (await client.run("describe"))["workers"]
    assert (state["world_size"], state["tp_size"], state["pp_size"], state["dp_size"]) == (2, 1, 1, 2)
    await proven_by_all(http, mixed, "initial", mixed.first)
    await client.run("update_weights", update_of(mixed.tiny(1), "one"))
    await client.run("load_lora_adapter", {"lora_name": "a", "lora_path": str(mixed.adapter(1))})
    adapter = ("a", mixed.adapter(1))
    await proven_by_all(http, mixed, "one", mixed.tiny(1), adapter)
    await client.run("update_weights", update_of(mixed.tiny(2), "two", staging="none"))
    await proven_by_all(http, mixed, "two", mixed.tiny(2), adapter)
    await client.run("unload_lora_adapter", {"lora_name": "a"})
    await proven_by_all(http, mixed, "two", mixed.tiny(2))


async def test_pushed_updates_reach_each_replica(mixed: Mixed, client: RlClient, http: httpx.AsyncClient) -> None:
    """Each bucket comes once for both replicas: a full version, and a delta."""
    from rl_plane.publish import WeightPublisher

    plane, shelf = mixed.plane, Shelf(mixed.base(2))
    how: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "workers": 1}
    publisher = WeightPublisher(shelf, plane.url, encoding="delta", transport="gloo", **how)
    try:
        for label, directory in (("full", mixed.base(2)), ("delta", stepped(mixed))):
            shelf.directory = directory
            await publisher.publish_async(label)
            await proven_by_all(http, mixed, label, directory)
    finally:
        await asyncio.to_thread(publisher.close)


async def test_both_replicas_answer_for_what_they_hold(mixed: Mixed, client: RlClient) -> None:
    await client.run("update_weights", update_of(mixed.base(3), "checked"))
    (row,) = (await client.run("check_weights", {"action": "checksum"}))["workers"]
    assert [rank["rank"] for rank in row["ranks"]] == [0, 1]
    assert len({rank["checksum"] for rank in row["ranks"]}) == 1, "equal bytes"
    await client.run("check_weights", {"action": "reset_tensors"})
    await mixed.plane.until(lambda: all_serve(client, "checked"), HEAL_S)
    (after,) = (await client.run("check_weights", {"action": "checksum"}))["workers"]
    assert after["ranks"] == row["ranks"]


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_requests_of_both_replicas_continue_over_an_update(mixed: Mixed, client: RlClient, kv: str) -> None:
    await mixed.witnessed(client)
    streams = await streams_of(mixed, client)
    (state,) = (await client.run("state"))["workers"]
    assert state["running"] == len(streams)
    await client.run("update_weights", update_of(mixed.base(2), "base 2", kv=kv))
    for one in streams:
        await one.until(tokens=len(one.tokens) + 20)
        assert one.spans[0]["version"] == "base 1"
        assert one.spans[-1]["version"] == "base 2"
        turn = one.spans[-1]["start"]
        before = [PROMPT[-1], *one.tokens]
        for place, token in enumerate(one.tokens):
            assert token == witness_next_token(1 if place < turn else 2, before[place])
    assert await client.run("abort_requests", {})
    for one in streams:
        await one.end()
        assert one.finish_reason == "abort"


async def test_a_drain_waits_for_both_replicas(mixed: Mixed, client: RlClient) -> None:
    await mixed.witnessed(client)
    streams = await streams_of(mixed, client)
    draining = asyncio.create_task(client.run("pause", {"mode": "wait"}))
    for one in streams[1:]:
        one.stop()
    await streams[0].until(tokens=len(streams[0].tokens) + 20)
    assert not draining.done(), "a request runs"
    streams[0].stop()
    async with asyncio.timeout(END_S):
        await draining
    await client.run("resume", {})


@pytest.mark.parametrize("replica", [0, 1])
async def test_a_replica_that_can_not_stage_leaves_both_as_they_are(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, replica: int
) -> None:
    await mixed.witnessed(client)
    place = "worker.receive.staging_area:MappedArea.__init__"
    await client.run("init_transport", rank_faults.fault(replica, place, done=False))
    with pytest.raises(PlaneError):
        await client.run("update_weights", update_of(mixed.base(2), "unborn"))
    await proven_by_all(http, mixed, "base 1", mixed.first)
    await client.run("destroy_transport", {"backend": rank_faults.BACKEND})


@pytest.mark.parametrize("replica", [0, 1])
async def test_one_replica_with_wrong_weights_is_never_served(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, replica: int
) -> None:
    """The scores of all replicas are compared, so the fleet goes back."""
    ((engine, _),) = mixed.ids.items()
    await client.run("update_weights", update_of(mixed.tiny(1), "tiny 1"))
    fault = weight_faults.fault(engine, "input_layernorm", 3.0, rank=replica)
    await client.run("init_transport", fault)
    with pytest.raises(CanaryFailed):
        await client.run("update_weights", update_of(mixed.tiny(2), "tiny 2"))
    assert "replicas 0 and 1 of the engine disagree" in mixed.plane.spawned[-1].log.read_text()
    await mixed.plane.until(lambda: all_serve(client, "tiny 1"), HEAL_S)
    await proven_by_all(http, mixed, "tiny 1", mixed.tiny(1))
    await client.run("destroy_transport", {"backend": weight_faults.BACKEND})


async def test_a_replica_killed_while_weights_come_ends_its_worker(mixed: Mixed, client: RlClient) -> None:
    """The worker ends, names the replica, and leaves nothing."""
    await mixed.witnessed(client)
    ((engine, _),) = mixed.ids.items()
    worker = mixed.plane.spawned[-1]
    family = psutil.Process(worker.process.pid).children(recursive=True)
    ranks = [one for one in family if one.name().startswith(PROCESSES[engine])]
    assert len(ranks) == REPLICAS
    if engine == "sglang":
        assert _readers_of_loads(family) == REPLICAS + 1, "its controller can choose by load"
    shared = mapped_files(one.pid for one in family)
    streams = await streams_of(mixed, client)
    with GroupTrainer(mixed.plane) as trainer:
        await Pushing(client, trainer).prepare(mixed.base(2), "unborn")
        await trainer.do("send", 2)
        (second,) = [one for one in ranks if "_DP1" in one.name() + psutil.Process(one.ppid()).name()]
        os.kill(second.pid, signal.SIGKILL)
        async with asyncio.timeout(END_S):
            for one in streams:
                with pytest.raises(PlaneError):
                    await one.end()
            with suppress(Unavailable):  # the host agent may take the last bucket before it is ended
                await send_all(trainer)
            await trainer.do("close")
            with pytest.raises(PlaneError):
                await client.run("complete_weights_update")
    assert await asyncio.to_thread(worker.process.wait, END_S) == ENGINE_DEAD
    assert " of replica 1 has ended" in worker.log.read_text()
    await mixed.plane.until(lambda: not any(map(lives, family)))
    assert shared
    assert not names_of(shared)
    assert not list(mixed.plane.tmp.glob("rl-plane-*"))


def _readers_of_loads(family: list[psutil.Process]) -> int:
    return sum(LOADS in Path(f"/proc/{one.pid}/maps").read_text() for one in family)
