"""The start of a frontend's components."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from frontend.served_component import ServedComponent, start_all
from rl_plane.errors import Unavailable
from rl_plane.protocol.subjects import Subjects

BOUND_S = 10.0


class _Component:
    """A component whose start waits until all of `together` have begun theirs."""

    def __init__(self, together: asyncio.Barrier, error: Exception | None = None) -> None:
        self._together = together
        self._error = error
        self.ended = False

    async def start(self) -> None:
        try:
            await self._together.wait()
            if self._error is not None:
                raise self._error
            await self._together.wait()
        finally:
            self.ended = True


async def _start(*components: _Component) -> None:
    async with asyncio.timeout(BOUND_S):
        await start_all(cast("list[ServedComponent]", components))


async def test_components_start_side_by_side() -> None:
    together = asyncio.Barrier(3)
    await _start(*(_Component(together) for _ in range(3)))


async def test_an_error_ends_the_start_of_all() -> None:
    together = asyncio.Barrier(2)
    good, bad = _Component(together), _Component(together, Unavailable("no store"))
    with pytest.raises(Unavailable, match="no store"):
        await _start(good, bad)
    assert good.ended


def test_the_fix_of_an_empty_component_starts_a_worker_of_it() -> None:
    assert Subjects("demo", "engine").start_worker == "`rl-plane worker`"
    assert Subjects("demo", "reward").start_worker == "`rl-plane worker --component reward`"
    assert Subjects("rl", "engine").start_worker == "`rl-plane worker --namespace rl`"
