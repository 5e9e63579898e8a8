"""Which worker gets a request: the pure router. Who may get one at all is `fleet_status.py`'s word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set


class Router:
    """The least loaded; among equals the one whose last turn is longest ago.

    Load is what a worker reported (up to 2 s old) plus what this frontend has open there: the first spreads over
    several frontends, the second reacts at once."""

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()
        self._last_turn: dict[str, int] = {}
        self._turns = 0

    def pick(self, reported: Mapping[str, int], excluded: Set[str] = frozenset()) -> str | None:
        """`reported`: instance id → load of every admitted worker. None: nobody is left."""

        def rank(instance_id: str) -> tuple[int, int, str]:
            load = reported[instance_id] + self._in_flight[instance_id]
            return load, self._last_turn.get(instance_id, 0), instance_id

        return min((key for key in reported if key not in excluded), key=rank, default=None)

    def started(self, instance_id: str) -> None:
        self._turns += 1
        self._in_flight[instance_id] += 1
        self._last_turn[instance_id] = self._turns

    def ended(self, instance_id: str) -> None:
        self._in_flight[instance_id] -= 1
        if self._in_flight[instance_id] <= 0:
            del self._in_flight[instance_id]

    def forget(self, instance_id: str) -> None:
        """It left the fleet; its requests still say `ended`."""
        self._last_turn.pop(instance_id, None)

    def in_flight(self, instance_id: str | None = None) -> int:
        return self._in_flight.total() if instance_id is None else self._in_flight[instance_id]
