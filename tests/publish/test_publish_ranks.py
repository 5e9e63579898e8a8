"""WeightPublisher on two ranks, whose weights are sharded: each takes part in every version to its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from safetensors.torch import save_file

from rl_plane.publish.sources.module import ModuleSource
from tests.conftest import Plane
from tests.support.exporting_ranks import GROWN
from tests.support.failing_ranks import BROKEN
from tests.support.freezing_ranks import TRAINED, freeze
from tests.support.publishing import served
from tests.support.publishing_ranks import VERSIONS, add_one
from tests.support.scripts import told_by_ranks
from tests.support.sharded_sources import digest_of, fresh

RANKS_S = 150.0
"""Two processes that import torch beside other tests, and each version's groups."""

pytestmark = [pytest.mark.slow, pytest.mark.parallel, pytest.mark.timeout(RANKS_S + 60)]


async def outcomes_on_two_ranks(plane: Plane, module: str, *ways: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns the versions, and the outcomes that each rank reports. Two workers serve the last version. One version
    by each way fails."""
    model, first = fresh(), plane.tmp / "weights" / "first"
    first.mkdir(parents=True)
    save_file(dict(ModuleSource(model).take().tensors), first / "model.safetensors")
    plane.spawn_many(2, model=first)
    where = (plane.url, plane.namespace, plane.component)
    outcomes = await asyncio.to_thread(told_by_ranks, 2, module, *where, *ways, timeout_s=RANKS_S)
    versions = [f"{way} {number}" for way in ways for number in range(1, VERSIONS + 1)]
    for _ in versions:
        add_one(model)
    _, digest = digest_of(ModuleSource(model))
    assert await served(plane) == {(versions[-1], digest, len(versions) - len(ways))}, outcomes
    return versions, outcomes


async def test_all_ranks_continue_after_rank_0_failed_in_the_middle_of_sending(plane: Plane) -> None:
    """The failed rank gathers to the end, so that no other rank waits for it, and raises its own error. The other rank
    learns of it. The next version is published."""
    ways = ("gloo", "ipc", "ipc:partial")
    versions, outcomes = await outcomes_on_two_ranks(plane, "tests.support.failing_ranks", *ways)
    errors = [f"OSError: {BROKEN}", f"PlaneError: rank 0: OSError: {BROKEN}"]
    assert {(one["rank"], one["version"]): one["error"] for one in outcomes} == {
        (rank, version): errors[rank] if version.endswith("2") else "" for rank in range(2) for version in versions
    }


async def test_rank_0_uses_an_export_up_as_the_others_do(plane: Plane) -> None:
    """Rank 0 also gathers the tensors that are left out after the last sent tensor, and meets a barrier there. A
    tensor that was not announced fails the version, on all ranks."""
    ways = ("gloo:full", "ipc:full", "ipc:delta")
    versions, outcomes = await outcomes_on_two_ranks(plane, "tests.support.exporting_ranks", *ways)
    refused = f"InvalidRequest: expected nothing next, but {GROWN!r} came"
    of_rank = [[one for one in outcomes if one["rank"] == rank] for rank in range(2)]
    for each in of_rank:
        assert [(one["version"], one["error"]) for one in each] == [
            (name, refused if name.endswith("2") else "") for name in versions
        ]
        # Once more for each publisher, at first.
        assert [one["exports"] for one in each] == [
            number + number // VERSIONS + 2 for number in range(len(versions))
        ]


async def test_sharded_ranks_gather_and_send_only_what_is_trained(plane: Plane) -> None:
    """Rank 0 decides whether a version is a partial one, and the other ranks gather the same tensors."""
    model, first = fresh(), plane.tmp / "weights" / "first"
    first.mkdir(parents=True)
    save_file(dict(ModuleSource(model).take().tensors), first / "model.safetensors")
    plane.spawn_many(2, model=first)
    where = (plane.url, plane.namespace, plane.component)
    outcomes = await asyncio.to_thread(
        told_by_ranks, 2, "tests.support.freezing_ranks", *where, "gloo", timeout_s=RANKS_S
    )
    assert [one["error"] for one in outcomes] == [""] * (2 * VERSIONS)
    freeze(model)
    for _ in range(VERSIONS):
        add_one(model)
    _, digest = digest_of(ModuleSource(model))
    assert await served(plane) == {(f"gloo {VERSIONS}", digest, VERSIONS)}
    updates = (await (await plane.client()).run("updates"))["updates"]
    trained = sum(one.nbytes for name, one in model.named_parameters() if name.startswith(TRAINED))
    whole = sum(spec.nbytes for _, spec in ModuleSource(model).take().specs)
    sent = [(one["encoding"], one["sent_bytes"]) for one in reversed(updates) if one["label"] != "initial"]
    assert sent == [("full", whole), *[("partial", trained)] * (VERSIONS - 1)]
