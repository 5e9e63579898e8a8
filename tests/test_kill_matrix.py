"""SIGKILL and SIGSTOP of a worker, of the coordinating frontend and of nats-server at each boundary of an update's
phases, on real processes, while clients check every token: no completion is of other weights than the committed ones.

One case: `-k fake-kill-worker-gate.before`; other choices within the cases: `KILL_SEED=7`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.killing import SEED, Case, Matrix

if sys.platform != "linux":
    pytest.skip("relies on PR_SET_PDEATHSIG", allow_module_level=True)

BOUNDARIES = [
    f"{phase}.{side}"
    for phase in ("prepare_update", "gate", "commit_update", "open")
    for side in ("before", "after")
]
FAULTS = [(fault, victim) for fault in ("kill", "stop") for victim in ("worker", "coordinator", "nats")]
CASES = [Case("fake", fault, victim, point) for point in BOUNDARIES for fault, victim in FAULTS]
# Real weights: the boundaries around the decision and the swap.
CASES += [
    Case("hf", fault, victim, point)
    for point in ("prepare_update.after", "commit_update.after")
    for fault, victim in FAULTS
]
FLEETS = {"fake": 2, "hf": 1}
"""Side by side: most of a case is waiting for a lease or a start."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def matrix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Matrix]:
    """Begins at once with all cases that were selected; each test waits for its own."""
    chosen = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec")
    ]
    matrix = Matrix(chosen, tmp_path_factory.mktemp("kill"), FLEETS)
    yield matrix
    await matrix.close()
    for case, took_s in matrix.took.items():
        print(f"{took_s:6.1f} s  {case}  (KILL_SEED={SEED})")


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_what_is_killed_in_the_middle(case: Case, matrix: Matrix) -> None:
    await matrix.result(case)
