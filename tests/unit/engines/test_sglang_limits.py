"""The checks of a model before SGLang starts with it, and before SGLang loads weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_plane.errors import InvalidRequest, Unsupported
from worker.engines.sglang.limits import ATTENTION, check_model, check_updates, lora_targets_on_cpu


def model_of(directory: Path, **config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("dense", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_a_qwen3_moe_with_dense_layers_is_refused(tmp_path: Path, dense: dict[str, Any]) -> None:
    architectures = ["Qwen3MoeForCausalLM"]
    with pytest.raises(Unsupported, match="dense layers") as caught:
        check_model(model_of(tmp_path, architectures=architectures, **dense))
    assert caught.value.facts["field"] == "model"
    check_model(model_of(tmp_path, architectures=architectures, mlp_only_layers=[], decoder_sparse_step=1))
    check_model(model_of(tmp_path, architectures=["Qwen2MoeForCausalLM"], **dense))


@pytest.mark.parametrize(
    "config", [{"num_experts": 4}, {"n_routed_experts": 4}, {"text_config": {"num_local_experts": 4}}]
)
def test_adapters_change_the_attention_alone_where_a_cpu_has_experts(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    experts = model_of(tmp_path, **config)
    assert lora_targets_on_cpu(experts, None) == list(ATTENTION)
    assert lora_targets_on_cpu(experts, ["q_proj"]) == ["q_proj"]
    for asked in (["all"], ["q_proj", "gate_proj"]):
        with pytest.raises(InvalidRequest, match="LoRA for experts") as caught:
            lora_targets_on_cpu(experts, asked)
        assert caught.value.facts["field"] == "engine_arg.lora_target_modules"


def test_adapters_change_all_of_a_dense_model(tmp_path: Path) -> None:
    dense = model_of(tmp_path, num_experts=None)
    assert lora_targets_on_cpu(dense, None) == ["all"]
    assert lora_targets_on_cpu(dense, ["gate_proj"]) == ["gate_proj"]


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    for asks in (check_model, lambda model: lora_targets_on_cpu(model, None)):
        with pytest.raises(InvalidRequest, match="not JSON") as caught:
            asks(tmp_path)
        assert caught.value.facts["field"] == "model"


@pytest.mark.engines("sglang")
@pytest.mark.filterwarnings("ignore:::(torch|sglang|transformers)")
def test_sglangs_own_refusals_are_asked(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))

    def shared(op: str) -> None:
        raise RuntimeError(f"{op} is not supported while the weight cache is active")

    updater = SimpleNamespace(_assert_weight_cache_inactive=lambda op: None)
    runner = SimpleNamespace(model=model, weight_updater=updater)
    check_updates(runner)
    updater._assert_weight_cache_inactive = shared
    with pytest.raises(Unsupported, match="update_weights is not supported while the weight cache"):
        check_updates(runner)
    model[0]._derived_weight_cache_error = "the indexer keeps a split of its weights"
    with pytest.raises(Unsupported, match="keeps a split of its weights") as caught:
        check_updates(runner)
    assert caught.value.facts["field"] == "engine"
