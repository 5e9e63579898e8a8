"""Helpers of `tests/fleet/test_history.py` and of other tests."""

from __future__ import annotations

import pytest

from rl_plane.commit.coordinator import Coordinator
from rl_plane.commit.steps import Event, Instruction
from rl_plane.errors import (
    Unavailable,
)


class _Dies(BaseException):
    """As a SIGKILL: nothing that the coordinator would do at its end is done."""


def ends_at(patch: pytest.MonkeyPatch, phase: str, error: BaseException, after: int = 0) -> None:
    """Coordinators get so far, and no further. `after`: how many times they carry the phase out before."""
    real, left = Coordinator._carry_out, after

    async def carry_out(self: Coordinator, instruction: Instruction) -> Event:
        nonlocal left
        if instruction.phase == phase:
            left -= 1
            if left < 0:
                raise error
        return await real(self, instruction)

    patch.setattr(Coordinator, "_carry_out", carry_out)


ENDS = [pytest.param(_Dies(), id="dies"), pytest.param(Unavailable("NATS is down"), id="503")]
"""How a coordinator may end after its decision, with nobody told who serves it."""
