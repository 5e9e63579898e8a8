"""The checkpoints that every other test and the demo stand on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from worker.testing.tiny_model import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    make_tiny_model,
    make_witness_model,
    witness_next_token,
)


def digests(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True).eval()


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    one = digests(make_tiny_model(tmp_path / "one", seed=3))
    two = digests(make_tiny_model(tmp_path / "two", seed=3))
    other = digests(make_tiny_model(tmp_path / "other", seed=4))
    assert one == two
    assert one["model.safetensors"] != other["model.safetensors"]
    assert one["tokenizer.json"] == other["tokenizer.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other", "two"]


def test_a_complete_checkpoint_is_left_alone_and_another_one_is_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", seed=1)
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert make_tiny_model(path, seed=1) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError):
        make_tiny_model(path, seed=2)
    with pytest.raises(FileExistsError):
        make_witness_model(path, seed=1)


def test_shape_and_dtype_can_be_chosen(tmp_path: Path) -> None:
    import torch

    model = load(make_tiny_model(tmp_path / "m", seed=1, dtype="bfloat16", hidden_size=64, num_hidden_layers=1))
    assert model.dtype == torch.bfloat16
    assert model.config.hidden_size == 64
    assert len(model.model.layers) == 1
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_the_tokenizer_takes_any_text_there_and_back(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path / "m", seed=1), local_files_only=True)
    text = "the tiny model, naïve: 日本語 🙂\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())  # some merges apply
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.eos_token_id == EOS_TOKEN_ID
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_permutation_is_one_cycle_that_leaves_eos_out() -> None:
    token, seen = 7, set()
    while token not in seen:
        seen.add(token)
        token = witness_next_token(1, token)
    assert seen == set(range(VOCAB_SIZE)) - {EOS_TOKEN_ID}
    assert witness_next_token(1, EOS_TOKEN_ID) == EOS_TOKEN_ID
    same = sum(witness_next_token(1, token) == witness_next_token(2, token) for token in range(1, VOCAB_SIZE))
    assert same < 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_witness_says_its_permutation_and_all_its_layers_count(tmp_path: Path, dtype: str) -> None:
    import torch

    model = load(make_witness_model(tmp_path / "w", seed=5, dtype=dtype))
    tokens = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).view(2, -1)
    expected = torch.tensor([[witness_next_token(5, int(token)) for token in row] for row in tokens])
    with torch.no_grad():
        logits = model(tokens).logits.float()
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        assert torch.equal(logits.argmax(-1), expected)
        assert (first - second).min() > 5
        for name, weight in model.named_parameters():
            kept = weight.clone()
            weight.mul_(0.5)
            assert not torch.equal(model(tokens).logits.float(), logits), f"{name} has no say"
            weight.copy_(kept)
