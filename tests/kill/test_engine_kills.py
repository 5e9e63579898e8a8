"""SIGKILL of a vLLM or SGLang worker, and of a process of its engine, in each phase of an update, and while it heals:
as `test_kill_matrix.py`, beside a worker of another engine that continues.

One case: `-k vllm-kill-EngineCore-gate.after`; other choices within the cases: `KILL_SEED=7`.
"""

from __future__ import annotations

import pytest

from tests.kill.cases import ENGINE_MARKS, ENGINE_POINTS, HEAL, Case, Engine, Matrix, matrix_fixture

CHILDREN: dict[Engine, tuple[str, ...]] = {
    "vllm": ("EngineCore", "Worker", "host"),
    "sglang": ("scheduler", "host"),
}
"""The processes that neither engine can run without."""
CASES = [
    case
    for engine, children in CHILDREN.items()
    for point in (*ENGINE_POINTS, HEAL)
    for case in (
        Case(engine, "kill", "worker", point),
        *(Case(engine, "kill", "engine", point, child) for child in children),
    )
]

pytestmark = ENGINE_MARKS
matrix = matrix_fixture(CASES, dict.fromkeys(CHILDREN, 1))


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_the_fleet_recovers_from_a_fault_of_an_engine(case: Case, matrix: Matrix) -> None:
    await matrix.result(case)
