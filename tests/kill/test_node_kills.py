"""The second node of a vLLM or SGLang engine dies or hangs in each phase of an update, and while it heals: the whole
node, its rank, or its host agent. A worker of another engine continues beside it.

The update is prepared on both nodes or fails, the worker ends and names the node, and both nodes come back with
the committed weights. One case: `-k vllm-nodes-kill-Worker-gate.after`; other choices within the cases: `KILL_SEED=7`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from tests.kill.cases import HEAL, LOAD, Case, Engine, Fault, Matrix, matrix_of
from tests.kill.held import RECEIVE

if sys.platform != "linux":
    pytest.skip("relies on PR_SET_PDEATHSIG", allow_module_level=True)

POINTS = (
    RECEIVE,
    LOAD,
    "prepare_update.after",
    "gate.after",
    "commit_update.before",
    "commit_update.after",
    "open.before",
)
PHASES: dict[Engine, Sequence[str]] = {
    "vllm-nodes": POINTS,
    # The nodes' part of an update is the same for both engines, and SGLang takes half a minute to start again.
    "sglang-nodes": (RECEIVE, "commit_update.before"),
}
FAULTS: tuple[Fault, ...] = ("kill", "stop")
CASES = [
    Case(engine, fault, "worker", point)
    for engine, points in PHASES.items()
    for fault in FAULTS
    for point in points
]
CASES += [
    Case("vllm-nodes", fault, "engine", point, "Worker")
    for fault in FAULTS
    for point in (LOAD, "prepare_update.after", "commit_update.before")
]
CASES += [Case("vllm-nodes", "kill", "engine", point, "host") for point in (RECEIVE, "gate.after")]
CASES += [
    Case("vllm-nodes", "kill", "worker", HEAL),
    Case("sglang-nodes", "kill", "engine", LOAD, "scheduler"),
    Case("sglang-nodes", "stop", "engine", "commit_update.before", "scheduler"),
]

pytestmark = [
    pytest.mark.engines("vllm", "sglang"),
    pytest.mark.alone,
    pytest.mark.kills,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
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
        patched.setenv("VLLM_HOST_IP", "127.0.0.1")
        async with matrix_of(CASES, dict.fromkeys(PHASES, 1), request, tmp_path_factory.mktemp("kill")) as matrix:
            yield matrix


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_what_happens_on_the_second_node(case: Case, matrix: Matrix) -> None:
    await matrix.result(case)
