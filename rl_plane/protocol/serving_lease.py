"""The serving lease: a worker admits requests, and a frontend routes them, only while it holds one. Pure.

docs/decisions/serving-lease.md says why.
"""

from __future__ import annotations

from rl_plane.protocol.record import SERVING_LEASE_S

Connection = tuple[str, int]
"""Server id and client id: see `Bus.identity`."""


class ServingLease:
    """Lasts SERVING_LEASE_S from the moment when its holder asked the leader for the record, on one connection."""

    def __init__(self) -> None:
        self.until = 0.0
        """In the seconds of the clock that `asked_at` and `now` are told by."""
        self._connection: Connection | None = None
        """The connection on which the lease was confirmed: while it was down, anything may have been decided."""

    def confirm(self, asked_at: float, connection: Connection) -> bool:
        """Notes that the leader has told the record after `asked_at`. False: a later question was answered before."""
        if asked_at + SERVING_LEASE_S <= self.until:
            return False
        self.until, self._connection = asked_at + SERVING_LEASE_S, connection
        return True

    def give_up(self) -> None:
        self.until = 0.0

    def holds(self, now: float, connection: Connection) -> bool:
        return now < self.until and connection == self._connection
