"""Checks of a request's tokens that every engine makes before the first token."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from rl_plane.errors import InvalidRequest, Unsupported
from rl_plane.protocol.generation import (
    MAX_BAD_WORDS_TOKENS,
    MAX_PROMPT_TOP_LOGPROBS,
    MAX_STOPS_WITH_MIN_TOKENS,
    TOGETHER,
    GenerateRequest,
)
from rl_plane.protocol.pooling import task_field

NO_EXPERTS = "the model has no experts"
NO_FORM = "this engine does not give a text a form: vllm and sglang do"
NO_ROUTED = "the engine was not told to: start it with --engine-arg enable_return_routed_experts=true"


def kept_of_prompt(request: GenerateRequest, prompt: list[int]) -> list[int]:
    return prompt if request.truncate_prompt_tokens is None else prompt[-request.truncate_prompt_tokens :]


def lacking_fields(lacks: Mapping[str, str]) -> dict[str, str]:
    """The fields of a request that an engine which lacks these refuses: `field`, or `field+field` for two that
    exclude each other, each with the reason."""
    named = ((name.partition(":"), reason) for name, reason in lacks.items())
    return {field: reason for (op, _, field), reason in named if op == "generate" and field}


def refuse_lacking(request: GenerateRequest, lacks: Mapping[str, str]) -> None:
    """Raises Unsupported if the request sets a field that the engine lacks."""
    lacking = lacking_fields(lacks)
    if (reason := lacking.pop(task_field(request.task), None)) is not None:
        raise Unsupported(
            reason, field="model", fix=f"name a model of a worker that was started with --task {request.task}"
        )
    for fields, reason in lacking.items():
        field, *others = fields.split(TOGETHER)
        if field not in GenerateRequest.model_fields:
            continue  # another task
        if all(getattr(request, one) != _default(one) for one in (field, *others)):
            raise Unsupported(
                reason, field=field, fix="leave it out, or name a worker that can: nvext.instance_id"
            )


def most_tops(vocab_size: int, own: int = -1) -> int:
    """Returns an engine's `max_prompt_top_logprobs`. `own`: the engine's own limit, -1 for none."""
    return min(MAX_PROMPT_TOP_LOGPROBS, vocab_size, own if own >= 0 else vocab_size)


def check_tops(request: GenerateRequest, most: int) -> None:
    """Raises InvalidRequest if the request asks for more of a prompt's likeliest tokens than `most`, the engine's
    limit."""
    if request.prompt_top_logprobs > most:
        raise InvalidRequest(
            f"{request.prompt_top_logprobs} of a prompt's likeliest tokens: this engine returns at most {most} beside "
            "each token",
            field="prompt_top_logprobs",
            fix=f"send at most {most}",
        )


def no_cut_rows(*outside: str) -> dict[str, str]:
    """The part of `EngineInfo.lacks` of an engine that reports routed experts only for a request that it ends itself.
    `outside`: the fields by which, set together, the adapter ends the request."""
    reason = f"this engine reports no routed experts where {' with '.join(outside)} ends a choice"
    return {f"generate:{TOGETHER.join((*outside, 'routed_experts'))}": reason}


@cache
def _default(field: str) -> Any:
    return GenerateRequest.model_fields[field].get_default(call_default_factory=True)


def check_tokens(
    request: GenerateRequest, prompt: list[int], eos: frozenset[int], vocab_size: int, max_model_len: int
) -> None:
    """Raises InvalidRequest if the prompt, the choice of tokens or the length does not fit the model. `eos`: the tokens
    that end a text."""
    for field, ids in (
        ("prompt_token_ids", prompt),
        ("stop_token_ids", request.stop_token_ids),
        ("logit_bias", [int(token) for token in request.logit_bias]),
        ("allowed_token_ids", request.allowed_token_ids),
        ("bad_words_token_ids", [token for word in request.bad_words_token_ids for token in word]),
    ):
        check_vocabulary(field, ids or [], vocab_size)
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", field="prompt", fix="give at least one token")
    request.check_prompt_logprobs(prompt)
    if len(prompt) + request.max_tokens > max_model_len:
        raise InvalidRequest(
            f"{len(prompt)} prompt tokens and {request.max_tokens} new ones: more than {max_model_len}",
            field="max_tokens",
            fix=f"at most {max_model_len} together",
            prompt_tokens=len(prompt),  # a frontend shortens max_tokens by it, if the caller did not choose it
        )
    _check_choice(request, eos, vocab_size)
    _check_form(request)


def check_pooled(prompt: list[int], vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidRequest if a pooling model can't take the prompt."""
    check_vocabulary("prompt_token_ids", prompt, vocab_size)
    if not 1 <= len(prompt) <= max_model_len:
        raise InvalidRequest(
            f"the input has {len(prompt)} tokens", field="prompt", fix=f"send 1 to {max_model_len} tokens"
        )


