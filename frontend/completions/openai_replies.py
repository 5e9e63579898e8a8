"""What the OpenAI routes answer: whole replies, and the chunks of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from frontend.completions.plans import Plan
from frontend.routing.attempts import Accepted
from frontend.routing.engine_client import Cut, Event
from frontend.server.http import error_body
from rl_plane.errors import PlaneError
from rl_plane.protocol.generation import GenerateDelta, VersionSpan
from rl_plane.protocol.routed_experts import RoutedExperts, as_npy

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "unsupported_error",
    503: "unavailable_error",
}


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
    """Of the worker that made the last token; `makers` has all."""
    makers: list[tuple[int, str, str]] = field(default_factory=list)
    """From which token on, instance id, incarnation."""
    cut: Cut | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    text: str = ""
    offsets: list[int] = field(default_factory=list)
    """Of each token in `text`; tokens that came together share one."""
    finish_reason: str | None = None
    stop_string: str | None = None
    spans: list[VersionSpan] = field(default_factory=list)
    """As they last came; later tokens lengthen the last one."""
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[float | None] | None = None
    """None until the first token."""
    routed_experts: RoutedExperts | None = None
    unlabelled: bool = False
    """Some of its tokens belong to no version: an error tells none of them."""

    def take(self, event: Event) -> None:
        if isinstance(event, Cut):
            self.cut = event
            return
        if isinstance(event, Accepted):
            self.instance_id, self.incarnation = event.instance_id, event.incarnation
            makers = [maker for maker in self.makers if maker[0] < event.at]
            self.makers = [*makers, (event.at, event.instance_id, event.incarnation)]
            if not event.at:
                # Before the first token another worker may take over: what the last one said is void.
                self.prompt_token_ids, self.prompt_logprobs, self.spans = None, None, []
                self.routed_experts = None
            elif self.routed_experts is not None:
                # Those that came ahead of tokens which never did are void.
                rows = len(self.prompt_token_ids or ()) + len(self.token_ids) - 1
                self.routed_experts = self.routed_experts.cut(0, rows)
            return
        self.offsets += [len(self.text)] * len(event.token_ids)
        self.token_ids += event.token_ids
        self.text += event.text
        if event.logprobs is not None:
            self.logprobs = (self.logprobs or []) + event.logprobs
        if event.top_logprobs is not None:
            self.top_logprobs = (self.top_logprobs or []) + event.top_logprobs
        if event.prompt_token_ids is not None:
            self.prompt_token_ids = event.prompt_token_ids
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.routed_experts = RoutedExperts.joined([self.routed_experts, event.routed_experts])
        self.finish_reason, self.spans = event.finish_reason, event.spans or self.spans
        self.stop_string = event.stop_string

    def labelled(self) -> list[VersionSpan]:
        """The spans of all tokens so far."""
        if not self.spans:
            return []
        return [*self.spans[:-1], self.spans[-1].model_copy(update={"end": len(self.token_ids)})]

    def provenance(self) -> dict[str, Any]:
        """Who made it: each of several workers, if it was continued. And why it was cut, if it was."""
        told: dict[str, Any] = {"instance_id": self.instance_id, "incarnation": self.incarnation}
        if len(self.makers) > 1:
            ends = [*(start for start, _, _ in self.makers[1:]), len(self.token_ids)]
            told["instances"] = [
                {"instance_id": instance_id, "incarnation": incarnation, "start": start, "end": end}
                for (start, instance_id, incarnation), end in zip(self.makers, ends, strict=True)
            ]
        if self.cut is not None:
            told["cut"] = {"demand": self.cut.demand, "message": self.cut.message}
        return told

    def stop_reason(self, plan: Plan) -> str | int | None:
        """In vLLM's form: the stop string, or the one of the request's `stop_token_ids`; null for the model's own."""
        if self.finish_reason != "stop" or self.stop_string is not None:
            return self.stop_string
        last = self.token_ids[-1] if self.token_ids else None
        return last if last in plan.requests[self.index].stop_token_ids else None

    def partial(self) -> dict[str, Any]:
        """What an error carries. With its prompt's ids: those and `token_ids` are the prompt from where it goes on."""
        if self.unlabelled:
            return {**Choice(self.index, self.instance_id, self.incarnation).partial(), "unlabelled": True}
        return {
            "index": self.index,
            **self.provenance(),
            "prompt_token_ids": self.prompt_token_ids,
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "weight_versions": spans_of(self.labelled()),
        }


