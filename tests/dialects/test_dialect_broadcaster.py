"""prime-rl's broadcaster and SkyRL's sender over a torch group: each step is an update of real models."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.server.bodies import MAX_BODY_BYTES
from rl_plane.errors import Locked
from rl_plane.protocol.versions import TensorSpec
from rl_plane.weights.safetensors_file import write_safetensors
from tests.support.broadcast_trainer import HOST, BroadcastTrainer, parts_of
from tests.support.broadcast_updates import NUMBERS
from tests.support.dialect_facade import (
    HEAL_S,
    PROMPT,
    Answered,
    facade,
    fine,
    just_before,
    proven,
    refused,
    refused_before,
    served,
    taken_before,
    witnessed,
)
from tests.support.free_port import free_port
from tests.support.hf_fleet import START_S, Witnesses
from tests.support.prime_rl_calls import PrimeRl
from worker.receive.staging import model_digest
from worker.testing.tiny_model import make_witness_model

if TYPE_CHECKING:
    from tests.conftest import Plane
    from tests.support.commanded_process import CommandedProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GLOO_S = 20.0


async def test_vllms_trainers_update_a_fleet_by_broadcast(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    ids = await asyncio.to_thread(witnesses.spawn, 2)
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http:
            await _prime_rl(witnesses, ids, trainer, http)
            http.timeout = httpx.Timeout(None)
            await _skyrl(witnesses, ids, trainer, http)
            await _older_skyrl(witnesses, ids, trainer, http)
            await _nemo_rl_by_dynamo(witnesses, ids, trainer, http)


async def _prime_rl(
    witnesses: Witnesses, ids: list[str], trainer: CommandedProcess, http: httpx.AsyncClient
) -> None:
    """Updates at the root and beneath `/v1/rl`. The call of each step is the update."""
    group = await _init_broadcaster(trainer, http)
    for step, seed, base in ((1, 2, "/v1/rl"), (2, 3, "")):
        body, sending = _broadcast(group, witnesses.base(seed), f"step_{step}")
        await http.post(f"{base}/pause?mode=keep&clear_cache=false")
        reply, _ = await asyncio.gather(
            http.post(f"{base}/update_weights", json=body), trainer.do("send", sending)
        )
        assert fine(reply)["weight_version"] == f"step_{step}"
        await http.post(f"{base}/resume")
        await proven(http, ids, seed, f"step_{step}")
    # Its own server takes a broadcast without a word of what comes: here a directory alone is one, with tensors in it.
    error = refused(await http.post("/update_weights", json={"weight_dir": "/any/step_3"}), 400)
    assert error["field"] == "transport.path"
    assert refused(await http.post("/update_weights", json={"weight_dir": None}), 400)["field"] == "update_info"
    await proven(http, ids, 3, "step_2")
    # The next run of this trainer sends by files.
    told = {"weight_dir": str(witnesses.base(1)), "weight_version": "filed"}
    assert fine(await http.post("/update_weights", json=told))["weight_version"] == "filed"
    await proven(http, ids, 1, "filed")
    await PrimeRl(http).update_by_method(witnesses.base(2))
    await proven(http, ids, 2)


async def _init_broadcaster(trainer: CommandedProcess, http: httpx.AsyncClient) -> str:
    """Forms a group of two workers. Returns its name."""
    group, port = f"prime-rl {next(NUMBERS)}", free_port()
    init = {
        "host": HOST,
        "port": port,
        "rank_offset": 0,
        "inference_world_size": 2,
        "timeout": GLOO_S,
        "quantize_in_weight_transfer": False,
        "backend": "gloo",
        "group_name": group,
    }
    formed, _ = await asyncio.gather(
        http.post("/v1/rl/init_broadcaster", json=init),
        trainer.do("form", {"group": group, "port": port, "world_size": 3, "timeout_s": GLOO_S}),
    )
    assert fine(formed) == {"status": "ok"}
    return group


def _broadcast(group: str, directory: Path, label: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call, and what its trainer does meanwhile."""
    (part,) = parts_of(directory, 1)
    info = {"names": part["names"], "dtype_names": part["dtypes"], "shapes": part["shapes"]}
    body = {"weight_dir": None, "weight_version": label, "update_info": info}
    return body, {"group": group, "directory": str(directory), "part": part}


