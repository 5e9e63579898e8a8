"""Decides when another node is gone or hangs. Pure: the caller passes the time in."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PeerWatch:
    """Notes the outcome of each ping of one node."""

    hang_s: float
    """Seconds of silence after which the node hangs."""
    gone_s: float
    """Seconds without a subscriber after which the node is gone."""
    now: float
    """The time of the last note."""
    _silent_s: float = field(default=0.0, init=False)
    _missing_s: float = field(default=0.0, init=False)
    """Seconds without a subscriber."""

    def heard(self, now: float) -> None:
        self.now, self._silent_s, self._missing_s = now, 0.0, 0.0

    def silent(self, now: float) -> None:
        """The node has not answered in time."""
        self._silent_s += now - self.now
        self._missing_s = 0.0
        self.now = now

    def missing(self, now: float) -> None:
        """No process listens to the node's subject."""
        self._missing_s += now - self.now
        self._silent_s += now - self.now
        self.now = now

    def cut_off(self, now: float) -> None:
        """This process has no connection to NATS, so the ping says nothing about the node."""
        self.now = now

    @property
    def silent_s(self) -> float:
        """The seconds since the node has answered."""
        return self._silent_s

    @property
    def gone(self) -> bool:
        return self._missing_s >= self.gone_s

    @property
    def hangs(self) -> bool:
        return self._silent_s >= self.hang_s
