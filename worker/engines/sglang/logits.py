"""Looks at SGLang's logits as the model made them, before grammars and biases change them.

Raw logprobs are of these logits. A request whose logits are not finite numbers ends: an observer in each rank marks it
when its token is sampled. The messages of the first rank then carry the mark, and the adapter ends the request by an
abort, which all ranks get at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.engines.common.finite_logits import take_out

NOTE = "rl_plane_not_finite"
"""The name of the mark, on a request in a rank and in a reply beside its tokens."""


RAW = "rl_plane_raw_logits"
"""The attribute of a batch's sampling parameters that has its logits from before grammars and biases."""


@dataclass(frozen=True, slots=True)
class Found:
    """The marked rows of a batch, first on its device and then on the host, as SGLang's protocols for such outputs want
    it."""

    rows: Any

    def copy_to_host(self, copy: Callable[[Any], Any]) -> Found:
        return Found(copy(self.rows))

    def to_pp_tensors(self) -> Mapping[str, Any]:
        return {"rows": self.rows.int()}

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """`commits`: None for each request that got no token."""
        for request, commit, found in zip(batch.reqs, commits, self.rows.tolist(), strict=False):
            if found and commit is not None:
                setattr(request, NOTE, True)


class Observer:
    """SGLang's SamplingObserver. `raw_logprobs`: logprobs are of the raw logits."""

    def __init__(self, raw_logprobs: bool) -> None:
        self._raw_logprobs = raw_logprobs

    def is_active(self, sampling: Any) -> bool:
        return True

    def before_grammar(self, logits: Any, sampling: Any) -> Any:
        found = take_out(logits)
        if self._raw_logprobs and (sampling.grammar_mask is not None or sampling.logit_bias is not None):
            setattr(sampling, RAW, logits.clone())
        return found

    def after_sample(self, rows: Any, token_ids: Any) -> Found:
        return Found(rows)

    def from_pp_tensors(self, tensors: Mapping[str, Any]) -> Found:
        return Found(tensors["rows"])


def sample_with_raw_logprobs(
    original: Any, sampler: Any, output: Any, sampling: Any, logprobs: bool, *more: Any, **named: Any
) -> Any:
    """Wraps SGLang's sampler, whose `logprob_logits` are the logits of the logprobs."""
    raw = sampling.__dict__.pop(RAW, None)
    if logprobs and raw is not None:
        named.setdefault("logprob_logits", raw)
    return original(sampler, output, sampling, logprobs, *more, **named)


def telling(streamer: Any, scheduler: Any) -> Any:
    """Returns a subclass of SGLang's class that sends tokens, `streamer`, whose messages carry the mark."""

    class Telling(streamer):  # type: ignore[misc]
        __slots__ = ()
        has_additional_customized_info = True

        def build_additional_customized_info(self, requests: list[Any]) -> dict[str, list[bool]]:
            noted = [hasattr(request, NOTE) for request in requests]
            return {NOTE: noted} if any(noted) else {}

    return Telling


def tell(original: Any, manager: Any, meta: dict[str, Any], state: Any, told: Any, index: int, *more: Any) -> None:
    """Wraps the function that copies a message's other data into a reply (`meta`). SGLang takes all of that as lists
    with an item per token, and returns the new items."""
    told = dict(told)
    if told.pop(NOTE, [False] * (index + 1))[index]:
        meta[NOTE] = True
    original(manager, meta, state, told, index, *more)
