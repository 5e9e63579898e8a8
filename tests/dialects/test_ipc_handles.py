"""CUDA IPC handles of colocated trainers: vLLM's own `ipc` engine and client, and SkyRL's calls. A fleet of real models
on two GPUs, which are a stand-in over shared memory."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from rl_plane.transports.trainer_memory import SHM
from tests.support.checkpoint_engine_server import CheckpointEngineServer
from tests.support.dialect_facade import facade, fine, proven, refused, served
from tests.support.hf_fleet import Witnesses
from tests.support.hostile_pickles import Reduced
from tests.support.ipc_handles_trainer import GPUS, IpcHandlesTrainer
from tests.support.shared_host_cuda import WORKER_PATCH

if TYPE_CHECKING:
    from tests.conftest import Plane
    from tests.support.commanded_process import CommandedProcess

pytestmark = [pytest.mark.engines("vllm"), pytest.mark.timeout(400)]

BUFFER_BYTES = 400_000
"""A witness goes in several buffers."""


@pytest.fixture
def trainers(plane: Plane) -> Iterator[list[IpcHandlesTrainer]]:
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(IpcHandlesTrainer(plane)) for _ in range(2)]
        yield started
        _remove_memory(started)


def _remove_memory(processes: Sequence[CommandedProcess]) -> None:
    """Removes the memory of processes that were killed."""
    for one in processes:
        for left in [*SHM.glob(f"rlp_gpu_{one.process.pid}_*"), *SHM.glob(f"torch_{one.process.pid}_*")]:
            left.unlink(missing_ok=True)


async def _rpc(http: httpx.AsyncClient, method: str, **named: Any) -> httpx.Response:
    return await http.post("/collective_rpc", json={"method": method, "kwargs": named})


async def _skyrl(http: httpx.AsyncClient, chunks: list[dict[str, Any]]) -> httpx.Response:
    """One update in SkyRL's order. Returns the first reply that is no 200, or the last one."""
    fine(await _rpc(http, "skyrl_start_weight_update", is_checkpoint_format=True))
    for chunk in chunks:
        reply = await _rpc(http, "update_weights_ipc", update_info=chunk)
        if reply.status_code != 200:
            return reply
    return await _rpc(http, "skyrl_finish_weight_update")


async def test_colocated_trainers_update_a_fleet(plane: Plane, trainers: list[CommandedProcess]) -> None:
    witnesses = Witnesses(plane)
    started = [
        plane.spawn(ready=False, engine="hf", model=witnesses.first, patch=WORKER_PATCH.format(gpu=gpu))
        for gpu in GPUS
    ]
    ids = [(await asyncio.to_thread(one.wait_ready, 120.0)).instance_id for one in started]
    trainer, other = trainers
    async with facade(plane) as http:
        url = str(http.base_url).rstrip("/")
        early = {"names": [], "dtype_names": [], "shapes": [], "ipc_handles_pickled": ""}
        assert (
            refused(await http.post("/update_weights", json={"update_info": early}), 409)["field"] == "update_info"
        )
        for packed, seed in ((False, 2), (True, 3)):
            told = {"directory": str(witnesses.first), "url": url, "packed": packed, "bytes": BUFFER_BYTES}
            await trainer.do("init", told)
            await trainer.do("load", str(witnesses.base(seed)))
            await trainer.do("send")
            await proven(http, ids, seed)
            assert await trainer.do("held") == [], "each share was opened once and released"
        # SkyRL's strategy: init_info is empty, and each chunk has handles of its own.
        fine(await http.post("/init_weight_transfer_engine", json={"init_info": {}}))
        chunks = await trainer.do("skyrl", {"directory": str(witnesses.base(1)), "chunks": 3})
        fine(await _skyrl(http, chunks))
        await proven(http, ids, 1)
        assert await trainer.do("held") == []
        for how, status, words in (
            ({"damaged": GPUS[1]}, 409, "received different bytes"),
            ({"gpus": GPUS[:1]}, 501, f"on {GPUS[0]}, and this worker's model is on {GPUS[1]}"),
            ({"longer": 1 << 20}, 400, "bytes to the end of its allocation"),
        ):
            chunks = await trainer.do("skyrl", {"directory": str(witnesses.base(2)), "chunks": 2, **how})
            reply = await _skyrl(http, chunks)
            # If the other worker's staging was undone first, the answer is the end of the whole update.
            assert reply.status_code in (status, 409), reply.text
            assert words in reply.text, how
            fine(await http.post("/init_weight_transfer_engine", json={"init_info": {}}))
            await proven(http, ids, 1)
        await _dies_in_the_middle(witnesses, ids, trainer, http)
        fine(await http.post("/init_weight_transfer_engine", json={"init_info": {}}))
        fine(await _skyrl(http, await other.do("skyrl", {"directory": str(witnesses.base(3)), "chunks": 1})))
        await proven(http, ids, 3)
        fine(await http.post("/shutdown_weight_transfer_engine"))


async def _dies_in_the_middle(
    witnesses: Witnesses, ids: list[str], trainer: CommandedProcess, http: httpx.AsyncClient
) -> None:
    """The trainer is killed after a chunk. Its next handles lead nowhere."""
    chunks = await trainer.do("skyrl", {"directory": str(witnesses.base(2)), "chunks": 2})
    fine(await _rpc(http, "skyrl_start_weight_update", is_checkpoint_format=True))
    fine(await _rpc(http, "update_weights_ipc", update_info=chunks[0]))
    await asyncio.to_thread(trainer.kill)
    error = refused(await _rpc(http, "update_weights_ipc", update_info=chunks[1]), 400)
    assert "is not on this machine, or has ended" in error["message"]
    refused(await _rpc(http, "skyrl_finish_weight_update"), 400)  # the update ended with this error
    await proven(http, ids, 1)
    assert [is_open for is_open, _ in await served(http)] == [True, True]


