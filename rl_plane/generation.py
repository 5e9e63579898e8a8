"""One generation request and its reply, as they travel between a frontend and a worker.

Made by the frontend from the OpenAI routes, read by the worker's engine; every engine means the same by them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rl_plane.errors import InvalidRequest

MAX_PROMPT_TOKENS = 1 << 20
"""More prompt tokens than any engine takes: a bound on the list before an engine checks its own."""
MAX_PROMPT_LOGPROBS = 1 << 16
"""Of one request: they go in one message, 14 bytes for each with its token."""

MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_TOKENS = 1024
MAX_STOPS_WITH_MIN_TOKENS = 96
"""What vLLM's second model runner has room for, with some for the model's own; beyond it that engine ends itself."""

MAX_SALT_CHARS = 1024

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIdText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
"""A token id as the key of a JSON map."""
Bias = Annotated[float, Field(ge=-100, le=100)]


class GenerateRequest(BaseModel):
    """Exactly one of `prompt_token_ids`, `prompt` and `messages` is set."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    id: str = Field(min_length=1, max_length=128)
    prompt_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_PROMPT_TOKENS)
    prompt: str | None = None
    adapter: str | None = None
    """The LoRA adapter by whose weights to generate; None: the base model alone."""
    messages: list[dict[str, Any]] | None = None
    """Chat messages, rendered by the model's chat template with a generation prompt."""
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0.0)
    """0 means greedy."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    """0 means all tokens."""
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    """Same seed, weights and prompt: same tokens, whatever else the engine is running."""
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024)
    """Generation ends after one of these; it is part of the tokens that come back."""
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    """So many first tokens are none of `stop_token_ids`, and none that ends a text, `ignore_eos` or not."""
    logit_bias: dict[TokenIdText, Bias] = Field(default_factory=dict, max_length=MAX_BIASES)
    """Added to the raw logits of these tokens before one is chosen."""
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKENS)
    """No others are made. None: all."""
    bad_words_token_ids: list[Annotated[list[TokenId], Field(min_length=1)]] = Field(
        default_factory=list, max_length=MAX_BAD_WORDS
    )
    """Sequences that are not made: where all but the last token of one have been, the last is not. The prompt's tokens
    don't count."""
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=MAX_PROMPT_TOKENS)
    """Keep only so many tokens of the prompt, the last ones."""
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)
    """Requests share prefixes in the engine's cache with those of the same salt only."""
    skip_special_tokens: bool = True
    """Leave them out of the text."""
    logprobs: bool = False
    """The log-softmax of the raw logits at temperature 1, of exactly the tokens that come back, whatever kept others
    from being chosen."""
    prompt_logprobs: bool = False
    """The same of the prompt's tokens, each given those before it."""

    def check_prompt_logprobs(self, prompt: list[int]) -> None:
        if self.prompt_logprobs and len(prompt) > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens; prompt logprobs come of at most {MAX_PROMPT_LOGPROBS}",
                field="prompt_logprobs",
                fix="leave it out, or send a shorter prompt",
            )


class AdapterSpan(BaseModel):
    """The adapter that a span's tokens were made with."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    sequence: int
    digest: str


class VersionSpan(BaseModel):
    """Tokens `start` (inclusive) to `end` (exclusive) of a choice were made under this version of the base weights,
    and of the adapter if the request named one."""

    model_config = ConfigDict(frozen=True)

    version: str
    sequence: int
    digest: str
    run: str
    start: int
    end: int
    adapter: AdapterSpan | None = None


FinishReason = Literal["stop", "length", "abort", "error"]


class GenerateDelta(BaseModel):
    """New tokens of one request. The last one has `finish_reason`."""

    model_config = ConfigDict(frozen=True)

    token_ids: list[int]
    logprobs: list[float] | None = None
    """As long as `token_ids`, when asked for."""
    text: str = ""
    finish_reason: FinishReason | None = None
    spans: list[VersionSpan] = Field(default_factory=list)
    """Of all tokens so far: on the first delta with tokens, on one whose tokens begin another span, and on the last.
    On the others it is empty: their tokens lengthen the last span."""
    prompt_token_ids: list[int] | None = None
    """On the first delta: the prompt as the engine saw it."""
    prompt_logprobs: list[float | None] | None = None
    """On the first delta, if that has tokens and they were asked for: one for each token of the prompt, None for the
    first. By the weights of the first span."""
