"""Trainers' own clients, unchanged, from their public packages: each takes the facade for one engine, and steers a
fleet of real ones. The tokens prove what every worker serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest

from examples.skyrl_client import FleetInferenceClient
from frontend.completions.service import Generation
from rl_plane.errors import Conflict, EngineFailed, InvalidRequest, Locked, Unsupported
from rl_plane.publish.integrations.vllm_client import FleetWeightSyncClient
from rl_plane.sync import SyncRlClient
from tests.support.broadcast_trainer import HOST, BroadcastTrainer, parts_of
from tests.support.broadcast_updates import NUMBERS
from tests.support.dialect_facade import HEAL_S, PROMPT, TOKENS, facade, fine, proven, witnessed
from tests.support.free_port import free_port
from tests.support.hf_fleet import chain
from tests.support.nccl_over_gloo import WORKER_PATCH
from tests.support.vllm_trainer import VllmTrainer
from worker.testing.tiny_adapter import make_witness_adapter
from worker.testing.tiny_model import make_witness_model

if TYPE_CHECKING:
    from tests.conftest import Plane
    from tests.support.commanded_process import CommandedProcess

pytestmark = [pytest.mark.engines("vllm", "trl"), pytest.mark.timeout(400)]

START_S = 120.0
GLOO_S = 20.0
"""A trainer's own bound in seconds for a broadcast that no worker takes."""
PACKED_BYTES = 20_000
"""A witness goes in several buffers."""


@pytest.fixture
def trainer(plane: Plane) -> Iterator[CommandedProcess]:
    with VllmTrainer(plane) as trainer:
        yield trainer


def witness(plane: Plane, seed: int) -> Path:
    return make_witness_model(plane.tmp / "weights" / f"witness{seed}", seed)


async def fleet(plane: Plane, count: int, dtype: str = "float32", patch: str = "") -> list[str]:
    model = make_witness_model(plane.tmp / "weights" / f"served in {dtype}", 1, dtype)
    started = [plane.spawn(ready=False, engine="hf", model=model, patch=patch) for _ in range(count)]
    return [(await asyncio.to_thread(one.wait_ready, START_S)).instance_id for one in started]


async def form(plane: Plane, trainer: CommandedProcess, ranks: int, *, packed: bool = False) -> None:
    """`WeightTransferTrainerFactory.trainer_init`, which forms the group by way of the client."""
    told = {
        "directory": str(witness(plane, 1)),
        "master_port": free_port(),
        "world_size": ranks + 1,
        "group_name": f"trainer {next(NUMBERS)}",
        "timeout_s": GLOO_S,
        "packed": packed,
        "packed_buffer_size_bytes": PACKED_BYTES,
    }
    await trainer.do("init", told)


async def form_by_nccl(plane: Plane, trainer: CommandedProcess, ranks: int, *, packed: bool) -> None:
    """vLLM's own NCCL engine forms its group, over a stand-in for NCCL."""
    told = {
        "directory": str(witness(plane, 1)),
        "master_port": free_port(),
        "world_size": ranks + 1,
        "packed": packed,
        "packed_buffer_size_bytes": PACKED_BYTES,
    }
    await trainer.do("init_nccl", told)


async def learn(plane: Plane, trainer: CommandedProcess, seed: int) -> None:
    await trainer.do("load", str(witness(plane, seed)))


def client_of(plane: Plane, kind: str, http: httpx.AsyncClient) -> dict[str, Any]:
    if kind == "nats":
        return {"kind": kind, "url": plane.url, "namespace": plane.namespace, "component": plane.component}
    return {"kind": kind, "url": str(http.base_url).rstrip("/")}


@pytest.mark.parametrize(("kind", "packed"), [("vllm", False), ("trl", True), ("nats", True)])
async def test_vllms_own_nccl_engine_drives_a_fleet(
    plane: Plane, trainer: CommandedProcess, kind: str, packed: bool
) -> None:
    """The trainer's engine, its rendezvous and its pickled id are vLLM's own; NCCL is a stand-in over gloo."""
    ids = await fleet(plane, 2, patch=WORKER_PATCH)
    async with facade(plane) as http:
        await trainer.do("client", client_of(plane, kind, http))
        await form_by_nccl(plane, trainer, 2, packed=packed)
        for step in (2, 3):
            await learn(plane, trainer, step)
            await trainer.do("send")
            await proven(http, ids, step, str(step - 1))
        await form_by_nccl(plane, trainer, 2, packed=not packed)  # another trainer takes over
        await learn(plane, trainer, 2)
        await trainer.do("send")
        await proven(http, ids, 2, "3")
        if kind == "trl":
            assert (await trainer.do("call", ["get_server_info"]))["weight_transfer_config"] == {"backend": "nccl"}


