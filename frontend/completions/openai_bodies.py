"""The bodies of the OpenAI routes. `unserved_fields` has the fields that they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from frontend.completions.auto_tools import AutoTools
from frontend.completions.forced_tools import REQUIRED, ChosenTool, Forced, forced_form
from frontend.completions.messages import STRICT, TemplateBody
from frontend.completions.structured_fields import (
    Found,
    ResponseFormat,
    SglangForms,
    StructuredOutputs,
)
from frontend.completions.unserved_fields import unsupported
from frontend.routing.demands import DemandFields
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.generation import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_PROMPT_TOKENS,
    MAX_PROMPT_TOP_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_SALT_CHARS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
    Bias,
    StopString,
    TokenId,
    TokenIdText,
)

MAX_N = 128
MAX_CHOICES = 1024
"""The number of choices of one request, for all its prompts."""
MAX_SEED = 1 << 63

TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]


def one_for_true(value: Any) -> Any:
    """Reads a count. Clients that know the field as a boolean, from another API, send true for 1."""
    return (1 if value else None) if isinstance(value, bool) else value


class StreamOptions(BaseModel):
    model_config = STRICT

    include_usage: bool = False
    """Send a last chunk with the usage and no choices."""

    @field_validator("include_usage", mode="before")
    @classmethod
    def _from_null(cls, value: Any) -> Any:
        return False if value is None else value


MAX_EXTRA_FIELDS = 32
TOLD = ("instance_id", "incarnation", "weight_version", "adapter")
"""The `extra_fields` that a reply's `nvext` always has."""
TOKENS_TOLD = ("completion_token_ids", "token_ids")
"""The `extra_fields` that ask for tokens, as `return_token_ids` does."""


class NvExt(DemandFields):
    """Dynamo's extension object."""

    model_config = STRICT

    instance_id: str | None = None
    """Use this worker and no other."""
    token_data: TokenIds | None = None
    """The prompt as tokens, as older clients send it. Messages or a prompt beside it are placeholders, and are not
    read."""
    return_token_ids: bool | None = None
    return_prompt_logprobs: bool | None = None
    return_routed_experts: bool | None = None
    extra_fields: list[str] | None = Field(None, max_length=MAX_EXTRA_FIELDS)
    """Adds `completion_token_ids` and `token_ids` (the prompt's) to the reply's `nvext`. The other names have no
    effect."""


class SamplingFields(BaseModel):
    """The sampling parameters that have the same names on all routes. null means the default."""

    model_config = STRICT

    temperature: float | None = Field(None, ge=0.0, le=MAX_TEMPERATURE)
    """Default 1; 0 means greedy."""
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1)
    """0 or -1: all tokens."""
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=MAX_REPETITION_PENALTY)
    n: int | None = Field(None, ge=1, le=MAX_N)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    stop: list[StopString] | None = Field(None, max_length=MAX_STOPS)
    """Strings, or one string, before which the text ends. The last token completes the string."""
    ignore_eos: bool | None = None
    logit_bias: dict[TokenIdText, Bias] | None = Field(None, max_length=MAX_BIASES)
    """Token id → the number that is added to its raw logit."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Default true."""

    @field_validator("stop", mode="before")
    @classmethod
    def _from_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class SamplingBody(SamplingFields):
    """The sampling parameters of OpenAI's and vLLM's routes."""

    seed: int | None = Field(None, ge=0, lt=MAX_SEED)
    """Choice i has seed + i."""
    include_stop_str_in_output: bool | None = None
    """End the text after the stop string."""
    min_tokens: int | None = Field(None, ge=0)
    """The first tokens, up to this number, are neither `stop_token_ids` nor tokens that end a text."""
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKENS)
    """The engine makes no other tokens."""
    bad_words_token_ids: list[Annotated[list[TokenId], Field(min_length=1)]] | None = Field(
        None, max_length=MAX_BAD_WORDS
    )
    """Sequences of tokens that the engine does not make. A sequence of one token may be its id."""

    @field_validator("bad_words_token_ids", mode="before")
    @classmethod
    def _from_ids(cls, value: Any) -> Any:
        return [[one] if isinstance(one, int) else one for one in value] if isinstance(value, list) else value


