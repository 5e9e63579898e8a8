"""The bodies of the engines' own generation routes: vLLM's `/inference/v1/generate` and SGLang's `/generate`.

Both become a `Plan`. `unserved_fields` has the fields that they refuse.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection
from typing import Any

from pydantic import Field, field_validator

from frontend.completions.messages import STRICT
from frontend.completions.openai_bodies import (
    MAX_SEED,
    SamplingBody,
    SamplingFields,
    StreamOptions,
    TokenIds,
)
from frontend.completions.plans import (
    ROUTED,
    Plan,
    check_stream,
    read_prompts,
    requests_of,
    top_of,
)
from frontend.completions.structured_fields import SglangForms, StructuredOutputs, only_form
from frontend.completions.unserved_fields import unsupported, without_unserved
from frontend.routing.demands import DemandFields, demands_of
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.generation import (
    ALL_THAT_FITS,
    MAX_PROMPT_TOP_LOGPROBS,
    MAX_SALT_CHARS,
    MAX_TOP_LOGPROBS,
    RAW_LOGPROBS,
)
from rl_plane.protocol.validation import parse_body

MAX_ID_CHARS = 100
SGLANG_TOKENS = 128
"""SGLang's own default."""

log = logging.getLogger("frontend.completions.native_bodies")


@functools.cache
def say_that_logprobs_are_raw() -> None:
    """Says it once for each process. These routes' own servers, as trainers start them, divide the logits."""
    log.warning(
        "a request asks for logprobs at a temperature other than 0 and 1. They are of the raw logits, not of the "
        "logits divided by the temperature: start the workers with --logprobs-mode processed_logprobs if the trainer "
        "divides its own, else its importance ratios are wrong"
    )


def check_temperature(plan: Plan, modes: Collection[str | None]) -> None:
    """Warns if the trainer may expect other logprobs. `modes`: those of the workers."""
    if plan.logprobs and plan.requests[0].temperature not in (0.0, 1.0) and RAW_LOGPROBS in modes:
        say_that_logprobs_are_raw()


# ---- vLLM's ----


class VllmSampling(SamplingBody):
    max_tokens: int | None = Field(None, ge=1)
    """Default: as many as there is room for, as in vLLM."""
    logprobs: int | None = Field(None, ge=-1, le=MAX_TOP_LOGPROBS)
    """0 or 1: the logprob of the chosen token. More: also of this many of the likeliest tokens."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_PROMPT_TOP_LOGPROBS)
    """The logprobs of the prompt's own tokens, and of this many of the likeliest tokens at each place. With `stream`: 0
    or 1."""
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)
    """prime-rl's place for the body's `cache_salt`, which counts if both are given."""
    detokenize: bool | None = None
    """false: no `decoded_token` beside the prompt's logprobs. The reply has no other text."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the text."""
    routed_experts_prompt_start: int | None = Field(None, ge=0)
    """With `return_routed_experts`: leave out the rows of this many tokens at the start of the prompt."""


VLLM_UNSERVED = frozenset(
    {
        *("bad_words", "extra_args", "flat_logprobs", "logprob_token_ids", "output_kind", "prompt_logprob_start"),
        *("prompt_logprob_token_ids", "repetition_detection", "skip_reading_prefix_cache"),
        *("spaces_between_special_tokens", "stream_interval"),
        *("thinking_token_budget", "trace_decode_token_ids", "watermarking"),
    }
)
"""The fields of the `SamplingParams` of vLLM 0.32 that a caller may give and that are not served. `unserved_fields`
says which of their values are refused."""


