"""The replies of the routes of pooling models."""

from __future__ import annotations

import base64
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from frontend.completions.native_replies import one_or_list, sglang_meta
from frontend.completions.openai_replies import extension_of, usage
from frontend.completions.plans import Plan
from frontend.completions.reply_choice import Choice
from rl_plane.protocol.pooling import unpacked

Write = Callable[[Plan, list[Choice], str, int], Any]
"""Writes the reply. Its arguments: the plan, its choices, the model and the time."""


def vector_of(choice: Choice) -> list[float]:
    assert choice.pooled is not None, "the call checks that each choice has one"
    return unpacked(choice.pooled)


def _listed(rows: Callable[[list[Choice]], Iterable[dict[str, Any]]]) -> Write:
    def write(plan: Plan, choices: list[Choice], model: str, created: int) -> dict[str, Any]:
        return {
            "id": plan.id,
            "object": "list",
            "created": created,
            "model": model,
            "data": list(rows(choices)),
            "usage": usage(plan, choices),
            "nvext": extension_of(plan, choices),
        }

    return write


def _score(index: int, score: float) -> dict[str, Any]:
    return {"index": index, "object": "score", "score": score}


def embeddings(in_base64: bool) -> Write:
    """OpenAI's form."""

    def row(choice: Choice) -> dict[str, Any]:
        assert choice.pooled is not None, "the call checks that each choice has one"
        shown = base64.b64encode(choice.pooled).decode() if in_base64 else vector_of(choice)
        return {"index": choice.index, "object": "embedding", "embedding": shown}

    return _listed(lambda choices: map(row, choices))


def classes(labels: Sequence[str]) -> Write:
    """vLLM's form."""

    def row(choice: Choice) -> dict[str, Any]:
        numbers = vector_of(choice)
        likeliest = max(range(len(numbers)), key=numbers.__getitem__)
        label = labels[likeliest] if likeliest < len(labels) else None
        return {"index": choice.index, "label": label, "probs": numbers, "num_classes": len(numbers)}

    return _listed(lambda choices: map(row, choices))


scores = _listed(lambda choices: (_score(choice.index, vector_of(choice)[0]) for choice in choices))
"""vLLM's form, by a classifier of pairs."""


def cosines(left: int, right: int) -> Write:
    """vLLM's form, by embeddings. The first `left` choices are one side, the others the other side."""

    def rows(choices: list[Choice]) -> Iterable[dict[str, Any]]:
        vectors = [vector_of(choice) for choice in choices]
        for index in range(right):
            one, other = vectors[index if left > 1 else 0], vectors[left + index]
            yield _score(index, _cosine(one, other))

    return _listed(rows)


def sglang(plan: Plan, choices: list[Choice], model: str, created: int) -> dict[str, Any] | list[Any]:
    """SGLang's form."""
    reason = {"type": "length", "length": 0}
    return one_or_list(
        plan,
        [
            {"embedding": vector_of(choice), "meta_info": sglang_meta(plan, choice, choice.spans, reason)}
            for choice in choices
        ],
    )


def _cosine(one: list[float], other: list[float]) -> float:
    """Both have length 1, as far as float32 goes. A vector of zeros has the cosine 0."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(map(operator.mul, one, other)) / lengths if lengths else 0.0
