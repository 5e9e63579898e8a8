"""Tiny mixture-of-experts models, and what plain transformers computes with them."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYERS, EXPERTS, TOP_K = 3, 8, 2
TIE = 0.05
"""The largest gap of router logits that an engine's rounding may take for equal. Two experts are mostly more than 1
apart."""

MOE_TOLERANCE = 0.01
"""The largest difference between a logprob of an engine in bfloat16 and `float32_logprobs`. The largest difference that
a correct engine shows is near 0.003."""

QWEN_CONTEXT = 32768
"""The most tokens of a request to the model of `make_qwen_moe`, unless an engine is started with fewer."""

BIASES = (128.0, 128.51, 129.49, 129.52)
"""The router biases of `make_glm_moe`, in another order in each layer. They are so far apart that an engine's rounding
changes no choice: the two largest win for every token. bfloat16 has steps of 1 there: a bias that was rounded to it
chooses other experts."""


def make_moe_model(path: Path, dense: list[int], seed: int = 0) -> Path:
    """`dense`: layers without experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from worker.testing.tiny_model import EOS_TOKEN_ID, VOCAB_SIZE, _tokenizer

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


def make_qwen_moe(path: Path, seed: int, dtype: str = "bfloat16", attention_bias: bool = False) -> Path:
    """Writes a Qwen3-MoE checkpoint of 2 layers and 4 experts. Returns `path`. `dtype`: torch's name."""
    from transformers import Qwen3MoeConfig

    from worker.testing.tiny_model import VOCAB_SIZE

    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=QWEN_CONTEXT,
        tie_word_embeddings=False,
        attention_bias=attention_bias,
    )
    return _save(config, path, seed, dtype, router=6.0)


def make_glm_moe(path: Path, seed: int, dtype: str = "bfloat16") -> Path:
    """Writes a GLM-4-MoE checkpoint of a dense layer and 2 layers with 4 experts. Returns `path`. The routers'
    `e_score_correction_bias` is float32, whatever `dtype` is."""
    from transformers import Glm4MoeConfig

    from worker.testing.tiny_model import VOCAB_SIZE

    config = Glm4MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    return _save(config, path, seed, dtype, router=1.0)


def _save(config: PretrainedConfig, path: Path, seed: int, dtype: str, router: float) -> Path:
    """Each expert moves the logprobs by far more than `MOE_TOLERANCE`. `router`: the standard deviation of the routers'
    logits. Where an engine's rounding may choose another second expert, a large one gives that expert little weight."""
    from transformers import AutoModelForCausalLM

    from worker.testing.tiny_model import EOS_TOKEN_ID, _tokenizer

    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, EOS_TOKEN_ID, EOS_TOKEN_ID
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if name.startswith("model.layers.") and weight.dim() > 1:
                gain = router if name.endswith("mlp.gate.weight") else 0.25
                weight.normal_(0.0, gain / math.sqrt(weight.shape[-1]))
        model.to(getattr(torch, dtype))
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias = torch.tensor(BIASES)[torch.randperm(4)]
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


@lru_cache(maxsize=8)
def _float32_model(path: Path, adapter: Path | None) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    if adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(adapter)).eval()


def float32_logprobs(path: Path, tokens: list[int], adapter: Path | None = None) -> list[float]:
    """The log-softmax of each token but the first, given the tokens before it, by one float32 forward of transformers.
    A model of one path is read once per process: write another model to another path."""
    with torch.no_grad():
        logits = _float32_model(path, adapter)(torch.tensor([tokens])).logits[0, :-1]
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    return found


def greedy_gap(path: Path, prompt: list[int], tokens: list[int]) -> float:
    """Returns how much less likely than the likeliest the worst of the tokens after `prompt` is, in nats."""
    with torch.no_grad():
        logits = _float32_model(path, None)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    made = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((logits.max(1).values - made).max())


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