class VllmGenerateBody(DemandFields):
    """The body of `POST /inference/v1/generate`."""

    model_config = STRICT

    request_id: str | None = Field(None, min_length=1, max_length=MAX_ID_CHARS)
    token_ids: TokenIds
    sampling_params: VllmSampling
    model: str | None = None
    """The base model or a loaded adapter. None: the base model."""
    return_token_ids: bool | None = None
    """Return the prompt's tokens. Each choice always has its own. `sampling_params` asks for logprobs."""
    return_routed_experts: bool | None = None
    """Return the experts of the prompt and of each choice. A field of this plane: vLLM's own server returns them with
    every reply, if it was started so."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)


VLLM_FIELDS = {name: f"sampling_params.{name}" for name in VllmSampling.model_fields} | {
    "prompt_token_ids": "token_ids",
    "adapter": "model",
    "cache_salt": "cache_salt",
    "prompt_top_logprobs": "sampling_params.prompt_logprobs",
    **ROUTED,
}
"""A GenerateRequest's field → the caller's name for it, which errors use."""


def plan_vllm(body: dict[str, Any], request_id: str) -> Plan:
    parsed = parse_body(VllmGenerateBody, without_unserved(_without_unknown_sampling(body), VllmGenerateBody))
    sampling = parsed.sampling_params
    if sampling.logprobs == -1:
        raise unsupported("sampling_params.logprobs", f"send at most {MAX_TOP_LOGPROBS}")
    stream, prompt_logprobs = bool(parsed.stream), sampling.prompt_logprobs
    check_stream(stream, parsed.stream_options, prompt_logprobs, "sampling_params.prompt_logprobs")
    given = sampling.structured_outputs
    form, form_field = only_form(() if given is None else given.form("sampling_params.structured_outputs"))
    own = {
        "id": request_id,  # callers may use an id twice
        "max_tokens": sampling.max_tokens or ALL_THAT_FITS,
        "cache_salt": parsed.cache_salt or sampling.cache_salt,
        "structured_output": form,
        "logprobs": sampling.logprobs is not None,
        "top_logprobs": top_of(sampling.logprobs),
        "prompt_logprobs": prompt_logprobs is not None,
        "prompt_top_logprobs": prompt_logprobs or 0,
        "prompt_token_texts": prompt_logprobs is not None and sampling.detokenize is not False,
        "routed_experts": bool(parsed.return_routed_experts),
    }
    return Plan(
        id=parsed.request_id or request_id,
        model=parsed.model,
        requests=requests_of(
            sampling,
            own,
            [{"prompt_token_ids": parsed.token_ids}],
            score_each=False,
            seed_field="sampling_params.seed",
        ),
        stream=stream,
        include_usage=parsed.stream_options is not None and parsed.stream_options.include_usage,
        return_token_ids=bool(parsed.return_token_ids),
        demands=demands_of(parsed),
        fields=VLLM_FIELDS | {"structured_output": form_field},
        routed_from=sampling.routed_experts_prompt_start or 0,
        any_length=sampling.max_tokens is None,
    )


def _without_unknown_sampling(body: dict[str, Any]) -> dict[str, Any]:
    """Drops what is no sampling parameter of vLLM's, as its server does. prime-rl sends fields of the body there, such
    as `return_token_ids`."""
    sampling = body.get("sampling_params")
    if not isinstance(sampling, dict):
        return body
    known = {
        name: value
        for name, value in sampling.items()
        if name in VllmSampling.model_fields or name in VLLM_UNSERVED
    }
    return {**body, "sampling_params": known}


# ---- SGLang's ----


class SglangSampling(SglangForms, SamplingFields):
    max_new_tokens: int | None = Field(None, ge=0)
    """Default 128, or as many as there is room for. 0: the reply has no tokens, only the scores of the prompt."""
    min_new_tokens: int | None = Field(None, ge=0)
    sampling_seed: int | None = Field(None, ge=0, lt=MAX_SEED)
    """The seed of the first choice. Choice i gets this seed plus i."""
    no_stop_trim: bool | None = None
    """End the text after the stop string. Only `skip_special_tokens` removes stop tokens from the text."""

    @field_validator("stop", mode="before")
    @classmethod
    def _from_one(cls, value: Any) -> Any:
        return ([value] if value else None) if isinstance(value, str) else value


class SglangGenerateBody(DemandFields):
    """The body of `POST /generate`."""

    model_config = STRICT

    rid: str | None = Field(None, min_length=1, max_length=MAX_ID_CHARS)
    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    """The prompt as tokens, in place of `text`. The reply to a list of prompts is a list: choice j of prompt i is its
    element i * n + j."""
    sampling_params: SglangSampling | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """With `return_logprob`: also the logprobs of this many of the likeliest tokens, at the places of the generated
    tokens, and of the prompt's tokens from `logprob_start_len` on."""
    logprob_start_len: int | None = Field(None, ge=-1)
    """-1: logprobs of the generated tokens. N: also of the prompt's tokens from number N. The first of these is null,
    as in SGLang."""
    return_prompt_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    """Return the experts of the prompt and of the generated tokens in `meta_info`."""
    routed_experts_start_len: int | None = Field(None, ge=0)
    """With `return_routed_experts`: leave out the rows of this many tokens at the start of the prompt."""
    lora_path: str | None = None
    """The name of a loaded adapter. None: the base model."""
    model: str | None = None
    """Another place for the base model or an adapter, by which routers choose. `lora_path` counts if both are given."""
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)
    stream: bool | None = None


