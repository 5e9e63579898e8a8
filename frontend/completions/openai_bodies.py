"""The bodies of the OpenAI routes.

| the body has | the route answers |
|---|---|
| a field of OpenAI, vLLM or SGLang that is not served, with a value that changes nothing | as without it |
| the same field with another value | 501, naming the field |
| a field that none of them knows | 400, naming the field |
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from frontend.completions.messages import STRICT, TemplateBody
from frontend.routing.demands import DemandFields
from rl_plane.errors import InvalidRequest, Unsupported
from rl_plane.protocol.generation import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_PROMPT_TOKENS,
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


class SamplingBody(BaseModel):
    """The sampling parameters. null means the default."""

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
    seed: int | None = Field(None, ge=0, lt=MAX_SEED)
    """Choice i has seed + i."""
    n: int | None = Field(None, ge=1, le=MAX_N)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    stop: list[StopString] | None = Field(None, max_length=MAX_STOPS)
    """Strings, or one string, before which the text ends. The last token is the one that completes the string."""
    include_stop_str_in_output: bool | None = None
    """End the text after the stop string."""
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    """The first tokens, up to this number, are neither `stop_token_ids` nor tokens that end a text."""
    logit_bias: dict[TokenIdText, Bias] | None = Field(None, max_length=MAX_BIASES)
    """Token id → the number that is added to its raw logit."""
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKENS)
    """The engine makes no other tokens."""
    bad_words_token_ids: list[Annotated[list[TokenId], Field(min_length=1)]] | None = Field(
        None, max_length=MAX_BAD_WORDS
    )
    """Sequences of tokens that the engine does not make. A sequence of one token may be its id."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Default true."""

    @field_validator("stop", mode="before")
    @classmethod
    def _from_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("bad_words_token_ids", mode="before")
    @classmethod
    def _from_ids(cls, value: Any) -> Any:
        return [[one] if isinstance(one, int) else one for one in value] if isinstance(value, list) else value


class GenerationBody(SamplingBody, DemandFields):
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
    prompt_logprobs: int | None = Field(None, ge=-1)
    """0 or 1 (or true): return the logprob of each token of the prompt, given the tokens before it."""
    return_prompt_logprobs: bool | None = None
    """Dynamo's name for `prompt_logprobs`. Also in `nvext`."""
    return_routed_experts: bool | None = None
    """Return the experts of each token of the prompt and of a choice. Also in `nvext`."""
    extra_fields: list[str] | None = Field(None, max_length=MAX_EXTRA_FIELDS)
    """The same field as in `nvext`."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    nvext: NvExt | None = None

    @field_validator("prompt_logprobs", mode="before")
    @classmethod
    def _from_bool(cls, value: Any) -> Any:
        """vLLM's clients send true for 1."""
        return (1 if value else None) if isinstance(value, bool) else value


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: str | TokenIds | list[str] | list[TokenIds] | None = None
    """With several prompts, choice j of prompt i has the index i * n + j."""
    add_special_tokens: bool | None = None
    """Add the special tokens that the tokenizer puts around a text. Default true, as in `/tokenize`."""
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """0 or 1 (or true): the logprob of the chosen token. More: also of this many of the likeliest tokens."""

    @field_validator("logprobs", mode="before")
    @classmethod
    def _one_from_bool(cls, value: Any) -> Any:
        """Chat clients send true for 1."""
        return (1 if value else None) if isinstance(value, bool) else value


class ChatBody(GenerationBody, TemplateBody):
    """POST /v1/chat/completions. With `prompt_token_ids`, the fields of the template are checked and have no effect."""

    tool_choice: Literal["auto", "none"] | None = None
    """none: the template gets no tools. Calls stand in the text as the model wrote them."""
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """With `logprobs`: also the logprobs of this many of the likeliest tokens."""


