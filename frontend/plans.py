"""From an OpenAI body to a `Plan`: the requests for the engines, one per choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from frontend.openai import (
    MAX_SEED,
    ChatBody,
    CompletionBody,
    GenerationBody,
    NvExt,
    TokenIds,
    refuse_in_messages,
    unsupported,
    without_neutral,
)
from rl_plane.errors import InvalidRequest
from rl_plane.generation import MAX_PROMPT_TOKENS, GenerateRequest
from rl_plane.ops import invalid_from_pydantic, parse_body

DEFAULT_MAX_TOKENS = 16
"""OpenAI's own for completions."""
DEFAULT_CHAT_TOKENS = 256
"""OpenAI's is "until the context is full", which in a fleet under training is a runaway; ask for more by name."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call of a route asks for."""

    chat: bool
    id: str
    model: str | None
    requests: tuple[GenerateRequest, ...]
    """One per choice."""
    instance_id: str | None
    stream: bool
    include_usage: bool
    return_token_ids: bool

    @property
    def logprobs(self) -> bool:
        return self.requests[0].logprobs


def plan_completion(body: dict[str, Any], request_id: str) -> Plan:
    body = without_neutral(body, CompletionBody)
    body, prompt = _take_prompt(body)
    parsed = parse_body(CompletionBody, body)
    assert isinstance(parsed, CompletionBody)
    if (parsed.logprobs or 0) > 1:
        raise unsupported("logprobs above 1", "send 1: only the chosen token's logprob is there")
    ids, text = parsed.prompt_token_ids, None
    if isinstance(prompt, list):
        ids = _only_one(ids, prompt, "prompt")
    elif prompt:
        text = _only_one(ids, prompt, "prompt")
    if ids is None and text is None:
        raise InvalidRequest("there is no prompt", field="prompt", fix="send a prompt, or prompt_token_ids")
    tokens = parsed.max_tokens or DEFAULT_MAX_TOKENS
    return _plan(parsed, request_id, {"prompt": text}, ids, tokens, parsed.logprobs is not None)


def _take_prompt(body: dict[str, Any]) -> tuple[dict[str, Any], str | list[int] | None]:
    """Apart, since of a union pydantic tells only that no part fits."""
    rest = {key: value for key, value in body.items() if key != "prompt"}
    prompt = body.get("prompt")
    if prompt is None or isinstance(prompt, str):
        return rest, prompt
    if isinstance(prompt, list) and prompt and all(isinstance(part, (str, list)) for part in prompt):
        raise unsupported("prompt as a batch", "send one request for each prompt")
    try:
        return rest, _TOKENS.validate_python(prompt, strict=True)
    except ValidationError as error:
        raise invalid_from_pydantic(error, "prompt") from error


_TOKENS: TypeAdapter[list[int]] = TypeAdapter(TokenIds)


def _only_one(ids: list[int] | None, other: Any, field: str) -> Any:
    if ids is not None:
        raise InvalidRequest(
            f"prompt_token_ids and {field} are both given", field="prompt_token_ids", fix="send one of the two"
        )
    return other


def plan_chat(body: dict[str, Any], request_id: str, max_model_len: int | None) -> Plan:
    body = without_neutral(body, ChatBody)
    refuse_in_messages(body)
    parsed = parse_body(ChatBody, body)
    assert isinstance(parsed, ChatBody)
    messages = None
    if parsed.messages:
        messages = _only_one(
            parsed.prompt_token_ids, [message.model_dump() for message in parsed.messages], "messages"
        )
    elif parsed.prompt_token_ids is None:
        raise InvalidRequest("there are no messages", field="messages", fix="send messages, or prompt_token_ids")
    stated = {parsed.max_tokens, parsed.max_completion_tokens} - {None}
    if len(stated) > 1:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ", field="max_completion_tokens", fix="send one of the two"
        )
    default = min(DEFAULT_CHAT_TOKENS, max(1, (max_model_len or MAX_PROMPT_TOKENS) // 2))
    tokens = parsed.max_completion_tokens or parsed.max_tokens or default
    own = {"messages": messages}
    return _plan(parsed, request_id, own, parsed.prompt_token_ids, tokens, bool(parsed.logprobs))


def _plan(
    body: GenerationBody,
    request_id: str,
    own: dict[str, Any],
    ids: list[int] | None,
    max_tokens: int,
    logprobs: bool,
) -> Plan:
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise InvalidRequest("stream_options without stream", field="stream_options", fix="send stream: true too")
    n, nvext = body.n or 1, body.nvext or NvExt()
    if body.seed is not None and body.seed + n > MAX_SEED:
        raise InvalidRequest("seed + n is over 63 bits", field="seed", fix="send a smaller seed")
    first = parse_body(
        GenerateRequest,
        {
            "id": request_id,
            "prompt_token_ids": ids,
            **own,
            "max_tokens": max_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_k": max(0, body.top_k or 0),
            "seed": body.seed,
            "stop_token_ids": body.stop_token_ids or [],
            "ignore_eos": bool(body.ignore_eos),
            "logprobs": logprobs,
        },
    )
    assert isinstance(first, GenerateRequest)
    return Plan(
        chat=isinstance(body, ChatBody),
        id=request_id,
        model=body.model,
        requests=(first,) if n == 1 else tuple(_choice(first, index) for index in range(n)),
        instance_id=nvext.instance_id,
        stream=stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        return_token_ids=bool(body.return_token_ids or nvext.return_token_ids),
    )


def _choice(request: GenerateRequest, index: int) -> GenerateRequest:
    seed = None if request.seed is None else request.seed + index
    return request.model_copy(update={"id": f"{request.id}-{index}", "seed": seed})
