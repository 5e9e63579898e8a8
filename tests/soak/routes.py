"""The routes that the soak asks for tokens: what each is sent, and its replies in one form, as a choice of OpenAI's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Choice = Mapping[str, Any]
"""{index, token_ids, logprobs: how many or None, finish_reason, instance_id, weight_versions, cut?}: what is new of
it."""
Before = Mapping[int, Sequence[int]]
"""The tokens of each choice that came before this event."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A request for tokens, without the names of one route's fields."""

    prompt: Sequence[int]
    max_tokens: int
    n: int
    adapter: str | None
    stream: bool
    demands: Mapping[str, Any]
    tops: int = 0
    """The number of likeliest tokens whose logprobs the reply carries, to make it longer."""


@dataclass(frozen=True, slots=True)
class Route:
    path: str
    body: Callable[[Tokens], dict[str, Any]]
    choices: Callable[[Any, Before], Iterable[Choice]]
    """Reads the choices of a whole reply, or of a stream's event. Raises ValueError if the event takes back earlier
    output."""


def _completion_body(ask: Tokens) -> dict[str, Any]:
    return {**_openai_body(ask), **({"logprobs": ask.tops} if ask.tops else {})}


def _chat_body(ask: Tokens) -> dict[str, Any]:
    return {**_openai_body(ask), **({"logprobs": True, "top_logprobs": ask.tops} if ask.tops else {})}


def _openai_body(ask: Tokens) -> dict[str, Any]:
    body: dict[str, Any] = {
        **ask.demands,
        "prompt_token_ids": list(ask.prompt),
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "n": ask.n,
        "return_token_ids": True,
        "stream": ask.stream,
    }
    return body if ask.adapter is None else {**body, "model": ask.adapter}


def _vllm_body(ask: Tokens) -> dict[str, Any]:
    body: dict[str, Any] = {
        **ask.demands,
        "token_ids": list(ask.prompt),
        "sampling_params": {"max_tokens": ask.max_tokens, "temperature": 0, "n": ask.n, "logprobs": ask.tops or 1},
        "stream": ask.stream,
    }
    return body if ask.adapter is None else {**body, "model": ask.adapter}


def _of_openai(told: Any, before: Before) -> Iterable[Choice]:
    """Reads the choices of a reply in OpenAI's format, which vLLM's own routes share."""
    for choice in told["choices"]:
        logprobs = choice.get("logprobs")
        if logprobs is not None:
            logprobs = len(logprobs["content"] if "content" in logprobs else logprobs["token_logprobs"])
        yield {**choice, "logprobs": logprobs}


def _sglang_body(ask: Tokens) -> dict[str, Any]:
    return {
        **ask.demands,
        "input_ids": list(ask.prompt),
        "sampling_params": {"max_new_tokens": ask.max_tokens, "temperature": 0, "n": ask.n},
        "return_logprob": True,
        "top_logprobs_num": ask.tops,
        "lora_path": ask.adapter,
        "stream": ask.stream,
    }


def _of_sglang(told: Any, before: Before) -> Iterable[Choice]:
    """Reads the choices of a reply of SGLang. An event has all tokens of its choice so far, and its index. In a whole
    reply the place of a choice is its index."""
    for place, choice in enumerate(told if isinstance(told, list) else [told]):
        index, tokens, meta = choice.get("index", place), choice["output_ids"], choice["meta_info"]
        had = list(before.get(index, ()))
        if tokens[: len(had)] != had:
            raise ValueError(f"choice {index} had {len(had)} tokens, but it begins with other tokens now")
        yield {
            "index": index,
            "token_ids": tokens[len(had) :],
            "logprobs": len(meta["output_token_logprobs"]) - len(had),
            "finish_reason": meta["finish_reason"] and meta["finish_reason"]["type"],
            "instance_id": meta["instance_id"],
            "weight_versions": meta["weight_versions"],
            "cut": meta.get("cut"),
        }


ROUTES = (
    Route("/v1/completions", _completion_body, _of_openai),
    Route("/v1/chat/completions", _chat_body, _of_openai),
    Route("/inference/v1/generate", _vllm_body, _of_openai),
    Route("/generate", _sglang_body, _of_sglang),
)
