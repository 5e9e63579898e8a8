"""How SGLang comes to tell of a request whose logits are no numbers, by its own ways to extend what is sampled and what
is sent: an observer in each rank notes it down with the tokens, and what the first rank sends says so from then on. The
adapter ends the request: by an abort, which all ranks get at the same place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.engines.common.finite_logits import take_out

NOTE = "rl_plane_not_finite"
"""Of a request in a rank, and in what a reply says beside its tokens."""


@dataclass(frozen=True, slots=True)
class Found:
    """`rows`: of a batch, on its device and then on the host, as SGLang's protocols for such outputs want it."""

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
    """In place of SGLang's class that sends what was made, `streamer`: one whose messages have the note."""

    class Telling(streamer):  # type: ignore[misc]
        __slots__ = ()
        has_additional_customized_info = True

        def build_additional_customized_info(self, requests: list[Any]) -> dict[str, list[bool]]:
            noted = [hasattr(request, NOTE) for request in requests]
            return {NOTE: noted} if any(noted) else {}

    return Telling


def tell(original: Any, manager: Any, meta: dict[str, Any], state: Any, told: Any, index: int, *more: Any) -> None:
    """Around what puts into a reply (`meta`) what a message says beside its tokens. SGLang takes all of that as lists
    with an item for each token, of which it gives the new ones."""
    told = dict(told)
    if told.pop(NOTE, [False] * (index + 1))[index]:
        meta[NOTE] = True
    original(manager, meta, state, told, index, *more)
