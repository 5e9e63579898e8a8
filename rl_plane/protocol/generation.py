"""One generation request and its reply, as they travel between a frontend and a worker.

The frontend builds the request from the OpenAI routes. Every engine gives its fields the same meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.pooling import MAX_DIMENSION, Pooling, Task
from rl_plane.protocol.prompt_tops import PromptTops
from rl_plane.protocol.routed_experts import RoutedExperts
from rl_plane.protocol.structured_output import StructuredOutput

ALL_THAT_FITS = 1 << 30
"""The `max_tokens` of a request whose caller wants as many tokens as there is room for. No worker has room for so
many."""
MAX_PROMPT_TOKENS = 1 << 20
"""More prompt tokens than any engine takes. It bounds the list before the engine checks its own limit."""
MAX_PROMPT_LOGPROBS = 1 << 16
"""Prompt logprobs of one request. They go in one message, with 14 bytes for each and its token."""
MAX_PROMPT_TOP_LOGPROBS = 1024
"""Likeliest tokens at each place of a prompt. A trainer that distils asks for a hundred; more than this says nothing of
a distribution that the rest does not."""
MAX_PROMPT_TOPS = 1 << 20
"""Likeliest tokens of all prompts of one call together, at all of their places. A reply writes about 70 bytes for each,
so this is 70 MB of JSON, and a frontend holds four times as much while it writes it."""

MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_TOKENS = 1024
MAX_STOPS_WITH_MIN_TOKENS = 96
"""The room in vLLM's second model runner, minus the model's own stop tokens. That engine exits if there are more."""

MAX_TOP_LOGPROBS = 20
"""The default limit of vLLM."""
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""vLLM's names: whether the logprobs of a completion are of the raw logits, or of the logits that the token was drawn
from, divided by the temperature."""
RAW_LOGPROBS: LogprobsMode = "raw_logprobs"

MAX_TEMPERATURE = 2.0
"""The bound of OpenAI and of vLLM."""
MAX_REPETITION_PENALTY = 10.0
"""A larger penalty leaves nothing of a logit."""
MAX_STOPS = 32
"""Stop strings of one request. Each one is searched in every new piece of text."""
MAX_STOP_CHARS = 512

MAX_SALT_CHARS = 1024

MAX_STREAMS = 4096
"""Requests in one worker, running and waiting. More would only queue in the engine."""
TOGETHER = "+"
"""Joins the fields of a request that an engine does not support together, in the member's info."""
UNKNOWN = "unknown"
"""The label of tokens from an engine that can't tell which weights make them."""
CHARS_PER_TOKEN = 4
"""Estimates the tokens of a text: right within a third for English, which is enough to balance load."""
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
"""Arguments of a chat template that a request can't set: those of the tokenizer, and those with fields of their own."""

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIdText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
"""A token id as the key of a JSON map."""
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


GATHER_S = 0.1
"""The longest time in seconds for which a worker gathers the tokens of a reply that is sent at its end. A worker that
dies loses no more than these, and another one makes them again."""


class Rendering(BaseModel):
    """The arguments of a chat template beside the messages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    """Whether the template begins the next reply after the messages."""
    continue_final_message: bool = False
    """Whether the last message stays open."""
    more: dict[str, Any] = Field(default_factory=dict)
    """Other arguments, by their names in the template."""

    @classmethod
    def of(
        cls,
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, Any]] | None,
        more: dict[str, Any] | None,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
    ) -> Rendering:
        """Builds it from the fields of a request's body. InvalidRequest names a wrong field."""
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
                    f"chat_template_kwargs.{name} is not an argument that a request may set",
                    field=f"chat_template_kwargs.{name}",
                    fix="leave it out, or use the field of the request with this meaning",
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
                    f"tools.{number}.{field} does not fit a function",
                    field=f"tools.{number}.{field}",
                    fix="send {type: function, function: {name, description, parameters}}",
                )