@pytest.mark.parametrize("kind", ["vllm", "trl", "nats"])
async def test_vllms_trainer_factory_drives_a_fleet(plane: Plane, trainer: CommandedProcess, kind: str) -> None:
    """The trainers use vLLM's `HTTPVLLMWeightSyncClient`, TRL's asynchronous client, and ours over NATS. TRL trains in
    float32 by default, whatever dtype the fleet serves."""
    dtype = "float32" if kind == "vllm" else "bfloat16"
    ids = await fleet(plane, 2, dtype)
    async with facade(plane) as http:
        await trainer.do("client", client_of(plane, kind, http))
        await form(plane, trainer, 2, packed=kind != "nats")
        await proven(http, ids, 1)
        for step in (2, 3):
            await learn(plane, trainer, step)
            if kind == "trl":
                await trainer.do("call", ["pause"])
            await trainer.do("send")
            if kind == "trl":
                await trainer.do("call", ["resume"])
            await proven(http, ids, step, str(step - 1))
        if kind == "vllm":
            # Called by the trainer's word for it; and in several parts, as for a model that is gathered by layers.
            await learn(plane, trainer, 2)
            await trainer.do("call", ["start_weight_update"])
            with pytest.raises(EngineFailed, match=r"409.*was called before"):
                await trainer.do("call", ["start_weight_update"])
            for number in range(3):
                await trainer.do("part", [number, 3])
                await proven(http, ids, 3, "2")
            await trainer.do("call", ["finish_weight_update", "step_7"])
            await proven(http, ids, 2, "step_7")
            with pytest.raises(EngineFailed, match="409"):
                await trainer.do("part", [0, 1])
            # Another trainer takes over after the first trainer died.
            await trainer.do("call", ["start_weight_update"])
            await form(plane, trainer, 2)
            await learn(plane, trainer, 3)
            await trainer.do("send")
            await proven(http, ids, 3)
        if kind == "trl":
            assert await trainer.do("call", ["get_world_size"]) == 2
            assert await trainer.do("call", ["get_dtype"]) == f"torch.{dtype}"
            assert await trainer.do("call", ["get_max_model_len"]) > 0
            info = await trainer.do("call", ["get_server_info"])
            assert info["weight_transfer_config"] is not None
            await _trl_brings_adapters_alone(plane, trainer, http, ids, info)
        if kind != "trl":
            await trainer.do("call", ["shutdown_weight_transfer_engine"])


async def _trl_brings_adapters_alone(
    plane: Plane, trainer: CommandedProcess, http: httpx.AsyncClient, ids: list[str], info: dict[str, Any]
) -> None:
    """TRL's trainer with a PEFT model names each version, loads it in a pause, and unloads the stale one then."""
    staleness = 1
    assert info["lora_config"]["max_lora_rank"] >= 8
    assert info["lora_config"]["max_loras"] >= staleness + 2
    assert info["parallel_config"]["data_parallel_size"] == 1
    for version in (1, 2, 3):
        adapter = make_witness_adapter(witness(plane, 1), plane.tmp / "weights" / f"trl-v{version}", version)
        await trainer.do("call", ["pause"])
        await trainer.do("call", ["load_lora_adapter", f"trl-policy-v{version}", str(adapter)])
        await trainer.do("call", ["resume"])
        if (stale := version - staleness - 1) > 0:
            await trainer.do("call", ["unload_lora_adapter", f"trl-policy-v{stale}"])
        for one in ids:
            body = {
                "model": f"trl-policy-v{version}",
                "prompt": PROMPT,
                "max_tokens": TOKENS,
                "temperature": 0,
                "top_p": 1.0,
                "top_k": 0,
                "repetition_penalty": 1.0,
                "n": 1,
                "return_token_ids": True,
                "logprobs": 0,
                "seed": (1 << 63) - version,
                "nvext": {"instance_id": one},
            }
            (choice,) = fine(await http.post("/v1/completions", json=body))["choices"]
            assert choice["token_ids"] == chain(PROMPT[-1], TOKENS, 3, version), (one, version)
            assert len(choice["logprobs"]["token_logprobs"]) == TOKENS
        served = [model["id"] for model in fine(await http.get("/v1/models"))["data"]][1:]
        assert served == [f"trl-policy-v{each}" for each in (version - 1, version) if each > 0]


