"""The serving lease: a worker admits requests, and a frontend routes them, only while it has one. Pure.

docs/decisions/serving-lease.md has the reasons.
"""

from __future__ import annotations

from rl_plane.protocol.record import SERVING_LEASE_S

Connection = tuple[str, int]
"""Server id and client id: see `Bus.identity`."""


class ServingLease:
    """A lease of SERVING_LEASE_S, from the moment at which its holder asked the leader for the record, on one
    connection."""

    def __init__(self) -> None:
        self.until = 0.0
        """The end of the lease, by the clock of `asked_at` and `now`."""
        self._connection: Connection | None = None
        """The connection on which the lease was confirmed. While it is down, the fleet may decide anything."""

    def confirm(self, asked_at: float, connection: Connection) -> bool:
        """Notes that the leader has sent the record, for a question asked at `asked_at`. False: a later question was
        answered before."""
        if asked_at + SERVING_LEASE_S <= self.until:
            return False
        self.until, self._connection = asked_at + SERVING_LEASE_S, connection
        return True

    def give_up(self) -> None:
        self.until = 0.0

    def holds(self, now: float, connection: Connection) -> bool:
        return now < self.until and connection == self._connection
