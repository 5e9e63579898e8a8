"""Helpers of `tests/dialects/test_dialect_sglang.py` and of other tests."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from frontend.dialects.sglang.body_tensors import read_tensors
from rl_plane.weights.safetensors_file import write_safetensors
from tests.conftest import Plane
from tests.support.dialect_facade import PROMPT, fine
from worker.engines.fake.fake_model import make_fake_model

ROUTED_BODY: dict[str, Any] = {
    "model": None,
    "input_ids": [5, 6],
    "sampling_params": {
        "temperature": 1.0,
        "max_new_tokens": 4,
        "top_p": 1.0,
        "top_k": -1,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    },
    "return_logprob": True,
    "return_text_in_logprobs": False,
    "stream": False,
    "log_metrics": True,
    "return_hidden_states": False,
    "background": False,
    "no_logs": False,
    "return_bytes": False,
    "return_entropy": False,
}
"""The body of `/generate` that sglang-router 0.3.2 makes of slime's."""


@asynccontextmanager
async def aborts_what_runs(http: httpx.AsyncClient) -> AsyncIterator[None]:
    """A request that runs when this begins is over when this ends, by an abort."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}

    async def runs() -> bool:
        loads = fine(await http.get("/v1/loads?include=core"))["loads"]
        return any(load["num_running_reqs"] for load in loads)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        request = tasks.create_task(http.post("/generate", json=body))
        while not await runs():
            assert not request.done()
        yield
        assert fine(await request)["meta_info"]["finish_reason"]["type"] == "abort"


def one_by_one(plane: Plane, seed: int) -> list[dict[str, Any]]:
    """A body for each tensor."""
    whole = (plane.model(seed) / "model.safetensors").read_bytes()
    bodies = []
    for name, one in read_tensors([base64.b64encode(whole).decode()]).items():
        path = plane.tmp / name
        write_safetensors(path, {name: (one.spec, bytes(one.data))})
        data = base64.b64encode(path.read_bytes()).decode()
        bodies.append({"serialized_named_tensors": [data], "load_format": "safetensors", "weight_version": "one"})
    return bodies


def on_disk(plane: Plane, seed: int) -> dict[str, Any]:
    return {"backend": "filesystem", "path": str(plane.model(seed))}


def tensors_of(plane: Plane, seed: int, **shape: int) -> dict[str, Any]:
    """A body of `update_weights_from_tensor`."""
    directory = make_fake_model(plane.tmp / "elsewhere" / f"{seed}-{len(shape)}", seed, **shape)
    data = base64.b64encode((directory / "model.safetensors").read_bytes()).decode()
    return {"serialized_named_tensors": [data], "load_format": "safetensors", "weight_version": "one"}
