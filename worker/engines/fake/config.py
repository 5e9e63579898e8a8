"""The engine arguments of the `fake` engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rl_plane.errors import InvalidRequest
from worker.engines.fake.fake_model import FIRST_TOKEN

MAX_DELAY_S = 3600.0
"""Longer than any time-out that a test may need."""


@dataclass(frozen=True, slots=True)
class FakeConfig:
    """The engine arguments (`--engine-arg key=value`)."""

    token_delay_s: float = 0.0
    """Seconds before each token. At 0, other tasks still get a turn between two tokens."""
    vocab_size: int = 512
    max_model_len: int = 4096
    stage_delay_s: float = 0.0
    """Seconds before the first tensor is staged. A cancel ends the delay."""
    swap_delay_s: float = 0.0
    """Seconds before the weights change. A swap that is cancelled meanwhile has changed nothing."""
    staging_bytes: int = 1 << 62
    """Host memory for staging. Larger weights can only overwrite the served ones."""
    hold_bytes: bool = True
    """False: it holds digests only, for large models or many engines."""
    fail_stage: bool = False
    fail_swap: bool = False
    """A swap fails before anything has changed."""
    fail_overwrite: bool = False
    """An overwrite fails after the first tensor: the weights are then a mixture."""
    miscompute: bool = False
    """After a swap, the engine computes with other weights than it was given, and does not say so. Its tokens and
    scores are of no version, until a swap without this."""
    hang_liveness: bool = False
    stage: bool = False
    """It is no engine but a stage of a mixed pipeline."""
    witnesses: bool = True
    """False: it can't tell which weights make its tokens, as another engine may say."""

    @classmethod
    def parse(cls, extra: Mapping[str, str]) -> FakeConfig:
        defaults = cls()
        known = asdict(defaults)
        values: dict[str, Any] = {}
        for key, text in extra.items():
            if key not in known:
                raise InvalidRequest(
                    f"the fake engine has no argument {key[:64]!r}",
                    field=f"engine_arg.{key[:64]}",
                    fix=f"use one of {', '.join(known)}",
                )
            values[key] = _parsed(key, text, known[key])
        return cls(**values)


_INT_BOUNDS = {
    "vocab_size": (FIRST_TOKEN + 1, 1 << 31),
    "max_model_len": (2, 1 << 31),
    "staging_bytes": (0, 1 << 62),
}


def _parsed(key: str, text: str, default: bool | int | float) -> bool | int | float:
    def refuse(fix: str) -> InvalidRequest:
        return InvalidRequest(f"{key} is {text[:64]!r}", field=f"engine_arg.{key}", fix=fix)

    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise refuse("say true or false")
        return text == "true"
    if isinstance(default, int):
        low, high = _INT_BOUNDS[key]
        if not (text.isascii() and text.isdigit() and len(text) <= 19 and low <= int(text) <= high):
            raise refuse(f"give a whole number from {low} to {high}")
        return int(text)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_DELAY_S:
        raise refuse(f"give seconds from 0 to {MAX_DELAY_S:g}")
    return value
