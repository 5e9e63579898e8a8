"""Gives an adapter one rank and one scaling. SGLang knows no more of an adapter than those. vLLM knows patterns, but
matches each module with each of them: with a pattern for each of 560 modules it stands still for minutes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from worker.engines.common.lora import LoraConfig, tensor_names


def with_even_ranks(
    lora: LoraConfig, modules: list[str], tensors: Mapping[str, torch.Tensor]
) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Returns the adapter without `rank_pattern` and `alpha_pattern`. It computes the same: zeros fill each module up
    to the largest rank, and each B is scaled. An adapter without patterns stays as it is."""
    if not lora.ranks and not lora.alphas:
        return lora, dict(tensors)
    rank = max(map(lora.rank_of, modules))
    even = {}
    for module in modules:
        name_a, name_b = tensor_names(module)
        a, b = tensors[name_a], tensors[name_b]
        more = rank - lora.rank_of(module)
        even[name_a] = torch.nn.functional.pad(a, (0, 0, 0, more))
        even[name_b] = torch.nn.functional.pad((b.double() * lora.scaling_of(module)).to(b.dtype), (0, more))
    return LoraConfig(rank, float(rank), False, lora.targets), even
