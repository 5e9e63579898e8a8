"""The second node of a vLLM or SGLang engine dies or hangs in each phase of an update, and while it heals: the whole
node, its rank, or its host agent. A worker of another engine continues beside it.

The update is prepared on both nodes or fails, the worker ends, and both nodes start again with the committed weights.
One case: `-k vllm-nodes-kill-host-gate.after`; other choices within the cases: `KILL_SEED=7`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.kill.cases import ENGINE_MARKS, ENGINE_POINTS, HEAL, LOAD, Case, Engine, Fault, Matrix, matrix_fixture
from tests.kill.held import RECEIVE
from tests.support.cores import bound_cores

PHASES: dict[Engine, Sequence[str]] = {
    "vllm-nodes": ENGINE_POINTS,
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

pytestmark = ENGINE_MARKS


@contextmanager
def _two_nodes_here() -> Iterator[None]:
    with bound_cores() as patched:
        patched.setenv("VLLM_HOST_IP", "127.0.0.1")
        yield


matrix = matrix_fixture(CASES, dict.fromkeys(PHASES, 1), _two_nodes_here)


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_the_fleet_recovers_from_a_fault_on_the_second_node(case: Case, matrix: Matrix) -> None:
    await matrix.result(case)
