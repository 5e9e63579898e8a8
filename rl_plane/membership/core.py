"""The members of the fleet: the pure core. Events in, instructions out; no clock, no I/O.

The members bucket is the truth. A member's key has no TTL and is written only when a worker joins, leaves or is removed
as dead, so the stream's sequence is the membership epoch. `view.py` feeds this core and carries out its instructions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from rl_plane.bus.entries import decoded
from rl_plane.protocol.generation import RAW_LOGPROBS
from rl_plane.protocol.subjects import MEMBER_PREFIX, Entry

_RECORD_TYPES: dict[str, type] = {"incarnation": str, "server_id": str, "client_id": int, "info": dict}
PARSES_CALLS = "parses_calls"
"""The field of `Member.info` by which a worker says that it answers the op `parse_tool_calls`."""
_INFO_TYPES: dict[str, type] = {
    "model_path": str,
    "world_size": int,
    "max_model_len": int,
    "pipeline_stage": str,
    "host": str,
    "logprobs_mode": str,
    PARSES_CALLS: bool,
    "nodes": list,
}
"""Fields of `Member.info` that other processes compute with. A worker may leave one out, or write None."""


@dataclass(frozen=True, slots=True)
class Member:
    """A registered worker. `revision` is the sequence of its record: a reconnect gives a new one, a new process
    also a new `incarnation`."""

    instance_id: str
    incarnation: str
    server_id: str
    client_id: int
    revision: int
    info: Mapping[str, Any]
    """engine, model, model_path, host, pid, world_size, transports."""

    @property
    def pipeline_stage(self) -> str | None:
        """The reason why a pipeline stage without the model skips the ops of engines. None: the worker has an
        engine."""
        return self.info.get("pipeline_stage")

    @property
    def logprobs_mode(self) -> str | None:
        """The mode of the logprobs of its completions. None: it makes no tokens."""
        if self.pipeline_stage is not None or self.info.get("task", "generate") != "generate":
            return None
        return self.info.get("logprobs_mode") or RAW_LOGPROBS

    @property
    def hosts(self) -> int:
        """The number of hosts that its engine spans. On each of them one process receives the weights."""
        return max(1, len(self.info.get("nodes") or ()))

    def to_record(self) -> bytes:
        packed: bytes = msgpack.packb({name: getattr(self, name) for name in _RECORD_TYPES})
        return packed

    @classmethod
    def from_entry(cls, entry: Entry) -> Member | None:
        """The worker that an entry registers. None: the key is absent, or the entry can't be read."""
        record = decoded(entry, _decode_record)
        if record is None:
            return None
        values = {name: record[name] for name in _RECORD_TYPES}
        return cls(entry.key[len(MEMBER_PREFIX) :], revision=entry.sequence, **values)


def _decode_record(value: bytes) -> dict[str, Any]:
    record = msgpack.unpackb(value)
    if not isinstance(record, dict):
        raise TypeError(f"the record is a {type(record).__name__}")
    for name, kind in _RECORD_TYPES.items():
        if type(record.get(name)) is not kind:
            raise TypeError(f"{name} is {record.get(name)!r}")
    for name, kind in _INFO_TYPES.items():
        found = record["info"].get(name)
        if found is not None and type(found) is not kind:
            raise TypeError(f"info.{name} is {found!r}")
    return record


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet at one epoch, in the order of the instance ids."""

    epoch: int
    fingerprint: str
    """The `fingerprint` of `members`."""
    members: tuple[Member, ...]
    """The workers with an engine. Calls, counts and routes mean these."""
    pipeline_stages: tuple[Member, ...] = ()
    """Workers without an engine. They only get a row in each reply."""

    def __iter__(self) -> Any:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)


def fingerprint(members: Iterable[Member]) -> str:
    """16 hex digits over the sorted (instance id, incarnation) pairs: equal for equal sets of processes."""
    lines = sorted(f"{member.instance_id} {member.incarnation}" for member in members)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Resync:
    """Read the whole bucket again and call `snapshot_read`."""


@dataclass(frozen=True, slots=True)
class Purge:
    """Delete a dead member's key, as a compare-and-set. If another process has written it first, nothing is to do."""

    instance_id: str
    revision: int


@dataclass(frozen=True, slots=True)
class Changed:
    """A change of one member. `after` None: it left or died. `before` None: it joined. Both: it reconnected, or it is a
    new process."""

    before: Member | None
    after: Member | None


Instruction = Resync | Purge | Changed


@dataclass(slots=True)
class MembershipCore:
    epoch: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    _by_connection: dict[tuple[str, int], str] = field(default_factory=dict)
    _snapshot: Snapshot | None = None
    _in_doubt: bool = False

    def reconnected(self) -> None:
        """Notes that the feed was interrupted. The store may have lost writes meanwhile, so the feed counts again only
        when the bucket was read once more, even if its next sequence seems to fit."""
        self._in_doubt = True

    def snapshot(self) -> Snapshot:
        if self._snapshot is None:
            ordered = tuple(self.members[key] for key in sorted(self.members))
            engines = tuple(member for member in ordered if member.pipeline_stage is None)
            stages = tuple(member for member in ordered if member.pipeline_stage is not None)
            self._snapshot = Snapshot(self.epoch, fingerprint(engines), engines, stages)
        return self._snapshot

    def feed(self, entry: Entry) -> list[Instruction]:
        """Takes a write to the bucket, in the order of its stream. There may be gaps and repeats."""
        if self._in_doubt:
            return [Resync()]
        if entry.sequence <= self.epoch:
            return []
        if entry.sequence != self.epoch + 1:
            return [Resync()]
        self.epoch = entry.sequence
        self._snapshot = None
        return self._apply(entry)

    def snapshot_read(self, entries: list[Entry], last_sequence: int) -> list[Instruction]:
        """Takes the whole bucket, complete up to `last_sequence`."""
        if last_sequence < self.epoch and not self._in_doubt:
            return []  # the feed has overtaken this read
        self._in_doubt = False
        self.epoch = last_sequence
        self._snapshot = None
        present = {entry.key[len(MEMBER_PREFIX) :] for entry in entries if entry.value is not None}
        gone = [Entry(MEMBER_PREFIX + key, None, last_sequence) for key in self.members if key not in present]
        return [instruction for entry in [*gone, *entries] for instruction in self._apply(entry)]

    def _apply(self, entry: Entry) -> list[Instruction]:
        if not entry.key.startswith(MEMBER_PREFIX):
            return []
        before = self.members.get(entry.key[len(MEMBER_PREFIX) :])
        after = Member.from_entry(entry)
        if after is None:
            if before is None:
                return []
            del self.members[before.instance_id]
            self._by_connection.pop((before.server_id, before.client_id), None)
            return [Changed(before, None)]
        if before == after:
            return []
        if before is not None:
            self._by_connection.pop((before.server_id, before.client_id), None)
        self.members[after.instance_id] = after
        self._by_connection[after.server_id, after.client_id] = after.instance_id
        return [Changed(before, after)]

    def disconnected(self, server_id: str, client_id: int) -> list[Instruction]:
        """Takes the server's advisory that this connection is closed. A newer connection of the same worker stays."""
        instance_id = self._by_connection.get((server_id, client_id))
        if instance_id is None:
            return []
        return [Purge(instance_id, self.members[instance_id].revision)]

    def found_dead(self, instance_id: str, revision: int) -> list[Instruction]:
        """Takes a proof that the worker registered at `revision` is gone. A newer registration stays."""
        member = self.members.get(instance_id)
        if member is None or member.revision != revision:
            return []
        return [Purge(instance_id, revision)]
