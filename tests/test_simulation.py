"""A share of the simulation runs with the tests; `make sim SEEDS=n` runs more."""

from __future__ import annotations

import pytest

from tests.sim.guards import GUARDS, without
from tests.sim.run import run_seed

SEEDS = 60


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_seeds_are_clean(first: int) -> None:
    for seed in range(first, first + 10):
        result = run_seed(seed)
        told = "\n".join(result.trace[-60:])
        assert result.violation is None, f"{told}\nseed {seed}: {result.violation}"


def test_the_same_seed_is_the_same_run() -> None:
    one, two = run_seed(1), run_seed(1)
    assert one.trace == two.trace
    assert one.served == two.served > 0


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_the_simulation_finds_the_fault(guard: str) -> None:
    with without(guard):
        assert any(run_seed(seed).violation is not None for seed in range(20))
