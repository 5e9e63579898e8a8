"""Engines of two ranks, for which one host agent receives, as a fleet sees them: one worker of each engine for all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import httpx
import psutil
import pytest

from rl_plane.client import RlClient
from rl_plane.errors import InvalidWeights, PlaneError, Unavailable
from tests.conftest import Plane, Spawned, lives
from tests.support import each_transport, rank_faults
from tests.support.cores import bound_cores
from tests.support.faults import Stream
from tests.support.fleet_updates import all_serve, update_of
from tests.support.group_pushes import Pushing, send_all
from tests.support.group_trainer import Trainer as GroupTrainer
from tests.support.ipc_trainer import Trainer as IpcTrainer
from tests.support.mixed_fleet import (
    ARGUMENTS,
    END_S,
    ENDLESS,
    HEAL_S,
    PROMPT,
    START_S,
    Mixed,
    client,
    fails_of_no_numbers,
    http,
    proven,
    witnessed,
)
from worker.engines.common.shared_names import mapped_files, names_of
from worker.exit_codes import ENGINE_DEAD
from worker.receive.host_agent.__main__ import NAME as HOST_AGENT
from worker.receive.staging import model_digest
from worker.runtime.engine_watch import DEFAULT_LIVENESS_TIMEOUT_S
from worker.testing.tiny_model import make_witness_model

__all__ = ["client", "http"]

pytestmark = [pytest.mark.timeout(600)]

DEATH_S = 4.0
"""Seconds until a death must be noticed: before an engine that does not answer would be
(DEFAULT_LIVENESS_TIMEOUT_S)."""
RANKS: dict[str, dict[str, Any]] = {"vllm": {"tensor_parallel_size": 2}, "sglang": {"tp_size": 2}}
PROCESSES = {"vllm": "VLLM::Worker", "sglang": "sglang::scheduler"}
"""The begin of the names of the processes that have the model."""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.engines(name)) for name in RANKS])
def mixed(make_plane: Callable[[], Plane], request: pytest.FixtureRequest) -> Iterator[Mixed]:
    """A fleet of one."""
    with bound_cores() as patched:
        engine, plane = request.param, make_plane()
        first = make_witness_model(plane.tmp / "weights" / "witness1", 1, "bfloat16")
        patched.setenv("TMPDIR", str(plane.tmp))
        rank_faults.install(plane.tmp / "site")
        patched.setenv("PYTHONPATH", str(plane.tmp / "site"), prepend=os.pathsep)
        found = Mixed(plane, first, {})
        _spawn(found, engine)
        yield found
    plane.kill_all()


def _spawn(mixed: Mixed, engine: str, instance_id: str | None = None) -> None:
    worker = mixed.plane.spawn(
        ready=False,
        instance_id=instance_id,
        engine=engine,
        model=mixed.first,
        weight_urls=[mixed.plane.weight_server.url],
        **ARGUMENTS[engine],
        **RANKS[engine],
    )
    mixed.ids[engine] = worker.wait_ready(START_S).instance_id


def _ranks(mixed: Mixed) -> tuple[Spawned, list[psutil.Process], list[psutil.Process]]:
    """The worker, all processes that it has started, and of those the two with the model."""
    (engine,) = mixed.ids
    worker = mixed.plane.spawned[-1]
    family = psutil.Process(worker.process.pid).children(recursive=True)
    ranks = [one for one in family if one.name().startswith(PROCESSES[engine])]
    assert len(ranks) == 2
    return worker, family, sorted(ranks, key=lambda one: one.name())  # which end with their numbers


async def test_updates_from_files_reach_both_ranks(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    (state,) = (await client.run("describe"))["workers"]
    assert (state["world_size"], state["tp_size"], state["pp_size"]) == (2, 2, 1)
    await proven(http, mixed, "initial", mixed.first)
    await client.run("update_weights", update_of(mixed.tiny(1), "one"))
    await client.run("load_lora_adapter", {"lora_name": "a", "lora_path": str(mixed.adapter(1))})
    adapter = ("a", mixed.adapter(1))
    await proven(http, mixed, "one", mixed.tiny(1), adapter)
    with pytest.raises(InvalidWeights):
        await client.run("update_weights", {**update_of(mixed.tiny(2)), "digest": "blake3:" + "0" * 64})
    await client.run("update_weights", update_of(mixed.tiny(2), "two", staging="none"))
    await proven(http, mixed, "two", mixed.tiny(2), adapter)
    await client.run("unload_lora_adapter", {"lora_name": "a"})


async def test_weights_that_are_no_numbers_make_no_tokens(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    await fails_of_no_numbers(http, mixed, client)


async def test_every_rank_answers_for_what_it_holds(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    wanted = {**update_of(mixed.base(3)), "update_id": "unborn", "label": "unborn"}
    (prepared,) = (await client.call_all("prepare_update", wanted)).rows
    assert prepared.body["digest"] == model_digest(mixed.base(3))
    assert prepared.rank_results is None
    await client.run("update_weights", update_of(mixed.base(3), "checked"))
    (row,) = (await client.run("init_transport", {"backend": "filesystem"}))["workers"]
    assert row["rank_results"] == [{"rank": 0}, {"rank": 1}]
    (row,) = (await client.run("check_weights", {"action": "checksum"}))["workers"]
    assert [rank["rank"] for rank in row["ranks"]] == [0, 1]
    assert len({rank["checksum"] for rank in row["ranks"]}) == 2
    assert row["rank_results"] == row["ranks"]
    await client.run("check_weights", {"action": "reset_tensors"})
    await mixed.plane.until(lambda: all_serve(client, "checked"), HEAL_S)
    await proven(http, mixed, "checked", mixed.base(3))


async def test_a_check_sees_what_changed_in_the_rank_that_has_it(mixed: Mixed, client: RlClient) -> None:
    """The first element of a linear layer is the first rank's and the last one the last's, by rows or by columns."""
    from safetensors.torch import load_file, save_file

    async def rows(action: str) -> list[dict[str, Any]]:
        (row,) = (await client.run("check_weights", {"action": action}))["workers"]
        ranks: list[dict[str, Any]] = row["ranks"]
        return ranks

    await client.run("update_weights", update_of(mixed.base(3), "checked"))
    await rows("snapshot")
    before = [rank["checksum"] for rank in await rows("checksum")]
    for layer in ("self_attn.q_proj", "mlp.down_proj"):
        for rank, element in enumerate((0, -1)):
            tensors = load_file(mixed.base(3) / "model.safetensors")
            tensors[f"model.layers.0.{layer}.weight"].view(-1)[element] += 1.0
            path = mixed.plane.tmp / "weights" / f"changed-{layer}-{rank}"
            path.mkdir(exist_ok=True)
            save_file(tensors, path / "model.safetensors")
            await client.run("update_weights", update_of(path, path.name))
            after = [rank["checksum"] for rank in await rows("checksum")]
            changed = [one != other for one, other in zip(before, after, strict=True)]
            assert changed == [number == rank for number in range(2)], path.name
            assert [bool(found["mismatches"]) for found in await rows("compare")] == changed
    await client.run("update_weights", update_of(mixed.base(3), "again"))
    assert [rank["checksum"] for rank in await rows("checksum")] == before
    assert all(rank["match"] for rank in await rows("compare"))


@pytest.mark.parametrize("backend", each_transport.BACKENDS)
async def test_each_transport_brings_weights_and_adapters(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, backend: str
) -> None:
    await each_transport.bring(mixed, client, http, backend)


async def test_weights_and_adapters_come_by_url(mixed: Mixed, client: RlClient, http: httpx.AsyncClient) -> None:
    await each_transport.bring_by_url(mixed, client, http)


async def test_updates_in_parts_reach_both_ranks(mixed: Mixed, client: RlClient, http: httpx.AsyncClient) -> None:
    await each_transport.bring_call_by_call(mixed, client, http)


@pytest.mark.parametrize("faults", ["once", "for good"])
async def test_an_adapter_is_unloaded_though_one_rank_fails_to_remove_it(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, faults: str
) -> None:
    """The committed version holds in the end, even if the first try could not be undone."""
    (engine,) = mixed.ids
    await client.run("update_weights", update_of(mixed.tiny(1), faults))
    await client.run("load_lora_adapter", {"lora_name": "a", "lora_path": str(mixed.adapter(1))})
    once = [rank_faults.fault(1, rank_faults.PLACES[engine]["unload"], done=True)]
    for one in once if faults == "once" else rank_faults.faults_for_good(engine, "unload", 1):
        await client.run("init_transport", one)
    await client.run("unload_lora_adapter", {"lora_name": "a"})
    await proven(http, mixed, faults, mixed.tiny(1))
    (state,) = (await client.run("state"))["workers"]
    assert state["adapters"] == {}
    await client.run("destroy_transport", {"backend": "faults"})
    await client.run("load_lora_adapter", {"lora_name": "a", "lora_path": str(mixed.adapter(2))})
    await proven(http, mixed, faults, mixed.tiny(1), ("a", mixed.adapter(2)))
    await client.run("unload_lora_adapter", {"lora_name": "a"})


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
async def test_the_engine_continues_after_one_rank_hung(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, rank: int, busy: bool
) -> None:
    """The round trip is one of all ranks, also where none makes tokens. A stream is as it would have been without."""
    await mixed.witnessed(client)
    ((engine, instance_id),) = mixed.ids.items()
    worker, _, ranks = _ranks(mixed)
    stream = None
    if busy:
        stream = Stream(client, instance_id, PROMPT, ENDLESS[engine], temperature=0.0, ignore_eos=True)
        await stream.until(tokens=2)

    async def engine_is(ready: bool) -> bool:
        # a machine that is busy may take longer for an answer than the second that the op has by itself
        state = (await client.call(instance_id, "state", timeout_s=10.0)).body
        reasons = [reason.partition(" ")[0] for reason in state["admission"]["reasons"]]
        return reasons == ([] if ready else ["engine:"]) and state["ready"] == state["engine_alive"] == ready

    ranks[rank].suspend()
    try:
        await mixed.plane.until(partial(engine_is, False), 3 * DEFAULT_LIVENESS_TIMEOUT_S)
    finally:
        ranks[rank].resume()
    await mixed.plane.until(partial(engine_is, True), 3 * DEFAULT_LIVENESS_TIMEOUT_S)
    if stream is not None:
        await stream.until(tokens=len(stream.tokens) + 20)
        stream.stop()
        assert stream.tokens == witnessed(1, len(stream.tokens))
    await proven(http, mixed, "base 1", mixed.first)
    assert worker.process.poll() is None


@pytest.mark.parametrize("who", ["rank", "host agent"])
@pytest.mark.parametrize("backend", ["gloo", "ipc"])
async def test_the_committed_version_returns_after_a_kill_while_weights_come(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, backend: str, who: str
) -> None:
    """Trainer and caller get an error, and the worker's replacement serves the committed version."""
    await mixed.witnessed(client)
    ((engine, instance_id),) = mixed.ids.items()
    worker, family, ranks = _ranks(mixed)
    killed = ranks[1] if who == "rank" else _host_agent(family)
    kill = partial(os.kill, killed.pid, signal.SIGKILL)
    await (_killed_in_a_group if backend == "gloo" else _killed_at_the_memory)(mixed, client, kill)
    assert await asyncio.to_thread(worker.process.wait, END_S) == ENGINE_DEAD
    assert (f"the host agent (pid {killed.pid}) has ended" in worker.log.read_text()) == (who == "host agent")
    await mixed.plane.until(lambda: not any(map(lives, family)))
    await asyncio.to_thread(_spawn, mixed, engine, instance_id)
    await proven(http, mixed, "base 1", mixed.first)


