"""The decision record: the value in the state bucket that every worker and frontend obeys.

The committed state is one version of the base weights and a map adapter → version. Each update makes one version,
`made`, and so the next record. `newer` orders records, even if a store has lost some of them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rl_plane.protocol.canary import CanaryRecord, OnCanaryFailure
from rl_plane.protocol.stored import Stored
from rl_plane.protocol.versions import VersionReply, WeightVersion

PauseMode = Literal["keep", "wait", "abort"]
KvPolicy = Literal["recompute", "keep"]
Staging = Literal["host", "none"]
Encoding = Literal["full", "delta", "partial"]

SERVING_LEASE_S = 5.0
"""A worker or frontend admits requests only if it has confirmed the record with the leader in the last so many seconds.
This long after a decision no process serves the version before, even if it did not receive the decision."""
MAX_DELTAS = 32
"""Deltas and partial versions on one full version. Deltas of 2 to 3 % each add up to another full version, which a new
worker must fetch."""
COMMIT_TIMEOUT_S = 60.0
"""The default time-out of the swap and the canary on every worker."""
LEASE_MARGIN_S = 1.0
"""Covers two clocks that run at slightly different speeds, and a round trip."""
TAKEOVER_S = 3.0
"""A frontend takes an unfinished update over within this time after the lock is free: it looks each second. Until then
a worker stays closed if only other workers' scores can show that it passes the canary."""


@dataclass(frozen=True, slots=True)
class VersionSource(Stored):
    """The source from which a version's bytes can be fetched again."""

    transport: Mapping[str, Any] | None
    """The transport object of the request. None for sequence 0, which is each worker's own model."""
    cast: bool = False
    refetchable: bool = True
    staging: Staging = "host"
    keep_staged: bool = False
    encoding: Encoding = "full"
    base: str | None = None
    """For a delta or a partial version: the digest of the version that it changes."""
    before: VersionSource | None = None
    """For a delta or a partial version: the source of that version."""
    sent_bytes: int | None = None
    """The bytes of the tensors that each worker took. None: the worker's own model, or not known."""
    model_bytes: int | None = None
    """The bytes of all tensors of the version."""

    @property
    def deltas(self) -> int:
        """The number of deltas and partial versions on top of a full version."""
        return 0 if self.before is None else 1 + self.before.deltas

    def chain(self, digest: str) -> list[tuple[str, VersionSource]]:
        """The (digest, source) of the full version and of each change on top of it, up to this one."""
        before = [] if self.before is None or self.base is None else self.before.chain(self.base)
        return [*before, (digest, self)]

    @property
    def from_scratch(self) -> bool:
        """Reports whether a worker without any copy can fetch the version."""
        return self.refetchable and (self.before is None or self.before.from_scratch)


@dataclass(frozen=True, slots=True)
class CommittedAdapter(Stored):
    """A LoRA adapter in the committed state."""

    version: WeightVersion
    source: VersionSource


@dataclass(frozen=True, slots=True)
class Held(Stored):
    """A state of the weights: the one in a worker's engine, or the committed one."""

    version: WeightVersion
    """The version of the base weights."""
    adapters: Mapping[str, WeightVersion] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DecisionRecord(Stored):
    """The committed state, and the sources from which a worker can fetch its bytes."""

    version: WeightVersion
    """The version of the base weights."""
    source: VersionSource
    update_id: str
    """The id of the request that made it. Empty for sequence 0."""
    made: WeightVersion
    """The version that this update made: `version`, an adapter's version, or the mark of an unloaded adapter."""
    adapters: Mapping[str, CommittedAdapter] = field(default_factory=dict)
    run_number: int = 0
    """The number of runs before this one. A new run begins only by an explicit call."""
    rolling_from: Held | None = None
    """During a rolling update: the state before, which may be served too."""
    pause_mode: PauseMode = "keep"
    keep_pause: bool = False
    """The policy's treatment of running requests, for a worker that swaps by itself."""
    kv: KvPolicy = "recompute"
    """The policy's treatment of the KV of running requests, for a worker that has prepared the update."""
    commit_timeout_s: float = COMMIT_TIMEOUT_S
    """The policy's seconds for the swap and the canary on every worker, for a coordinator that finishes the update."""
    canary: CanaryRecord | None = None
    """The scores that the base weights must reach. None: no worker scores them."""
    on_canary_failure: OnCanaryFailure = "exclude"
    fallback: DecisionRecord | None = None
    """The record before, to which the fleet returns if every worker fails the canary. None: the version is open, or the
    fleet can't return."""
    missed: Mapping[str, Any] | None = None
    """The canary's result for the version of this update, which failed. This record brings the version before back."""
    open: bool = True
    """Whether it may be served. False from the decision until every member and every frontend has learnt it, has left,
    or has lost its serving lease."""
    decided_at: float = field(default_factory=time.time)
    """Unix seconds, for people. No decision depends on it."""
    fence: int = 0
    """The fence of the coordinator that decided it. 0 for sequence 0."""
    seal: int = field(default=0, compare=False)
    """The fence of the newest coordinator that has taken the record up: see `bus/sealed_record.py`."""
    barred: int = field(default=0, compare=False)
    """No coordinator with this fence or a lower one can write the record any more."""

    @property
    def sequence(self) -> int:
        return self.made.sequence

    @property
    def made_source(self) -> VersionSource:
        """The source of the version that this update made."""
        for adapter in self.adapters.values():
            if adapter.version == self.made:
                return adapter.source
        # An unloaded adapter has no source.
        return self.source if self.version == self.made else VersionSource(None)

    @property
    def held(self) -> Held:
        return Held(self.version, {name: adapter.version for name, adapter in self.adapters.items()})

    @property
    def sources(self) -> list[VersionSource]:
        """All sources from which a worker that heals may fetch, also after the return to `fallback`."""
        found: list[VersionSource] = []
        for source in (self.source, *(adapter.source for adapter in self.adapters.values())):
            before: VersionSource | None = source
            while before is not None:
                found.append(before)
                before = before.before
        return found + (self.fallback.sources if self.fallback is not None else [])

    @property
    def final(self) -> bool:
        """Reports whether the update has ended."""
        return self.open and self.rolling_from is None

    @property
    def restorable(self) -> bool:
        """Reports whether a worker that has lost these weights can fetch them again."""
        sources = (self.source, *(adapter.source for adapter in self.adapters.values()))
        return all(source.from_scratch for source in sources)

    def opened(self) -> DecisionRecord:
        return replace(self, open=True, rolling_from=None, fallback=None)


