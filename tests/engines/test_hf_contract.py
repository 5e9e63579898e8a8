"""The hf engine passes the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.engines.base import EngineOptions
from worker.engines.hf.adapter import build
from worker.testing.engine_contract import check_engine
from worker.testing.tiny_adapter import make_witness_adapter
from worker.testing.tiny_model import make_witness_model


@pytest.mark.timeout(300)
async def test_the_hf_engine_keeps_the_contract(tmp_path: Path) -> None:
    one, two = (make_witness_model(tmp_path / str(seed), seed) for seed in (1, 2))
    adapter = make_witness_adapter(one, tmp_path / "adapter", 1)
    await check_engine(build, EngineOptions(one, device="cpu", weight_roots=(tmp_path,)), two, adapter=adapter)
