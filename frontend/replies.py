"""What the OpenAI routes answer: whole replies, and the chunks of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from frontend.engine_client import Accepted
from frontend.http import error_body
from frontend.plans import Plan
from rl_plane.errors import PlaneError
from rl_plane.generation import GenerateDelta, VersionSpan

_TYPES = {401: "authentication_error", 404: "not_found_error", 501: "unsupported_error", 503: "unavailable_error"}


def openai_error(error: PlaneError, elapsed_s: float) -> dict[str, Any]:
    """The facade's shape, with the keys that OpenAI's clients look for."""
    body = error_body(error, elapsed_s)
    otherwise = "invalid_request_error" if error.http_status < 500 else "server_error"
    body["error"] = {
        **body["error"],
        "type": _TYPES.get(error.http_status, otherwise),
        "param": error.facts.get("field"),
    }
    return body


@dataclass(slots=True)
class Choice:
    """One choice as far as it has come."""

    index: int
    instance_id: str = ""
    incarnation: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    text: str = ""
    offsets: list[int] = field(default_factory=list)
    """Of each token in `text`; tokens that came together share one."""
    finish_reason: str | None = None
    spans: list[VersionSpan] = field(default_factory=list)
    """As they last came; later tokens lengthen the last one."""
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[float | None] | None = None
    """None until the first token."""

    def take(self, event: Accepted | GenerateDelta) -> None:
        if isinstance(event, Accepted):
            # Before the first token another worker may take over: what the last one said is void.
            self.instance_id, self.incarnation = event.instance_id, event.incarnation
            self.prompt_token_ids, self.prompt_logprobs, self.spans = None, None, []
            return
        self.offsets += [len(self.text)] * len(event.token_ids)
        self.token_ids += event.token_ids
        self.text += event.text
        if event.logprobs is not None:
            self.logprobs = (self.logprobs or []) + event.logprobs
        if event.prompt_token_ids is not None:
            self.prompt_token_ids = event.prompt_token_ids
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.finish_reason, self.spans = event.finish_reason, event.spans or self.spans

    def labelled(self) -> list[VersionSpan]:
        """The spans of all tokens so far."""
        if not self.spans:
            return []
        return [*self.spans[:-1], self.spans[-1].model_copy(update={"end": len(self.token_ids)})]

    def partial(self) -> dict[str, Any]:
        """What an error carries."""
        return {
            "index": self.index,
            "instance_id": self.instance_id,
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "weight_versions": spans_of(self.labelled()),
        }


def spans_of(spans: list[VersionSpan]) -> list[dict[str, Any]]:
    return [span.model_dump(exclude_none=True) for span in spans]


def token_name(token_id: int) -> str:
    return f"token_id:{token_id}"  # as vLLM writes them with return_tokens_as_token_ids


def _logprobs(chat: bool, token_ids: list[int], logprobs: list[float], offsets: list[int]) -> dict[str, Any]:
    if chat:
        rows = zip(token_ids, logprobs, strict=True)
        return {
            "content": [
                {"token": token_name(token), "logprob": value, "bytes": None, "top_logprobs": []}
                for token, value in rows
            ]
        }
    return {
        "tokens": [token_name(token) for token in token_ids],
        "token_logprobs": logprobs,
        "top_logprobs": None,
        "text_offset": offsets,
    }


def prompt_logprobs(choice: Choice) -> list[dict[str, Any] | None] | None:
    """In vLLM's form: of each token of the prompt a map from its id; null for the first."""
    if choice.prompt_logprobs is None or choice.prompt_token_ids is None:
        return None
    rows = zip(choice.prompt_token_ids, choice.prompt_logprobs, strict=True)
    return [None if value is None else {str(token): {"logprob": value}} for token, value in rows]


def usage(choices: list[Choice]) -> dict[str, int]:
    prompt = max((len(choice.prompt_token_ids or ()) for choice in choices), default=0)
    made = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _nvext(plan: Plan, choices: list[Choice]) -> dict[str, Any]:
    """Of the first choice; `weight_version` is null unless one state of the weights made every token. `adapter` is
    there if that has one. `completion_token_ids` is a list for each choice if there are several."""
    made = {
        (span.run, span.sequence, span.version, span.digest, span.adapter) for one in choices for span in one.spans
    }
    first = choices[0]
    told: dict[str, Any] = {"instance_id": first.instance_id, "incarnation": first.incarnation}
    if plan.return_token_ids:
        each = [one.token_ids for one in choices]
        told["completion_token_ids"] = each[0] if len(each) == 1 else each
        told["token_ids"] = first.prompt_token_ids
    if len(made) != 1:
        return {**told, "weight_version": None}
    *version, adapter = made.pop()
    told["weight_version"] = dict(zip(("run", "sequence", "label", "digest"), version, strict=True))
    if adapter is not None:
        told["adapter"] = adapter.model_dump()
    return told


def whole(plan: Plan, choices: list[Choice], model: str, created: int) -> dict[str, Any]:
    """The reply without `stream`."""
    reply: dict[str, Any] = {
        "id": plan.id,
        "object": "chat.completion" if plan.chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [_whole_choice(plan, choice) for choice in choices],
        "usage": usage(choices),
        "nvext": _nvext(plan, choices),
    }
    if plan.return_token_ids:
        reply["prompt_token_ids"] = choices[0].prompt_token_ids
    if plan.prompt_logprobs and plan.chat:
        reply["prompt_logprobs"] = prompt_logprobs(choices[0])
    return reply


def _whole_choice(plan: Plan, choice: Choice) -> dict[str, Any]:
    content: dict[str, Any] = {"text": choice.text}
    if plan.chat:
        content = {"message": {"role": "assistant", "content": choice.text}}
    logprobs = None
    if plan.logprobs:
        logprobs = _logprobs(plan.chat, choice.token_ids, choice.logprobs or [], choice.offsets)
    reply: dict[str, Any] = {
        "index": choice.index,
        **content,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "weight_versions": spans_of(choice.labelled()),
        "instance_id": choice.instance_id,
    }
    if plan.return_token_ids:
        reply["token_ids"] = choice.token_ids
    if plan.prompt_logprobs and not plan.chat:
        reply["prompt_logprobs"] = prompt_logprobs(choice)
    return reply


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
        """`delta` is what `choice` has just taken; `offset`: where its text begins."""
        plan, first = self._plan, choice.index not in self._begun
        self._begun.add(choice.index)
        content: dict[str, Any] = {"text": delta.text}
        if plan.chat:
            content = {"delta": {**({"role": "assistant"} if first else {}), "content": delta.text}}
        logprobs = None
        if plan.logprobs:
            offsets = [offset] * len(delta.token_ids)
            logprobs = _logprobs(plan.chat, delta.token_ids, delta.logprobs or [], offsets)
        told: dict[str, Any] = {
            "index": choice.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "instance_id": choice.instance_id,
        }
        chunk: dict[str, Any] = {**self._head, "choices": [told]}
        if plan.return_token_ids:
            told["token_ids"] = delta.token_ids
            if first:
                chunk["prompt_token_ids"] = choice.prompt_token_ids
        if delta.prompt_logprobs is not None:
            holder = chunk if plan.chat else told
            holder["prompt_logprobs"] = prompt_logprobs(choice)
        if delta.finish_reason is not None:
            told["weight_versions"] = spans_of(delta.spans)
            chunk["nvext"] = _nvext(plan, [choice])
        return chunk

    def usage(self) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage(self._choices)}
