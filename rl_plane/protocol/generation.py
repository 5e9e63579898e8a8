"""One generation request and its reply, as they travel between a frontend and a worker.

Made by the frontend from the OpenAI routes, read by the worker's engine; every engine means the same by them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.routed_experts import RoutedExperts

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

MAX_TOP_LOGPROBS = 20
"""What vLLM gives at most, unless told otherwise."""
MAX_TEMPERATURE = 2.0
"""OpenAI's own bound, and vLLM's."""
MAX_REPETITION_PENALTY = 10.0
"""Beyond it there is nothing left of a logit."""
MAX_STOPS = 32
"""Each is looked for in every new piece of text."""
MAX_STOP_CHARS = 512

MAX_SALT_CHARS = 1024

MAX_STREAMS = 4096
"""Requests in one worker, running and waiting: beyond it an engine only queues."""
TOGETHER = "+"
"""Between fields of a request that an engine can't do together, as its member tells."""
UNKNOWN = "unknown"
"""The label of tokens whose engine can't witness which weights make them."""
CHARS_PER_TOKEN = 4
"""Of a text whose tokens are not counted yet: right for English within a third, which is enough to weigh by."""
RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of a tokenizer's own, which a request has no say in, and those that have fields of their own."""

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIdText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
"""A token id as the key of a JSON map."""
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class Rendering(BaseModel):
    """What a chat template is given besides the messages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    """The head of the next reply after the messages."""
    continue_final_message: bool = False
    """Leave the last message open."""
    more: dict[str, Any] = Field(default_factory=dict)
    """By the names that the template has for it."""

    @classmethod
    def of(
        cls,
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, Any]] | None,
        more: dict[str, Any] | None,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
    ) -> Rendering:
        """As a body says it; InvalidRequest by its names."""
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "continue_final_message leaves the last message open, add_generation_prompt begins another",
                field="continue_final_message",
                fix="send one of the two",
            )
        _check_tools(tools or [])
        for name in more or {}:
            if name in RESERVED:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name} is no argument of a template",
                    field=f"chat_template_kwargs.{name}",
                    fix="leave it out: what can be said of it is a field of the request",
                )
        return cls(
            tools=tools or None,
            documents=documents or None,
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=bool(continue_final_message),
            more=more or {},
        )


def _check_tools(tools: list[dict[str, Any]]) -> None:
    for number, tool in enumerate(tools):
        function = tool.get("function")
        for field, right in (
            ("type", tool.get("type") == "function"),
            ("function", isinstance(function, dict)),
            ("function.name", isinstance(function, dict) and isinstance(function.get("name"), str)),
        ):
            if not right:
                raise InvalidRequest(
                    f"tools.{number}.{field} is not that of a function",
                    field=f"tools.{number}.{field}",
                    fix="send {type: function, function: {name, description, parameters}}",
                )


class GenerateRequest(BaseModel):
    """Exactly one of `prompt_token_ids`, `prompt` and `messages` is set."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    id: str = Field(min_length=1, max_length=128)
    prompt_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_PROMPT_TOKENS)
    prompt: str | None = None
    add_special_tokens: bool = True
    """Of `prompt`: those that the tokenizer puts around a text."""
    adapter: str | None = None
    """The LoRA adapter by whose weights to generate; None: the base model alone."""
    messages: list[dict[str, Any]] | None = None
    """Chat messages, rendered by the model's chat template."""
    rendering: Rendering = Field(default_factory=Rendering)
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=MAX_TEMPERATURE)
    """0 means greedy."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    """0 means all tokens."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Tokens less likely than this times the likeliest one are not made, at the temperature."""
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Taken from a token's raw logit as often as it has been made."""
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Taken from it once, if it has been made."""
    repetition_penalty: float = Field(1.0, gt=0.0, le=MAX_REPETITION_PENALTY)
    """Divides the raw logit of a token that was made or is in the prompt, where that is above 0, and multiplies it
    below."""
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    """Same seed, weights and prompt: same tokens, whatever else the engine is running."""
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024)
    """Generation ends after one of these; it is part of the tokens that come back."""
    stop: list[StopString] = Field(default_factory=list, max_length=MAX_STOPS)
    """Generation ends after the token that completes one of these in the text, and the text is cut before it. The
    token is part of those that come back."""
    include_stop_str_in_output: bool = False
    """Cut the text after it."""
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    """So many first tokens are none of `stop_token_ids`, and none that ends a text, `ignore_eos` or not. What they
    complete of `stop` does not count."""
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
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    """With `logprobs`: of so many of the likeliest tokens, too, beside each that comes back."""
    prompt_logprobs: bool = False
    """The same of the prompt's tokens, each given those before it."""
    routed_experts: bool = False
    """Which experts each token of the prompt and of the choice was sent to: `RoutedExperts`."""
    continued: int = Field(0, ge=0)
    """So many tokens at the end of `prompt_token_ids` were made for this request before, by a worker that is lost: the
    text goes on from theirs."""

    def prompt_size(self) -> int:
        """Tokens, guessed where the prompt is text."""
        if self.prompt_token_ids is not None:
            size = len(self.prompt_token_ids)
        elif self.prompt is not None:
            size = len(self.prompt) // CHARS_PER_TOKEN
        else:
            size = sum(_text_size(message.get("content")) for message in self.messages or ()) // CHARS_PER_TOKEN
        return size if self.truncate_prompt_tokens is None else min(size, self.truncate_prompt_tokens)

    def check_prompt_logprobs(self, prompt: list[int]) -> None:
        if self.prompt_logprobs and len(prompt) > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens; prompt logprobs come of at most {MAX_PROMPT_LOGPROBS}",
                field="prompt_logprobs",
                fix="leave it out, or send a shorter prompt",
            )