def _host_agent(family: list[psutil.Process]) -> psutil.Process:
    (found,) = [one for one in family if one.name() == HOST_AGENT]
    return found


async def _killed_in_a_group(mixed: Mixed, client: RlClient, kill: Callable[[], None]) -> None:
    with GroupTrainer(mixed.plane) as trainer:
        await Pushing(client, trainer).prepare(mixed.base(2), "unborn")
        await trainer.do("send", 2)
        kill()
        async with asyncio.timeout(END_S):
            with suppress(Unavailable):  # the host agent may take the last bucket before it is ended
                await send_all(trainer)
            await trainer.do("close")
            with pytest.raises(PlaneError):
                await client.run("complete_weights_update")


async def _killed_at_the_memory(mixed: Mixed, client: RlClient, kill: Callable[[], None]) -> None:
    trainer = IpcTrainer()
    try:
        trainer.publish(mixed.base(2), 1, bucket_bytes=each_transport.BUCKET_BYTES, holds=(2,))
        transport = (await trainer.says("transport"))["transport"]
        update = asyncio.create_task(client.run("update_weights", {"transport": transport, "version": "unborn"}))
        await trainer.says("at")
        kill()
        trainer.go_on()
        async with asyncio.timeout(END_S):
            with pytest.raises(PlaneError):
                await update
            ended = (await trainer.says("ended"))["ended"]
            assert ended is None or ended["message"], "the host agent may take the last bucket before it is ended"
    finally:
        trainer.close()


