"""Workers of both modes of logprobs, and what a frontend does with them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.support.dialect_facade import facade, fine, refused
from tests.support.frontend_process import PROMPT, ask, error_of, http, until_running

__all__ = ["http"]

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

PROCESSED = "processed_logprobs"
ROLLOUT = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "temperature": 0.7, "logprobs": 1}}


async def test_workers_of_two_modes_serve_only_requests_without_logprobs(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    raw = plane.spawn()
    assert (await ask(http, max_tokens=2, logprobs=1))["choices"]
    other = plane.spawn(logprobs_mode=PROCESSED)
    for path, body in (
        ("/v1/completions", {"prompt_token_ids": PROMPT, "max_tokens": 2, "logprobs": 1}),
        (
            "/v1/completions",
            {"prompt_token_ids": PROMPT, "max_tokens": 2, "return_token_ids": True, "logprobs": 0},
        ),
        ("/inference/v1/generate", ROLLOUT),
    ):
        error = error_of(await http.post(path, json=body), 409)
        assert error["code"] == "conflict"
        assert "raw_logprobs" in error["message"]
        assert PROCESSED in error["message"]
        assert "--logprobs-mode" in error["fix"]
    served = {(await ask(http, max_tokens=2, prompt_logprobs=0))["choices"][0]["instance_id"] for _ in range(8)}
    assert served == {raw.instance_id, other.instance_id}
    raw.process.terminate()
    raw.process.wait(30)
    (choice,) = (await ask(http, max_tokens=2, logprobs=1))["choices"]
    assert choice["instance_id"] == other.instance_id


async def test_a_choice_is_not_continued_by_a_worker_of_another_mode(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    raw = plane.spawn(token_delay_s=0.02)
    body = {"prompt_token_ids": PROMPT, "max_tokens": 4000, "logprobs": 1, "migrate": True}
    running = asyncio.create_task(http.post("/v1/completions", json=body))
    await until_running(plane, await plane.client(), raw.instance_id, 1)
    plane.spawn(logprobs_mode=PROCESSED)
    raw.process.kill()
    raw.process.wait(30)
    error = error_of(await running, 409)
    assert error["code"] == "conflict"
    assert error["partial"]


async def test_vllms_server_information_has_the_mode_of_the_workers(plane: Plane) -> None:
    plane.spawn(logprobs_mode=PROCESSED)
    async with facade(plane) as http:
        config = fine(await http.get("/server_info?config_format=json"))["vllm_config"]["model_config"]
        assert config["logprobs_mode"] == PROCESSED
        plane.spawn()
        error = refused(await http.get("/server_info?config_format=json"), 409)
        assert error["field"] == "logprobs_mode"


IGNORES_IT = """
from dataclasses import replace
import worker.engines.fake.adapter as fake
starts = fake.FakeEngine.start
async def start(self):
    return replace(await starts(self), logprobs_mode="raw_logprobs")
fake.FakeEngine.start = start
"""


async def test_a_worker_ends_if_its_engine_has_another_mode_than_it_was_told(plane: Plane) -> None:
    one = plane.spawn(ready=False, logprobs_mode=PROCESSED, patch=IGNORES_IT)
    assert one.process.wait(30) != 0
    assert f"gives raw_logprobs with this model, not {PROCESSED}" in one.log.read_text()
