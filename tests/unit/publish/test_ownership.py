"""The owners of tensors: balanced by bytes, and the same on every rank."""

from __future__ import annotations

import random

import pytest

from rl_plane.protocol.versions import TensorSpec
from rl_plane.publish.ranks.ownership import MAX_OWNERS, owners_of, shares_of


def specs_of(*sizes: int) -> list[tuple[str, TensorSpec]]:
    return [(f"t{number}", TensorSpec("U8", (size,))) for number, size in enumerate(sizes)]


def loads_of(specs: list[tuple[str, TensorSpec]], owners: dict[str, int], ranks: int) -> list[int]:
    return [sum(spec.nbytes for name, spec in specs if owners[name] == rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_shares_differ_by_at_most_one_tensor(ranks: int) -> None:
    sizes = random.Random(ranks).choices(range(1, 1000), k=300)
    specs = specs_of(*sizes)
    loads = loads_of(specs, owners_of(specs, {name for name, _ in specs}, ranks), ranks)
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)
    assert max(loads) <= sum(sizes) / ranks * 1.05 + 10


def test_rank_0_owns_what_is_not_shared_and_less_of_the_rest() -> None:
    specs = specs_of(100, 10, 60, 60, 60)
    owners = owners_of(specs, {"t1", "t2", "t3", "t4"}, 2)
    assert owners["t0"] == 0
    assert loads_of(specs, owners, 2) in ([160, 130], [110, 180])
    assert owners_of(specs, set(), 2) == dict.fromkeys((name for name, _ in specs), 0)


def test_rank_0_always_owns_something() -> None:
    """It opens the update, so it needs a share."""
    specs = specs_of(5)
    assert owners_of(specs, {"t0"}, 8) == {"t0": 0}


def test_no_more_than_some_ranks_own_tensors() -> None:
    specs = specs_of(*[1] * (2 * MAX_OWNERS))
    owners = owners_of(specs, {name for name, _ in specs}, 4 * MAX_OWNERS)
    assert set(owners.values()) == set(range(MAX_OWNERS))


def test_shares_are_in_the_order_of_the_specs() -> None:
    specs = specs_of(1, 2, 3, 4)
    shares = shares_of(specs, {"t0": 3, "t1": 0, "t2": 3, "t3": 0})
    assert {rank: [name for name, _ in share] for rank, share in shares.items()} == {
        0: ["t1", "t3"],
        3: ["t0", "t2"],
    }
    assert list(shares) == [0, 3]
