"""What the fleet has decided: the record in the state bucket that every worker and frontend obeys."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rl_plane.bus import Bus, Entry
from rl_plane.subjects import PAUSE, RECORD, SESSION, Bucket
from rl_plane.versions import WeightVersion

PauseMode = Literal["keep", "wait", "abort"]

SERVING_LEASE_S = 5.0
"""A worker admits requests only if it has confirmed the record with the leader in the last so many seconds. So
long after a decision nobody serves the version before, whoever could not be told."""
LEASE_MARGIN_S = 1.0
"""Two clocks that run at slightly different speeds, and a round trip."""


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """The committed version, and where its bytes can be fetched again by a worker that lacks them."""

    version: WeightVersion
    update_id: str
    """The request that made it; empty for sequence 0."""
    transport: Mapping[str, Any] | None
    """The request's transport object; None for sequence 0, which is each worker's own model."""
    cast: bool = False
    refetchable: bool = True
    pause_mode: PauseMode = "keep"
    keep_pause: bool = False
    """How a worker that has to swap by itself treats its running requests, as the update's policy says."""
    open: bool = True
    """May it be served already? False from the decision until every member is gated, has left, or has lost its
    serving lease."""
    decided_at: float = field(default_factory=time.time)
    """Unix seconds, for people; nothing is decided by it."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> DecisionRecord:
        wire = json.loads(data)
        return cls(**{**wire, "version": WeightVersion.from_wire(wire["version"])})


@dataclass(frozen=True, slots=True)
class DesiredPause:
    """Pause is desired state: a worker that joins a paused fleet starts paused."""

    paused: bool
    mode: str = "keep"
    until: float = 0.0
    """Unix seconds at which the lease ends."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> DesiredPause:
        return cls(**json.loads(data))

    def left_s(self, now: float) -> float:
        return max(0.0, self.until - now) if self.paused else 0.0


@dataclass(frozen=True, slots=True)
class UpdateSession:
    """An update that spans several calls: prepared everywhere, waiting for complete or abort."""

    update_id: str
    label: str
    body: Mapping[str, Any]
    """The prepare call's UpdateWeights body."""
    digest: str
    refetchable: bool
    prepared: Mapping[str, str]
    """instance_id → incarnation of those that hold it."""
    expires_at: float
    """Unix seconds; silence until then aborts it."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> UpdateSession:
        return cls(**json.loads(data))

    def live(self, now: float) -> bool:
        return now < self.expires_at


def record_of(entry: Entry | None) -> DecisionRecord | None:
    return DecisionRecord.decode(entry.value) if entry is not None and entry.value else None


async def read_record(bus: Bus, state: Bucket) -> DecisionRecord | None:
    """From the leader. None: no worker has fixed sequence 0 yet."""
    return record_of(await bus.get(state, RECORD))


async def read_pause(bus: Bus, state: Bucket) -> DesiredPause:
    entry = await bus.get(state, PAUSE)
    return DesiredPause.decode(entry.value) if entry is not None and entry.value else DesiredPause(False)


async def read_session(bus: Bus, state: Bucket) -> UpdateSession | None:
    entry = await bus.get(state, SESSION)
    return UpdateSession.decode(entry.value) if entry is not None and entry.value else None
