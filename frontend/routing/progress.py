"""The tokens of one choice, and the request by which another worker continues them. Pure.

When a worker is lost, the next worker gets a longer prompt: the prompt and the tokens so far. It makes the tokens that
are missing. Its deltas count from 0, and `GenerationProgress` turns them into deltas of the choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.generation import FinishReason, GenerateDelta, GenerateRequest, Rendering, VersionSpan
from rl_plane.protocol.routed_experts import RoutedExperts

PROMPT_FIELDS = ("prompt", "messages", "truncate_prompt_tokens")
"""The fields that the prompt's tokens replace."""

OF_THE_PROMPT = ("prompt_logprobs", "prompt_token_texts", "prompt_text")
"""The fields that ask for facts of the prompt. The worker of the first token has sent them."""
TOLD_ALREADY = ("prompt_token_ids", "prompt_logprobs", "prompt_tops", "prompt_token_texts", "prompt_text")
"""The fields of a delta that have such facts."""


def check_can_continue(request: GenerateRequest) -> None:
    """Raises InvalidRequest where the tokens of two workers would differ from those of one."""
    if any(len(word) > 1 for word in request.bad_words_token_ids):
        raise InvalidRequest(
            "migrate with bad_words_token_ids of several tokens: one could come about half before and half after",
            field="bad_words_token_ids",
            fix="bar single tokens, or leave migrate out",
        )
    for field_name in ("frequency_penalty", "presence_penalty"):
        if getattr(request, field_name):
            raise InvalidRequest(
                f"migrate with {field_name}: the next worker takes the tokens so far for its prompt, and counts from "
                "none",
                field=field_name,
                fix="use repetition_penalty, which counts the prompt too, or leave migrate out",
            )


@dataclass(slots=True, kw_only=True)
class ChoiceTokens:
    """The tokens of one choice so far, with the version spans that say which weights made them."""

    token_ids: list[int] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    """The spans of the last delta that had some. Later tokens lengthen the last span."""
    prompt_token_ids: list[int] | None = None
    """The prompt as the worker has rendered it. It is None until the worker has sent it."""

    def labelled(self) -> list[VersionSpan]:
        """The spans of all tokens so far."""
        if not self.spans:
            return []
        return [*self.spans[:-1], self.spans[-1].model_copy(update={"end": len(self.token_ids)})]

    def add(self, delta: GenerateDelta) -> None:
        self.token_ids += delta.token_ids
        self.spans = delta.spans or self.spans
        if delta.prompt_token_ids is not None:
            self.prompt_token_ids = delta.prompt_token_ids

    def restart(self) -> None:
        """Drops what a lost worker sent before its first token."""
        self.spans, self.prompt_token_ids = [], None


class GenerationProgress(ChoiceTokens):
    """The tokens of one choice, from all workers that made them. `rest` makes the request to the next worker; `shifted`
    and `take` add the deltas of that worker."""

    def __init__(self, request: GenerateRequest) -> None:
        super().__init__()
        self.request = request
        self.most = request.max_tokens
        """The number of tokens that the choice may have when the present worker is done."""
        self._routed = 0
        """Rows of experts that the caller has received."""
        self._routed_again = 0
        """The number of these rows that the present worker has yet to repeat. It begins with the first row."""
        self._start = 0
        """The number of tokens before the present worker began."""
        self._spans_before: list[VersionSpan] = []

    @property
    def fresh(self) -> int:
        """The number of tokens of the present worker."""
        return len(self.token_ids) - self._start

    @property
    def can_move(self) -> bool:
        """Whether another worker can continue. It needs the prompt's tokens, and a request whose sampling depends on no
        earlier tokens."""
        try:
            check_can_continue(self.request)
        except InvalidRequest:
            return False
        return self.prompt_token_ids is not None

    @property
    def full(self) -> bool:
        """Whether all tokens have come. If the worker is lost now, only its last message is missing."""
        return len(self.token_ids) >= self.most

    def rest(self, most: int | None = None) -> GenerateRequest:
        """Makes the request to the next worker. `most` is the number of tokens in all, if it is below `max_tokens`."""
        self._start, self._spans_before = len(self.token_ids), self.labelled()
        request, count = self.request, len(self.token_ids)
        self.most = most or request.max_tokens
        if not count:
            self.restart()
            self._routed = 0
            return request if most is None else request.model_copy(update={"max_tokens": most})
        assert self.prompt_token_ids is not None, "can_move says so"
        # Rows that came ahead of tokens which never followed do not count.
        self._routed = self._routed_again = min(self._routed, len(self.prompt_token_ids) + count - 1)
        return request.model_copy(
            update={
                **dict.fromkeys(PROMPT_FIELDS),
                "rendering": Rendering(),
                "prompt_token_ids": [*self.prompt_token_ids, *self.token_ids],
                "continued": count,
                "max_tokens": self.most - count,
                "min_tokens": max(0, request.min_tokens - count),
                **dict.fromkeys(OF_THE_PROMPT, False),
                "prompt_top_logprobs": 0,
                "seed": None if request.seed is None else seed_after(request.seed, count),
            }
        )

    def shifted(self, delta: GenerateDelta) -> GenerateDelta:
        """Turns a delta of the present worker into a delta of the choice."""
        if not self._start:
            return delta
        spans = _joined(self._spans_before, delta.spans, self._start) if delta.spans else []
        if delta.finish_reason is not None and not spans:
            spans = self.labelled()
        return delta.model_copy(
            update={
                **dict.fromkeys(TOLD_ALREADY),
                "spans": spans,
                "routed_experts": self._unknown_rows(delta),
            }
        )

    def _unknown_rows(self, delta: GenerateDelta) -> RoutedExperts | None:
        rows = delta.routed_experts
        if rows is None or not self._routed_again:
            return rows
        known = min(self._routed_again, rows.tokens)
        self._routed_again -= known
        return rows.cut(known) if known < rows.tokens else None

    def take(self, delta: GenerateDelta) -> None:
        """Adds a delta that the caller receives."""
        self.add(delta)
        self._routed += delta.routed_experts.tokens if delta.routed_experts is not None else 0

    def end(self, reason: FinishReason) -> GenerateDelta:
        """Makes the last delta of a choice that the plane itself ends. It has the prompt's tokens if they are known."""
        logprobs: list[float] | None = [] if self.request.logprobs else None
        prompt = self.prompt_token_ids
        if prompt is None and (given := self.request.prompt_token_ids) is not None:
            prompt = given[-(self.request.truncate_prompt_tokens or len(given)) :]
        return GenerateDelta(
            token_ids=[],
            logprobs=logprobs,
            finish_reason=reason,
            spans=self.labelled(),
            prompt_token_ids=prompt,
        )


def seed_after(seed: int, made: int) -> int:
    """The seed of the next worker. With the same seed it would draw the same numbers again."""
    digest = blake2b(f"{seed} {made}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _joined(before: list[VersionSpan], after: list[VersionSpan], shift: int) -> list[VersionSpan]:
    """Joins the spans of two workers; the same weights on both sides make one span."""
    moved = [one.model_copy(update={"start": one.start + shift, "end": one.end + shift}) for one in after]
    if before and moved and _same_weights(before[-1], moved[0]):
        return [*before[:-1], before[-1].model_copy(update={"end": moved[0].end}), *moved[1:]]
    return [*before, *moved]


def _same_weights(one: VersionSpan, other: VersionSpan) -> bool:
    return one.model_copy(update={"start": other.start, "end": other.end}) == other
