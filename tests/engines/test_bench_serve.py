"""vLLM's `bench serve`, unchanged, against a frontend with hf workers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.frontend_process import frontend

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.engines("vllm"), pytest.mark.slow, pytest.mark.timeout(400)]

START_S = 60.0
BENCH_S = 180.0
"""Most of it is vLLM's own import."""
PROMPTS, TOKENS = 12, 8
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The function that `vllm bench serve` runs; the command itself needs parts of vLLM that are of no use here."""


@pytest.mark.parametrize(
    ("backend", "more"),
    [
        ("vllm", ["--logprobs", "1"]),
        ("openai-chat", ["--endpoint", "/v1/chat/completions", "--temperature", "0.7", "--top-p", "0.9"]),
    ],
)
async def test_vllms_bench_serve_runs_unchanged(plane: Plane, backend: str, more: list[str]) -> None:
    from worker.testing.tiny_model import make_witness_model

    model = make_witness_model(plane.tmp / "weights" / "witness", seed=1)
    for one in [plane.spawn(ready=False, engine="hf", model=model) for _ in range(2)]:
        one.wait_ready(START_S)
    result = plane.tmp / "result.json"
    # Neither a model nor a tokenizer is named: it asks /v1/models for both.
    command = [
        *(sys.executable, "-c", BENCH_SERVE, "--backend", backend, "--dataset-name", "random", "--disable-tqdm"),
        *("--random-input-len", "12", "--random-output-len", str(TOKENS), "--num-prompts", str(PROMPTS)),
        *("--max-concurrency", "4", "--ignore-eos", "--save-result", "--result-filename", str(result)),
        *more,
    ]
    async with frontend(plane, admission_wait_s=10.0) as http:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with (plane.tmp / "bench.log").open("w") as log:
            bench = await asyncio.create_subprocess_exec(
                *command, "--base-url", str(http.base_url).rstrip("/"), stdout=log, stderr=log, env=environment
            )
        try:
            async with asyncio.timeout(BENCH_S):
                code = await bench.wait()
        finally:
            if bench.returncode is None:
                bench.kill()
                await bench.wait()
    assert code == 0, (plane.tmp / "bench.log").read_text()
    found = json.loads(result.read_text())
    assert (found["completed"], found["failed"]) == (PROMPTS, 0)
    assert found["total_output_tokens"] == PROMPTS * TOKENS