def new_run() -> str:
    """A new run id. Run ids sort by their time of creation, to a millisecond."""
    return f"{int(time.time() * 1000):012x}-{secrets.token_hex(2)}"


def first_record(digest: str, run_number: int = 0) -> DecisionRecord:
    """The record of sequence 0 of a new run: each worker's own model."""
    version = WeightVersion(new_run(), 0, "initial", digest)
    return DecisionRecord(version, VersionSource(None), "", version, run_number=run_number)


def newer(one: DecisionRecord, other: DecisionRecord | None) -> bool:
    """Reports whether `one` replaces `other`.

    A store may have lost writes that it had acknowledged, so the order follows from the records themselves. In one run
    the record with the higher seal is newer, because its coordinator had asked every worker for the newest one before.

    Two runs can have the same number if two stores were empty. Then the run with more versions counts, else the older
    run."""
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
class DesiredPause(Stored):
    """The pause that the fleet must have. A worker that joins a paused fleet starts paused."""

    paused: bool
    mode: str = "keep"
    until: float = 0.0
    """Unix seconds at which the lease ends, by the NATS server's clock (`Bus.server_time`)."""

    def left_s(self, now: float) -> float:
        """The seconds that the pause lasts from `now` on, which is the NATS server's time."""
        return max(0.0, self.until - now) if self.paused else 0.0


@dataclass(frozen=True, slots=True)
class DesiredMemory(Stored):
    """The memory that the fleet must have released. A worker that starts meanwhile releases its own before it opens.

    It has no lease, because a trainer uses the memory for an unknown time."""

    released: frozenset[str] = frozenset()
    """The tags that every worker must release, except those in `own`."""
    own: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """instance_id → tags, for workers that a call named by their ids."""

    def of(self, instance_id: str) -> frozenset[str]:
        return self.own.get(instance_id, self.released)

    def after(self, op: str, tags: Iterable[str], workers: Iterable[str] | None) -> DesiredMemory:
        """The desired memory after an op. `op`: release_memory or resume_memory. `workers` None: all."""

        def then(before: frozenset[str]) -> frozenset[str]:
            return before | set(tags) if op == "release_memory" else before - set(tags)

        if workers is not None:
            return replace(self, own={**self.own, **{one: then(self.of(one)) for one in workers}})
        released = then(self.released)
        own = {one: then(mine) for one, mine in self.own.items()}
        return DesiredMemory(released, {one: mine for one, mine in own.items() if mine != released})


@dataclass(frozen=True, slots=True)
class UpdateSession(Stored):
    """An update that spans several calls. It is prepared on every worker, and waits for complete or abort."""

    update_id: str
    label: str
    body: Mapping[str, Any]
    """The UpdateWeights body of the prepare call."""
    digest: str
    """Empty: the workers listen, and report the digest when they have received what the trainer pushes."""
    refetchable: bool
    prepared: Mapping[str, str]
    """instance_id → incarnation of the workers that hold it, or listen."""
    idle_s: int
    """Seconds of silence after which the server removes the session: the TTL of its key, counted by the server."""
    parts: int = 0
    """The number of parts that were received."""

    def updated(
        self, *, version: str | None = None, pause_mode: PauseMode | None = None, kv: KvPolicy | None = None
    ) -> UpdateSession:
        """The session with a label, a pause mode or a `kv` that its trainer gives only now. None: no change."""
        body = dict(self.body)
        if version is not None:
            body["version"] = version
        said = {"pause_mode": pause_mode, "kv": kv}
        if given := {name: value for name, value in said.items() if value is not None}:
            body["policy"] = {**body.get("policy", {}), **given}
        return replace(self, label=version or self.label, body=body)

    @property
    def listening(self) -> bool:
        """Reports whether the workers listen for what the trainer pushes. Else they hold verified bytes."""
        return not self.digest

    @property
    def owner(self) -> str | None:
        """The dialect whose calls continue the update. None: the body names none."""
        owner: str | None = self.body.get("owner")
        return owner
