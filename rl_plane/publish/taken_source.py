"""The source of the attempts that send from host memory, and the errors of a base that is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rl_plane.errors import NotAtBase, PlaneError
from rl_plane.publish.sources.base import Taken


@dataclass(frozen=True, slots=True)
class TakenSource:
    """A WeightSource of tensors that lie in the publisher's own host memory."""

    take: Callable[[], Taken]
    collective = False
    adapter = False


def is_not_at_base(error: PlaneError) -> bool:
    """True if the error says that a change can't be applied, at the fleet or on some worker."""
    return isinstance(error, NotAtBase) or says_not_at_base(error.facts.get("workers"))


def says_not_at_base(rows: object) -> bool:
    """True if a worker's row, of a reply or of an error, says that a change can't be applied."""
    codes = [(row.get("error") or {}).get("code") for row in rows] if isinstance(rows, list) else []
    return NotAtBase.code in codes
