"""GRPO in plain functions: advantages within a group of completions, and the clipped policy-gradient loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CLIP = 0.2
"""The clip range of a token's probability ratio: PPO's usual value."""
SPREAD_FLOOR = 1e-6
"""Makes the advantages of a group with equal rewards 0 instead of 0/0."""


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """The rewards of one group, less their mean, divided by their standard deviation."""
    mean = sum(rewards) / len(rewards)
    spread = (sum((value - mean) ** 2 for value in rewards) / len(rewards)) ** 0.5
    return [(value - mean) / (spread + SPREAD_FLOOR) for value in rewards]


def policy_loss(new: Any, old: Any, advantages: Any, mask: Any, clip: float = CLIP) -> Any:
    """The mean over tokens of -min(ratio * A, clipped ratio * A).

    Args:
        new, old: Log probabilities of the sampled tokens, [completions, tokens]. `old` are the engines'.
        advantages: [completions].
        mask: [completions, tokens], true for real tokens.
        clip: See CLIP.
    """
    ratio = (new - old).exp()
    gain = advantages.unsqueeze(1)
    worst = (ratio * gain).minimum(ratio.clamp(1.0 - clip, 1.0 + clip) * gain)
    return -(worst * mask).sum() / mask.sum()


def completion_logprobs(model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Any:
    """The log-softmax of the raw logits at each completion token; [completions, longest], 0 where padded.

    The padding is on the right, where it has no effect on the tokens before it.
    """
    import torch

    rows = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    logprobs = model(input_ids=tokens[:, :-1], use_cache=False).logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    width = max(len(completion) for completion in completions)
    starts = torch.tensor([len(prompt) - 1 for prompt in prompts]).unsqueeze(1)
    at = (starts + torch.arange(width)).clamp(max=longest - 2)
    return chosen.gather(1, at) * padded_mask(completions)


def padded(rows: Sequence[Sequence[float]]) -> Any:
    """Rows of different lengths as a float tensor, with 0 after the end of each."""
    import torch

    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float32)


def padded_mask(rows: Sequence[Sequence[object]]) -> Any:
    """True where `padded` holds a value of a row."""
    return padded([[1.0] * len(row) for row in rows]).bool()