async def test_a_killed_rank_ends_its_worker_and_leaves_no_process(mixed: Mixed, client: RlClient) -> None:
    """All ends, soon, and leaves nothing. The tests after it start workers of their own."""
    ((engine, instance_id),) = mixed.ids.items()
    worker, family, ranks = _ranks(mixed)
    assert list(mixed.plane.tmp.glob("rl-plane-*"))
    stream = Stream(client, instance_id, PROMPT, ENDLESS[engine], temperature=0.0, ignore_eos=True)
    await stream.until(tokens=2)
    draining = asyncio.create_task(client.run("pause", {"mode": "wait"}))
    await stream.until(tokens=len(stream.tokens) + 50)  # by now it waits
    shared = mapped_files(one.pid for one in family)
    os.kill(ranks[1].pid, signal.SIGKILL)
    async with asyncio.timeout(DEATH_S):
        for told in (stream.end(), draining):
            with pytest.raises(PlaneError):
                await told
    assert await asyncio.to_thread(worker.process.wait, END_S) == ENGINE_DEAD
    await mixed.plane.until(lambda: not any(map(lives, family)))
    assert not list(mixed.plane.tmp.glob("rl-plane-*"))
    assert not names_of(shared)


@pytest.mark.parametrize("who", ["worker", "all its processes"])
async def test_a_kill_leaves_no_shared_memory(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, who: str
) -> None:
    """The second kill also ends the process that deletes what others leave."""
    ((engine, instance_id),) = mixed.ids.items()
    await asyncio.to_thread(_spawn, mixed, engine, instance_id)
    await client.run("update_weights", update_of(mixed.base(3), who))
    await proven(http, mixed, who, mixed.base(3))
    worker, family, _ = _ranks(mixed)
    processes = [psutil.Process(worker.process.pid), *family]
    killed = processes[:1] if who == "worker" else processes
    for one in killed:
        one.suspend()
    shared = mapped_files(one.pid for one in processes)
    assert shared, "the ranks share memory"
    for one in killed:
        one.kill()
    assert await asyncio.to_thread(worker.process.wait, END_S) == -signal.SIGKILL
    await mixed.plane.until(lambda: not any(map(lives, processes)))
    assert not names_of(shared)