async def test_prime_rls_update_waits_for_another_callers_change(plane: Plane) -> None:
    """prime-rl's update waits for the other caller. Its client does not repeat after a 409, so a failed update must
    leave nothing behind."""
    for one in (plane.spawn(ready=False), plane.spawn(ready=False)):
        await asyncio.to_thread(one.wait_ready)
    client = await plane.client()
    view = await client.view()
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http:

            async def update(label: str, seed: int) -> httpx.Response:
                body, sending = _broadcast(group, plane.model(seed), label)
                reply, _ = await asyncio.gather(
                    http.post("/update_weights", json=body), trainer.do("send", sending)
                )
                return reply

            @asynccontextmanager
            async def taken_from(op: str) -> AsyncIterator[None]:
                """Locks the fleet from this op on, and still holds the lock when the update is dropped."""
                async with AsyncExitStack() as stack:

                    async def refuse(answered: Answered) -> None:
                        await stack.enter_async_context(client.lock(view))
                        raise Locked("taken", retry_after_s=1.0)

                    async with just_before(op, refuse):
                        yield

            group = await _init_broadcaster(trainer, http)
            async with (
                taken_before(client, "receive_weights_part"),
                taken_before(client, "complete_weights_update"),
            ):
                assert fine(await update("one", 1))["weight_version"] == "one"
            body, _ = _broadcast(group, plane.model(2), "two")
            async with taken_from("receive_weights_part"):
                assert refused(await http.post("/update_weights", json=body), 409)["cause"] == "locked"
            group = await _init_broadcaster(trainer, http)
            assert fine(await update("two", 2))["weight_version"] == "two"
            async with taken_from("complete_weights_update"):
                assert refused(await update("three", 1), 409)["cause"] == "locked"
            assert await served(http) == [(True, "two")] * 2
            group = await _init_broadcaster(trainer, http)
            assert fine(await update("three", 1))["weight_version"] == "three"
            assert await served(http) == [(True, "three")] * 2


async def test_a_group_is_not_formed_over_what_its_trainer_has_left(plane: Plane) -> None:
    """This also holds at a frontend that has started since. If the old update can't be dropped, no worker joins the new
    group."""
    for one in (plane.spawn(ready=False), plane.spawn(ready=False)):
        await asyncio.to_thread(one.wait_ready)
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http, facade(plane) as other:

            async def form(at: httpx.AsyncClient) -> str:
                group, port = f"v {next(NUMBERS)}", free_port()
                init = {"backend": "gloo", "group_name": group, "master_address": HOST, "master_port": port}
                formed, _ = await asyncio.gather(
                    at.post("/init_weight_transfer_engine", json={"init_info": {**init, "world_size": 3}}),
                    trainer.do("form", {"group": group, "port": port, "world_size": 3, "timeout_s": GLOO_S}),
                )
                fine(formed)
                return group

            async def send(at: httpx.AsyncClient, group: str, seed: int, count: int) -> None:
                fine(await at.post("/start_weight_update", json={}))
                for part in parts_of(plane.model(seed), 2)[:count]:
                    info = {"names": part["names"], "dtype_names": part["dtypes"], "shapes": part["shapes"]}
                    told = {"group": group, "directory": str(plane.model(seed)), "part": part}
                    reply, _ = await asyncio.gather(
                        at.post("/update_weights", json={"update_info": info}), trainer.do("send", told)
                    )
                    fine(reply)

            for seed, at in ((1, other), (2, http)):
                await send(http, await form(http), seed, 1)
                init = {"backend": "gloo", "master_address": HOST, "master_port": free_port(), "world_size": 3}
                async with refused_before("abort_weights_update", Locked("taken", retry_after_s=1.0)):
                    error = refused(await at.post("/init_weight_transfer_engine", json={"init_info": init}), 503)
                assert error["code"] == "locked", "no worker has joined"
                await send(at, await form(at), seed, 2)
                fine(await at.post("/finish_weight_update", json={"weight_version": str(seed)}))
                assert await served(http) == [(True, str(seed))] * 2