async def test_a_worker_killed_in_the_middle_leaves_all_as_it_was(plane: Plane, trainer: CommandedProcess) -> None:
    """The client gets one 409. The other workers continue to serve, and the next group has all present workers."""
    ids = await fleet(plane, 2)
    async with facade(plane) as http:
        await trainer.do("client", client_of(plane, "vllm", http))
        await form(plane, trainer, 2)
        await learn(plane, trainer, 2)
        await trainer.do("call", ["start_weight_update"])
        await trainer.do("part", [0, 3])
        plane.spawned[0].kill()
        with pytest.raises(EngineFailed, match="409"):
            await trainer.do("part", [1, 3])
        with pytest.raises(EngineFailed, match="409"):
            await trainer.do("call", ["finish_weight_update"])
        await proven(http, ids[1:], 1)
        again = await asyncio.to_thread(
            plane.spawn, engine="hf", model=witness(plane, 1), instance_id=ids[0], ready=False
        )
        await asyncio.to_thread(again.wait_ready, START_S)
        await form(plane, trainer, 2)
        await learn(plane, trainer, 2)
        await trainer.do("send")
        await plane.until(lambda: _ready(http), HEAL_S)
        await proven(http, ids, 2, "1")


async def _ready(http: httpx.AsyncClient) -> bool:
    return bool((await http.get("/v1/rl/ready?min_workers=2")).status_code == 200)


