"""The hf engine passes the conformance suites."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plane.protocol.pooling import PoolingTask
from tests.support.pooling_models import make_classifier
from worker.engines.base import EngineOptions
from worker.testing.engine_contract import check_engine
from worker.testing.pooling_contract import check_pooling
from worker.testing.tiny_adapter import make_witness_adapter
from worker.testing.tiny_model import make_tiny_model, make_witness_model


@pytest.mark.timeout(300)
async def test_the_hf_engine_keeps_the_contract(tmp_path: Path) -> None:
    from worker.engines.hf.adapter import build

    one, two = (make_witness_model(tmp_path / str(seed), seed) for seed in (1, 2))
    adapter = make_witness_adapter(one, tmp_path / "adapter", 1)
    await check_engine(build, EngineOptions(one, device="cpu", weight_roots=(tmp_path,)), two, adapter=adapter)


@pytest.mark.parametrize("task", ["classify", "embed"])
async def test_the_hf_pooling_engine_keeps_the_contract(tmp_path: Path, task: PoolingTask) -> None:
    from worker.engines.hf.adapter import build

    make = make_classifier if task == "classify" else make_tiny_model
    one, two = (make(tmp_path / str(seed), seed) for seed in (1, 2))
    await check_pooling(build, EngineOptions(one, device="cpu", task=task), two)
