"""A tiny mixture-of-experts model, and what plain transformers says of where its tokens go."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

LAYERS, EXPERTS, TOP_K = 3, 8, 2
TIE = 0.05
"""Of logits that an engine's rounding may take for equal; those of two experts are mostly more than 1 apart."""


def make_moe_model(path: Path, dense: list[int], seed: int = 0) -> Path:
    """`dense`: layers without experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from worker.tiny_model import EOS_TOKEN_ID, VOCAB_SIZE, _tokenizer

    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_hidden_layers=LAYERS,
        mlp_only_layers=dense,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=EOS_TOKEN_ID,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.normal_()
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


@lru_cache(maxsize=4)
def _model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True).eval()


def check_experts(path: Path, tokens: list[int], found: Any) -> None:
    """`found`: numpy's [tokens, layers, top_k], the likeliest first, as one forward of transformers has them, up to
    ties."""
    model = _model(path)
    dense = model.config.mlp_only_layers
    with torch.no_grad():
        routers = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    assert found.shape == (len(tokens), LAYERS, TOP_K)
    assert not found[:, dense].any()
    for layer, logits in zip((layer for layer in range(LAYERS) if layer not in dense), routers, strict=True):
        chosen = torch.from_numpy(found[:, layer].astype("int64"))
        assert (chosen[:, 0] != chosen[:, 1]).all()
        off = (logits.gather(1, chosen) - logits.topk(TOP_K).values).abs()
        assert off.max() < TIE, (layer, off.argmax())
