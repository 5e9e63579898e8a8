"""WeightPublisher on several ranks with sharded weights: each rank owns some of the tensors, and sends them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from rl_plane.errors import EngineFailed
from rl_plane.publish.sources.module import ModuleSource
from rl_plane.weights.manifest import PackedBucket
from tests.conftest import Plane
from tests.support.faulty_ranks import FaultyRank
from tests.support.owning_ranks import step
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


async def told(plane: Plane, ranks: int, module: str, *ways: str, **environ: str) -> list[dict[str, Any]]:
    """Runs the ranks of a trainer, and returns what they report."""
    where = (plane.url, plane.namespace, plane.component)
    environ["PUBLISH_ROOT"] = str(root_of(plane))
    return await asyncio.to_thread(
        told_by_ranks, ranks, f"tests.support.{module}", *where, *ways, timeout_s=RANKS_S, **environ
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
    ways = [f"{kind}:{way}" for way in ("filesystem:full", "nixl:full", "gloo:full", "nixl:delta", "gloo:delta")]
    outcomes = await told(plane, ranks, "owning_ranks", *ways, **with_deepspeed(kind))
    assert [one["error"] for one in outcomes] == [""] * ranks * VERSIONS * len(ways)
    for _ in range(VERSIONS):
        step(model, ways[-1])
    _, digest = digest_of(ModuleSource(model))
    last = f"{ways[-1]} {VERSIONS}"
    assert await served(plane) == {(last, digest, VERSIONS * len(ways))}, outcomes
    sent = (await (await plane.client("asks")).run("updates", {"limit": 100}))["updates"]
    deltas = {one["label"] for one in sent if one["encoding"] == "delta"}
    assert deltas == {f"{way} {number}" for way in ways if way.endswith("delta") for number in (2, 3)}
    sizes = [PackedBucket.of([one]).nbytes for one in ModuleSource(model).take().specs]
    fair = sum(sizes) / ranks
    for one in outcomes:
        assert 0 < one["packed"] <= fair + max(sizes), one


async def published(ranks: Sequence[FaultyRank], *version: Any) -> list[str]:
    """Each rank's error of one version; an empty text for none."""
    done = await asyncio.gather(*(one.publish(*version) for one in ranks), return_exceptions=True)
    return [str(one) if isinstance(one, BaseException) else "" for one in done]


def trainer(plane: Plane, name: str, transport: str) -> list[FaultyRank]:
    """The three ranks of a trainer."""
    return [FaultyRank(plane, name, rank, 3, transport) for rank in range(3)]


def digest_plus(number: int) -> str | None:
    """The digest of the model plus a number."""
    model = fresh()
    for _ in range(number):
        add_one(model)
    return digest_of(ModuleSource(model))[1]


@pytest.mark.parametrize(
    ("transport", "phase", "victim"),
    [
        ("filesystem", "begin", 1),
        ("filesystem", "finish", 2),
        ("nixl", "gather", 1),
        ("nixl", "gather", 0),
        ("gloo", "send", 1),
        ("gloo", "finish", 2),
    ],
)
async def test_a_rank_that_dies_fails_the_version_on_all_ranks(
    plane: Plane, transport: str, phase: str, victim: int
) -> None:
    """Each rank that lives raises an error that names the dead rank. The fleet serves the version before, whole. A
    trainer that is started again publishes the next version."""
    fleet_of(plane, 2)
    with ExitStack() as stack:
        ranks = [stack.enter_context(one) for one in trainer(plane, "first", transport)]
        assert await published(ranks, "good", "", "", 1) == ["", "", ""]
        lives = [one for one in ranks if one.rank != victim]
        dying = asyncio.create_task(ranks[victim].publish("bad", "die", phase, 2))
        errors = await published(lives, "bad", "", "", 2)
        assert all(f"rank {victim} of the trainer has died" in error for error in errors), errors
        assert isinstance((await asyncio.gather(dying, return_exceptions=True))[0], AssertionError)
        assert await served(plane) == {("good", digest_plus(1), 1)}
    with ExitStack() as stack:
        ranks = [stack.enter_context(one) for one in trainer(plane, "second", transport)]
        assert await published(ranks, "next", "", "", 3) == ["", "", ""]
        assert await served(plane) == {("next", digest_plus(3), 2)}


@pytest.mark.parametrize("transport", ["filesystem", "nixl", "gloo"])
async def test_a_rank_that_hangs_fails_the_version_on_all_ranks(plane: Plane, transport: str) -> None:
    """Each other rank raises an error that names the hung rank. When that one continues, it raises the error
    too, and the same processes publish the next version."""
    fleet_of(plane, 1)
    with ExitStack() as stack:
        ranks = [stack.enter_context(one) for one in trainer(plane, "hanging", transport)]
        assert await published(ranks, "good 0", "", "", 0) == ["", "", ""]
        for number, phase in enumerate(("begin", "gather", "finish"), 1):
            hanging = asyncio.create_task(ranks[1].publish(f"bad {number}", "hang", phase, number))
            errors = await published([ranks[0], ranks[2]], f"bad {number}", "", "", number)
            assert all("rank 1 of the trainer hangs" in error for error in errors), (phase, errors)
            ranks[1].go_on()
            with pytest.raises(EngineFailed, match="rank 1 of the trainer hangs"):
                await hanging
            assert await published(ranks, f"good {number}", "", "", number) == ["", "", ""], phase
            assert await served(plane) == {(f"good {number}", digest_plus(number), number + 1)}, phase


async def test_ranks_with_other_tensors_are_refused(plane: Plane) -> None:
    """The error names the rank and the tensor, on all ranks. Nothing was sent."""
    fleet_of(plane, 1)
    outcomes = await told(plane, 2, "differing_ranks", "filesystem")
    assert len(outcomes) == 2
    for one in outcomes:
        assert one["error"] == (
            "InvalidRequest: rank 1 of the trainer has other tensors than rank 0: "
            "('scale', 'F32', (2,)) on rank 0, ('scale', 'F32', (3,)) there"
        )
    assert not root_of(plane).exists()
