"""prime-rl's broadcaster and SkyRL's sender over a torch group: each step is an update of real models."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from tests.dialect_facade import PROMPT, facade, fine, proven, refused, witnessed
from tests.fed_trainer import HOST, FedTrainer, parts_of
from tests.test_dialect_prime_rl import PrimeRl
from tests.test_fed_updates import NUMBERS, free_port
from tests.test_hf_fleet import Witnesses

if TYPE_CHECKING:
    from tests.conftest import Plane
    from tests.told_process import ToldProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GLOO_S = 20.0


async def test_trainers_that_broadcast_to_vllm(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    ids = await asyncio.to_thread(witnesses.spawn, 2)
    with FedTrainer(plane) as trainer:
        async with facade(plane) as http:
            await _prime_rl(witnesses, ids, trainer, http)
            http.timeout = httpx.Timeout(None)
            await _skyrl(witnesses, ids, trainer, http)


async def _prime_rl(witnesses: Witnesses, ids: list[str], trainer: ToldProcess, http: httpx.AsyncClient) -> None:
    """At the root and beneath `/v1/rl`; the call of each step is the update."""
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
    for step, seed, base in ((1, 2, "/v1/rl"), (2, 3, "")):
        (part,) = parts_of(witnesses.base(seed), 1)
        body: dict[str, Any] = {
            "weight_dir": None,
            "weight_version": f"step_{step}",
            "update_info": {
                "names": part["names"],
                "dtype_names": part["dtypes"],
                "shapes": part["shapes"],
            },
        }
        await http.post(f"{base}/pause?mode=keep&clear_cache=false")
        sending = {"group": group, "directory": str(witnesses.base(seed)), "part": part}
        reply: httpx.Response
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


async def _skyrl(witnesses: Witnesses, ids: list[str], trainer: ToldProcess, http: httpx.AsyncClient) -> None:
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
