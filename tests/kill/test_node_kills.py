"""SIGKILL and SIGSTOP of the other node of an engine, and of a rank there, in each phase of an update: as
`test_engine_kills.py`, beside a worker of another engine that goes on.

One case: `-k two-nodes-kill-node-gate.after`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.kill.cases import LOAD, Case, Matrix, matrix_of
from tests.kill.held import RECEIVE

if sys.platform != "linux":
    pytest.skip("relies on PR_SET_PDEATHSIG", allow_module_level=True)

POINTS = (RECEIVE, LOAD, "prepare_update.after", "gate.after", "commit_update.before")
CASES = [
    *(Case("two-nodes", "kill", "node", point) for point in POINTS),
    *(Case("two-nodes", "kill", "node-engine", point, "scheduler") for point in POINTS),
    *(Case("two-nodes", "stop", "node", point) for point in (RECEIVE, "gate.after")),
]

pytestmark = [
    pytest.mark.engines("sglang"),
    pytest.mark.alone,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1500),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def matrix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Matrix]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
        async with matrix_of(CASES, {"two-nodes": 1}, request, tmp_path_factory.mktemp("kill")) as matrix:
            yield matrix


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_the_other_node_in_the_middle(case: Case, matrix: Matrix) -> None:
    await matrix.result(case)
