"""Corrects prompt logprobs of vLLM with LoRA, on CPUs and GPUs.

vLLM takes each row of logits for the last token of a request, though these rows are a prompt's. It then leaves an
adapter's part of the output layer out, or gives it to other requests; on a CPU the engine ends.
"""

from __future__ import annotations

from typing import Any

import torch


def score_prompts_by_token(runner: Any) -> None:
    """Gives each row the adapter of its own token while prompts are scored. Call it once in a rank, with LoRA."""
    from vllm.lora.layers import LogitsProcessorWithLoRA

    original = runner._get_prompt_logprobs_dict

    def by_token(hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> Any:
        # Looked up each time: a reload may have replaced them.
        layers = [layer for layer in runner.model.modules() if isinstance(layer, LogitsProcessorWithLoRA)]
        wrappers = [layer.punica_wrapper for layer in layers]
        for layer, wrapper in zip(layers, wrappers, strict=True):
            layer.punica_wrapper = _ByToken(hidden_states, wrapper.token_lora_indices)
        try:
            return original(hidden_states, num_scheduled_tokens)
        finally:
            for layer, wrapper in zip(layers, wrappers, strict=True):
                layer.punica_wrapper = wrapper

    runner._get_prompt_logprobs_dict = by_token


class _ByToken:
    """Replaces vLLM's kernels. `adapters`: the slot of each row of `hidden_states`, -1 for the base model alone."""

    def __init__(self, hidden_states: torch.Tensor, adapters: torch.Tensor) -> None:
        self._hidden_states = hidden_states
        self._adapters = adapters

    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Adds to `y` in place. `x`: consecutive rows of the hidden states, not copied. `a`: [slots, 1, rank, hidden].
        `b`: [slots, 1, vocabulary, rank]."""
        skipped = x.storage_offset() - self._hidden_states.storage_offset()
        first = skipped // self._hidden_states.stride(0)
        adapters = self._adapters[first : first + len(x)]
        for slot in set(adapters.tolist()) - {-1}:
            rows = adapters == slot
            low = x[rows].float() @ a[slot, 0].float().T
            y[rows, : b.shape[2]] += (scale * (low @ b[slot, 0].float().T)).to(y.dtype)
        return y
