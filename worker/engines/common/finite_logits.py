"""Detects logits that are not finite numbers: diverged weights make them, and vLLM and SGLang would make arbitrary
tokens of them."""

from __future__ import annotations

import math
from typing import Any

from rl_plane.errors import EngineFailed

NOT_FINITE = "the model's logits are not finite numbers"


def take_out(logits: Any) -> Any:
    """Finds the rows of `logits`, a tensor [rows, vocabulary] as the model made it, in which no token has a logprob: a
    value is NaN, or the largest one is infinite. Returns a boolean for each row.

    It overwrites such a row with zeros. From the row itself, samplers for GPUs make tokens outside the vocabulary, and
    the next step ends the engine. It does not wait for a device.
    """
    rows = logits.amax(dim=-1).isfinite().logical_not()
    logits.masked_fill_(rows.unsqueeze(-1), 0.0)
    return rows


def check_prompt(logprobs: list[float | None]) -> list[float | None]:
    """Returns the logprobs of a prompt's tokens, or raises EngineFailed if one is not finite. The first token has
    none."""
    if not all(value is not None and math.isfinite(value) for value in logprobs[1:]):
        raise EngineFailed(NOT_FINITE)
    return logprobs