NONE: tuple[Any, ...] = ()
REFUSED: dict[str, tuple[Any, ...]] = {
    # Field → the values, besides null, that change nothing.
    "length_penalty": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "guided_json": NONE,
    "guided_regex": NONE,
    "guided_choice": NONE,
    "guided_grammar": NONE,
    "structured_outputs": NONE,
    "regex": NONE,
    "json_schema": NONE,
    "ebnf": NONE,
    "logits_processors": ([],),
    "bad_words": ([],),
    "add_special_tokens": (False,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (True,),  # replies here are always written so
    "detokenize": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": NONE,
    "chat_template_kwargs": ({},),
    "chat_template_args": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "audio": NONE,
    "prediction": NONE,
    "reasoning_effort": NONE,
    "verbosity": NONE,
    "web_search_options": NONE,
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "priority": (0,),
    "prompt_cache_key": NONE,
    "safety_identifier": NONE,
    "lora_path": NONE,
    "return_hidden_states": (False,),
    # vLLM's own fields.
    "request_id": NONE,
    "session_id": NONE,
    "prompt_embeds": NONE,
    "truncation_side": ("left",),
    "include_reasoning": (True,),
    "thinking_token_budget": NONE,
    "logprob_token_ids": NONE,
    "routed_experts_prompt_start": (0,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "media_io_kwargs": ({},),
    "mm_payload": ("tensors", "none"),  # replies have none
    "return_mm_kwargs": (False,),
    "kv_transfer_params": NONE,
    "ec_transfer_params": NONE,
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "stream_interval": (1,),
    "repetition_detection": NONE,
    # SGLang's own fields.
    "rid": NONE,
    "input_ids": NONE,
    "session_params": NONE,
    "extra_key": NONE,
    "custom_labels": NONE,
    "bootstrap_host": NONE,
    "bootstrap_port": NONE,
    "bootstrap_room": NONE,
    "data_parallel_rank": NONE,
    "routed_dp_rank": NONE,
    "disagg_prefill_dp_rank": NONE,
    "stop_regex": ([], ""),
    "no_stop_trim": (False,),
    "custom_logit_processor": NONE,
    "custom_params": ({},),
    "watermark": NONE,
    "task": NONE,
    "thinking": NONE,
    "separate_reasoning": (True, False),  # a model's reasoning always stands in the text
    "stream_reasoning": (True, False),
    "routed_experts_start_len": (0,),
    "sampling_logprobs_mode": NONE,
    "return_meta_info": (False,),
    "return_sampling_mask": (False,),
    "return_cached_tokens_details": (False,),
    "return_spec_tokens_details": (False,),
    "return_prompt_token_ids": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_output_ids_in_sglext": (False,),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (True, False),  # the encoding of a field that is refused
    "max_dynamic_patch": NONE,
    "min_dynamic_patch": NONE,
    "use_audio_in_video": (False,),
    "images_config": NONE,
    "video_config": NONE,
}
REFUSED_IN_NVEXT: dict[str, tuple[Any, ...]] = {
    "cache_salt": NONE,
    "greed_sampling": (False,),
    "use_raw_prompt": (False,),
    "annotations": ([],),
    "backend_instance_id": NONE,
    "prefill_worker_id": NONE,
    "decode_worker_id": NONE,
    "dp_rank": NONE,
    "prefill_dp_rank": NONE,
    "max_thinking_tokens": NONE,
    "agent_hints": ({},),
    "metadata_upload": NONE,
}
REFUSED_OF_STREAMS: dict[str, tuple[Any, ...]] = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}
_REFUSED_EXTRA_FIELDS = {
    "worker_id": "leave it out",
    "timing": "leave it out",
    "routed_experts": "send return_routed_experts: each choice has them",
    "prompt_logprobs": "send return_prompt_logprobs",
}


def _same(value: Any, neutral: Any) -> bool:
    """Equality in which true differs from 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def unsupported(field: str, fix: str = "leave it out", what: str = "") -> Unsupported:
    return Unsupported(f"{what or field} is not supported here", field=field, fix=fix)


def without_neutral(body: dict[str, Any], served: type[BaseModel]) -> dict[str, Any]:
    kept = without(REFUSED, body, served, "")
    if isinstance(nvext := kept.get("nvext"), dict):
        kept["nvext"] = without(REFUSED_IN_NVEXT, nvext, NvExt, "nvext.")
    return without_of_streams(kept)


def without_of_streams(body: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(options := body.get("stream_options"), dict):
        return body
    return {**body, "stream_options": without(REFUSED_OF_STREAMS, options, StreamOptions, "stream_options.")}


def without(
    refused: dict[str, tuple[Any, ...]], body: dict[str, Any], served: type[BaseModel], where: str
) -> dict[str, Any]:
    kept = {}
    for key, value in body.items():
        if key not in refused or key in served.model_fields:
            kept[key] = value
        elif value is not None and not any(_same(value, neutral) for neutral in refused[key]):
            raise unsupported(where + key)
    return kept


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
