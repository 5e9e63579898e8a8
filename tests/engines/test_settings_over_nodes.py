"""Settings of an engine over two nodes that can't work. Each node refuses them by itself, also without NATS."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.free_port import free_port
from tests.support.zygote import fork_module
from worker.testing.tiny_model import make_tiny_model

END_S = 120.0
"""The time in which the first process of an engine imports it, on a busy machine."""


def refusal(tmp_path: Path, engine: str, rank: int, *arguments: str) -> list[str]:
    """Runs a node without a NATS server. Returns the lines that it prints, all to stderr."""
    model = make_tiny_model(tmp_path / "model", 1)
    argv = ["worker", "--engine", engine, "--model", str(model), "--nats-url", f"nats://127.0.0.1:{free_port()}"]
    argv += ["--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", f"127.0.0.1:{free_port()}", *arguments]
    node = fork_module(engine, "rl_plane.cli.main", argv, env=os.environ, stderr_pipe=True, text=True)
    try:
        out, errors = node.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        node.kill()
        raise
    assert (node.returncode, out) == (2, ""), errors
    return str(errors).splitlines()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("engine", "arguments", "said"),
    [
        pytest.param(
            "sglang",
            ["pp_size=3"],
            "rl-plane: error: nnodes: a model with pp_size 3 and tp_size 1 can't be divided among 2 nodes; fix: use a "
            "pp_size that nnodes divides",
            id="sglang-stages",
            marks=pytest.mark.engines("sglang"),
        ),
        pytest.param(
            "sglang",
            ["dp_size=2", "tp_size=2"],
            "rl-plane: error: engine_arg.dp_size: data parallelism inside an engine is for one host; fix: run one",
            id="sglang-replicas",
            marks=pytest.mark.engines("sglang"),
        ),
        pytest.param(
            "vllm",
            ["tensor_parallel_size=3"],
            "rl-plane: error: nnodes: 3 ranks can't be divided among 2 nodes; fix: tensor_parallel_size times",
            id="vllm-ranks",
            marks=pytest.mark.engines("vllm"),
        ),
    ],
)
def test_a_model_that_can_not_be_divided_ends_each_node(
    tmp_path: Path, rank: int, engine: str, arguments: list[str], said: str
) -> None:
    flags = [flag for argument in arguments for flag in ("--engine-arg", argument)]
    (line,) = refusal(tmp_path, engine, rank, *flags)
    assert line.startswith(said)
