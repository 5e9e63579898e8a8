"""Seeds of requests on SGLang's CPU build.

SGLang reads seeds in its deterministic mode only, which has no backend for a CPU, and its sampler with seeds needs a
kernel that the CPU build lacks.
"""

from __future__ import annotations

from typing import Any


def hand_over_seeds(info: Any, cls: Any, batch: Any, vocab_size: int) -> None:
    """A hook after SGLang builds the sampling parameters of a batch: adds the seed of each request."""
    import torch

    if info.sampling_seed is None:
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)


def sample_by_seed(original: Any, logprobs: Any, seed: Any, positions: Any) -> Any:
    """Replaces SGLang's sampler with seeds: one draw per row, which depends on the row's seed and position alone."""
    import torch

    noise = torch.empty(logprobs.shape, dtype=torch.float64)
    for row, (number, position) in enumerate(zip(seed.tolist(), positions.tolist(), strict=True)):
        generator = torch.Generator().manual_seed(hash((number, position)))
        noise[row].exponential_(generator=generator)
    return torch.argmax(logprobs.to(torch.float64) - noise.log(), dim=1, keepdim=True)
