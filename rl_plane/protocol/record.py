"""What the fleet has decided: the record in the state bucket that every worker and frontend obeys.

The committed state is one version of the base weights and a map adapter → version. Each update makes one version,
`made`, and so the next record; records are ordered by `newer`, whatever the store has kept of them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rl_plane.protocol.canary import CanaryRecord, OnCanaryFailure
from rl_plane.protocol.versions import VersionReply, WeightVersion

PauseMode = Literal["keep", "wait", "abort"]
Staging = Literal["host", "none"]
Encoding = Literal["full", "delta"]

SERVING_LEASE_S = 5.0
"""A worker or frontend admits requests only if it has confirmed the record with the leader in the last so many
seconds. So long after a decision nobody serves the version before, whoever could not be told."""
MAX_DELTAS = 32
"""On one full version: so many, of 2 to 3 % each, are as much again for a worker that has to fetch them all."""
LEASE_MARGIN_S = 1.0
"""Two clocks that run at slightly different speeds, and a round trip."""
TAKEOVER_S = 3.0
"""A frontend that runs takes an update over within this once the lock is free: it looks each second. Until then a
worker that only other workers' scores can judge stays closed."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a version's bytes can be fetched again."""

    transport: Mapping[str, Any] | None
    """The request's transport object; None for sequence 0, which is each worker's own model."""
    cast: bool = False
    refetchable: bool = True
    staging: Staging = "host"
    keep_staged: bool = False
    encoding: Encoding = "full"
    base: str | None = None
    """Of a delta: the digest of the version that it changes."""
    before: Source | None = None
    """Of a delta: that version's source."""

    @property
    def deltas(self) -> int:
        """On top of a full version."""
        return 0 if self.before is None else 1 + self.before.deltas

    def chain(self, digest: str) -> list[tuple[str, Source]]:
        """(digest, source) of the full version and of each that a delta has made of it, up to this one's."""
        before = [] if self.before is None or self.base is None else self.before.chain(self.base)
        return [*before, (digest, self)]

    @property
    def from_scratch(self) -> bool:
        """Can a worker that keeps nothing fetch it?"""
        return self.refetchable and (self.before is None or self.before.from_scratch)

    def to_wire(self) -> dict[str, Any]:
        return {
            "transport": self.transport,
            "cast": self.cast,
            "refetchable": self.refetchable,
            "staging": self.staging,
            "keep_staged": self.keep_staged,
            "encoding": self.encoding,
            "base": self.base,
            "before": self.before.to_wire() if self.before is not None else None,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Source:
        before = wire.get("before")
        return cls(**{**wire, "before": cls.from_wire(before) if before is not None else None})


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that belongs to the committed state."""

    version: WeightVersion
    source: Source

    def to_wire(self) -> dict[str, Any]:
        return {"version": self.version.to_wire(), "source": self.source.to_wire()}


@dataclass(frozen=True, slots=True)
class Held:
    """A state of the weights: what a worker's engine holds, or what is committed."""

    version: WeightVersion
    """Of the base weights."""
    adapters: Mapping[str, WeightVersion] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        adapters = {name: version.to_wire() for name, version in self.adapters.items()}
        return {"version": self.version.to_wire(), "adapters": adapters}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Held:
        adapters = {name: WeightVersion.from_wire(version) for name, version in wire["adapters"].items()}
        return cls(WeightVersion.from_wire(wire["version"]), adapters)


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """The committed state, and where the bytes can be fetched again by a worker that lacks them."""

    version: WeightVersion
    """Of the base weights."""
    source: Source
    update_id: str
    """The request that made it; empty for sequence 0."""
    made: WeightVersion
    """The version that this update made: `version`, an adapter's, or the mark of one that was unloaded."""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    run_number: int = 0
    """How many runs there were before: a new one begins only by an explicit call."""
    rolling_from: Held | None = None
    """While a rolling update goes on: the state before, which may be served beside this one."""
    pause_mode: PauseMode = "keep"
    keep_pause: bool = False
    """How a worker that has to swap by itself treats its running requests, as the update's policy says."""
    canary: CanaryRecord | None = None
    """What the base weights must compute. None: nothing scores them."""
    on_canary_failure: OnCanaryFailure = "exclude"
    fallback: DecisionRecord | None = None
    """The record before, which comes back if every worker fails the canary. None: nothing can come back, or the version
    is open."""
    missed: Mapping[str, Any] | None = None
    """What the canary has shown of the update's own version. This record brings the version before back."""
    open: bool = True
    """May it be served already? False from the decision until every member and every frontend has learnt it, has left,
    or has lost its serving lease."""
    decided_at: float = field(default_factory=time.time)
    """Unix seconds, for people; nothing is decided by it."""
    fence: int = 0
    """The fence of the coordinator that decided it; 0 for sequence 0."""
    seal: int = field(default=0, compare=False)
    """The fence of the newest coordinator that has taken the record up: see `seal.py`."""
    barred: int = field(default=0, compare=False)
    """No coordinator with this fence or a lower one can write the record any more."""

    @property
    def sequence(self) -> int:
        return self.made.sequence

    @property
    def made_source(self) -> Source:
        """Of the version that this update made."""
        for adapter in self.adapters.values():
            if adapter.version == self.made:
                return adapter.source
        return self.source if self.version == self.made else Source(None)  # nothing brings an adapter that went

    @property
    def held(self) -> Held:
        return Held(self.version, {name: adapter.version for name, adapter in self.adapters.items()})

    @property
    def sources(self) -> list[Source]:
        """All from which a worker that heals may fetch."""
        found: list[Source] = []
        for source in (self.source, *(adapter.source for adapter in self.adapters.values())):
            before: Source | None = source
            while before is not None:
                found.append(before)
                before = before.before
        return found

    @property
    def final(self) -> bool:
        """Nothing more is to come of this update."""
        return self.open and self.rolling_from is None

    @property
    def restorable(self) -> bool:
        """Can a worker that has lost these weights get them again?"""
        sources = (self.source, *(adapter.source for adapter in self.adapters.values()))
        return all(source.from_scratch for source in sources)

    def opened(self) -> DecisionRecord:
        return replace(self, open=True, rolling_from=None, fallback=None)

    def to_wire(self) -> dict[str, Any]:
        # Each worker makes one for each update: `asdict` takes twenty times as long.
        return {
            "version": self.version.to_wire(),
            "source": self.source.to_wire(),
            "update_id": self.update_id,
            "made": self.made.to_wire(),
            "adapters": {name: adapter.to_wire() for name, adapter in self.adapters.items()},
            "run_number": self.run_number,
            "rolling_from": self.rolling_from.to_wire() if self.rolling_from is not None else None,
            "pause_mode": self.pause_mode,
            "keep_pause": self.keep_pause,
            "canary": self.canary.to_wire() if self.canary is not None else None,
            "on_canary_failure": self.on_canary_failure,
            "fallback": self.fallback.to_wire() if self.fallback is not None else None,
            "missed": self.missed,
            "open": self.open,
            "decided_at": self.decided_at,
            "fence": self.fence,
            "seal": self.seal,
            "barred": self.barred,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> DecisionRecord:
        adapters = {
            name: Adapter(WeightVersion.from_wire(one["version"]), Source.from_wire(one["source"]))
            for name, one in wire["adapters"].items()
        }
        rolling, canary, fallback = wire["rolling_from"], wire["canary"], wire["fallback"]
        return cls(
            **{
                **wire,
                "version": WeightVersion.from_wire(wire["version"]),
                "made": WeightVersion.from_wire(wire["made"]),
                "source": Source.from_wire(wire["source"]),
                "adapters": adapters,
                "rolling_from": Held.from_wire(rolling) if rolling is not None else None,
                "canary": CanaryRecord.from_wire(canary) if canary is not None else None,
                "fallback": cls.from_wire(fallback) if fallback is not None else None,
            }
        )

    def encode(self) -> bytes:
        return json.dumps(self.to_wire()).encode()

    @classmethod
    def decode(cls, data: bytes) -> DecisionRecord:
        return cls.from_wire(json.loads(data))


def new_run() -> str:
    """Sorts by its birth, to a millisecond."""
    return f"{int(time.time() * 1000):012x}-{secrets.token_hex(2)}"


def first_record(digest: str, run_number: int = 0) -> DecisionRecord:
    """Sequence 0 of a new run: each worker's own model."""
    version = WeightVersion(new_run(), 0, "initial", digest)
    return DecisionRecord(version, Source(None), "", version, run_number=run_number)


def newer(one: DecisionRecord, other: DecisionRecord | None) -> bool:
    """Reports whether `one` replaces `other`, wherever the two are found.

    A store may have lost writes that it had acknowledged, so the order comes from the records themselves. In one run
    the higher seal is newer: the coordinator that wrote it had asked every worker for the newest record before.

    Two stores that were found empty can begin two runs under one number. Then the run with more versions counts, else
    the older one."""
    if other is None:
        return True
    if one.run_number != other.run_number:
        return one.run_number > other.run_number
    if one.version.run != other.version.run:
        if one.sequence != other.sequence:
            return one.sequence > other.sequence
        return one.version.run < other.version.run
    return (one.seal, one.sequence, one.final) > (other.seal, other.sequence, other.final)


def version_wire(record: DecisionRecord | None) -> VersionReply | None:
    return record.version.to_wire() if record is not None else None


@dataclass(frozen=True, slots=True)
class DesiredPause:
    """Pause is desired state: a worker that joins a paused fleet starts paused."""

    paused: bool
    mode: str = "keep"
    until: float = 0.0
    """Unix seconds at which the lease ends, by the NATS server's clock (`Bus.server_time`)."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> DesiredPause:
        return cls(**json.loads(data))

    def left_s(self, now: float) -> float:
        """`now`: the NATS server's time."""
        return max(0.0, self.until - now) if self.paused else 0.0


@dataclass(frozen=True, slots=True)
class DesiredMemory:
    """Released memory is desired state: a worker that starts anew while the fleet's is released releases its own before
    it opens. It has no lease: a trainer has the memory, and nobody knows for how long."""

    released: frozenset[str] = frozenset()
    """Tags, of every worker that is not among `own`."""
    own: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """instance_id → tags, of workers that were asked by their ids."""

    def of(self, instance_id: str) -> frozenset[str]:
        return self.own.get(instance_id, self.released)

    def after(self, op: str, tags: Iterable[str], workers: Iterable[str] | None) -> DesiredMemory:
        """`op`: release_memory or resume_memory. `workers`: None is all."""

        def then(before: frozenset[str]) -> frozenset[str]:
            return before | set(tags) if op == "release_memory" else before - set(tags)

        if workers is not None:
            return replace(self, own={**self.own, **{one: then(self.of(one)) for one in workers}})
        released = then(self.released)
        own = {one: then(mine) for one, mine in self.own.items()}
        return DesiredMemory(released, {one: mine for one, mine in own.items() if mine != released})

    def encode(self) -> bytes:
        own = {one: sorted(tags) for one, tags in self.own.items()}
        return json.dumps({"released": sorted(self.released), "own": own}).encode()

    @classmethod
    def decode(cls, data: bytes) -> DesiredMemory:
        wire = json.loads(data)
        return cls(frozenset(wire["released"]), {one: frozenset(tags) for one, tags in wire["own"].items()})


@dataclass(frozen=True, slots=True)
class UpdateSession:
    """An update that spans several calls: prepared everywhere, waiting for complete or abort."""

    update_id: str
    label: str
    body: Mapping[str, Any]
    """The prepare call's UpdateWeights body."""
    digest: str
    """Empty: the workers listen, and tell it when they have received what the trainer pushes."""
    refetchable: bool
    prepared: Mapping[str, str]
    """instance_id → incarnation of those that hold it, or listen."""
    idle_s: int
    """Seconds of silence after which the server removes the session: the TTL of its key, counted by the server."""
    parts: int = 0
    """How many parts a fed update has received."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> UpdateSession:
        return cls(**json.loads(data))

    def updated(self, *, version: str | None = None, pause_mode: PauseMode | None = None) -> UpdateSession:
        """The session with a label or a pause mode that its trainer gives only now. None: no change."""
        body = dict(self.body)
        if version is not None:
            body["version"] = version
        if pause_mode is not None:
            body["policy"] = {**body["policy"], "pause_mode": pause_mode}
        return replace(self, label=version or self.label, body=body)

    @property
    def listening(self) -> bool:
        """The workers listen for what the trainer pushes. Else they hold verified bytes."""
        return not self.digest

    @property
    def owner(self) -> str | None:
        """Who goes on with it, where its body says so."""
        owner: str | None = self.body.get("owner")
        return owner
