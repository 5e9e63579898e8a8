"""Turns an OpenAI body into a `Plan`: the requests for the engines, one per choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from frontend.completions.auto_tools import AutoTools
from frontend.completions.forced_tools import Forced, check_choice
from frontend.completions.messages import parse_chat
from frontend.completions.openai_bodies import (
    MAX_CHOICES,
    MAX_SEED,
    ChatBody,
    CompletionBody,
    GenerationBody,
    NvExt,
    SamplingBody,
    SamplingFields,
    StreamOptions,
    TokenIds,
    tells_tokens,
)
from frontend.completions.structured_fields import only_form
from frontend.completions.unserved_fields import without_unserved
from frontend.routing.demands import NO_DEMANDS, Demands, demands_of
from frontend.routing.progress import check_can_continue
from rl_plane.errors import InvalidRequest, PayloadTooLarge
from rl_plane.protocol.envelope import MAX_MESSAGE_BYTES
from rl_plane.protocol.generation import GenerateRequest, check_prompt_tops
from rl_plane.protocol.validation import invalid_from_pydantic, parse_body

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""
DEFAULT_CHAT_TOKENS = 256
"""The default of `max_tokens` for chat. OpenAI's default is the whole context, which a model under training would often
fill."""


MAX_PACKED_BYTES = 5
"""The bytes of a token, or of a character, in a message."""
SAMPLED = SamplingBody.model_fields.keys() - {"n"}
"""The fields that a GenerateRequest has under the same names. null is its default. In `top_k` it has 0 for -1."""
PROMPTS = frozenset({"prompt", "prompt_token_ids"})
UNSCORED = {"prompt_logprobs": False, "prompt_top_logprobs": 0, "prompt_token_texts": False}
"""The fields of a request whose prompt another choice scores."""
ROUTED = {"routed_experts": "return_routed_experts"}
"""A GenerateRequest's field → the caller's name for it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices and the reply that one call asks for."""

    id: str
    model: str | None
    requests: tuple[GenerateRequest, ...]
    """One request per choice: the choices of the first prompt, then those of the next."""
    chat: bool = False
    instance_id: str | None = None
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    demands: Demands = NO_DEMANDS
    session: str | None = None
    """The name of the session, from the request's headers."""
    caller_id: str = ""
    """The name of the request, from its headers."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """A GenerateRequest's field → the caller's name for it, where that is another."""
    batch: int | None = None
    """The number of prompts. None: one prompt that did not come in a list."""
    scores_only: bool = False
    """The caller asked for no tokens. The engine makes one beside the scores of the prompt, and the reply drops it."""
    scored_from: int = 0
    """The first token of the prompt whose logprob the caller asked for."""
    routed_from: int = 0
    """With `routed_experts`: the first token of the prompt whose row the caller asked for. A prompt that is shorter has
    the rows of its new tokens."""
    echo: bool = False
    """The prompt stands before the new tokens, in the text and in the logprobs."""
    echoed_tops: int = 0
    """With `echo`: the number of likeliest tokens beside each token of the prompt in the logprobs."""
    forced: Forced | None = None
    """The `tool_choice`, if it forces calls."""
    auto_tools: AutoTools | None = None
    """The tools that the model may call by itself, if the reply shall have its calls apart from its text."""
    any_length: bool = False
    """Whether `max_tokens` is the default. The worker then makes fewer tokens if the context is full."""

    @property
    def made_id(self) -> str:
        """The id by which workers know all choices of the call."""
        first = self.requests[0].id
        return first if len(self.requests) == 1 else first.removesuffix("-0")

    @property
    def n(self) -> int:
        """The number of choices of each prompt."""
        return len(self.requests) // (self.batch or 1)

    def field_of(self, field: str, index: int) -> str:
        """The caller's name for a field of the request of this choice."""
        name = self.fields.get(field, field)
        return f"{name}.{index // self.n}" if self.batch and field in PROMPTS else name

    def __post_init__(self) -> None:
        # The size of a text is an estimate. The call counts the rows that come.
        rows = sum(one.prompt_top_logprobs * one.prompt_size() for one in self.requests)
        check_prompt_tops(rows, self.field_of("prompt_top_logprobs", 0))
        given = [one.prompt_token_ids for one in self.requests if one.prompt_token_ids is not None]
        if self.routed_experts and self.routed_from > (shortest := min(map(len, given), default=self.routed_from)):
            field = self.field_of("routed_experts_prompt_start", 0)
            raise InvalidRequest(
                f"{field} is {self.routed_from}, and a prompt has {shortest} tokens",
                field=field,
                fix="send at most the length of the shortest prompt",
            )
        if self.demands.migrate:
            if self.instance_id is not None:
                raise InvalidRequest(
                    "migrate and nvext.instance_id are both given: one allows another worker, the other does not",
                    field="nvext.instance_id",
                    fix="send one of the two",
                )
            check_can_continue(self.requests[0])

    @property
    def logprobs(self) -> bool:
        return self.requests[0].logprobs

    @property
    def prompt_logprobs(self) -> bool:
        return self.requests[0].prompt_logprobs

    @property
    def routed_experts(self) -> bool:
        return self.requests[0].routed_experts

    def with_adapter(self, name: str) -> Plan:
        """This plan with an adapter."""
        return replace(self, requests=tuple(one.model_copy(update={"adapter": name}) for one in self.requests))