@pytest.fixture
def server(plane: Plane) -> Iterator[CheckpointEngineServer]:
    with CheckpointEngineServer(plane) as server:
        yield server
        _remove_memory([server])


async def test_checkpoint_engine_updates_a_fleet(plane: Plane, server: CommandedProcess) -> None:
    """It comes by vLLM's `/collective_rpc` and by SGLang's route, with the messages of its parameter server."""
    witnesses = Witnesses(plane)
    started = [
        plane.spawn(ready=False, engine="hf", model=witnesses.first, patch=WORKER_PATCH.format(gpu=gpu))
        for gpu in GPUS
    ]
    ids = [(await asyncio.to_thread(one.wait_ready, 120.0)).instance_id for one in started]
    async with facade(plane) as http:

        async def update(seed: int, **how: Any) -> httpx.Response:
            told = {"directory": str(witnesses.base(seed)), "buckets": 3, **how}
            handles = await server.do("begin", told)
            return await http.post(
                "/collective_rpc", json={"method": "update_weights_from_ipc", "args": [handles]}
            )

        assert fine(await update(2)) == {"results": [None] * 2}
        assert (await server.do("end"), await server.do("held")) == ("", [])
        await proven(http, ids, 2)
        handles = await server.do("begin", {"directory": str(witnesses.base(3)), "buckets": 2})
        asked = {"zmq_handles": handles, "flush_cache": True, "weight_version": "step_3"}
        assert fine(await http.post("/update_weights_from_ipc", json=asked))["success"] is True
        await proven(http, ids, 3, "step_3")
        assert "received different bytes" in refused(await update(1, damaged=1), 409)["message"]
        assert "has no socket for" in refused(await update(1, gpus=GPUS[:1]), 501)["message"]
        # The other worker is stopped, unless it had everything already. Its server learns that, and does not wait.
        assert await server.do("end") in ("", "RuntimeError: Failed to update weights due to remote errors")
        away = {"zmq_handles": dict.fromkeys(GPUS, "tcp://10.0.0.1:1")}
        assert (
            refused(await http.post("/update_weights_from_ipc", json=away), 400)["field"]
            == "transport.zmq_handles"
        )
        await proven(http, ids, 3, "step_3")


async def test_a_parameter_server_that_lies_or_dies_changes_nothing(
    plane: Plane, server: CommandedProcess
) -> None:
    witnesses = Witnesses(plane)
    patch = WORKER_PATCH.format(gpu=GPUS[0])
    one = plane.spawn(ready=False, engine="hf", model=witnesses.first, patch=patch)
    ids = [(await asyncio.to_thread(one.wait_ready, 120.0)).instance_id]
    async with facade(plane) as http:
        told = {"directory": str(witnesses.base(2)), "buckets": 3, "gpus": GPUS[:1]}
        handles = await server.do("begin", {**told, "first": pickle.dumps(Reduced(eval, ("1",))).hex()})
        asked = {"method": "update_weights_from_ipc", "args": [handles]}
        assert "'builtins' 'eval'" in refused(await http.post("/collective_rpc", json=asked), 400)["message"]
        assert "remote errors" in await server.do("end"), "the server hears of it, and does not wait"
        handles = await server.do("begin", {**told, "waits": True})
        asked = {"method": "update_weights_from_ipc", "args": [handles]}
        updating = asyncio.create_task(http.post("/collective_rpc", json=asked))
        await plane.until(lambda: _has_come(http))
        await asyncio.to_thread(server.kill)
        assert "has ended" in refused(await updating, 409)["message"]
        await proven(http, ids, 1)
        assert [is_open for is_open, _ in await served(http)] == [True]


async def _has_come(http: httpx.AsyncClient) -> bool:
    """Whether each worker has received some bytes of an update."""
    rows = fine(await http.get("/v1/rl/state"))["workers"]
    return all(row.get("update") and row["update"]["bytes"] > 0 for row in rows)


async def test_handles_that_are_none_are_refused_by_name(plane: Plane) -> None:
    plane.spawn()
    async with facade(plane) as http:
        fine(await http.post("/init_weight_transfer_engine", json={"init_info": {"packed": False}}))
        fine(await http.post("/start_weight_update"))
        described = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
        for handles, words in (
            ("%%%", "something else than base64"),
            (base64.b64encode(pickle.dumps(Reduced(eval, ("1",)))).decode(), "'builtins' 'eval'"),
            (base64.b64encode(pickle.dumps([{}])).decode(), "a handle for each GPU"),
        ):
            info = {**described, "ipc_handles_pickled": handles}
            error = refused(await http.post("/update_weights", json={"update_info": info}), 400)
            assert (words in error["message"], error["field"]) == (True, "update_info.ipc_handles_pickled")
        plain = {**described, "ipc_handles": [{}]}
        assert (
            "as JSON" in refused(await http.post("/update_weights", json={"update_info": plain}), 400)["message"]
        )
        refused(await http.post("/update_weights", json={"update_info": described}), 409)