async def test_a_trainer_that_is_there_before_its_fleet_waits_for_it(
    plane: Plane, trainer: CommandedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's, which takes the first model as soon as `/health` is a 200."""
    twice, check, asked = asyncio.Event(), Generation.check_stays, 0

    def counted(generation: Generation) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            twice.set()
        check(generation)

    monkeypatch.setattr(Generation, "check_stays", counted)
    async with facade(plane) as http:
        await trainer.do("client", client_of(plane, "trl", http))
        ready = asyncio.create_task(trainer.do("call", ["wait_for_server_ready"]))
        again = asyncio.create_task(twice.wait())
        await asyncio.wait({ready, again}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        assert (again.done(), ready.done()) == (True, False)
        await asyncio.to_thread(plane.spawn)
        await ready
        assert await trainer.do("call", ["get_max_model_len"]) > 0


async def test_the_facade_refuses_vllms_nccl_trainer_before_any_worker_waits(
    plane: Plane, trainer: CommandedProcess
) -> None:
    ids = await fleet(plane, 1)
    async with facade(plane) as http:
        await trainer.do("client", client_of(plane, "vllm", http))
        nccl = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
        with pytest.raises(EngineFailed, match=r"501.*have no GPU"):
            await trainer.do("call", ["init_weight_transfer_engine", {**nccl, "packed": True}])
        with pytest.raises(EngineFailed, match="409"):
            await trainer.do("call", ["update_weights", {"names": [], "dtype_names": [], "shapes": []}])
        await proven(http, ids, 1)
        assert fine(await http.get("/weight_info")) == {"weight_version": "initial"}
        # TRL's synchronous client: all of it that needs no GPU, its retries included.
        await trainer.do("client", client_of(plane, "trl, synchronous", http))
        assert await trainer.do("call", ["get_world_size"]) == 1
        info = await trainer.do("call", ["get_server_info"])
        assert info["weight_transfer_config"] == {"backend": "gloo"}
        assert (
            info["model_config"]["logprobs_mode"] == "raw_logprobs"
        )  # GRPOTrainer reads it before its first step
        await trainer.do("call", ["reset_prefix_cache"])
        prompts = [PROMPT, PROMPT[-1:]]
        made = await trainer.do("call", ["generate", prompts, None, 2, 1.0, 0.0, 1.0, 0, 0.0, TOKENS])
        assert (made["prompt_ids"], made["completion_ids"]) == (prompts, [witnessed(1)] * 4)
        assert made["logprob_token_ids"] == [[[token] for token in witnessed(1)]] * 4
        with pytest.raises(EngineFailed, match="needs a CUDA device"):
            await trainer.do("call", ["init_communicator", "cpu"])


async def test_the_skyrl_client_of_the_examples_updates_a_fleet(plane: Plane) -> None:
    """SkyRL's trainer pauses, sends one bucket after the other, and resumes."""
    ids = await fleet(plane, 2)
    sync = await asyncio.to_thread(SyncRlClient.connect, plane.url, plane.namespace, plane.component)
    client = FleetInferenceClient(sync)
    with BroadcastTrainer(plane) as trainer:
        size, _ = await client.get_world_size()
        group, port = f"skyrl {next(NUMBERS)}", free_port()
        info = {"backend": "gloo", "group_name": group, "master_address": HOST, "master_port": port}
        await asyncio.gather(
            client.init_weight_update_communicator({**info, "rank_offset": 1, "world_size": size + 1}),
            trainer.do("form", {"group": group, "port": port, "world_size": size + 1, "timeout_s": GLOO_S}),
        )
        async with facade(plane) as http:
            await client.pause_generation()
            await client.reset_prefix_cache()
            await client.start_weight_update()
            directory = witness(plane, 2)
            for part in parts_of(directory, 3):
                told = {"names": part["names"], "dtype_names": part["dtypes"], "shapes": part["shapes"]}
                sending = {"group": group, "directory": str(directory), "part": part}
                await asyncio.gather(client.update_named_weights(told), trainer.do("send", sending))
            await client.finish_weight_update("step_1")
            await client.resume_generation()
            await proven(http, ids, 2, "step_1")
    await asyncio.to_thread(sync.close)


class LosingClient(SyncRlClient):
    """A client whose replies can have a worker more, which has left meanwhile."""

    one_has_left = False

    def run(self, op: str, *more: Any, **how: Any) -> dict[str, Any]:
        reply = super().run(op, *more, **how)
        if self.one_has_left:
            reply["workers"].append({"instance_id": "left", "status": "error"})
        return reply


async def test_our_client_over_nats_refuses_wrong_calls_before_any_worker_changes(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    plane.spawn_copies(2)
    caplog.set_level(logging.WARNING, "rl_plane.publish")
    sync = await asyncio.to_thread(LosingClient.connect, plane.url, plane.namespace, plane.component)
    assert isinstance(sync, LosingClient)
    client = FleetWeightSyncClient(sync)
    update = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "colour": "red"}
    for _ in range(2):
        with pytest.raises(Unsupported, match="can't reach this fleet"):
            await asyncio.to_thread(client.init_weight_transfer_engine, {"world_size": 3, "colour": "red"})
        with pytest.raises(InvalidRequest, match="1 entries, and the fleet has 2 ranks"):
            await asyncio.to_thread(client.update_weights, [update])
        with pytest.raises(Conflict, match="no update has begun"):
            await asyncio.to_thread(client.update_weights, [update] * 2)
    sync.one_has_left = True
    with pytest.raises(InvalidRequest, match="1 entries, and the fleet has 2 ranks"):
        await asyncio.to_thread(client.update_weights, [update])
    told = "the field %r has no effect: it is not known here, and is dropped"
    assert [record.getMessage() for record in caplog.records if record.name == "rl_plane.publish"] == [
        told % name for name in ("init_info.colour", "update_info.colour")
    ]
    await asyncio.to_thread(sync.close)


class TakenOnce:
    """A fleet that records the ops it runs. Another caller holds it at the first abort."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def run(self, op: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.ran.append(op)
        if op == "abort_weights_update" and self.ran.count(op) == 1:
            raise Locked("taken", retry_after_s=1.0)
        return {"workers": []}


def test_our_client_over_nats_forms_no_group_while_what_it_left_stands() -> None:
    fleet = TakenOnce()
    client = FleetWeightSyncClient(cast(SyncRlClient, fleet))
    init = {"backend": "gloo", "master_address": HOST, "master_port": 1, "world_size": 2}
    client.init_weight_transfer_engine(init)
    client.start_weight_update()
    fleet.ran.clear()
    with pytest.raises(Locked):
        client.init_weight_transfer_engine(init)
    client.init_weight_transfer_engine(init)
    assert [op for op in fleet.ran if op != "describe"] == ["abort_weights_update"] * 2 + ["init_transport"]