def names_of(stream_id: str) -> tuple[str, str, str]:
    """By which an abort may mean it: a frontend calls a request `<reply>-<choice>.<attempt>`, without the latter two
    where there is but one."""
    attempt = stream_id.rpartition(".")
    choice = attempt[0] if attempt[0] and attempt[2].isdecimal() else stream_id
    reply = choice.rpartition("-")
    return stream_id, choice, reply[0] if reply[2].isdecimal() else choice


def _text_size(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else ()
    return sum(len(str(part.get("text", ""))) for part in parts if isinstance(part, dict))


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
    """Its label; `unknown` without a sequence where the engine can't witness."""
    sequence: int | None
    digest: str | None
    run: str | None
    start: int
    end: int
    adapter: AdapterSpan | None = None


def unwitnessed(tokens: int) -> list[VersionSpan]:
    """Of all tokens so far of an engine that can't tell which weights make them."""
    span = VersionSpan(version=UNKNOWN, sequence=None, digest=None, run=None, start=0, end=tokens)
    return [span] if tokens else []


FinishReason = Literal["stop", "length", "abort", "error"]


class GenerateDelta(BaseModel):
    """New tokens of one request. The last one has `finish_reason`."""

    model_config = ConfigDict(frozen=True)

    token_ids: list[int]
    logprobs: list[float] | None = None
    """As long as `token_ids`, when asked for."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """Likewise: of each token, the likeliest in its place with their logprobs, the first first."""
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    """With the finish_reason `stop`: the one of `stop` that the last token completed."""
    spans: list[VersionSpan] = Field(default_factory=list)
    """Of all tokens so far: on the first delta with tokens, on one whose tokens begin another span, and on the last.
    On the others it is empty: their tokens lengthen the last span."""
    prompt_token_ids: list[int] | None = None
    """On the first delta: the prompt as the engine saw it. A long one may come ahead of the tokens, alone."""
    prompt_logprobs: list[float | None] | None = None
    """On the first delta, if that has tokens and they were asked for: one for each token of the prompt, None for the
    first. By the weights of the first span."""
    routed_experts: RoutedExperts | None = None
    """The next rows, when asked for: some of them may come ahead of their tokens, with none beside them. A choice that
    an engine did not end may have none at all."""

    @property
    def is_ahead(self) -> bool:
        """Nothing but rows of experts, or the prompt."""
        return not self.token_ids and not self.text and self.finish_reason is None
