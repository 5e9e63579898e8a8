"""Limits the next token of a request of the `hf` engine: changes its logits before one is chosen."""

from __future__ import annotations

import math
from collections import Counter

import torch

from rl_plane.protocol.generation import GenerateRequest


class Constraint:
    """The limits of one request."""

    def __init__(self, request: GenerateRequest, prompt: list[int], ends: frozenset[int]) -> None:
        """`ends`: tokens that may not be made before `min_tokens`."""
        self._prompt = prompt
        self._frequency = request.frequency_penalty
        self._presence = request.presence_penalty
        self._repetition = request.repetition_penalty
        self._allowed = request.allowed_token_ids
        self._bad_words = request.bad_words_token_ids
        self._biased = [int(token) for token in request.logit_bias]
        self._biases = list(request.logit_bias.values())
        self._min_tokens = request.min_tokens
        self._ends = sorted(ends)

    @classmethod
    def of(cls, request: GenerateRequest, prompt: list[int], eos: frozenset[int]) -> Constraint | None:
        """Returns None if the request has no limits."""
        barred = request.min_tokens or request.allowed_token_ids or request.bad_words_token_ids
        weighed = request.logit_bias or request.frequency_penalty or request.presence_penalty
        if not (barred or weighed or request.repetition_penalty != 1.0):
            return None
        return cls(request, prompt, frozenset(request.stop_token_ids) | eos)

    def apply(self, logits: torch.Tensor, made: list[int]) -> None:
        """Changes `logits` ([vocabulary]) in place. `made`: the tokens so far, without the prompt's."""
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
        self._penalize(logits, made)

    def _penalize(self, logits: torch.Tensor, made: list[int]) -> None:
        if self._repetition != 1.0:
            seen = [*{*self._prompt, *made}]
            rows = logits[seen]
            logits[seen] = torch.where(rows > 0, rows / self._repetition, rows * self._repetition)
        if made and (self._frequency or self._presence):
            counts = Counter(made)
            times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
            logits[list(counts)] -= self._frequency * times + self._presence
