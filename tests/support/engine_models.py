"""Models and adapters for tests of vLLM and SGLang, and the check of what they make."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_kinds import SGLANG, VLLM, Kind
from tests.support.engine_runs import (
    Result,
)
from tests.support.reference import logprobs_of
from tests.support.zygote import children_forked
from worker.testing.tiny_adapter import make_tiny_adapter
from worker.testing.tiny_model import make_tiny_model, make_witness_model

LOGPROBS = 0.02
"""Two forwards in bfloat16, batched in other ways, agree to this."""


@dataclasses.dataclass
class Models:
    root: Path
    tiny: dict[int, Path]
    witness: dict[int, Path]
    adapters: dict[int, Path]
    """Adapters with different ranks and scalings."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    tiny = {seed: make_tiny_model(root / f"tiny-{seed}", seed, "bfloat16") for seed in (1, 2)}
    witness = {seed: make_witness_model(root / f"witness-{seed}", seed, "bfloat16") for seed in (1, 2)}
    adapters = {}
    for seed, rank in ((1, 4), (2, 8)):
        path = adapters[seed] = make_tiny_adapter(tiny[1], root / f"adapter-{seed}", seed, r=rank)
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": seed == 2}))
    return Models(root, tiny, witness, adapters)


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.engines(kind.name), id=kind.name) for kind in (VLLM, SGLANG)],
)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    with children_forked(request.param.name):
        yield request.param


def is_of(result: Result, base: Path, adapter: Path | None = None) -> bool:
    """Are the tokens the likeliest, up to ties, by this base with this adapter, and are these their logprobs?"""
    prompt = result.deltas[0].prompt_token_ids
    assert prompt is not None
    expected, gap = logprobs_of(base, prompt, result.tokens, adapter)
    within = LOGPROBS if adapter is None else 2 * LOGPROBS
    return gap <= LOGPROBS and result.logprobs == pytest.approx(expected, abs=within)
