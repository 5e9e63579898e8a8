"""Merges the queued token deltas of one request."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypeVar

from rl_plane.protocol.generation import GenerateDelta, VersionSpan
from rl_plane.protocol.prompt_tops import PromptTops
from rl_plane.protocol.routed_experts import RoutedExperts

T = TypeVar("T")


def joined(batch: list[GenerateDelta]) -> list[GenerateDelta]:
    """Merges the deltas into as few as possible, in their order.

    A delta with prompt logprobs stays alone, because they may fill a message. A delta of another version begins a new
    one, so that a reader who wants one version gets all of its tokens."""
    if len(batch) == 1:
        return batch
    parts = [[batch[0]]]
    for before, delta in itertools.pairwise(batch):
        if before.prompt_logprobs is not None or _begins_span(delta):
            parts.append([])
        parts[-1].append(delta)
    return [merged(part) for part in parts]


def _begins_span(delta: GenerateDelta) -> bool:
    return bool(delta.token_ids and delta.spans) and delta.spans[-1].end - delta.spans[-1].start <= len(
        delta.token_ids
    )


def merged(batch: list[GenerateDelta]) -> GenerateDelta:
    """Merges all deltas into one. It has spans of all tokens so far if one of the deltas has spans."""
    if len(batch) == 1:
        return batch[0]
    # A delta with rows that arrive before their tokens has nothing else.
    with_logprobs = any(delta.logprobs is not None for delta in batch)
    with_tops = any(delta.top_logprobs is not None for delta in batch)
    texts = [delta.prompt_text for delta in batch if delta.prompt_text is not None]
    spans: list[VersionSpan] = []
    for delta in batch:
        if delta.spans:
            spans = delta.spans
        elif spans and delta.token_ids:
            longer = {"end": spans[-1].end + len(delta.token_ids)}
            spans = [*spans[:-1], spans[-1].model_copy(update=longer)]
    return GenerateDelta(
        token_ids=[token for delta in batch for token in delta.token_ids],
        logprobs=[value for delta in batch for value in delta.logprobs or []] if with_logprobs else None,
        top_logprobs=[top for delta in batch for top in delta.top_logprobs or []] if with_tops else None,
        token_texts=_united(delta.token_texts for delta in batch),
        text="".join(delta.text for delta in batch),
        finish_reason=batch[-1].finish_reason,
        stop_string=batch[-1].stop_string,
        spans=spans,
        prompt_token_ids=_first(delta.prompt_token_ids for delta in batch),
        prompt_logprobs=_first(delta.prompt_logprobs for delta in batch),
        prompt_tops=PromptTops.joined(delta.prompt_tops for delta in batch),
        prompt_token_texts=_united(delta.prompt_token_texts for delta in batch),
        prompt_text="".join(texts) if texts else None,
        routed_experts=RoutedExperts.joined(delta.routed_experts for delta in batch),
        pooled=_first(delta.pooled for delta in batch),
    )


def _united(every: Iterable[dict[str, str] | None]) -> dict[str, str] | None:
    known = [one for one in every if one is not None]
    return {token: text for one in known for token, text in one.items()} if known else None


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)
