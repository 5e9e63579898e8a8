"""The shape of an op's handler, and of what it returns."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol


class ByRank(dict[str, Any]):
    """A reply body, together with the results of the engine's ranks."""

    def __init__(self, body: Mapping[str, Any], ranks: list[dict[str, Any]]) -> None:
        super().__init__(body)
        self.ranks = ranks


class Handler(Protocol):
    """Carries out one op. `body` is the op's checked request.

    A plain function answers at once, on the NATS loop. A coroutine function may wait. `fence` is 0 for an op that
    changes nothing.
    """

    def __call__(self, body: Any, fence: int, /) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]: ...
