"""SIGKILL of a vLLM or SGLang worker, and of a process of its engine, in each phase of an update, and while it heals:
as `test_kill_matrix.py`, beside a worker of another engine that goes on.

One case: `-k vllm-kill-EngineCore-gate.after`; other choices within the cases: `KILL_SEED=7`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.kill.cases import HEAL, LOAD, Case, Engine, Matrix, matrix_of
from tests.kill.held import RECEIVE

if sys.platform != "linux":
    pytest.skip("relies on PR_SET_PDEATHSIG", allow_module_level=True)

CHILDREN: dict[Engine, tuple[str, ...]] = {
    "vllm": ("EngineCore", "Worker", "host"),
    "sglang": ("scheduler", "host"),
}
"""The processes that neither engine can run without."""
POINTS = (
    RECEIVE,
    LOAD,
    "prepare_update.after",
    "gate.after",
    "commit_update.before",
    "commit_update.after",
    "open.before",
    HEAL,
)
CASES = [
    case
    for engine, children in CHILDREN.items()
    for point in POINTS
    for case in (
        Case(engine, "kill", "worker", point),
        *(Case(engine, "kill", "engine", point, child) for child in children),
    )
]

pytestmark = [
    pytest.mark.engines(*CHILDREN),
    pytest.mark.alone,
    pytest.mark.kills,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def matrix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Matrix]:
    async with matrix_of(CASES, dict.fromkeys(CHILDREN, 1), request, tmp_path_factory.mktemp("kill")) as matrix:
        yield matrix


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_what_is_killed_in_the_middle(case: Case, matrix: Matrix) -> None:
    await matrix.result(case)