def check_adapter(adapter: str | None, loaded: Collection[str], field: str) -> None:
    """Raises InvalidRequest if the adapter is not loaded. `field`: the field of the request that names it."""
    if adapter is not None and adapter not in loaded:
        raise InvalidRequest(
            f"there is no adapter {adapter[:64]!r} here",
            field=field,
            fix="name a loaded adapter, or the base model" if field == "model" else "name a loaded adapter",
        )


def check_vocabulary(field: str, ids: list[int], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        raise InvalidRequest(
            f"token {max(ids)} is outside the vocabulary", field=field, fix=f"use ids below {vocab_size}"
        )


FREE_END = ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words_token_ids")
"""Fields that bar or ignore the end of a text, or other tokens that its form may need."""


def _check_form(request: GenerateRequest) -> None:
    """Raises InvalidRequest if the form of the text and another limit might leave no token to choose."""
    if request.structured_output is None:
        return
    for field in FREE_END:
        if getattr(request, field) != _default(field):
            raise InvalidRequest(
                f"{field} beside a form of the text: together they may allow no token at all",
                field=field,
                fix="send one of the two",
            )


def _check_choice(request: GenerateRequest, eos: frozenset[int], vocab_size: int) -> None:
    """Raises InvalidRequest if the request's limits contradict each other, or may leave no token to choose."""
    if request.min_tokens > request.max_tokens:
        raise InvalidRequest(
            f"min_tokens {request.min_tokens} is more than max_tokens {request.max_tokens}",
            field="min_tokens",
            fix="send at most max_tokens",
        )
    if request.min_tokens and len(request.stop_token_ids) > MAX_STOPS_WITH_MIN_TOKENS:
        raise InvalidRequest(
            f"min_tokens with {len(request.stop_token_ids)} stop_token_ids",
            field="stop_token_ids",
            fix=f"with min_tokens send at most {MAX_STOPS_WITH_MIN_TOKENS}",
        )
    if sum(map(len, request.bad_words_token_ids)) > MAX_BAD_WORDS_TOKENS:
        raise InvalidRequest(
            f"bad_words_token_ids has more than {MAX_BAD_WORDS_TOKENS} tokens",
            field="bad_words_token_ids",
            fix="send fewer or shorter ones",
        )
    ends = {*request.stop_token_ids, *eos} if request.min_tokens else set()
    allowed = request.allowed_token_ids
    for barred in _barred_together(request.bad_words_token_ids):
        left = len(set(allowed) - barred - ends) if allowed is not None else vocab_size - len(barred | ends)
        if left <= 0:
            raise InvalidRequest(
                "bad_words_token_ids or min_tokens may bar every token that is allowed",
                field="bad_words_token_ids" if barred else "allowed_token_ids",
                fix="allow one more, or bar fewer",
            )


def _barred_together(words: list[list[int]]) -> Iterator[set[int]]:
    """Yields the largest sets of tokens that bad words bar at one place."""
    for longest in ([], *(word[:-1] for word in words)):
        # If the last tokens are `longest`: the words that begin with the end of it.
        yield {word[-1] for word in words if longest[len(longest) - len(word) + 1 :] == word[:-1]}
