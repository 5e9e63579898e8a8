"""One choice as far as its workers have brought it, and how it goes on at another one when its worker is lost. Pure.

The next worker is asked for the prompt and the tokens so far as its prompt, and for as many tokens less. What it sends
counts from 0: here it is made to go on from what was there."""

from __future__ import annotations

from hashlib import blake2b

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.generation import FinishReason, GenerateDelta, GenerateRequest, Rendering, VersionSpan
from rl_plane.protocol.routed_experts import RoutedExperts

PROMPT_FIELDS = ("prompt", "messages", "truncate_prompt_tokens")
"""Of which the prompt's tokens were made."""


def check_can_continue(request: GenerateRequest) -> None:
    """InvalidRequest where the tokens of two workers would not be those of one."""
    if any(len(word) > 1 for word in request.bad_words_token_ids):
        raise InvalidRequest(
            "migrate with bad_words_token_ids of several tokens: one could come about half before and half after",
            field="bad_words_token_ids",
            fix="bar single tokens, or leave migrate out",
        )
    for field in ("frequency_penalty", "presence_penalty"):
        if getattr(request, field):
            raise InvalidRequest(
                f"migrate with {field}: the next worker takes the tokens so far for its prompt, and counts from none",
                field=field,
                fix="use repetition_penalty, which counts the prompt too, or leave migrate out",
            )


class SoFar:
    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.most = request.max_tokens
        """Tokens in all that the present worker was asked for."""
        self.prompt: list[int] | None = None
        """As the first worker has rendered it; None: not told yet."""
        self.made: list[int] = []
        self.spans: list[VersionSpan] = []
        """As they last came: later tokens lengthen the last one."""
        self._routed = 0
        """So many rows of experts have gone on to the caller."""
        self._routed_again = 0
        """So many of those are still to come again from the present worker, which begins with the first."""
        self._start = 0
        """So many tokens were there when the present worker began."""
        self._spans_before: list[VersionSpan] = []

    @property
    def fresh(self) -> int:
        """Tokens of the present worker."""
        return len(self.made) - self._start

    def labelled(self) -> list[VersionSpan]:
        """The spans of all tokens so far."""
        if not self.spans:
            return []
        return [*self.spans[:-1], self.spans[-1].model_copy(update={"end": len(self.made)})]

    # ---- what a worker is asked, and what comes of it ----

    def rest(self, most: int | None = None) -> GenerateRequest:
        """For the next worker. `most`: so many tokens in all, fewer than `max_tokens`."""
        self._start, self._spans_before = len(self.made), self.labelled()
        request, count = self.request, len(self.made)
        self.most = most or request.max_tokens
        if not count:
            self.prompt, self.spans, self._routed = None, [], 0  # what a worker said that is gone is void
            return request if most is None else request.model_copy(update={"max_tokens": most})
        assert self.prompt is not None, "can_move says so"
        # Rows that were ahead of tokens which never came are void.
        self._routed = self._routed_again = min(self._routed, len(self.prompt) + count - 1)
        return request.model_copy(
            update={
                **dict.fromkeys(PROMPT_FIELDS),
                "rendering": Rendering(),
                "prompt_token_ids": [*self.prompt, *self.made],
                "continued": count,
                "max_tokens": self.most - count,
                "min_tokens": max(0, request.min_tokens - count),
                "prompt_logprobs": False,
                "seed": None if request.seed is None else seed_after(request.seed, count),
            }
        )

    @property
    def can_move(self) -> bool:
        return self.prompt is not None

    @property
    def full(self) -> bool:
        """All tokens are there: what was lost is the word that they are."""
        return len(self.made) >= self.most

    def shifted(self, delta: GenerateDelta) -> GenerateDelta:
        """What the present worker sent, as a part of the choice."""
        if not self._start:
            return delta
        spans = _joined(self._spans_before, delta.spans, self._start) if delta.spans else []
        if delta.finish_reason is not None and not spans:
            spans = self.labelled()
        fields = {"spans": spans, "prompt_token_ids": None, "prompt_logprobs": None}
        return delta.model_copy(update=fields | {"routed_experts": self._unknown_rows(delta)})

    def _unknown_rows(self, delta: GenerateDelta) -> RoutedExperts | None:
        rows = delta.routed_experts
        if rows is None or not self._routed_again:
            return rows
        known = min(self._routed_again, rows.tokens)
        self._routed_again -= known
        return rows.cut(known) if known < rows.tokens else None

    def take(self, delta: GenerateDelta) -> None:
        """One that goes on to the caller."""
        self.made += delta.token_ids
        self.spans = delta.spans or self.spans
        self._routed += delta.routed_experts.tokens if delta.routed_experts is not None else 0
        if delta.prompt_token_ids is not None:
            self.prompt = delta.prompt_token_ids

    def end(self, reason: FinishReason) -> GenerateDelta:
        """The last delta, where the plane ends the choice. The prompt's tokens are there if they are known."""
        logprobs: list[float] | None = [] if self.request.logprobs else None
        prompt = self.prompt
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
    """Of what comes after so many tokens: with the same one the same numbers would be drawn again."""
    digest = blake2b(f"{seed} {made}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _joined(before: list[VersionSpan], after: list[VersionSpan], shift: int) -> list[VersionSpan]:
    """One span where the weights are the same on both sides."""
    moved = [one.model_copy(update={"start": one.start + shift, "end": one.end + shift}) for one in after]
    if before and moved and _same_weights(before[-1], moved[0]):
        return [*before[:-1], before[-1].model_copy(update={"end": moved[0].end}), *moved[1:]]
    return [*before, *moved]


def _same_weights(one: VersionSpan, other: VersionSpan) -> bool:
    return one.model_copy(update={"start": other.start, "end": other.end}) == other