async def _skyrl(witnesses: Witnesses, ids: list[str], trainer: CommandedProcess, http: httpx.AsyncClient) -> None:
    """Its client has no time-outs and does not repeat. The group forms while `init` is under way; the buckets come by
    `/collective_rpc`, and with newer versions by vLLM's own routes."""
    size = fine(await http.request("GET", "/get_world_size", json={}))["world_size"]
    assert size == 2
    group, port = f"skyrl {next(NUMBERS)}", free_port()
    init = {"master_address": HOST, "master_port": port, "rank_offset": 1, "world_size": size + 1}
    refused(await http.post("/init_weight_transfer_engine", json={"init_info": init}), 501)  # its own NCCL
    init = {**init, "backend": "gloo", "group_name": group}
    formed, _ = await asyncio.gather(
        http.post("/init_weight_transfer_engine", json={"init_info": init}),
        trainer.do("form", {"group": group, "port": port, "world_size": size + 1, "timeout_s": GLOO_S}),
    )
    fine(formed)
    for seed, newer in ((1, False), (2, True)):
        directory = witnesses.base(seed)
        fine(await http.post("/pause?mode=keep&clear_cache=false"))
        try:
            assert fine(await http.post("/reset_prefix_cache", json={}))["success"] is True
            await _skyrl_step(http, "skyrl_start_weight_update", {"is_checkpoint_format": True}, newer)
            for part in parts_of(directory, 3):
                info = {"names": part["names"], "dtype_names": part["dtypes"], "shapes": part["shapes"]}
                told = {**part, "layout": "packed" if newer else "each"}
                info = {**info, "packed": newer}
                named = {"update_info": [info] * size if newer else info}
                await asyncio.gather(
                    _skyrl_step(http, "update_weights_nccl", named, newer),
                    trainer.do("send", {"group": group, "directory": str(directory), "part": told}),
                )
            await _skyrl_step(http, "skyrl_finish_weight_update", {}, newer)
        finally:
            fine(await http.post("/resume"))
        await proven(http, ids, seed)
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "temperature": 0.0}, "cache_salt": "a"}
        reply = await http.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "episode 1"})
        (choice,) = fine(reply)["choices"]
        assert choice["token_ids"] == witnessed(seed, 4)


async def _older_skyrl(
    witnesses: Witnesses, ids: list[str], trainer: CommandedProcess, http: httpx.AsyncClient
) -> None:
    """Its client of a remote engine. No call ends an update: the last missing tensor commits it."""
    for number, seed in enumerate((3, 1, 2)):
        group, port = f"older skyrl {next(NUMBERS)}", free_port()
        init = {"master_port": port, "rank_offset": 1, "world_size": 3, "group_name": group, "backend": "gloo"}
        if number:  # asdict(BroadcastInitInfo)
            init |= {"master_addr": HOST, "model_dtype_str": "torch.float32", "override_existing_receiver": True}
        else:
            init |= {"master_address": HOST, "override_existing": False}
        wrong = refused(await http.post("/init_weight_update_communicator", json={**init, "world_size": 4}), 400)
        assert wrong["field"] == "world_size"
        formed, _ = await asyncio.gather(
            http.post("/init_weight_update_communicator", json=init),
            trainer.do("form", {"group": group, "port": port, "world_size": 3, "timeout_s": GLOO_S}),
        )
        assert fine(formed) == {"status": "ok"}
        directory = witnesses.base(seed)
        fine(await http.post("/pause?mode=keep"))
        for part in parts_of(directory, 99 if number == 0 else 3):
            told, path, body = {**part, "layout": "each"}, "/update_weights", {**part}
            if number == 0:  # one tensor: name, dtype, shape
                body = {key.removesuffix("s"): value[0] for key, value in part.items()}
            if number == 1:
                path, body, told["layout"] = "/update_weights_skyrl", {**part, "sizes": _sizes(part)}, "flat"
            sent = {"group": group, "directory": str(directory), "part": told}
            reply, _ = await asyncio.gather(http.post(path, json=body), trainer.do("send", sent))
            assert fine(reply) == {"status": "ok"}
        fine(await http.post("/resume"))
        fine(await http.post("/reset_prefix_cache", json={"reset_running_requests": False}))
        await proven(http, ids, seed)
        assert fine(await http.post("/destroy_weights_update_group"))["success"] is True
    shared = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "extras": [{"ipc_handles": {}}]}
    assert refused(await http.post("/update_weights", json=shared), 501)["field"] == "extras"
    assert refused(await http.post("/update_weights", json={**part, "name": "a"}), 400)["field"] == "name"


def _sizes(part: dict[str, Any]) -> list[int]:
    return [math.prod(shape) for shape in part["shapes"]]