def plan_completion(body: dict[str, Any], request_id: str) -> Plan:
    body = without_unserved(_unpacked(body), CompletionBody)
    rest = {key: value for key, value in body.items() if key != "prompt"}
    prompt = read_prompts(body.get("prompt"), "prompt")
    parsed = parse_body(CompletionBody, rest)
    ids = _prompt_ids(parsed, None if prompt is None else "prompt")
    prompts = prompt if ids is None else Prompts.of(ids, "prompt_token_ids")
    if prompts is None:
        raise InvalidRequest("there is no prompt", field="prompt", fix="send a prompt, or prompt_token_ids")
    if parsed.add_special_tokens is not None:
        prompts = prompts.with_special_tokens(parsed.add_special_tokens)
    tokens, logprobs = parsed.max_tokens, parsed.logprobs
    if tokens == 0 and not parsed.echo:
        raise InvalidRequest(
            "max_tokens is 0, and the prompt is not echoed",
            field="max_tokens",
            fix="send echo: true too, or at least 1",
        )
    return _plan(parsed, request_id, prompts, tokens, logprobs is not None, top_of(logprobs))


def _unpacked(body: dict[str, Any]) -> dict[str, Any]:
    """The body with the fields of its `extra_body`. OpenAI's Python client unpacks such an object, and verifiers'
    EvalClient sends it as it is."""
    extra = body.get("extra_body")
    if extra is None:
        return body
    if not isinstance(extra, dict) or "extra_body" in extra:
        raise InvalidRequest(
            "extra_body is not an object of the body's fields", field="extra_body", fix="send them beside it"
        )
    return {**extra, **body}


def top_of(logprobs: int | None) -> int:
    """The number of likeliest tokens to score. 0 and 1 ask for the chosen token alone."""
    return logprobs if logprobs is not None and logprobs > 1 else 0


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one call."""

    each: list[dict[str, Any]]
    """The prompt fields of a GenerateRequest, for each prompt."""
    field: str
    """The caller's name for the prompt."""
    batch: bool
    """The prompts came in a list."""

    @classmethod
    def of(cls, ids: list[int], field: str) -> Prompts:
        return cls([{"prompt_token_ids": ids}], field, False)

    def with_special_tokens(self, add: bool) -> Prompts:
        """The prompts with or without the tokenizer's special tokens. InvalidRequest: they are wanted around tokens."""
        if not all("prompt" in one for one in self.each):
            if not add:
                return self
            raise InvalidRequest(
                "add_special_tokens has no effect on tokens", field="add_special_tokens", fix="leave it out"
            )
        return replace(self, each=[{**one, "add_special_tokens": add} for one in self.each])


