"""The checks of a model and of its settings before SGLang starts with it, and before SGLang loads weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rl_plane.errors import InvalidRequest, Unsupported
from tests.support.lacking_files import without
from tests.support.moe import make_qwen_moe
from worker.engines.base import EngineOptions
from worker.engines.common.checkpoint_spec import check_tensors
from worker.engines.sglang.adapter import build
from worker.engines.sglang.args import check_nodes
from worker.engines.sglang.limits import ATTENTION, check_model, check_updates, lora_targets_on_cpu
from worker.testing.tiny_model import make_tiny_model


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


@pytest.mark.parametrize(
    "lacking", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.experts.2.up_proj.weight"]
)
def test_a_model_whose_files_lack_a_tensor_is_refused(tmp_path: Path, lacking: str) -> None:
    whole = make_qwen_moe(tmp_path / "whole", seed=1)
    check_tensors(whole, "generate")
    partial = without({lacking}, whole, tmp_path / "partial")
    with pytest.raises(InvalidRequest, match=lacking) as caught:
        check_tensors(partial, "generate")
    assert caught.value.facts["field"] == "model"


def test_a_model_that_may_be_whole_is_not_refused(tmp_path: Path) -> None:
    whole = make_tiny_model(tmp_path / "whole", seed=1)
    head, inner = "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
    check_tensors(without({head}, whole, tmp_path / "tied", tie_word_embeddings=True), "generate")
    check_tensors(without({head}, whole, tmp_path / "embeds"), "embed")
    own = without({inner}, whole, tmp_path / "own", architectures=["OwnForCausalLM"])
    check_tensors(own, "generate")
    quantised = without({inner}, whole, tmp_path / "quantised")
    tensors = load_file(quantised / "model.safetensors") | {f"{inner}_packed": torch.zeros(1)}
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    check_tensors(quantised, "generate")


def test_only_an_embedding_model_may_lack_its_pooler(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    check_tensors(tmp_path, "embed")
    with pytest.raises(InvalidRequest, match="pooler"):
        check_tensors(tmp_path, "classify")


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


@pytest.mark.parametrize(
    ("stages", "parts", "nodes"),
    [(1, 1, 1), (3, 1, 1), (2, 1, 2), (4, 1, 2), (1, 4, 2), (3, 2, 3), (6, 1, 3), (2, 2, 4), (2, 6, 6)],
)
def test_a_node_has_whole_stages_or_an_even_part_of_one(stages: int, parts: int, nodes: int) -> None:
    check_nodes({"pp_size": stages, "tp_size": parts}, nodes)


@pytest.mark.parametrize(
    ("stages", "parts", "nodes"), [(1, 1, 2), (3, 1, 2), (3, 2, 2), (1, 3, 2), (2, 1, 4), (2, 3, 4), (4, 3, 6)]
)
def test_a_model_that_nodes_can_not_share_is_refused(stages: int, parts: int, nodes: int) -> None:
    """SGLang's own check lets (3, 2, 2) pass. It would start no process for the last stage."""
    with pytest.raises(InvalidRequest, match=f"divided among {nodes} nodes") as caught:
        check_nodes({"pp_size": stages, "tp_size": parts}, nodes)
    assert caught.value.facts["field"] == "nnodes"
    assert caught.value.facts["fix"]


@pytest.mark.parametrize("name", ["pp_size", "tp_size", "dp_size"])
def test_a_size_is_at_least_1(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_nodes({name: 0}, 1)
    assert (caught.value.facts["field"], caught.value.facts["fix"]) == (f"engine_arg.{name}", "give 1 or more")


def test_replicas_are_on_one_host() -> None:
    with pytest.raises(InvalidRequest, match="one host"):
        check_nodes({"dp_size": 2, "tp_size": 2}, 2)


def test_a_model_that_can_not_be_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no config\.json") as caught:
        build(EngineOptions(tmp_path, device="cpu", extra={"max_lora_rank": "8"}))
    assert caught.value.facts["field"] == "model"
    dense = model_of(tmp_path, architectures=["Qwen3MoeForCausalLM"], mlp_only_layers=[1])
    with pytest.raises(Unsupported, match="dense layers"):
        build(EngineOptions(dense, device="cpu"))
