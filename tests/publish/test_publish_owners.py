"""WeightPublisher on several ranks with sharded weights: each rank owns some of the tensors, and sends them."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from safetensors.torch import save_file

from rl_plane.publish.sources.module import ModuleSource
from rl_plane.weights.manifest import PackedBucket
from tests.conftest import Plane
from tests.support.paths import ROOT
from tests.support.publishing import root_of, served
from tests.support.publishing_ranks import VERSIONS, add_one
from tests.support.scripts import told_by_ranks
from tests.support.sharded_sources import digest_of, fresh

RANKS_S = 240.0
"""Processes that import torch beside other tests, and each version's groups."""

pytestmark = [pytest.mark.slow, pytest.mark.parallel, pytest.mark.timeout(RANKS_S + 60)]


def fleet_of(plane: Plane, workers: int) -> Any:
    """Starts workers that serve the model as it is made. Returns it."""
    model, first = fresh(), plane.tmp / "weights" / "first"
    first.mkdir(parents=True)
    save_file(dict(ModuleSource(model).take().tensors), first / "model.safetensors")
    plane.spawn_many(workers, model=first)
    return model


async def told(plane: Plane, ranks: int, script: str, *ways: str, **environ: str) -> list[dict[str, Any]]:
    """Runs the ranks of a trainer, and returns what they report."""
    where = (plane.url, plane.namespace, plane.component)
    environ["PUBLISH_ROOT"] = str(root_of(plane))
    return await asyncio.to_thread(
        told_by_ranks, ranks, f"tests/support/{script}", *where, *ways, timeout_s=RANKS_S, **environ
    )


def with_deepspeed(kind: str) -> dict[str, str]:
    """The environment in which ranks find DeepSpeed, if they need it."""
    if kind != "zero3":
        return {}
    deepspeed = Path(sys.prefix) / "deepspeed"
    if not deepspeed.is_dir():
        pytest.skip("deepspeed not installed: make engines")
    return {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), str(deepspeed)])}


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp2", 4), ("zero3", 2)])
async def test_each_rank_sends_the_tensors_that_it_owns(plane: Plane, kind: str, ranks: int) -> None:
    """The fleet gets exactly the bytes of the model, and no rank has packed more than a balanced share."""
    model = fleet_of(plane, 2)
    ways = [f"{kind}:{transport}:full" for transport in ("filesystem", "nixl", "gloo")]
    outcomes = await told(plane, ranks, "owning_ranks.py", *ways, **with_deepspeed(kind))
    for _ in range(VERSIONS):
        add_one(model)
    _, digest = digest_of(ModuleSource(model))
    last = f"{ways[-1]} {VERSIONS}"
    assert await served(plane) == {(last, digest, VERSIONS * len(ways))}, outcomes
    assert [one["error"] for one in outcomes] == [""] * ranks * VERSIONS * len(ways)
    sizes = [PackedBucket.of([one]).nbytes for one in ModuleSource(model).take().specs]
    fair = sum(sizes) / ranks
    for one in outcomes:
        assert 0 < one["packed"] <= fair + max(sizes), one
