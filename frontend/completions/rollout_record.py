"""The record of one choice: a line of JSON that `rl-plane replay` reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from frontend.completions.openai_bodies import SamplingBody
from frontend.completions.reply_choice import Choice, spans_of
from frontend.completions.structured_fields import in_structured_outputs
from rl_plane.protocol.generation import ALL_THAT_FITS, GenerateRequest

FORMAT = 1
"""Grows when a reader of records has to know of a change."""
_BODY = (SamplingBody.model_fields.keys() & GenerateRequest.model_fields.keys()) | {"max_tokens", "cache_salt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One choice after its end. Nothing changes it any more, so another thread may write it."""

    component: str
    """The component that made it."""
    model: str | None = None
    """The `model` by which the request chose a component other than the frontend's own."""
    request: GenerateRequest
    choice: Choice
    outcome: str
    """The outcome of the call: ok, disconnected, or the error's code."""
    began_at: float
    """Unix seconds."""
    first_token_s: float | None
    """Seconds from the call to the first token. None: there was none."""
    seconds: float
    """Seconds from the call to its end."""

    @property
    def tokens(self) -> int:
        """The tokens of prompt and choice: about what the record weighs."""
        return self.request.prompt_size() + len(self.choice.token_ids)

    def to_wire(self) -> dict[str, Any]:
        choice = self.choice
        prompt = choice.prompt_token_ids or self.request.prompt_token_ids
        return {
            "format": FORMAT,
            "id": self.request.id,
            "component": self.component,
            "index": choice.index,
            "outcome": self.outcome,
            "finish_reason": choice.finish_reason,
            "began_at": self.began_at,
            "first_token_s": self.first_token_s,
            "seconds": self.seconds,
            **choice.provenance(),
            "weight_versions": spans_of(choice.labelled()),
            "prompt_token_ids": prompt,
            "token_ids": choice.token_ids,
            "logprobs": choice.logprobs,
            "body": body_of(self.request, len(choice.token_ids), self.model),
        }


def body_of(request: GenerateRequest, made: int, model: str | None = None) -> dict[str, Any]:
    """The body of `POST /v1/completions` that asks for the same choice, without the prompt. `made`: the tokens that it
    has. `model`: as in `RolloutRecord`."""
    given = request.model_dump(exclude_defaults=True)
    body = {name: value for name, value in given.items() if name in _BODY}
    body["max_tokens"] = request.max_tokens if request.max_tokens != ALL_THAT_FITS else max(1, made)
    if (named := model or request.adapter) is not None:
        body["model"] = named
    if request.structured_output is not None:
        body["structured_outputs"] = in_structured_outputs(request.structured_output)
    if request.logprobs:
        body["logprobs"] = max(1, request.top_logprobs)
    return body
