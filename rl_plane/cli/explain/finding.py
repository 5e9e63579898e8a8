"""One thing that keeps a fleet from serving, or an update or a request from ending."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    subject: str
    """`NATS`, `lock`, `pause`, `fleet`, or the id of a worker, update or request."""
    kind: str
    """`nats`, `lock`, `pause`, `fleet`, `worker`, `update` or `request`."""
    cause: str
    """The cause, as a sentence without its subject."""
    fix: str
    waits_for: str = ""
    until: str = ""
    """The time at which it ends by itself, in words. Empty: it does not, or the time is not known."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.subject}" if self.kind in ("worker", "update", "request") else self.subject

    def line(self) -> str:
        """The finding in one line."""
        until = f"; ends {self.until}" if self.until else ""
        return f"{self.name} {self.cause}{until}; fix: {self.fix}"