async def _nemo_rl_by_dynamo(
    witnesses: Witnesses, ids: list[str], trainer: CommandedProcess, http: httpx.AsyncClient
) -> None:
    """NeMo-RL's `DynamoRefitChannel`, for which the fleet is one worker of Dynamo's."""

    async def post(route: str, body: dict[str, Any]) -> None:
        assert fine(await http.post(f"/engine/{route}", json=body)) == {"status": "ok"}

    (worker,) = fine(await http.get("/fleet/v1/rl/workers"))["workers"]
    size, port = worker["world_size"], free_port()
    init = {"master_address": HOST, "master_port": port, "rank_offset": 1, "world_size": size + 1}
    asked = {"engine_rpc": "init_weight_transfer_engine", "init_info": init}
    refused(await http.post("/engine/init_weights_update_group", json=asked), 501)  # its own NCCL
    group = f"nemo-rl {next(NUMBERS)}"
    asked["init_info"] = {**init, "backend": "gloo", "group_name": group}
    await asyncio.gather(
        post("init_weights_update_group", asked),
        trainer.do("form", {"group": group, "port": port, "world_size": size + 1, "timeout_s": GLOO_S}),
    )
    common = {"allow_unpaused": True, "reset_prefix_cache": False}
    for seed in (3, 1):
        directory = witnesses.base(seed)
        (part,) = parts_of(directory, 1)
        info = {"names": part["names"], "dtype_names": part["dtypes"], "shapes": part["shapes"], "packed": True}
        route = "update_weights_from_distributed"
        await post(route, {"engine_rpc": "start_weight_update", **common, "is_checkpoint_format": True})
        told = {"group": group, "directory": str(directory), "part": {**part, "layout": "packed"}}
        await asyncio.gather(
            post(route, {"engine_rpc": "update_weights", **common, "update_info": info}),
            trainer.do("send", told),
        )
        await post(route, {"engine_rpc": "finish_weight_update", **common})
        await post("pause_generation", {"mode": "wait", "clear_cache": True})
        await post("resume_generation", {})
        await proven(http, ids, seed)


async def test_weights_of_another_float_dtype_are_cast_as_engines_servers_do(plane: Plane) -> None:
    """No trainer's client can ask for it. The version is what was published; who comes later casts it too."""
    witnesses = Witnesses(plane)
    half = make_witness_model(witnesses.weights / "half", 1, "bfloat16")
    started = [plane.spawn(ready=False, engine="hf", model=half) for _ in range(2)]
    ids = [(await asyncio.to_thread(one.wait_ready, START_S)).instance_id for one in started]
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http:
            own = {"transport": {"backend": "filesystem", "path": str(witnesses.base(2))}}
            assert (await http.post("/v1/rl/update_weights", json=own)).json()["error"]["field"] == "cast"
            label = 0

            async def served_by_all(seed: int) -> None:
                nonlocal label
                label += 1
                await proven(http, ids, seed, str(label))
                version = fine(await http.get("/v1/rl/state"))["version"]
                assert version["digest"] == model_digest(witnesses.base(seed))
                assert fine(await http.get("/v1/rl/updates"))["updates"][0]["cast"] is True

            fine(await http.post("/update_weights_from_disk", json={"model_path": str(witnesses.base(2))}))
            await served_by_all(2)
            fine(await http.post("/update_weights", json={"weight_dir": str(witnesses.base(3))}))
            await served_by_all(3)
            data = base64.b64encode((witnesses.base(1) / "model.safetensors").read_bytes()).decode()
            body = {"serialized_named_tensors": [data], "load_format": "safetensors"}
            fine(await http.post("/update_weights_from_tensor", json=body))
            await served_by_all(1)
            group = await _init_broadcaster(trainer, http)
            for part in parts_of(witnesses.base(2), 2):
                sending = {"group": group, "directory": str(witnesses.base(2)), "part": part}
                reply, _ = await asyncio.gather(
                    http.post("/update_weights_from_distributed", json={**part, "group_name": group}),
                    trainer.do("send", sending),
                )
                fine(reply)
            await served_by_all(2)
            fine(await http.post("/start_weight_update"))
            info = {"weight_dir": str(witnesses.base(3))}
            fine(await http.post("/update_weights", json={"update_info": info}))
            fine(await http.post("/finish_weight_update"))
            await served_by_all(3)
            adapter = {"lora_name": "own", "lora_path": str(witnesses.adapter(1)), "cast": False}
            error = (await http.post("/v1/rl/load_lora_adapter", json=adapter)).json()["error"]
            assert error["field"] == "cast"
            for prefix in ("", "/v1", "/v1/rl", "/v1/rl/v1"):
                path = f"{prefix}/load_lora_adapter"
                name = path.replace("/", "-")
                fine(await http.post(path, json={"lora_name": name, "lora_path": str(witnesses.adapter(1))}))
                assert fine(await http.get("/v1/rl/updates"))["updates"][0]["target"]["name"] == name
            assert started[0].log.read_text().count("the update allows a cast") == 1
            started[0].kill()
            again = plane.spawn(ready=False, engine="hf", model=half, instance_id=ids[0])
            await asyncio.to_thread(again.wait_ready, START_S)
            await plane.until(lambda: _all_ready(http), HEAL_S)
            await proven(http, ids, 3, str(label))


