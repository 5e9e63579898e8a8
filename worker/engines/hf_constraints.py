"""Which tokens a request of the `hf` engine may have next: its logits, before one is chosen."""

from __future__ import annotations

import math

import torch

from rl_plane.generation import GenerateRequest


class Constraint:
    def __init__(self, request: GenerateRequest, ends: frozenset[int]) -> None:
        """`ends`: what may not be made before `min_tokens`."""
        self._allowed = request.allowed_token_ids
        self._bad_words = request.bad_words_token_ids
        self._biased = [int(token) for token in request.logit_bias]
        self._biases = list(request.logit_bias.values())
        self._min_tokens = request.min_tokens
        self._ends = sorted(ends)

    @classmethod
    def of(cls, request: GenerateRequest, eos: frozenset[int]) -> Constraint | None:
        """None: it may have any."""
        if not (
            request.min_tokens or request.logit_bias or request.allowed_token_ids or request.bad_words_token_ids
        ):
            return None
        return cls(request, frozenset(request.stop_token_ids) | eos)

    def apply(self, logits: torch.Tensor, made: list[int]) -> None:
        """In place. `logits`: [vocabulary]; `made`: the tokens so far, without the prompt's."""
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits.fill_(-math.inf)
            logits[self._allowed] = kept
        for *before, last in self._bad_words:
            if len(made) >= len(before) and made[len(made) - len(before) :] == before:
                logits[last] = -math.inf
        if len(made) < self._min_tokens:
            logits[self._ends] = -math.inf
        if self._biased:
            logits[self._biased] += torch.tensor(self._biases, dtype=logits.dtype, device=logits.device)