class GenerateRequest(BaseModel):
    """A generation request. Exactly one of `prompt_token_ids`, `prompt` and `messages` is set."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    id: str = Field(min_length=1, max_length=128)
    prompt_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_PROMPT_TOKENS)
    prompt: str | None = None
    add_special_tokens: bool = True
    """For `prompt`: whether the tokenizer adds its special tokens."""
    adapter: str | None = None
    """The LoRA adapter to generate with. None: the base model alone."""
    messages: list[dict[str, Any]] | None = None
    """Chat messages. The model's chat template renders them."""
    rendering: Rendering = Field(default_factory=Rendering)
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=MAX_TEMPERATURE)
    """0 means greedy."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    """0 means all tokens."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Excludes tokens that are less likely than this share of the likeliest one, at the temperature."""
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Subtracted from a token's raw logit once for each time that the token was generated."""
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Subtracted from a token's raw logit once if the token was generated."""
    repetition_penalty: float = Field(1.0, gt=0.0, le=MAX_REPETITION_PENALTY)
    """Divides a positive raw logit, and multiplies a negative one, of each token that was generated or is in the
    prompt."""
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    """Equal seed, weights and prompt give the same tokens, whatever other requests the engine runs."""
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024)
    """Generation ends after one of these tokens. The token is part of the reply."""
    stop: list[StopString] = Field(default_factory=list, max_length=MAX_STOPS)
    """Generation ends after the token that completes one of these strings. The text is cut before the string, and the
    token is part of the reply."""
    include_stop_str_in_output: bool = False
    """Cut the text after the stop string."""
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    """The first tokens that may be neither one of `stop_token_ids` nor an end token, also with `ignore_eos`. A string
    of `stop` that they complete does not count."""
    logit_bias: dict[TokenIdText, Bias] = Field(default_factory=dict, max_length=MAX_BIASES)
    """Added to the raw logits of these tokens before the choice."""
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKENS)
    """The only tokens that may be generated. None: all."""
    bad_words_token_ids: list[Annotated[list[TokenId], Field(min_length=1)]] = Field(
        default_factory=list, max_length=MAX_BAD_WORDS
    )
    """Sequences that are not generated: after all but the last token of one, the last token is excluded. Tokens of the
    prompt don't count."""
    structured_output: StructuredOutput | None = None
    """The form of the text. None: any text."""
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=MAX_PROMPT_TOKENS)
    """Keep only this many tokens of the prompt, the last ones."""
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)
    """A request shares prefixes in the engine's cache only with requests of the same salt."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: bool = False
    """Return the logprob of each token. The worker's `--logprobs-mode` says of which logits: by default of the raw ones
    at temperature 1, whatever limits the choice had."""
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    """With `logprobs`: return this many of the likeliest tokens too, beside each token."""
    token_texts: bool = False
    """With `logprobs`: return the text of each token that has a logprob."""
    prompt_logprobs: bool = False
    """Return the logprobs of the prompt's tokens, each given the tokens before it."""
    prompt_top_logprobs: int = Field(0, ge=0, le=MAX_PROMPT_TOP_LOGPROBS)
    """With `prompt_logprobs`: return this many of the likeliest tokens too, beside each token of the prompt."""
    prompt_token_texts: bool = False
    """With `prompt_logprobs`: return the text of each token of the prompt, and of the likeliest tokens beside them."""
    prompt_text: bool = False
    """Return the text of the prompt."""
    routed_experts: bool = False
    """Return the experts that each token of the prompt and of the choice was sent to: `RoutedExperts`."""
    continued: int = Field(0, ge=0)
    """The number of tokens at the end of `prompt_token_ids` that a lost worker generated for this request. The text
    continues after them."""
    gather_s: float = Field(0.0, ge=0.0, le=GATHER_S)
    """The most seconds for which the worker may hold tokens back after the first one, to handle many at once. It holds
    nothing back at the end."""
    pooling: Pooling | None = None
    """Compute one vector of the prompt, and no tokens. Only a pooling model can do it, and it can do nothing else."""

    @property
    def task(self) -> Task:
        """The task of the workers that can serve the request."""
        return "generate" if self.pooling is None else self.pooling.task

    def prompt_size(self) -> int:
        """The number of tokens. It is an estimate if the prompt is text."""
        if self.prompt_token_ids is not None:
            size = len(self.prompt_token_ids)
        elif self.prompt is not None:
            size = len(self.prompt) // CHARS_PER_TOKEN
        else:
            size = sum(_text_size(message.get("content")) for message in self.messages or ()) // CHARS_PER_TOKEN
        if self.pooling is not None and self.pooling.text_pair is not None:
            size += len(self.pooling.text_pair) // CHARS_PER_TOKEN
        return size if self.truncate_prompt_tokens is None else min(size, self.truncate_prompt_tokens)

    def check_one_prompt(self) -> None:
        """Raises InvalidRequest unless exactly one field has the prompt."""
        names = ("prompt_token_ids", "prompt", "messages")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"{' and '.join(given) or 'no prompt'} given",
                field=given[-1] if given else "prompt",
                fix=f"give exactly one of {', '.join(names)}",
            )

    def check_prompt_logprobs(self, prompt: list[int]) -> None:
        """Raises InvalidRequest if the prompt is too long for what is asked of it."""
        for field, asked in (("prompt_logprobs", self.prompt_logprobs), ("prompt_text", self.prompt_text)):
            if asked and len(prompt) > MAX_PROMPT_LOGPROBS:
                raise InvalidRequest(
                    f"the prompt has {len(prompt)} tokens, and {field} is limited to {MAX_PROMPT_LOGPROBS}",
                    field=field,
                    fix="leave it out, or send a shorter prompt",
                )
        check_prompt_tops(self.prompt_top_logprobs * len(prompt))