def read_prompts(value: Any, field: str) -> Prompts | None:
    """Reads a text, token ids, or a list of either. It is apart from the body, because pydantic says of a union only
    that no part fits."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return Prompts([{"prompt": value}], field, False)
    first = value[0] if isinstance(value, list) and value else None
    try:
        if isinstance(first, str):
            texts = _TEXTS.validate_python(value, strict=True)
            _check_each_fits(texts, field)
            return Prompts([{"prompt": text} for text in texts], field, True)
        if isinstance(first, list):
            every = _MANY_TOKENS.validate_python(value, strict=True)
            _check_each_fits(every, field)
            return Prompts([{"prompt_token_ids": ids} for ids in every], field, True)
        return Prompts.of(_TOKENS.validate_python(value, strict=True), field)
    except ValidationError as error:
        raise invalid_from_pydantic(error, field) from error


def _check_each_fits(prompts: Sequence[str | list[int]], field: str) -> None:
    """Raises PayloadTooLarge for a prompt that no message carries, before other prompts of the call begin."""
    for index, prompt in enumerate(prompts):
        if len(prompt) * MAX_PACKED_BYTES < MAX_MESSAGE_BYTES:
            continue
        if (size := len(msgpack.packb(prompt))) > MAX_MESSAGE_BYTES:
            raise PayloadTooLarge(
                f"{field}.{index} has {size} bytes; the message to a worker carries {MAX_MESSAGE_BYTES}",
                field=f"{field}.{index}",
                fix="send a shorter prompt",
            )


_TOKENS: TypeAdapter[list[int]] = TypeAdapter(TokenIds)
_MANY_TOKENS: TypeAdapter[list[list[int]]] = TypeAdapter(Annotated[list[TokenIds], Field(max_length=MAX_CHOICES)])
_TEXTS: TypeAdapter[list[str]] = TypeAdapter(
    Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_CHOICES)]
)


def _prompt_ids(body: GenerationBody, other: str | None) -> list[int] | None:
    """The prompt as tokens. `other`: a field that gives a prompt too. Beside `nvext.token_data` it is a placeholder."""
    data = body.nvext.token_data if body.nvext is not None else None
    rival = other if data is None else "nvext.token_data"
    if body.prompt_token_ids is not None and rival is not None:
        raise InvalidRequest(
            f"prompt_token_ids and {rival} are both given", field="prompt_token_ids", fix="send one of the two"
        )
    return body.prompt_token_ids if data is None else data


def plan_chat(body: dict[str, Any], request_id: str) -> Plan:
    body = without_unserved(_unpacked(body), ChatBody)
    check_choice(body.get("tool_choice"))
    parsed = parse_chat(ChatBody, body)
    messages, rendering = parsed.plain_messages(), parsed.rendering()
    if (ids := _prompt_ids(parsed, "messages" if messages else None)) is not None:
        prompts = Prompts.of(ids, "prompt_token_ids")
    elif messages:
        prompts = Prompts([{"messages": messages, "rendering": rendering}], "messages", False)
    else:
        raise InvalidRequest("there are no messages", field="messages", fix="send messages, or prompt_token_ids")
    stated = {parsed.max_tokens, parsed.max_completion_tokens} - {None}
    if len(stated) > 1:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ", field="max_completion_tokens", fix="send one of the two"
        )
    tokens = parsed.max_completion_tokens or parsed.max_tokens
    if parsed.top_logprobs and not parsed.logprobs:
        raise InvalidRequest("top_logprobs without logprobs", field="top_logprobs", fix="send logprobs: true too")
    return _plan(parsed, request_id, prompts, tokens, bool(parsed.logprobs), parsed.top_logprobs or 0)


def _plan(
    body: GenerationBody,
    request_id: str,
    prompts: Prompts,
    max_tokens: int | None,
    logprobs: bool,
    top: int,
) -> Plan:
    """`max_tokens`: the caller's."""
    stream = bool(body.stream)
    check_stream(stream, body.stream_options, body.prompt_logprobs, "prompt_logprobs")
    nvext, chat = body.nvext or NvExt(), isinstance(body, ChatBody)
    asked = [
        tells_tokens(body.extra_fields, "extra_fields"),
        tells_tokens(nvext.extra_fields, "nvext.extra_fields"),
    ]
    tokens_out = any(asked) or bool(body.return_token_ids or nvext.return_token_ids)
    default = DEFAULT_CHAT_TOKENS if chat else DEFAULT_MAX_TOKENS
    # vLLM's echo: the caller's `logprobs` count for the prompt too, and a caller who reads ids gets no text of it.
    echoing = body if isinstance(body, CompletionBody) and body.echo else None
    echo, echoed = echoing is not None, echoing.logprobs if echoing is not None else None
    scored = echoed if body.prompt_logprobs is None else body.prompt_logprobs
    by_ids = bool(body.return_tokens_as_token_ids)
    form, form_field = only_form(body.each_form())
    own = {
        "id": request_id,
        "max_tokens": default if max_tokens is None else max(1, max_tokens),
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "cache_salt": body.cache_salt,
        "structured_output": form,
        "logprobs": logprobs or tokens_out,
        "top_logprobs": top,
        "token_texts": logprobs and not by_ids,
        "prompt_logprobs": scored is not None or bool(body.return_prompt_logprobs or nvext.return_prompt_logprobs),
        "prompt_top_logprobs": scored or 0,
        "prompt_token_texts": scored is not None and not by_ids,
        "prompt_text": echo and not (body.return_token_ids or nvext.return_token_ids),
        "routed_experts": bool(body.return_routed_experts or nvext.return_routed_experts),
    }
    return Plan(
        chat=chat,
        id=request_id,
        model=body.model,
        requests=requests_of(body, own, prompts.each, score_each=not chat),
        instance_id=nvext.instance_id,
        stream=stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        return_token_ids=tokens_out,
        demands=demands_of(body, nvext),
        fields=dict.fromkeys(PROMPTS, prompts.field)
        | ROUTED
        | {"prompt_top_logprobs": "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"}
        | {"prompt_text": "echo", "structured_output": form_field}
        | ({} if logprobs or not tokens_out else {"logprobs": "return_token_ids"}),
        batch=len(prompts.each) if prompts.batch else None,
        scores_only=max_tokens == 0,
        routed_from=body.routed_experts_prompt_start or 0,
        echo=echo,
        echoed_tops=echoed or 0,
        forced=body.forced if isinstance(body, ChatBody) else None,
        auto_tools=body.auto_tools if isinstance(body, ChatBody) else None,
        any_length=max_tokens is None,
    )


