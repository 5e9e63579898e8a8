"""The replies of the OpenAI routes: whole replies, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from frontend.completions.forced_tools import REQUIRED, calls_of
from frontend.completions.plans import Plan
from frontend.completions.reply_choice import Choice, spans_of
from frontend.server.replies import error_body
from rl_plane.errors import PlaneError
from rl_plane.protocol.generation import GenerateDelta
from rl_plane.protocol.prompt_tops import PromptPlace
from rl_plane.protocol.routed_experts import as_npy

LEAST_LOGPROB = -9999.0
"""vLLM's number for a token that can't come. JSON has no infinity."""
UNKNOWN_PLACE = PromptPlace(None, [])

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "unsupported_error",
    503: "unavailable_error",
}


def openai_error(error: PlaneError, elapsed_s: float) -> dict[str, Any]:
    """The facade's error body, with the keys that OpenAI's clients read."""
    body = error_body(error, elapsed_s)
    otherwise = "invalid_request_error" if error.http_status < 500 else "server_error"
    body["error"] = {
        **body["error"],
        "type": _TYPES.get(error.http_status, otherwise),
        "param": error.facts.get("field"),
    }
    return body


def token_name(token_id: int) -> str:
    return f"token_id:{token_id}"  # vLLM writes them so with return_tokens_as_token_ids


def _logprobs(chat: bool, made: Choice | GenerateDelta, offsets: list[int]) -> dict[str, Any]:
    token_ids, logprobs, texts = made.token_ids, made.logprobs or [], made.token_texts or {}
    rows = zip(token_ids, logprobs, top_rows(made), strict=True)
    if chat:
        return {
            "content": [
                {**_named(token, value, texts), "top_logprobs": [_named(*one, texts) for one in top]}
                for token, value, top in rows
            ]
        }
    # The chosen token is always among them, as in vLLM, whose clients rely on it.
    tops = [{_name(one, texts): each for one, each in (*top, (token, value))} for token, value, top in rows]
    return {
        "tokens": [_name(token, texts) for token in token_ids],
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _name(token: int, texts: Mapping[str, str]) -> str:
    """Returns the token's text, or its id if the caller asked for ids or the worker has no tokenizer."""
    text = texts.get(str(token))
    return token_name(token) if text is None else text


def _named(token: int, logprob: float, texts: Mapping[str, str]) -> dict[str, Any]:
    text = texts.get(str(token))
    octets = None if text is None else list(text.encode("utf-8", errors="replace"))
    return {"token": _name(token, texts), "logprob": logprob, "bytes": octets}


def top_rows(made: Choice | GenerateDelta) -> list[list[tuple[int, float]]]:
    """The likeliest tokens beside each token."""
    return made.top_logprobs if made.top_logprobs is not None else [[] for _ in made.token_ids]


def scored_prompt(choice: Choice) -> Iterator[tuple[int, float | None, PromptPlace]]:
    """Each token of the prompt with its logprob and its place. The first has no logprob."""
    places = [UNKNOWN_PLACE]
    places += choice.prompt_tops.rows() if choice.prompt_tops is not None else []
    rows = zip(choice.prompt_token_ids or (), choice.prompt_logprobs or (), strict=True)
    for place, (token, value) in enumerate(rows):
        yield token, value, places[place] if place < len(places) else UNKNOWN_PLACE


def prompt_logprobs(choice: Choice) -> list[dict[str, Any] | None] | None:
    """vLLM's form: for each token of the prompt a map from its id, and from those of the likeliest tokens at its place.
    The first is null."""
    if choice.prompt_logprobs is None or choice.prompt_token_ids is None:
        return None
    texts = choice.token_texts
    rows: list[dict[str, Any] | None] = []
    for token, value, place in scored_prompt(choice):
        if value is None:
            rows.append(None)
            continue
        # Clients sort by the rank. An engine that does not know it has at least not found the token among the tops.
        rank = place.rank or (len(place.tops) + 1 if place.tops else None)
        row = {str(token): _scored(value, rank, token, texts)}
        for number, (one, logprob) in enumerate(place.tops, 1):
            row[str(one)] = _scored(value if one == token else logprob, number, one, texts)
        rows.append(row)
    return rows


