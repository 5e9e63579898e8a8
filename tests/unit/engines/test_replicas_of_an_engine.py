"""Tests of the replicas of an engine: the replica that a process belongs to, and the comparison of their scores."""

from __future__ import annotations

import math

import pytest

from rl_plane.errors import EngineFailed, InvalidRequest
from worker.engines.common.replicas import check_replicas, replica_of, scores_of_replicas


def test_a_process_belongs_to_the_replica_in_its_name_or_above_it() -> None:
    names = {
        2: "VLLM::EngineCore_DP1",
        3: "VLLM::Worker",
        4: "VLLM::DPCoordinator",
        5: "sglang::scheduler_DP0_TP1",
    }
    parents = {2: 1, 3: 2, 4: 1, 5: 1}
    assert [replica_of(pid, names, parents) for pid in (2, 3, 4, 5, 6)] == [1, 1, None, 0, None]


def test_replicas_that_agree_have_one_score() -> None:
    assert scores_of_replicas([[[-1.0, -math.inf], [-3.0]]]) == [[-1.0, -math.inf], [-3.0]]
    assert scores_of_replicas([[[-1.0], [-3.0]], [[-1.01], [-3.0]]]) == [[-1.0], [-3.0]]
    assert math.isnan(scores_of_replicas([[[math.nan]], [[math.nan]]])[0][0])


@pytest.mark.parametrize("other", [-2.1, math.nan, -math.inf])
def test_replicas_that_disagree_fail(other: float) -> None:
    with pytest.raises(EngineFailed, match=r"replicas 0 and 2 .* token 2 of sequence 1"):
        scores_of_replicas([[[-1.0], [-1.0, -2.0]]] * 2 + [[[-1.0], [-1.0, other]]])


@pytest.mark.parametrize(("replicas", "hosts"), [(0, 1), (2, 2)])
def test_a_number_that_an_engine_can_not_have_names_the_field(replicas: int, hosts: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_replicas(replicas, hosts, "dp_size")
    assert (caught.value.facts["field"], bool(caught.value.facts["fix"])) == ("engine_arg.dp_size", True)
    check_replicas(1, 2, "dp_size")
    check_replicas(2, 1, "dp_size")
