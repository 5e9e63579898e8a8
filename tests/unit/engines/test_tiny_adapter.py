"""Tiny LoRA adapters: valid for PEFT, the same bytes from the same seed, witnesses that say what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.receive.staging import adapter_digest
from worker.testing.tiny_adapter import (
    make_tiny_adapter,
    make_witness_adapter,
    witness_adapter_next_token,
)
from worker.testing.tiny_model import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    make_tiny_model,
    make_witness_model,
    witness_next_token,
)


def with_adapter(model: Path, adapter: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
    return PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False).eval()


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    model = make_witness_model(tmp_path / "model", seed=1)
    for number, make in enumerate((make_tiny_adapter, make_witness_adapter)):
        digests = [
            adapter_digest(make(model, tmp_path / f"{number}-{place}", seed))
            for place, seed in enumerate((1, 1, 2))
        ]
        assert digests[0] == digests[1] != digests[2]


def test_a_tiny_adapter_changes_all_modules_that_it_names(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1, dtype="bfloat16")
    whole = with_adapter(model, make_tiny_adapter(model, tmp_path / "adapter", seed=1))
    layers = [name for name, module in whole.named_modules() if hasattr(module, "lora_A")]
    assert len(layers) == 10
    tokens = torch.arange(3, 35).view(2, -1)
    with torch.no_grad():
        logits = whole(tokens).logits
        assert whole.dtype == logits.dtype == torch.bfloat16
        with whole.disable_adapter():
            assert (whole(tokens).logits.argmax(-1) != logits.argmax(-1)).float().mean() > 0.5
        for name in layers:
            part = whole.get_submodule(name).lora_B["default"].weight
            kept = part.clone()
            part.zero_()
            assert not torch.equal(whole(tokens).logits, logits), f"{name} has no say"
            part.copy_(kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_witness_adapter_says_its_permutation_on_any_witness(tmp_path: Path, dtype: str) -> None:
    models = [make_witness_model(tmp_path / f"model-{seed}", seed, dtype) for seed in (1, 2)]
    tokens = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).view(2, -1)
    for seed in (1, 2):
        adapter = make_witness_adapter(models[0], tmp_path / f"adapter-{seed}", seed)
        expected = torch.tensor(
            [[witness_adapter_next_token(seed, int(token)) for token in row] for row in tokens]
        )
        for model in models:
            with torch.no_grad():
                logits = with_adapter(model, adapter)(tokens).logits.float()
            first, second = logits.topk(2, dim=-1).values.unbind(-1)
            assert torch.equal(logits.argmax(-1), expected)
            assert (first - second).min() > 50


def test_witness_permutations_are_apart() -> None:
    def permutation(of: Any, seed: int) -> list[int]:
        return [of(seed, token) for token in range(VOCAB_SIZE)]

    found = [
        *(permutation(witness_next_token, seed) for seed in (1, 2)),
        *(permutation(witness_adapter_next_token, seed) for seed in (1, 2)),
    ]
    for number, one in enumerate(found):
        assert sorted(one) == list(range(VOCAB_SIZE))
        assert one[EOS_TOKEN_ID] == EOS_TOKEN_ID
        for other in found[:number]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 10


@pytest.mark.slow
@pytest.mark.parallel
def test_the_command_makes_the_same_adapter_as_the_function(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1)
    command = [
        sys.executable,
        "-m",
        "worker.testing.tiny_adapter",
        str(model),
        str(tmp_path / "made"),
        "--seed",
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"{tmp_path / 'made'}\n"
    expected = make_tiny_adapter(model, tmp_path / "expected", seed=3)
    assert adapter_digest(tmp_path / "made") == adapter_digest(expected)