def _scored(logprob: float, rank: int | None, token: int, texts: Mapping[str, str]) -> dict[str, Any]:
    return {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": texts.get(str(token))}


def _echoed(plan: Plan, choice: Choice) -> dict[str, Any]:
    """The logprobs of the prompt, in the form of `/v1/completions`."""
    texts, at = choice.token_texts, 0
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, value, place in scored_prompt(choice):
        tops = [*place.tops[: plan.echoed_tops], (token, value)]
        found["tokens"].append(_name(token, texts))
        found["token_logprobs"].append(value)
        found["top_logprobs"].append(
            None
            if value is None
            else {_name(one, texts): max(each, LEAST_LOGPROB) for one, each in tops if each is not None}
        )
        found["text_offset"].append(at)
        at += len(texts.get(str(token), ""))
    return found


def _with_echo(plan: Plan, choice: Choice, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    """The logprobs of a choice's first tokens, behind those of the prompt."""
    if logprobs is None or choice.prompt_logprobs is None:
        return logprobs
    shift = len(choice.prompt_text)
    logprobs = {**logprobs, "text_offset": [shift + at for at in logprobs["text_offset"]]}
    return {name: values + logprobs[name] for name, values in _echoed(plan, choice).items()}


def usage(plan: Plan, choices: list[Choice]) -> dict[str, int]:
    """The token counts. A prompt with several choices counts once."""
    lengths: dict[int, int] = {}
    for choice in choices:
        place = choice.index // plan.n
        lengths[place] = max(lengths.get(place, 0), len(choice.prompt_token_ids or ()))
    prompt = sum(lengths.values())
    made = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def extension_of(plan: Plan, choices: list[Choice]) -> dict[str, Any]:
    """The `nvext` of a reply. Worker and tokens are those of the first choice. `weight_version` is null unless one
    known state made every token, and `adapter` is there if that state has one. With several choices,
    `completion_token_ids` has a list for each."""
    made = {
        (span.run, span.sequence, span.version, span.digest, span.adapter) for one in choices for span in one.spans
    }
    first = choices[0]
    facts: dict[str, Any] = {"instance_id": first.instance_id, "incarnation": first.incarnation}
    if plan.return_token_ids:
        each = [one.token_ids for one in choices]
        facts["completion_token_ids"] = each[0] if len(each) == 1 else each
        prompts = [one.prompt_token_ids for one in choices[:: plan.n]]
        facts["token_ids"] = prompts if plan.batch and len(choices) > 1 else prompts[0]
    if len(made) != 1 or any(run is None for run, *_ in made):
        return {**facts, "weight_version": None}
    *version, adapter = made.pop()
    facts["weight_version"] = dict(zip(("run", "sequence", "label", "digest"), version, strict=True))
    if adapter is not None:
        facts["adapter"] = adapter.model_dump()
    return facts


def whole(plan: Plan, choices: list[Choice], model: str, created: int) -> dict[str, Any]:
    """The whole reply."""
    reply: dict[str, Any] = {
        "id": plan.id,
        "object": "chat.completion" if plan.chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [_whole_choice(plan, choice) for choice in choices],
        "usage": usage(plan, choices),
        "nvext": extension_of(plan, choices),
    }
    if plan.return_token_ids and plan.batch is None:
        reply["prompt_token_ids"] = choices[0].prompt_token_ids
    if plan.prompt_logprobs and plan.chat:
        reply["prompt_logprobs"] = prompt_logprobs(choices[0])
    return reply


def _whole_choice(plan: Plan, choice: Choice) -> dict[str, Any]:
    content: dict[str, Any] = {"text": choice.prompt_text + choice.text}
    calls = _calls(plan, choice)
    if plan.chat:
        said = {"content": choice.text} if calls is None else {"content": choice.rest, "tool_calls": calls}
        content = {"message": {"role": "assistant", **said}}
    logprobs = None
    if plan.logprobs:
        logprobs = _logprobs(plan.chat, choice, choice.offsets)
    if plan.echo:
        logprobs = _with_echo(plan, choice, logprobs)
    reply: dict[str, Any] = {
        "index": choice.index,
        **content,
        "logprobs": logprobs,
        "finish_reason": _finish_reason(plan, choice, calls),
        "stop_reason": choice.stop_reason(plan),
        "weight_versions": spans_of(choice.labelled()),
        **choice.provenance(),
    }
    if plan.return_token_ids:
        reply["token_ids"] = choice.token_ids
        if not plan.chat:
            reply["prompt_token_ids"] = choice.prompt_token_ids
    if plan.prompt_logprobs and not plan.chat:
        reply["prompt_logprobs"] = prompt_logprobs(choice)
    if plan.routed_experts:
        reply["routed_experts"] = as_npy(choice.experts(plan))
    return reply


def _calls(plan: Plan, choice: Choice) -> list[dict[str, Any]] | None:
    """The calls of a choice that has ended. None: there is none, the text ends within one, or the choice was cut: it
    may have been read before that."""
    if choice.finish_reason == "abort":
        return None
    if plan.forced is None:
        return choice.calls
    return calls_of(choice.text, plan.forced, plan.requests[choice.index].id)


def _finish_reason(plan: Plan, choice: Choice, calls: list[dict[str, Any]] | None) -> str | None:
    """vLLM's: a named function that was called ends with `stop`, other calls end with `tool_calls`."""
    is_named = plan.forced not in (None, REQUIRED)
    return "tool_calls" if calls is not None and not is_named else choice.finish_reason


class Chunks:
    """The chunks of one stream."""

    def __init__(self, plan: Plan, choices: list[Choice], model: str, created: int) -> None:
        self._plan = plan
        self._choices = choices
        self._begun: set[int] = set()
        self._head = {
            "id": plan.id,
            "object": "chat.completion.chunk" if plan.chat else "text_completion",
            "created": created,
            "model": model,
        }

    def of(self, choice: Choice, delta: GenerateDelta, offset: int) -> dict[str, Any]:
        """The chunk of a delta that `choice` has just taken. `offset`: where its text begins."""
        plan, first = self._plan, choice.index not in self._begun
        self._begun.add(choice.index)
        content: dict[str, Any] = {"text": (choice.prompt_text if first else "") + delta.text}
        calls = _calls(plan, choice) if delta.finish_reason is not None else None
        if plan.chat:
            role = {"role": "assistant"} if first else {}
            content = {"delta": {**role, **self._said(choice, delta, calls)}}
        logprobs = None
        if plan.logprobs:
            offsets = [offset + (0 if first else len(choice.prompt_text))] * len(delta.token_ids)
            logprobs = _logprobs(plan.chat, delta, offsets)
        if plan.echo and first:
            logprobs = _with_echo(plan, choice, logprobs)
        row: dict[str, Any] = {
            "index": choice.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason and _finish_reason(plan, choice, calls),
            **choice.provenance(),
        }
        chunk: dict[str, Any] = {**self._head, "choices": [row]}
        if plan.return_token_ids:
            row["token_ids"] = delta.token_ids
            if first and plan.batch is None:
                chunk["prompt_token_ids"] = choice.prompt_token_ids
            if first and not plan.chat:
                row["prompt_token_ids"] = choice.prompt_token_ids
        if delta.prompt_logprobs is not None:
            holder = chunk if plan.chat else row
            holder["prompt_logprobs"] = prompt_logprobs(choice)
        if delta.spans or delta.finish_reason is not None:
            row["weight_versions"] = spans_of(choice.labelled())
        if delta.finish_reason is not None:
            row["stop_reason"] = choice.stop_reason(plan)
            if plan.routed_experts:
                row["routed_experts"] = as_npy(choice.experts(plan))
            chunk["nvext"] = extension_of(plan, [choice])
        return chunk

    def _said(self, choice: Choice, delta: GenerateDelta, calls: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Calls come whole, in the last chunk. So does a text that may have calls, or ends within one."""
        if self._plan.forced is None and self._plan.auto_tools is None:
            return {"content": delta.text}
        if calls is not None:
            rest = {"content": choice.rest} if choice.rest else {}
            return {**rest, "tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]}
        return {"content": choice.text if delta.finish_reason is not None else ""}

    def usage(self) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage(self._plan, self._choices)}
