"""Helpers of `tests/fleet/test_history.py` and of other tests."""

from __future__ import annotations

import pytest

from rl_plane.commit.coordinator import Coordinator
from rl_plane.commit.steps import Event, Instruction
from rl_plane.errors import (
    Unavailable,
)


class CoordinatorDies(BaseException):
    """Ends a coordinator like a SIGKILL: it runs none of its cleanup."""


def ends_at(patch: pytest.MonkeyPatch, phase: str, error: BaseException, after: int = 0) -> None:
    """Makes each coordinator fail with `error` in `phase`. `after`: how many times it carries the phase out before."""
    real, left = Coordinator.carry_out, after

    async def carry_out(self: Coordinator, instruction: Instruction) -> Event:
        nonlocal left
        if instruction.phase == phase:
            left -= 1
            if left < 0:
                raise error
        return await real(self, instruction)

    patch.setattr(Coordinator, "carry_out", carry_out)


ENDS = [pytest.param(CoordinatorDies(), id="dies"), pytest.param(Unavailable("NATS is down"), id="503")]
"""The ways in which a coordinator may end after its decision, before it announces the outcome."""