async def _all_ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/v1/rl/ready?min_workers=2")).status_code == 200


async def _skyrl_step(http: httpx.AsyncClient, method: str, named: dict[str, Any], newer: bool) -> None:
    if not newer:
        reply = fine(await http.post("/collective_rpc", json={"method": method, "kwargs": named}))
        assert reply == {"results": [None] * 2}
        return
    path = {
        "skyrl_start_weight_update": "/start_weight_update",
        "update_weights_nccl": "/update_weights",
        "skyrl_finish_weight_update": "/finish_weight_update",
    }[method]
    assert fine(await http.post(path, json=named))["message"]


MANY = 20_000


"""Names as in a model of many experts."""
NAMES = [f"model.layers.{number // 400}.mlp.experts.{number % 400}.down_proj.weight" for number in range(MANY)]


def many_tensors(plane: Plane, seed: int) -> Path:
    """Writes a model of many tensors, each of one number."""
    path, numbers = plane.model(seed), random.Random(seed)
    weights = {name: (TensorSpec("F32", (1,)), numbers.randbytes(4)) for name in NAMES}
    write_safetensors(path / "model.safetensors", weights)
    return path


async def test_an_update_may_name_more_tensors_than_a_message_carries(plane: Plane) -> None:
    """TRL and SGLang-Omni's trainers announce all tensors of a model in one call."""
    before, after = (many_tensors(plane, seed) for seed in (1, 2))
    plane.spawn_copies(2, model=before)
    group, port = f"many {next(NUMBERS)}", free_port()
    part: dict[str, Any] = {"names": NAMES, "dtypes": ["float32"] * MANY, "shapes": [[1]] * MANY}
    info = {"names": NAMES, "dtype_names": part["dtypes"], "shapes": part["shapes"]}
    assert len(json.dumps(info)) > MAX_BODY_BYTES
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http:
            init = {"backend": "gloo", "group_name": group, "master_address": HOST, "master_port": port}
            init |= {"rank_offset": 1, "world_size": 3, "packed": True, "packed_buffer_size_bytes": 1000}
            formed, _ = await asyncio.gather(
                http.post("/init_weight_transfer_engine", json={"init_info": init}),
                trainer.do("form", {"group": group, "port": port, "world_size": 3, "timeout_s": GLOO_S}),
            )
            fine(formed)
            fine(await http.post("/start_weight_update", json={}))
            told = {"group": group, "directory": str(after)}
            packed = {**part, "layout": "packed", "bucket_bytes": 1000}
            reply, _ = await asyncio.gather(
                http.post("/update_weights", json={"update_info": info}),
                trainer.do("send", {**told, "part": packed}),
            )
            fine(reply)
            version = fine(await http.post("/finish_weight_update", json={"weight_version": "many"}))["version"]
            assert version["digest"] == model_digest(after)
            assert await served(http) == [(True, "many")] * 2
            # Two phases: all tensors are compared with the model at once, so a single tensor does not fit.
            asked = {"num_buckets": 1, "group_name": group}
            for wrong in ({**part, "shapes": [*part["shapes"][:-1], [2]]}, {key: part[key][:-1] for key in part}):
                body = {**asked, "buckets": [wrong]}
                error = refused(await http.post("/prepare_weights_update", json=body), 400)
                assert (error["code"], NAMES[-1] in error["message"]) == ("invalid_weights", True), error
            # One broadcast of so many tensors can't be announced in pieces.
            flat = {**part, "group_name": group, "load_format": "flattened_bucket"}
            error = refused(await http.post("/update_weights_from_distributed", json=flat), 413)
            assert (error["field"], bool(error["fix"])) == ("names", True)
            assert await served(http) == [(True, "many")] * 2
