"""One choice of a reply, as far as it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from frontend.completions.plans import Plan
from frontend.routing.attempts import Accepted
from frontend.routing.engine_client import Event
from frontend.routing.progress import ChoiceTokens
from frontend.routing.retry import StaleStop
from rl_plane.protocol.generation import GenerateDelta, VersionSpan
from rl_plane.protocol.prompt_tops import PromptTops
from rl_plane.protocol.routed_experts import RoutedExperts


@dataclass(slots=True)
class Choice(ChoiceTokens):
    """The tokens of one choice, with the rest of what its reply says."""

    index: int
    instance_id: str = ""
    incarnation: str = ""
    """The worker of the last token. `makers` has all workers."""
    makers: list[tuple[int, str, str]] = field(default_factory=list)
    """The first token, the instance id and the incarnation of each worker."""
    stop: StaleStop | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    token_texts: dict[str, str] = field(default_factory=dict)
    """The texts of tokens with logprobs, by their ids, those of the prompt too. Empty unless they were asked for."""
    text: str = ""
    offsets: list[int] = field(default_factory=list)
    """The place of each token in `text`. Tokens that came together share one."""
    finish_reason: str | None = None
    stop_string: str | None = None
    prompt_logprobs: list[float | None] | None = None
    """None until the first token."""
    prompt_tops: PromptTops | None = None
    """One row for each of `prompt_logprobs` after the first, from an engine that reports them."""
    prompt_text: str = ""
    """Empty unless it was asked for."""
    routed_experts: RoutedExperts | None = None
    calls: list[dict[str, Any]] | None = None
    """The calls that a worker's parser has found in the text. None: none, or the text was not parsed."""
    rest: str = ""
    """The text without these calls."""
    pooled: bytes | None = None
    """The packed vector, if the call asks for one."""
    is_unlabelled: bool = False
    """Some of the tokens belong to no version, so an error carries none of them."""

    def take(self, event: Event) -> None:
        if isinstance(event, StaleStop):
            self.stop = event
        elif isinstance(event, Accepted):
            self._take_worker(event)
        else:
            self._take_delta(event)

    def _take_worker(self, event: Accepted) -> None:
        self.instance_id, self.incarnation = event.instance_id, event.incarnation
        makers = [maker for maker in self.makers if maker[0] < event.at]
        self.makers = [*makers, (event.at, event.instance_id, event.incarnation)]
        if not event.at:
            # Another worker begins anew, so what the last one said does not count.
            self.restart()
            self.prompt_logprobs = self.prompt_tops = self.routed_experts = None
            self.prompt_text = ""
        elif self.routed_experts is not None:
            # Rows that came ahead of tokens which never followed do not count.
            rows = len(self.prompt_token_ids or ()) + len(self.token_ids) - 1
            self.routed_experts = self.routed_experts.cut(0, rows)

    def _take_delta(self, delta: GenerateDelta) -> None:
        self.add(delta)
        self.offsets += [len(self.text)] * len(delta.token_ids)
        self.text += delta.text
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.top_logprobs is not None:
            self.top_logprobs = (self.top_logprobs or []) + delta.top_logprobs
        if delta.token_texts is not None:
            self.token_texts.update(delta.token_texts)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.token_texts.update(delta.prompt_token_texts or {})
        self.prompt_tops = PromptTops.joined([self.prompt_tops, delta.prompt_tops])
        self.prompt_text += delta.prompt_text or ""
        self.routed_experts = RoutedExperts.joined([self.routed_experts, delta.routed_experts])
        self.pooled = delta.pooled
        self.finish_reason, self.stop_string = delta.finish_reason, delta.stop_string

    def provenance(self) -> dict[str, Any]:
        """The worker that made the choice, or each of several. Also the demand that ended it, if one did."""
        facts: dict[str, Any] = {"instance_id": self.instance_id, "incarnation": self.incarnation}
        if len(self.makers) > 1:
            ends = [*(start for start, _, _ in self.makers[1:]), len(self.token_ids)]
            facts["instances"] = [
                {"instance_id": instance_id, "incarnation": incarnation, "start": start, "end": end}
                for (start, instance_id, incarnation), end in zip(self.makers, ends, strict=True)
            ]
        if self.stop is not None:
            facts["cut"] = {"demand": self.stop.demand, "message": self.stop.message}
        return facts

    def stop_reason(self, plan: Plan) -> str | int | None:
        """vLLM's `stop_reason`: the stop string, or the token of `stop_token_ids`; null for the model's own."""
        if self.finish_reason != "stop" or self.stop_string is not None:
            return self.stop_string
        last = self.token_ids[-1] if self.token_ids else None
        return last if last in plan.requests[self.index].stop_token_ids else None

    def experts(self, plan: Plan) -> RoutedExperts | None:
        """The rows of experts that the caller asked for."""
        if self.routed_experts is None:
            return None
        return self.routed_experts.cut(min(plan.routed_from, len(self.prompt_token_ids or ())))

    def partial(self) -> dict[str, Any]:
        """The choice as an error carries it. Its prompt's ids and its `token_ids` are the prompt to continue from."""
        if self.is_unlabelled:
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


def scores_alone(delta: GenerateDelta) -> GenerateDelta:
    """The delta without its tokens. An empty span says which weights have scored the prompt."""
    return delta.model_copy(
        update={
            "token_ids": [],
            "logprobs": None if delta.logprobs is None else [],
            "top_logprobs": None if delta.top_logprobs is None else [],
            "token_texts": None,
            "text": "",
            "finish_reason": "length" if delta.finish_reason == "stop" else delta.finish_reason,
            "stop_string": None,
            "spans": [span.model_copy(update={"end": 0}) for span in delta.spans[:1]],
        }
    )


def spans_of(spans: list[VersionSpan]) -> list[dict[str, Any]]:
    return [
        span.model_dump(exclude={name for name in ("adapter", "kv_version") if getattr(span, name) is None})
        for span in spans
    ]
