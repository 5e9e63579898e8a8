"""A process that serves many connections takes as many descriptors as it may have."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from rl_plane._util.descriptors import ENOUGH, bounded, open_limit, raise_open_limit


@pytest.fixture
def hard() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_is_raised_to_the_hard_one(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    raise_open_limit()
    assert open_limit() == bounded(hard)


def test_an_infinite_or_huge_limit_means_enough_descriptors() -> None:
    assert (bounded(resource.RLIM_INFINITY), bounded(1 << 30), bounded(1024)) == (ENOUGH, ENOUGH, 1024)
