"""Tiny pooling models for tests, and what plain transformers makes of them in float32."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from worker.testing.tiny_model import EOS_TOKEN_ID, VOCAB_SIZE, make_tiny_model

torch = pytest.importorskip("torch")

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
INPUTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [300], list(range(40, 80))]
"""Token ids of several lengths."""


def make_classifier(path: Path, seed: int, labels: int = 1, **config: Any) -> Path:
    """A Llama with a linear layer over its last token."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    made = LlamaConfig(
        **SHAPE,
        num_labels=labels,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=EOS_TOKEN_ID,
        tie_word_embeddings=False,
        **config,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(made)
        model.score.weight.normal_(0.0, 0.5)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(make_tiny_model(path.parent / "tokenizer", 1)).save_pretrained(path)
    return path


@functools.cache
def _model(path: Path, task: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if task == "classify" else AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float32).eval()


def logits_of(path: Path, prompt: list[int]) -> list[float]:
    """The logits of a classifier."""
    with torch.inference_mode():
        found: list[float] = _model(path, "classify")(input_ids=torch.tensor([prompt])).logits[0].tolist()
    return found


def embedding_of(path: Path, prompt: list[int]) -> list[float]:
    """The hidden state of the last token, with length 1."""
    with torch.inference_mode():
        hidden = _model(path, "embed").model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
        found: list[float] = torch.nn.functional.normalize(hidden, dim=0).tolist()
    return found