SGLANG_FIELDS = {name: f"sampling_params.{name}" for name in SglangSampling.model_fields} | {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "include_stop_str_in_output": "sampling_params.no_stop_trim",
    "prompt_token_ids": "input_ids",
    "prompt": "text",
    "adapter": "lora_path",
    "logprobs": "return_logprob",
    "top_logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    "prompt_top_logprobs": "top_logprobs_num",
    "routed_experts_prompt_start": "routed_experts_start_len",
    **ROUTED,
}
"""A GenerateRequest's field → the name that SGLang's callers use."""


def plan_sglang(body: dict[str, Any], request_id: str) -> Plan:
    for field in ("rid", "sampling_params", "return_logprob", "logprob_start_len", "lora_path"):
        if isinstance(body.get(field), list):
            raise unsupported(field, "send one for all prompts, or a request for each", f"{field} as a list")
    found = [read_prompts(body.get(field), field) for field in ("text", "input_ids")]
    body = {key: value for key, value in body.items() if key not in ("text", "input_ids")}
    parsed = parse_body(SglangGenerateBody, without_unserved(body, SglangGenerateBody))
    prompts = found[0] or found[1]
    if prompts is None or all(found):
        raise InvalidRequest(
            "one of text and input_ids is the prompt", field="input_ids", fix="send one of the two"
        )
    start = -1 if parsed.logprob_start_len is None else parsed.logprob_start_len
    shortest = min(
        (len(one["prompt_token_ids"]) for one in prompts.each if "prompt_token_ids" in one), default=start
    )
    if start > shortest:
        raise InvalidRequest(
            f"logprob_start_len is {start}, and a prompt has {shortest} tokens",
            field="logprob_start_len",
            fix="send at most the length of the shortest prompt",
        )
    if parsed.top_logprobs_num and not parsed.return_logprob:
        raise InvalidRequest(
            "top_logprobs_num without return_logprob",
            field="top_logprobs_num",
            fix="send return_logprob: true too",
        )
    given = parsed.sampling_params or SglangSampling()
    form, form_field = only_form(given.forms("sampling_params."))
    own = {
        "id": request_id,
        "max_tokens": SGLANG_TOKENS if given.max_new_tokens is None else max(1, given.max_new_tokens),
        "min_tokens": given.min_new_tokens or 0,
        "seed": given.sampling_seed,
        "include_stop_str_in_output": bool(given.no_stop_trim),
        "cache_salt": parsed.cache_salt,
        "structured_output": form,
        "logprobs": bool(parsed.return_logprob),
        "top_logprobs": parsed.top_logprobs_num or 0,
        "prompt_logprobs": bool(parsed.return_logprob) and start >= 0,
        "prompt_top_logprobs": (parsed.top_logprobs_num or 0) if start >= 0 else 0,
        "routed_experts": bool(parsed.return_routed_experts),
    }
    return Plan(
        id=parsed.rid or request_id,
        model=parsed.lora_path or parsed.model,
        requests=requests_of(
            given,
            own,
            prompts.each,
            score_each=True,
            seed_field="sampling_params.sampling_seed",
            n_field="sampling_params.n",
        ),
        stream=bool(parsed.stream),
        return_token_ids=bool(parsed.return_prompt_token_ids),
        demands=demands_of(parsed),
        fields=SGLANG_FIELDS | {"structured_output": form_field},
        batch=len(prompts.each) if prompts.batch else None,
        scores_only=given.max_new_tokens == 0,
        scored_from=max(0, start),
        routed_from=parsed.routed_experts_start_len or 0,
        any_length=given.max_new_tokens is None,
    )
