"""Tests which `adapter_config.json` is accepted, and which tensors it asks for."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plane.errors import InvalidWeights
from rl_plane.protocol.versions import TensorSpec
from worker.engines.common.lora import lora_spec, parse_lora, target_modules, tensor_names

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "1.up"]}
LINEAR = {"model.0.q_proj": (3, 5), "model.1.q_proj": (3, 5), "model.1.up": (3, 7), "model.11.up": (3, 7)}


def test_a_config_asks_for_these_tensors() -> None:
    lora = parse_lora(CONFIG)
    modules = target_modules(lora, LINEAR, frozenset({"model.norm", "eq_proj"}))
    assert modules == ["model.0.q_proj", "model.1.q_proj", "model.1.up"]
    spec = lora_spec(lora, modules, LINEAR, dict.fromkeys(LINEAR, "BF16"))
    assert len(spec) == 6
    assert spec["base_model.model.model.1.up.lora_A.weight"] == TensorSpec("BF16", (4, 3))
    assert spec["base_model.model.model.1.up.lora_B.weight"] == TensorSpec("BF16", (7, 4))


def test_patterns_give_single_modules_their_rank_and_scaling() -> None:
    assert parse_lora(CONFIG).scaling_of("model.0.q_proj") == 2.0
    assert parse_lora(CONFIG | {"use_rslora": True}).scaling_of("model.0.q_proj") == 4.0
    patterns = {"rank_pattern": {r"model\.1\..*": 16, "up": 2}, "alpha_pattern": {"1.up": 32, "q": 99}}
    lora = parse_lora(CONFIG | patterns)
    assert [lora.rank_of(name) for name in LINEAR] == [4, 16, 16, 2]
    assert [lora.scaling_of(name) for name in LINEAR] == [2.0, 0.5, 2.0, 4.0]
    assert parse_lora(CONFIG | patterns | {"use_rslora": True}).scaling_of("model.1.up") == 8.0
    spec = lora_spec(lora, ["model.1.up"], LINEAR, dict.fromkeys(LINEAR, "BF16"))
    assert [each.shape for each in spec.values()] == [(16, 3), (7, 16)]


def test_an_adapter_of_one_rank_and_one_scaling_computes_the_same() -> None:
    import torch

    from worker.engines.common.even_ranks import with_even_ranks

    lora = parse_lora(CONFIG | {"rank_pattern": {"1.up": 6}, "alpha_pattern": {"q_proj": 3}, "use_rslora": True})
    modules = target_modules(lora, LINEAR)
    spec = lora_spec(lora, modules, LINEAR, dict.fromkeys(LINEAR, "F32"))
    tensors = {name: torch.randn(each.shape) for name, each in spec.items()}
    even, made = with_even_ranks(lora, modules, tensors)
    assert (even.r, even.scaling_of("model.1.up"), even.rslora) == (6, 1.0, False)
    for module in modules:
        a, b = tensor_names(module)
        assert made[a].shape[0] == made[b].shape[1] == 6
        torch.testing.assert_close(made[b] @ made[a], lora.scaling_of(module) * tensors[b] @ tensors[a])
    plain = parse_lora(CONFIG)
    assert with_even_ranks(plain, modules, tensors) == (plain, tensors)


@pytest.mark.parametrize("target", ["gate_proj", "mlp.experts.0.w1"])
def test_parts_of_experts_are_refused_by_name(target: str) -> None:
    """Before any tensor is looked at. A dense model may have no such layer: PEFT ignores the name then."""
    lora = parse_lora(CONFIG | {"target_modules": ["q_proj", target]})
    with pytest.raises(InvalidWeights, match="part of this model's experts") as caught:
        target_modules(lora, LINEAR, frozenset({"model.1.mlp.experts"}))
    assert caught.value.facts["field"] == "adapter_config.target_modules"
    assert target_modules(lora, LINEAR) == ["model.0.q_proj", "model.1.q_proj"]


def test_whole_names_fit_too() -> None:
    lora = parse_lora(CONFIG | {"target_modules": ["model.1.up"]})
    assert target_modules(lora, LINEAR) == ["model.1.up"]


@pytest.mark.parametrize(
    "extra",
    [
        {
            "bias": "none",
            "use_dora": False,
            "modules_to_save": None,
            "rank_pattern": {},
            "layers_to_transform": None,
        },
        {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", "inference_mode": True, "revision": "main"},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"a_key_of_a_later_peft": False},
    ],
)
def test_keys_that_change_nothing_are_accepted(extra: dict[str, Any]) -> None:
    assert parse_lora(CONFIG | extra) == parse_lora(CONFIG)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("r", 0),
        ("r", True),
        ("r", 4.0),
        ("r", "4"),
        ("r", 1 << 40),
        ("r", None),
        ("lora_alpha", 0),
        ("lora_alpha", -1),
        ("lora_alpha", True),
        ("lora_alpha", float("inf")),
        ("lora_alpha", float("nan")),
        ("lora_alpha", 10**400),
        ("lora_alpha", "8"),
        ("target_modules", ".*_proj"),
        ("target_modules", "all-linear"),
        ("target_modules", []),
        ("target_modules", None),
        ("target_modules", ["q_proj", 3]),
        ("target_modules", [""]),
        ("use_rslora", 1),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", ["x"]),
        ("modules_to_save", ["lm_head"]),
        ("use_dora", True),
        ("use_qalora", True),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", [["q_proj", 8]]),
        ("rank_pattern", {"q_(proj": 8}),
        ("rank_pattern", {"(?i)q_proj": 8}),
        ("rank_pattern", {"q_proj{99999999999}": 8}),
        ("rank_pattern", False),
        ("alpha_pattern", {"q_proj": float("nan")}),
        ("layers_to_transform", [0]),
        ("layers_to_transform", 0),
        ("layer_replication", [[0, 1]]),
        ("exclude_modules", ["up"]),
        ("target_parameters", ["experts.w"]),
        ("trainable_token_indices", [1]),
        ("alora_invocation_tokens", [1]),
        ("a_key_of_a_later_peft", True),
        ("k" * 5000, {"x": "y" * 5000}),
    ],
)
def test_a_refusal_names_the_key_and_a_fix(key: str, value: Any) -> None:
    with pytest.raises(InvalidWeights) as caught:
        parse_lora(CONFIG | {key: value})
    assert caught.value.facts["field"] == f"adapter_config.{key[:64]}"
    assert caught.value.facts["fix"]
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("missing", ["peft_type", "r", "lora_alpha", "target_modules"])
def test_missing_keys_are_refused(missing: str) -> None:
    with pytest.raises(InvalidWeights) as caught:
        parse_lora({key: value for key, value in CONFIG.items() if key != missing})
    assert caught.value.facts["field"] == f"adapter_config.{missing}"


def test_targets_that_are_absent_or_no_linear_layers_are_refused() -> None:
    with pytest.raises(InvalidWeights, match="no linear layer of this model"):
        target_modules(parse_lora(CONFIG | {"target_modules": ["proj"]}), LINEAR)
    with pytest.raises(InvalidWeights, match=r"'model\.norm', which is no linear layer"):
        target_modules(
            parse_lora(CONFIG | {"target_modules": ["q_proj", "norm"]}), LINEAR, frozenset({"model.norm"})
        )
