"""The results of plain transformers, without any engine: the truth that engines are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


@lru_cache(maxsize=16)
def _model(base: Path, adapter: Path | None) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True).eval()
    if adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(adapter)).eval()


def prompt_logprobs(base: Path, prompt: list[int], adapter: Path | None = None) -> list[float]:
    """The log-softmax of each token but the first, given those before it."""
    with torch.no_grad():
        rows = _model(base, adapter)(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    found: list[float] = rows.gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1).tolist()
    return found


def greedy(
    base: Path, prompt: list[int], count: int, adapter: Path | None = None
) -> tuple[list[int], list[float]]:
    """The greedy tokens after `prompt`, each by a forward over all before it, and their log-softmax."""
    tokens, logprobs = list(prompt), []
    for _ in range(count):
        with torch.no_grad():
            logits = _model(base, adapter)(torch.tensor([tokens])).logits[0, -1].float()
        tokens.append(int(logits.argmax()))
        logprobs.append(float(torch.log_softmax(logits, -1)[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


def logits_of(base: Path, prompt: list[int], tokens: list[int], adapter: Path | None = None) -> torch.Tensor:
    """[tokens, vocabulary]: what each of these tokens after `prompt` was chosen by."""
    with torch.no_grad():
        logits: torch.Tensor = _model(base, adapter)(torch.tensor([prompt + tokens])).logits
    return logits[0, len(prompt) - 1 : -1].float()


def logprobs_of(
    base: Path, prompt: list[int], tokens: list[int], adapter: Path | None = None
) -> tuple[list[float], float]:
    """The log-softmax of tokens after `prompt`, and by how much the worst of them is less likely than the likeliest."""
    every = torch.log_softmax(logits_of(base, prompt, tokens, adapter), -1)
    made = every.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return made.tolist(), float((every.max(1).values - made).max())


def logprobs_over_kv(models: Sequence[Path], parts: Sequence[list[int]]) -> list[float]:
    """The log-softmax of the tokens of the last part, where each model has computed the KV of its own part only.

    As in an engine that keeps KV, the last token of a part goes through the next model, which makes the token after
    it."""
    cache: Any = None
    left: list[int] = []
    for base, part in zip(models, parts, strict=True):
        fed, left = [*left, *part[:-1]], part[-1:]
        with torch.no_grad():
            out = _model(base, None)(torch.tensor([fed]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
    last = parts[-1] if len(parts) > 1 else parts[-1][1:]  # no model makes the first token of all
    rows = torch.log_softmax(out.logits[0, -len(last) :].float(), -1)
    made: list[float] = rows.gather(1, torch.tensor(last)[:, None])[:, 0].tolist()
    return made


def penalized(
    row: torch.Tensor, prompt: list[int], made: list[int], frequency: float, presence: float, repetition: float
) -> list[float]:
    """Raw logits, token by token, as a request's penalties leave them."""
    scores = []
    for token, logit in enumerate(row.tolist()):
        if token in prompt or token in made:
            logit = logit / repetition if logit > 0 else logit * repetition
        scores.append(logit - frequency * made.count(token) - presence * (token in made))
    return scores
