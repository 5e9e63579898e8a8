"""The facts that the doctor judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """The reply of one question, and when it was asked and answered: Unix seconds of this machine."""

    reply: Row
    since: float
    until: float

    def clock_off_s(self, clock: float) -> float:
        """The seconds by which a clock is ahead, if it was read between question and answer. 0: it may agree."""
        if clock < self.since:
            return clock - self.since
        return max(0.0, clock - self.until)


@dataclass(frozen=True, slots=True)
class NatsFacts:
    """NATS, as this command itself reaches it."""

    url: str
    role: str | None
    """The role of the key for NATS. None: no key, or a key without a role."""
    key: str
    """The public key. Empty: no key."""
    error: Row | None = None
    """Why it could not be asked, as on the wire."""
    server: Row | None = None
    """`Bus.about`."""
    round_trip_s: float = 0.0
    clock: Asked | None = None
    """The reply has `clock`. None: there is no bucket to ask."""
    account: Row | None = None
    account_error: str = ""
    buckets: Mapping[str, Row | None] = field(default_factory=dict)
    """The bucket's name → its stream's configuration. None: there is none."""
    bucket_errors: Mapping[str, str] = field(default_factory=dict)
    write_error: Row | None = None
    """Why the state's bucket did not take a write, as on the wire. Empty: it took one. None: there is no bucket."""
    frontends: Sequence[str] | None = None
    """The frontends that have confirmed within seconds that they may deliver tokens. None: not read."""


@dataclass(frozen=True, slots=True)
class DoctorFacts:
    """The facts that were read for one examination."""

    version: str
    """The version of rl_plane of this command."""
    url: str
    about: Asked | None = None
    """`GET /v1/rl/about`. None: no frontend was asked, or `about_error` says why it did not answer."""
    about_error: Row | None = None
    describe: Asked | None = None
    """The reply of the op `describe` with `host`."""
    describe_error: Row | None = None
    nats: NatsFacts | None = None
    """It is None if this machine did not ask NATS."""
    nats_was_named: bool = False
    """The operator has named the NATS server, so this machine must reach it."""
    roots: Sequence[str] = ()
    """The weight roots that the operator has named."""

    @property
    def rows(self) -> Sequence[Row]:
        """The workers that have described themselves."""
        found = self.describe.reply["workers"] if self.describe is not None else ()
        return [row for row in found if row.get("status") == "ok" and row.get("host")]
