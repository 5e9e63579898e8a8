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


def ends_at(patch: pytest.MonkeyPatch, phase: str, error: BaseException) -> None:
    """Coordinators get so far, and no further."""
    real = Coordinator._carry_out

    async def carry_out(self: Coordinator, instruction: Instruction) -> Event:
        if instruction.phase == phase:
            raise error
        return await real(self, instruction)

    patch.setattr(Coordinator, "_carry_out", carry_out)


ENDS = [pytest.param(_Dies(), id="dies"), pytest.param(Unavailable("NATS is down"), id="503")]
"""How a coordinator may end after its decision, with nobody told who serves it."""
