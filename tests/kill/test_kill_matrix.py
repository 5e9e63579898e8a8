"""SIGKILL and SIGSTOP of a worker, of the coordinating frontend and of nats-server at each boundary of an update's
phases, on real processes, while clients check every token: no completion is of other weights than the committed ones.

One case: `-k fake-kill-worker-gate.before`; other choices within the cases: `KILL_SEED=7`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.kill.cases import DECIDE, HEAL, KILL_MARKS, LOAD, Case, Engine, Fault, Matrix, Victim, matrix_fixture
from tests.kill.held import RECEIVE

PHASES = ("prepare_update", "gate", "commit_update", "open")
BOUNDARIES = [f"{phase}.{side}" for phase in PHASES for side in ("before", "after")]
FAULTS: tuple[Fault, ...] = ("kill", "stop")
VICTIMS: tuple[Victim, ...] = ("worker", "coordinator", "nats")
POINTS: dict[Engine, Sequence[str]] = {
    "fake": [*BOUNDARIES, DECIDE],
    "hf": ("prepare_update.after", "commit_update.after"),  # real weights around the decision and the swap
}
CASES = [
    Case(engine, fault, victim, point)
    for engine, points in POINTS.items()
    for point in points
    for fault in FAULTS
    for victim in VICTIMS
]
CASES += [
    Case("hf", "kill", "worker", point)
    for point in (RECEIVE, LOAD, "gate.after", "commit_update.before", "open.before", HEAL)
]
FLEETS: dict[Engine, int] = {"fake": 2, "hf": 1}
"""Side by side: most of a case is waiting for a lease or a start."""

pytestmark = [
    *KILL_MARKS,
    pytest.mark.slow,
    pytest.mark.parallel,
    pytest.mark.timeout(1200),  # a test may wait for all other cases first; each case has a bound of its own
]
matrix = matrix_fixture(CASES, FLEETS)


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_the_fleet_recovers_from_a_fault_at_each_phase(case: Case, matrix: Matrix) -> None:
    await matrix.result(case)
