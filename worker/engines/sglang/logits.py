"""Reports requests of SGLang whose logits are not finite numbers.

An observer in each rank marks such a request when its token is sampled. The messages of the first rank then carry the
mark, and the adapter ends the request by an abort, which all ranks get at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.engines.common.finite_logits import take_out

NOTE = "rl_plane_not_finite"
"""The name of the mark, on a request in a rank and in a reply beside its tokens."""


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
    """SGLang's SamplingObserver."""

    def is_active(self, sampling: Any) -> bool:
        return True

    def before_grammar(self, logits: Any, sampling: Any) -> Any:
        return take_out(logits)

    def after_sample(self, rows: Any, token_ids: Any) -> Found:
        return Found(rows)

    def from_pp_tensors(self, tensors: Mapping[str, Any]) -> Found:
        return Found(tensors["rows"])


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