class GenerationBody(SamplingBody, SglangForms, DemandFields):
    """The fields of both OpenAI routes."""

    model: str | None = None
    """The base model or a loaded adapter. None: the base model."""
    prompt_token_ids: TokenIds | None = None
    """The prompt as tokens, in place of a prompt or messages."""
    max_tokens: int | None = Field(None, ge=1)
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=MAX_PROMPT_TOKENS)
    """Keep only the last tokens of the prompt, up to this number."""
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)
    """An engine's cache shares prefixes only between requests of the same salt."""
    return_token_ids: bool | None = None
    """Return each choice's `token_ids` with their logprobs, whatever `logprobs` says, and `prompt_token_ids`. Also in
    `nvext`."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_PROMPT_TOP_LOGPROBS)
    """Return the logprob of each token of the prompt, given the tokens before it, and those of this many of the
    likeliest tokens at its place. true means 1. With `stream`: 0 or 1."""
    return_prompt_logprobs: bool | None = None
    """Dynamo's name for `prompt_logprobs: 0`. Also in `nvext`."""
    return_tokens_as_token_ids: bool | None = None
    """Name the tokens beside logprobs by their ids, `token_id:5`. Default: by their texts."""
    return_routed_experts: bool | None = None
    """Return the experts of each token of the prompt and of a choice. Also in `nvext`."""
    routed_experts_prompt_start: int | None = Field(None, ge=0)
    """With `return_routed_experts`: leave out the rows of this many tokens at the start of the prompt."""
    extra_fields: list[str] | None = Field(None, max_length=MAX_EXTRA_FIELDS)
    """Another place for `nvext.extra_fields`."""
    response_format: ResponseFormat | None = None
    """The form of the text: any JSON object, JSON that fits a schema, or xgrammar's structural tags."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's names for the form of the text."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    extra_body: dict[str, Any] | None = None
    """Other fields of this body. A field that the body has too keeps the body's value."""
    nvext: NvExt | None = None

    _from_bool = field_validator("prompt_logprobs", mode="before")(one_for_true)

    def each_form(self) -> Iterator[Found]:
        """The forms that the body gives the text: at most one is right."""
        if self.response_format is not None:
            yield from self.response_format.form("response_format")
        if self.structured_outputs is not None:
            yield from self.structured_outputs.form("structured_outputs")
        yield from self.forms()


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt: str | TokenIds | list[str] | list[TokenIds] | None = None
    """With several prompts, choice j of prompt i has the index i * n + j."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens. Default true, as in `/tokenize`."""
    max_tokens: int | None = Field(None, ge=0)
    """0, with `echo`: the reply has the prompt and its scores, and no new token."""
    echo: bool | None = None
    """Put the prompt before the new tokens, in the text and in the logprobs. With `return_token_ids` the text has the
    new tokens alone, as in vLLM."""
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """0 or 1 (or true): the logprob of the chosen token. More: also of this many of the likeliest tokens."""

    _one_from_bool = field_validator("logprobs", mode="before")(one_for_true)


class ChatBody(GenerationBody, TemplateBody):
    """The body of `POST /v1/chat/completions`.

    With `prompt_token_ids` the frontend checks the fields of the template, but they do not change the prompt. `tools`
    and `tool_choice` still change the reply.
    """

    tool_choice: Literal["auto", "none", "required"] | ChosenTool | None = None
    """none: calls stay in the text as the model wrote them. auto: a worker's parser reads these calls, and the message
    has them as `tool_calls`; the default, where a worker has a parser. required, or a named function: the text has the
    form of such calls, and the message has them as `tool_calls`."""
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """With `logprobs`: also the logprobs of this many of the likeliest tokens."""

    @property
    def forced(self) -> Forced | None:
        """The `tool_choice`, if it forces calls."""
        choice = self.tool_choice
        return choice if isinstance(choice, ChosenTool) or choice == REQUIRED else None

    @property
    def auto_tools(self) -> AutoTools | None:
        """The tools that the model may call by itself."""
        if not self.tools or self.tool_choice not in (None, "auto"):
            return None
        return AutoTools(tuple(self.tools), is_asked_for=self.tool_choice is not None)

    def each_form(self) -> Iterator[Found]:
        yield from super().each_form()
        if self.forced is not None:
            yield forced_form(self.forced, self.tools or ())


_REFUSED_EXTRA_FIELDS = {
    "worker_id": "leave it out",
    "timing": "leave it out",
    "routed_experts": "send return_routed_experts: each choice has them",
    "prompt_logprobs": "send return_prompt_logprobs",
}


def tells_tokens(names: list[str] | None, where: str) -> bool:
    """Whether `extra_fields` asks for tokens. `where`: the field's name in the caller's body."""
    for number, name in enumerate(names or ()):
        field = f"{where}.{number}"
        if name in _REFUSED_EXTRA_FIELDS:
            raise unsupported(field, _REFUSED_EXTRA_FIELDS[name], what=name)
        if name not in TOLD + TOKENS_TOLD:
            known = ", ".join(TOLD + TOKENS_TOLD)
            raise InvalidRequest(f"a reply's nvext has no {name[:64]!r}", field=field, fix=f"name some of {known}")
    return any(name in TOKENS_TOLD for name in names or ())