def check_prompt_tops(count: int, field: str = "prompt_top_logprobs") -> None:
    """Raises InvalidRequest if a call asks for too many of its prompts' likeliest tokens. `count`: of all places.
    `field`: the caller's name for the number beside each token."""
    if count > MAX_PROMPT_TOPS:
        raise InvalidRequest(
            f"{count} of the prompts' likeliest tokens are asked for, and at most {MAX_PROMPT_TOPS} fit one reply",
            field=field,
            fix="ask for fewer beside each token, or send fewer or shorter prompts in one call",
        )


def names_of(stream_id: str) -> tuple[str, str, str]:
    """The names by which an abort may mean a stream. A frontend calls it `<reply>-<choice>.<attempt>`, without choice
    and attempt if there is only one."""
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
    """The adapter that has generated a span's tokens."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    sequence: int
    digest: str


class KvVersion(BaseModel):
    """The base weights that have computed KV."""

    model_config = ConfigDict(frozen=True)

    version: str
    sequence: int
    digest: str


class VersionSpan(BaseModel):
    """The version of the base weights, and of the adapter if there is one, that has generated the tokens `start`
    (inclusive) to `end` (exclusive) of a choice."""

    model_config = ConfigDict(frozen=True)

    version: str
    """The label. It is `unknown`, without a sequence, if the engine can't tell the version."""
    sequence: int | None
    digest: str | None
    run: str | None
    start: int
    end: int
    adapter: AdapterSpan | None = None
    kv_version: KvVersion | None = None
    """The oldest weights of which the KV before these tokens may hold a part, after an update with `policy.kv: keep`.
    None: the weights of the span have computed all of it."""


def unwitnessed(tokens: int) -> list[VersionSpan]:
    """The span of all tokens so far, for an engine that can't tell which weights make them."""
    span = VersionSpan(version=UNKNOWN, sequence=None, digest=None, run=None, start=0, end=tokens)
    return [span] if tokens else []


FinishReason = Literal["stop", "length", "abort", "error"]


class GenerateDelta(BaseModel):
    """New tokens of one request. The last one has `finish_reason`. A message leaves out the fields that have their
    defaults."""

    model_config = ConfigDict(frozen=True)

    token_ids: list[int]
    logprobs: list[float] | None = None
    """One for each of `token_ids`, if the request asks for them."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """For each token the likeliest tokens at its place with their logprobs, the likeliest first, if requested."""
    token_texts: dict[str, str] | None = None
    """The text of each token of `token_ids` and `top_logprobs`, by the token's id, if requested. None also from an
    engine without a tokenizer."""
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    """With the finish_reason `stop`: the stop string that the last token completed."""
    spans: list[VersionSpan] = Field(default_factory=list)
    """The spans of all tokens so far. They are on the first delta with tokens, on a delta that begins another span, and
    on the last delta. The tokens of other deltas lengthen the last span."""
    prompt_token_ids: list[int] | None = None
    """On the first delta: the prompt as the engine has it. A long prompt may come alone, before the tokens."""
    prompt_logprobs: list[float | None] | None = None
    """On the first delta with tokens, if requested: one for each token of the prompt, None for the first. They are from
    the weights of the first span."""
    prompt_tops: PromptTops | None = None
    """If prompt logprobs are requested: the rows of the next tokens of the prompt after the first, from an engine that
    reports them. Rows may come before the tokens, in deltas without tokens. They are from the weights of the prompt
    logprobs."""
    prompt_token_texts: dict[str, str] | None = None
    """The text of some tokens of the prompt and of `prompt_tops`, by the token's id, if requested. Before or with the
    first tokens."""
    prompt_text: str | None = None
    """The next part of the prompt's text, if requested. Before or with the first tokens."""
    routed_experts: RoutedExperts | None = None
    """The next rows, if requested. Some rows may come before their tokens, in a delta without tokens. A choice that the
    engine did not end may have no rows."""
    pooled: bytes | None = Field(None, max_length=4 * MAX_DIMENSION)
    """The vector that a pooling request asks for, as `pooling.packed` writes it. The delta is then the only one, and
    its span is from 0 to 1."""

    @property
    def size(self) -> int:
        """The number of results that the spans count: tokens, or one vector."""
        return len(self.token_ids) + (self.pooled is not None)

    @property
    def is_ahead(self) -> bool:
        """Reports whether the delta has only rows of experts, or facts of the prompt."""
        return not self.size and not self.text and self.finish_reason is None