async def test_a_rank_killed_while_its_engine_starts_ends_the_worker(mixed: Mixed) -> None:
    """The kernel kills a rank for want of memory. The worker ends as it does later, and is worth a restart."""
    (engine,), directories = mixed.ids, set(mixed.plane.tmp.glob("rl-plane-*"))
    worker = mixed.plane.spawn(ready=False, engine=engine, model=mixed.first, **ARGUMENTS[engine], **RANKS[engine])
    family: list[psutil.Process] = []

    def ranks() -> list[psutil.Process]:
        family[:] = psutil.Process(worker.process.pid).children(recursive=True)
        found = []
        for one in family:
            with suppress(psutil.NoSuchProcess):
                found += [one] if one.name().startswith(PROCESSES[engine]) else []
        return found if len(found) == 2 else []

    found = await mixed.plane.until(ranks, START_S)
    os.kill(found[1].pid, signal.SIGKILL)
    assert await asyncio.to_thread(worker.process.wait, END_S) == ENGINE_DEAD, worker.log.read_text()
    assert worker.process.stdout is not None
    assert worker.process.stdout.read() == "", "it was never ready"
    await mixed.plane.until(lambda: not any(map(lives, family)))
    assert set(mixed.plane.tmp.glob("rl-plane-*")) == directories
