"""The instructions that `WorkerCore` gives, and the facts about staging that it decides by.

The shell carries one instruction out and reports with the method of WorkerCore that stands after the arrow.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_plane.protocol.canary import CanaryRecord
from rl_plane.protocol.record import DecisionRecord, PauseMode, VersionSource
from rl_plane.protocol.versions import WeightVersion


@dataclass(frozen=True, slots=True)
class Read:
    """Read the record from the store's leader. → `leader_said`"""


@dataclass(frozen=True, slots=True)
class Relabel:
    """Set the labels of the record: its bytes are here already. → `relabelled`"""

    record: DecisionRecord


@dataclass(frozen=True, slots=True)
class Drop:
    """Discard this update from staging: no coordinator will swap it in. → `is_staged`"""

    update_id: str


@dataclass(frozen=True, slots=True)
class Swap:
    """Make what is staged under `update_id` the base weights, or the adapter `name`. → `swapped` or `swap_failed`"""

    update_id: str
    name: str | None
    version: WeightVersion
    pause_mode: PauseMode
    keep_kv: bool = False
    """Running requests keep the KV that they have."""


@dataclass(frozen=True, slots=True)
class Unload:
    """Unload the adapter. → `swapped` or `swap_failed`"""

    name: str
    pause_mode: PauseMode


@dataclass(frozen=True, slots=True)
class Fetch:
    """Receive a committed version into staging: from its recorded source, or from a worker that has a copy.
    → `is_staged` or `fetch_failed`"""

    update_id: str
    name: str | None
    """The adapter. None: base weights."""
    version: WeightVersion
    source: VersionSource


@dataclass(frozen=True, slots=True)
class ScoreCanary:
    """Score the canary's sequences with the weights that the engine holds. → `scored`, or `fetch_failed`"""

    canary: CanaryRecord


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the next event."""

    until: float | None = None
    """Monotonic seconds at which the wait ends at the latest. None: without a bound."""


Instruction = Read | Relabel | Drop | Swap | Unload | Fetch | ScoreCanary | Wait


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """Complete and verified weights beside the served ones, or over them (`in_place`)."""

    update_id: str
    name: str | None
    """The adapter. None: base weights."""
    digest: str
    fence: int | None
    """The coordinator's. None: this worker fetched the weights to heal."""
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatedUpdate:
    """An update that a coordinator has begun on this worker."""

    update_id: str
    fence: int