def spans_of(spans: list[VersionSpan]) -> list[dict[str, Any]]:
    return [span.model_dump(exclude=None if span.adapter is not None else {"adapter"}) for span in spans]


def token_name(token_id: int) -> str:
    return f"token_id:{token_id}"  # as vLLM writes them with return_tokens_as_token_ids


def _logprobs(chat: bool, made: Choice | GenerateDelta, offsets: list[int]) -> dict[str, Any]:
    token_ids, logprobs = made.token_ids, made.logprobs or []
    rows = zip(token_ids, logprobs, top_rows(made), strict=True)
    if chat:
        return {
            "content": [
                {**_named(token, value), "top_logprobs": [_named(*one) for one in top]}
                for token, value, top in rows
            ]
        }
    # As vLLM's, whose clients count on it: the chosen one is always there.
    tops = [{token_name(one): each for one, each in (*top, (token, value))} for token, value, top in rows]
    return {
        "tokens": [token_name(token) for token in token_ids],
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _named(token: int, logprob: float) -> dict[str, Any]:
    return {"token": token_name(token), "logprob": logprob, "bytes": None}


def top_rows(made: Choice | GenerateDelta) -> list[list[tuple[int, float]]]:
    """Of each token."""
    return made.top_logprobs if made.top_logprobs is not None else [[] for _ in made.token_ids]


def prompt_logprobs(choice: Choice) -> list[dict[str, Any] | None] | None:
    """In vLLM's form: of each token of the prompt a map from its id; null for the first."""
    if choice.prompt_logprobs is None or choice.prompt_token_ids is None:
        return None
    rows = zip(choice.prompt_token_ids, choice.prompt_logprobs, strict=True)
    return [None if value is None else {str(token): {"logprob": value}} for token, value in rows]


def usage(plan: Plan, choices: list[Choice]) -> dict[str, int]:
    """Of each prompt once."""
    lengths: dict[int, int] = {}
    for choice in choices:
        place = choice.index // plan.n
        lengths[place] = max(lengths.get(place, 0), len(choice.prompt_token_ids or ()))
    prompt = sum(lengths.values())
    made = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _nvext(plan: Plan, choices: list[Choice]) -> dict[str, Any]:
    """Of the first choice; `weight_version` is null unless one known state made every token. `adapter` is
    there if that has one. `completion_token_ids` is a list for each choice if there are several."""
    made = {
        (span.run, span.sequence, span.version, span.digest, span.adapter) for one in choices for span in one.spans
    }
    first = choices[0]
    told: dict[str, Any] = {"instance_id": first.instance_id, "incarnation": first.incarnation}
    if plan.return_token_ids:
        each = [one.token_ids for one in choices]
        told["completion_token_ids"] = each[0] if len(each) == 1 else each
        prompts = [one.prompt_token_ids for one in choices[:: plan.n]]
        told["token_ids"] = prompts if plan.batch and len(choices) > 1 else prompts[0]
    if len(made) != 1 or any(run is None for run, *_ in made):
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
        "usage": usage(plan, choices),
        "nvext": _nvext(plan, choices),
    }
    if plan.return_token_ids and plan.batch is None:
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
        logprobs = _logprobs(plan.chat, choice, choice.offsets)
    reply: dict[str, Any] = {
        "index": choice.index,
        **content,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
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
        reply["routed_experts"] = as_npy(choice.routed_experts)
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
            logprobs = _logprobs(plan.chat, delta, offsets)
        told: dict[str, Any] = {
            "index": choice.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            **choice.provenance(),
        }
        chunk: dict[str, Any] = {**self._head, "choices": [told]}
        if plan.return_token_ids:
            told["token_ids"] = delta.token_ids
            if first and plan.batch is None:
                chunk["prompt_token_ids"] = choice.prompt_token_ids
            if first and not plan.chat:
                told["prompt_token_ids"] = choice.prompt_token_ids
        if delta.prompt_logprobs is not None:
            holder = chunk if plan.chat else told
            holder["prompt_logprobs"] = prompt_logprobs(choice)
        if delta.spans or delta.finish_reason is not None:
            told["weight_versions"] = spans_of(choice.labelled())
        if delta.finish_reason is not None:
            told["stop_reason"] = choice.stop_reason(plan)
            if plan.routed_experts:
                told["routed_experts"] = as_npy(choice.routed_experts)
            chunk["nvext"] = _nvext(plan, [choice])
        return chunk

    def usage(self) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage(self._plan, self._choices)}
