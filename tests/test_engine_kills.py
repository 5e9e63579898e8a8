"""SIGKILL of a vLLM or SGLang worker, and of a process of its engine, in each phase of an update: as
`test_kill_matrix.py`, beside a worker of another engine that goes on.

One case: `-k vllm-kill-engine-gate.after`; other choices within the cases: `KILL_SEED=7`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.kill.cases import Case, Engine, Matrix, Victim, matrix_of

if sys.platform != "linux":
    pytest.skip("relies on PR_SET_PDEATHSIG", allow_module_level=True)

ENGINES: tuple[Engine, ...] = ("vllm", "sglang")
VICTIMS: tuple[Victim, ...] = ("worker", "engine")
POINTS = ("prepare_update.after", "gate.after", "commit_update.before", "open.before")
CASES = [Case(engine, "kill", victim, point) for engine in ENGINES for victim in VICTIMS for point in POINTS]

pytestmark = [
    pytest.mark.engines(*ENGINES),
    pytest.mark.alone,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def matrix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Matrix]:
    async with matrix_of(CASES, dict.fromkeys(ENGINES, 1), request, tmp_path_factory.mktemp("kill")) as matrix:
        yield matrix


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_what_is_killed_in_the_middle(case: Case, matrix: Matrix) -> None:
    await matrix.result(case)
