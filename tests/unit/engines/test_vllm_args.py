"""The arguments that vLLM starts with, as far as a test without vLLM can see them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rl_plane.errors import InvalidRequest, Unsupported
from tests.support import experts_over_gloo
from worker.engines.vllm.args import (
    CPU_KV_CACHE_BYTES,
    LORA_SLOTS,
    check_cpu,
    check_device,
    check_draft,
    check_experts,
    check_lora_targets,
    check_nodes,
    completed,
    thread_binding,
)

SEEDED = {"seed": 7}
"""A seed set by hand, which wins."""


def test_a_cpu_gets_a_bound_for_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert completed(SEEDED, True) == {
        **SEEDED,
        "enforce_eager": True,
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
    }
    given = {**SEEDED, "kv_cache_memory_bytes": 5, "enforce_eager": False}
    assert completed(given, True) == given
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert "kv_cache_memory_bytes" not in completed({}, True)
    assert completed(SEEDED, False) == SEEDED


def test_each_worker_draws_by_a_seed_of_its_own() -> None:
    """Workers with one seed would make the same samples of one prompt."""
    seeds = [completed({}, on_cpu)["seed"] for on_cpu in (True, True, False, False)]
    assert len({*seeds}) == len(seeds)
    assert all(0 <= seed < 1 << 32 for seed in seeds)  # as NumPy takes them


def test_a_rank_asks_for_lora() -> None:
    assert completed({**SEEDED, "max_lora_rank": 8}, False) == {
        **SEEDED,
        "max_lora_rank": 8,
        "enable_lora": True,
        "max_loras": LORA_SLOTS,
    }
    refused = {**SEEDED, "max_lora_rank": 8, "enable_lora": False}
    assert completed(refused, False) == refused
    given = {**SEEDED, "enable_lora": True, "max_loras": 1, "max_cpu_loras": 2}
    assert completed(given, False) == given
    on_cpu = completed(given, True)
    assert (on_cpu["max_loras"], "max_cpu_loras" in on_cpu) == (3, False)


@pytest.mark.parametrize(
    ("cores", "ranks", "binding"),
    [(2, 1, None), (2, 2, "0|1"), (4, 2, "0,1|2,3"), (5, 2, "0,1|2,3"), (1, 2, None)],
)
def test_ranks_share_the_cores(cores: int, ranks: int, binding: str | None) -> None:
    assert thread_binding(ranks, range(cores)) == binding


def test_a_pipeline_is_refused_on_a_cpu() -> None:
    with pytest.raises(InvalidRequest, match="for GPUs") as caught:
        check_cpu({"pipeline_parallel_size": 2})
    assert caught.value.facts["field"] == "engine_arg.pipeline_parallel_size"
    check_cpu({"enable_expert_parallel": True, "pipeline_parallel_size": 1, "tensor_parallel_size": 2})


def test_nodes_have_the_same_number_of_ranks() -> None:
    for arguments in ({}, {"tensor_parallel_size": 3}, {"tensor_parallel_size": 3, "pipeline_parallel_size": 3}):
        check_nodes(arguments, 1)
        with pytest.raises(InvalidRequest, match="ranks can't be divided among 2 nodes") as caught:
            check_nodes(arguments, 2)
        assert caught.value.facts["field"] == "nnodes"
        assert caught.value.facts["fix"]
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        check_nodes({key: 4}, 2)
    with pytest.raises(InvalidRequest, match="one host"):
        check_nodes({"tensor_parallel_size": 2, "data_parallel_size": 2}, 2)


def test_adapters_may_change_all_modules_of_a_kind_or_none() -> None:
    check_lora_targets({})
    check_lora_targets({"lora_target_modules": ["q_proj", "o_proj"]})
    with pytest.raises(InvalidRequest, match="o_proj") as caught:
        check_lora_targets({"lora_target_modules": ["q_proj", "model.layers.0.self_attn.o_proj"]})
    assert caught.value.facts["field"] == "engine_arg.lora_target_modules"
    assert caught.value.facts["fix"]


def test_a_model_that_brings_a_draft_model_is_refused() -> None:
    check_draft(SimpleNamespace(speculative_config=None))
    with pytest.raises(Unsupported, match="draft model") as caught:
        check_draft(SimpleNamespace(speculative_config=object()))
    assert caught.value.facts["field"] == "model"


@pytest.mark.parametrize(("device", "on_cpu"), [("auto", True), ("cpu", True), ("cuda", False), ("cuda:0", False)])
def test_a_device_that_vllm_can_take_is_accepted(device: str, on_cpu: bool) -> None:
    check_device(device, on_cpu)


@pytest.mark.parametrize(
    ("device", "on_cpu", "known"),
    [("cuda:1", False, "cuda"), ("auto:1", False, "cuda"), ("cpu", False, "cuda"), ("cuda:1", True, "cpu")],
)
def test_a_device_that_it_would_not_take_is_refused(device: str, on_cpu: bool, known: str) -> None:
    with pytest.raises(InvalidRequest, match=device) as caught:
        check_device(device, on_cpu)
    assert caught.value.facts["field"] == "device"
    assert caught.value.facts["fix"] == f"use {known}; CUDA_VISIBLE_DEVICES says which"


@pytest.mark.engines("vllm")
@pytest.mark.filterwarnings("ignore:::(torch|vllm)")  # theirs, not ours
def test_replicas_that_can_not_share_their_experts_are_refused() -> None:
    """vLLM's CPU build has no way to pass tokens among them."""
    with pytest.raises(InvalidRequest, match="no all_gatherv for cpu") as caught:
        check_experts(2, has_experts=True)
    assert caught.value.facts["field"] == "engine_arg.data_parallel_size"
    assert caught.value.facts["fix"] == "run one worker for each replica"
    check_experts(1, has_experts=True)
    check_experts(2, has_experts=False)
    with pytest.MonkeyPatch.context() as patched:
        experts_over_gloo.put_in(patched.setattr)
        check_experts(2, has_experts=True)
