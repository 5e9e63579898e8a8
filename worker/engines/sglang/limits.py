"""Finds what SGLang can't do with a model, before SGLang computes wrong tokens or ends itself.

The adapter loads weights without SGLang's own update calls, so `check_updates` makes the checks of those calls.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_plane.errors import InvalidRequest, Unsupported
from worker.engines.common.checkpoint_spec import saved_specs
from worker.engines.common.pooling_head import PoolingHead

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

DENSE_LAYERS = (
    "SGLang builds each layer of a Qwen3-MoE model with experts, and never fills those of the dense layers that this "
    "model's config names"
)
RAW_EMBEDDING = "SGLang scales each embedding to length 1 itself"
BIASED_HEADS = {"Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification"}
NO_EXPERT_LORA = (
    "SGLang has LoRA for experts by Triton kernels only, and ends itself at the first request on a CPU"
)


def check_model(model: Path) -> None:
    """Raises Unsupported for a model that SGLang starts with and computes wrongly."""
    config = _config(model)
    dense = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    if dense and "Qwen3MoeForCausalLM" in (config.get("architectures") or ()):
        raise Unsupported(DENSE_LAYERS, field="model", fix="serve this model with another engine")


def check_pooling(model: Path, head: PoolingHead) -> None:
    """Raises Unsupported for a pooling model that SGLang starts with and computes wrongly."""
    if head.task == "embed" and head.position != "last":
        raise Unsupported(
            f"SGLang takes the last token of a model that generates, and this model's files say {head.position}",
            field="model",
            fix="serve this model with hf or vllm",
        )
    named = set(_config(model).get("architectures") or ()) & BIASED_HEADS
    if named and "score.bias" not in saved_specs(model):
        raise Unsupported(
            f"SGLang gives {named.pop()} a bias behind `score`, which the model's files lack and SGLang never sets",
            field="model",
            fix="serve this model with hf or vllm",
        )


def lora_targets_on_cpu(model: Path, asked: list[str] | None) -> list[str]:
    """The modules that adapters may change on a CPU. `asked`: the value of --engine-arg lora_target_modules."""
    if not _has_experts(model):
        return asked or ["all"]
    if beyond := [name for name in asked or () if name.rpartition(".")[2] not in ATTENTION]:
        raise InvalidRequest(
            f"adapters of {', '.join(beyond)} can't be served: {NO_EXPERT_LORA}",
            field="engine_arg.lora_target_modules",
            fix=f"use {json.dumps(ATTENTION)}, or run on a GPU",
        )
    return asked or list(ATTENTION)


def check_updates(runner: Any) -> None:
    """Raises Unsupported if SGLang's model runner can't take new weights. The reason is in SGLang's own words."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import (
        _unsupported_derived_weight_cache_error,
    )

    reason = _unsupported_derived_weight_cache_error(runner.model)
    if reason is None:
        try:
            runner.weight_updater._assert_weight_cache_inactive("update_weights")
        except RuntimeError as error:
            reason = str(error)
    if reason is not None:
        raise Unsupported(
            f"SGLang refuses weight updates: {reason}", field="engine", fix="start it without what this names"
        )


def _has_experts(model: Path) -> bool:
    config = _config(model)
    parts = [config, config.get("text_config") or {}]
    return any(part.get(key) for part in parts for key in ("num_experts", "n_routed_experts", "num_local_experts"))


def _config(model: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((model / "config.json").read_text())
    except ValueError as error:
        raise InvalidRequest(
            f"{model}/config.json is not JSON: {error}", field="model", fix="give a Hugging Face model directory"
        ) from error
    return found
