"""The engine arguments of the `fake` engine."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rl_plane.protocol.generation import MAX_PROMPT_TOP_LOGPROBS
from worker.engines.fake.fake_model import FIRST_TOKEN

MAX_DELAY_S = 3600.0
"""Longer than any time-out that a test may need."""

Delay = Annotated[float, Field(ge=0, le=MAX_DELAY_S)]


class FakeConfig(BaseModel):
    """The engine arguments (`--engine-arg key=value`)."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    token_delay_s: Delay = 0.0
    """Seconds before each token. At 0, other tasks still get a turn between two tokens."""
    vocab_size: int = Field(512, gt=FIRST_TOKEN, le=1 << 31)
    max_model_len: int = Field(4096, ge=2, le=1 << 31)
    max_prompt_top_logprobs: int = Field(64, ge=0, le=MAX_PROMPT_TOP_LOGPROBS)
    """The largest number of likeliest tokens beside each token of a prompt."""
    stage_delay_s: Delay = 0.0
    """Seconds before the first tensor is staged. A cancel ends the delay."""
    swap_delay_s: Delay = 0.0
    """Seconds before the weights change. A swap that is cancelled meanwhile has changed nothing."""
    staging_bytes: int = Field(1 << 62, ge=0)
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
    pipeline_stage: bool = False
    """It is no engine but a stage of a mixed pipeline."""
    witnesses: bool = True
    """False: it can't tell which weights make its tokens, as another engine may say."""
