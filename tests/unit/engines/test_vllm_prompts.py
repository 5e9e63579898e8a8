"""The output layer's adapter of each token of a prompt that is scored, without vLLM."""

from __future__ import annotations

from typing import Any

import torch

from worker.engines.vllm.prompt_logprobs import _ByToken

TOKENS, HIDDEN, RANK, VOCABULARY = 12, 8, 2, 16


def test_each_row_has_the_adapter_of_its_own_token() -> None:
    source = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=source)

    batch = random(TOKENS + 3, HIDDEN)[2 : 2 + TOKENS]  # a view itself, as the engine's is
    a, b = random(2, 1, RANK, HIDDEN), random(2, 1, VOCABULARY, RANK)
    adapters = torch.tensor([-1] * 3 + [1] * 4 + [0] * 5)
    kernels = _ByToken(batch, adapters)
    for start, end in ((0, TOKENS), (0, 3), (3, 7), (4, 6), (7, TOKENS), (2, 8), (5, 5)):
        rows = batch[start:end]
        logits = random(len(rows), VOCABULARY)
        expected = logits.clone()
        for row, slot in enumerate(adapters[start:end].tolist()):
            if slot >= 0:
                expected[row] += 0.5 * (b[slot, 0] @ (a[slot, 0] @ rows[row]))
        kernels.add_lora_logits(logits, rows, a, b, 0.5)
        torch.testing.assert_close(logits, expected)