def check_stream(stream: bool, options: StreamOptions | None, prompt_logprobs: int | None, field: str) -> None:
    """Raises InvalidRequest for `stream_options` without `stream`, and for a stream whose first event would have the
    likeliest tokens of a whole prompt, as vLLM does. `field`: the caller's name for `prompt_logprobs`."""
    if options is not None and not stream:
        raise InvalidRequest("stream_options without stream", field="stream_options", fix="send stream: true too")
    if stream and (prompt_logprobs or 0) > 1:
        raise InvalidRequest(
            f"{field} is {prompt_logprobs} in a stream", field=field, fix="send at most 1, or leave stream out"
        )


def requests_of(
    body: SamplingFields,
    own: dict[str, Any],
    prompts: list[dict[str, Any]],
    *,
    score_each: bool,
    seed_field: str = "seed",
    n_field: str = "n",
) -> tuple[GenerateRequest, ...]:
    """The requests, one for each choice.

    `own`: the fields that `body` lacks.
    `prompts`: the fields that differ between prompts.
    `score_each`: every choice gets prompt logprobs. Else only the first choice of a prompt, for a reply with one place
    for them."""
    n = body.n or 1
    if n * len(prompts) > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n {n}",
            field=n_field,
            fix=f"ask for at most {MAX_CHOICES} choices at once",
        )
    first = parse_body(
        GenerateRequest,
        {
            **own,
            **prompts[0],
            **body.model_dump(include=SAMPLED, exclude_none=True),
            "top_k": max(0, body.top_k or 0),
        },
    )
    if first.seed is not None and first.seed + n > MAX_SEED:
        raise InvalidRequest("seed + n is over 63 bits", field=seed_field, fix="send a smaller seed")
    if n == len(prompts) == 1:
        return (first,)

    def choice(index: int) -> GenerateRequest:
        prompt, place = divmod(index, n)
        return first.model_copy(
            update={
                **prompts[prompt],
                "id": f"{first.id}-{index}",
                "seed": None if first.seed is None else first.seed + place,
                **({} if score_each or not place else UNSCORED),
            }
        )

    return tuple(choice(index) for index in range(n * len(prompts)))
