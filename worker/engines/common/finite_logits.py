"""Weights that diverged make logits that are no numbers. vLLM and SGLang would make arbitrary tokens of them."""

from __future__ import annotations

import math
from typing import Any

from rl_plane.errors import EngineFailed

NOT_FINITE = "the model's logits are not finite numbers"


def take_out(logits: Any) -> Any:
    """`logits`: a tensor [rows, vocabulary], as the model made it → a boolean for each row: no token of it has a
    logprob, since one is NaN, or the largest is infinite. Such a row becomes zeros: of what it was, samplers for GPUs
    make tokens outside the vocabulary, and the next step ends the engine. Nothing here waits for a device."""
    rows = logits.amax(dim=-1).isfinite().logical_not()
    logits.masked_fill_(rows.unsqueeze(-1), 0.0)
    return rows


def check_prompt(logprobs: list[float | None]) -> list[float | None]:
    """Of each token of a prompt; the first has none."""
    if not all(value is not None and math.isfinite(value) for value in logprobs[1:]):
        raise EngineFailed(NOT_FINITE)
    return logprobs
