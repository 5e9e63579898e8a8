"""The history of updates: entries in the state bucket, how they are read, and how an unfinished one is completed.

`journal.py` writes an entry under the lock. It is `running` from where work begins, and final once it is `committed` or
`aborted`. If its coordinator died, the decision record tells how the update ended, so the record counts as the newest
entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from pydantic import ConfigDict

from rl_plane.bus.connection import Bus
from rl_plane.bus.entries import decoded
from rl_plane.bus.lock import read_holder
from rl_plane.bus.state_store import read_record, read_session
from rl_plane.commit.canary_steps import missed_error
from rl_plane.errors import (
    CanaryFailed,
    Conflict,
    InvalidRequest,
    PlaneError,
    Unavailable,
    UpdateAborted,
    error_from_wire,
)
from rl_plane.protocol.fleet_reply_types import UpdateOutcome
from rl_plane.protocol.record import DecisionRecord, UpdateSession
from rl_plane.protocol.relay import SourceUse, largest
from rl_plane.protocol.stored import Stored
from rl_plane.protocol.subjects import HISTORY_PREFIX, KeyValueBucket
from rl_plane.protocol.transport_traits import traits_of
from rl_plane.protocol.update_requests import UpdateWeights, without_secret
from rl_plane.protocol.versions import WeightVersion

KEEP = 256
"""The number of entries that the store keeps: a day of steps of five minutes. With 1,024 workers they take about 20 MB
in the store."""
MAX_ENTRY_BYTES = 512_000
"""Half of what a NATS message carries. An entry above it (with some 5,000 workers) lists only the failed workers. An
entry that is still above it loses its transport, so that no roll-back leads to its version."""
MAX_FACTS_BYTES = 8_000
"""The size of an error's facts. A larger error keeps only its code, message, field and fix."""
MAX_MESSAGE_CHARS = 500
WORKERS_WITH_SOURCES, SOURCES_OF_A_WORKER = 64, 4
"""The sources that an entry lists: 20 kB at most."""

WAY_BACK = "/rollback"
"""Ends the id of the entry for the decision that brought the version before back, after the failed update's own id."""

ESSENTIAL = ("code", "message", "field", "fix")


@dataclass(frozen=True, slots=True)
class UpdateEntry(Stored):
    """One update, as `GET /v1/rl/updates` reports it."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # another release of the plane may have written more

    update_id: str
    """The request id; empty for sequence 0, the workers' own model."""
    label: str
    outcome: UpdateOutcome
    """`prepared`: the update was prepared by a call of its own, and waits for complete or abort."""
    who: str = ""
    """The client that coordinated it. Empty: the entry was made from the record alone."""
    asked_by: str = ""
    """The id of the HTTP key with which the caller asked; over NATS the public key that it says is its own, with
    ` (said)`. Empty: it has no key."""
    caller: str = ""
    """The process that asked, such as `train.py@gpu3:4711`. If it asked over HTTP, its address follows."""
    began_at: float | None = None
    """Unix seconds."""
    ended_at: float | None = None
    """Unix seconds. None: the update has not ended, or its coordinator died."""
    version: WeightVersion | None = None
    """It is None if nothing was committed."""
    error: Mapping[str, Any] | None = None
    """The error's wire form without `workers`. A committed update has one if too few workers served it, or if the
    number was never reported."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """The seconds of each phase: `wait_s` (for the fleet, the lock and the workers' reports), `prepare_s`, `receive_s`,
    `gate_s`, `commit_s`, `open_s`, … Once the update has ended, they add up to the time from `began_at` to
    `ended_at`."""
    workers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """instance_id → `{incarnation, status, error?}`."""
    workers_left_out: int = 0
    """The number of successful workers that are not listed, to save space."""
    excluded: Sequence[str] = ()
    canary: Mapping[str, Any] | None = None
    """The result of the numeric canary: see `rl_plane.commit.canary_rules.Settlement.summary`."""
    target: Mapping[str, Any] | None = None
    transport: Mapping[str, Any] | None = None
    """The transport of the request. None for sequence 0."""
    digest: str | None = None
    """The committed digest, or the digest that the caller stated."""
    cast: bool = False
    refetchable: bool = True
    encoding: str = "full"
    base: str | None = None
    """For a delta or a partial version: the digest of the version that it changed."""
    before: Mapping[str, Any] | None = None
    """For a delta or a partial version: the source of that version."""
    sent_bytes: int | None = None
    """The bytes of the tensors that each worker took. None: not known."""
    model_bytes: int | None = None
    """The bytes of all tensors of the version."""
    rollback: Mapping[str, Any] | None = None
    """The version that the update went back to, as the caller named it."""
    sources: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Worker → `{source, bytes, seconds}` of each source from which it took bytes. Empty: there was one source. See
    `short_sources`."""
    num_buckets: int | None = None
    """The number of buckets that were pushed. None: the workers fetched the weights."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `update_requests.SHOWN_AS_ASKED`, such as `step`. `to_wire` puts them beside the entry's own."""
    min_ready: int = 1
    """The policy's value, for a `complete` that is repeated after the session has ended."""
    request: str = ""
    """A hash of the request. A different request under the same id is a mistake. Empty: not known."""

    @classmethod
    def of(cls, update_id: str, body: UpdateWeights) -> Self:
        """The entry of an update that begins now."""
        transport = body.transport.model_dump() if body.transport is not None else None
        return cls(
            update_id,
            body.version or "",
            "running",
            target=body.target.model_dump(),
            transport=_without_manifest(transport),
            digest=body.digest,
            cast=body.cast,
            encoding=body.encoding,
            base=body.base,
            num_buckets=_pushed_buckets(transport),
            min_ready=body.policy.min_ready,
            asked=body.shown_as_asked(),
        )

    @property
    def final(self) -> bool:
        return self.outcome in ("committed", "aborted")

    def _fields(self) -> dict[str, Any]:
        """The fields, without the deep copy that `asdict` makes of each worker's reply."""
        wire = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**wire, "version": self.version.to_wire() if self.version is not None else None}

    def encode(self) -> bytes:
        data = json.dumps(self._fields(), default=str).encode()
        if len(data) <= MAX_ENTRY_BYTES:
            return data
        if not self.workers and not self.excluded:  # the request itself is too large
            backend = {"backend": self.transport["backend"]} if self.transport is not None else None
            short = replace(self, transport=backend, before=None, refetchable=False)
            return json.dumps(short._fields(), default=str).encode()
        failed = {key: reply for key, reply in self.workers.items() if reply.get("status") != "ok"}
        if len(failed) == len(self.workers):  # even their errors are too many
            failed = dict(list(failed.items())[: len(failed) // 2])
        left_out = self.workers_left_out + len(self.workers) - len(failed)
        excluded = self.excluded if failed else self.excluded[: len(self.excluded) // 2]
        return replace(self, workers=failed, excluded=excluded, workers_left_out=left_out).encode()

    def to_wire(self) -> dict[str, Any]:
        """The entry as replies show it, without what only the plane needs, and without the transport's secret.
        `PastUpdate` describes it."""
        wire = self._fields()
        if self.transport is not None:
            wire["transport"] = without_secret(self.transport)
        del wire["request"], wire["before"], wire["min_ready"], wire["asked"]
        always = ("version", "transport", "ended_at")
        own = {key: value for key, value in wire.items() if value is not None or key in always}
        return {**self.asked, **own}

    def replies(self) -> list[dict[str, Any]]:
        """The workers in the form of an update's reply."""
        return [{"instance_id": key, **reply} for key, reply in sorted(self.workers.items())]

    @property
    def try_again(self) -> bool:
        """Reports whether the error was temporary (503), so that the same request may succeed."""
        return self.error is not None and isinstance(error_from_wire(dict(self.error)), Unavailable)

    @property
    def outcome_unreported(self) -> bool:
        """Reports whether the update is committed, and no caller got the number of workers that serve it."""
        return self.outcome == "committed" and self.try_again

    @property
    def unserved(self) -> bool:
        """Reports whether the update is committed, and every worker failed its canary."""
        return self.outcome == "committed" and (self.error or {}).get("code") == CanaryFailed.code

    def first_error(self) -> PlaneError:
        """Returns the error that answers a repeated call.

        If the update was aborted, or too few workers serve its version, that is the error of the first answer. If the
        outcome was not reported, the error says that it can't be reported any more."""
        if self.outcome_unreported:
            return Conflict(
                f"{self.label} was committed, and another version since; it is not known how many workers served it",
                version=self.version.to_wire() if self.version is not None else None,
                fix="don't send it again: read the state",
                repeated=True,
            )
        error = error_from_wire(dict(self.error or UpdateAborted("it was aborted").to_wire()))
        if self.workers:
            error.facts["workers"] = self.replies()
        error.facts["repeated"] = True
        return error


def short_sources(sources: Mapping[str, Sequence[SourceUse]]) -> dict[str, list[SourceUse]]:
    """The largest sources of the first workers, so that an entry stays short."""
    return {key: largest(sources[key], SOURCES_OF_A_WORKER) for key in sorted(sources)[:WORKERS_WITH_SOURCES]}


def history_key(update_id: str) -> str:
    return HISTORY_PREFIX + hashlib.blake2b(update_id.encode(), digest_size=8).hexdigest()


def _without_manifest(transport: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The transport without its manifest, which is long. The record has it, if workers can fetch by it."""
    if transport is None:
        return None
    kept = {key: value for key, value in transport.items() if key != "manifest"}
    if isinstance(shares := kept.get("shares"), list):
        kept["shares"] = [_without_manifest(one) if isinstance(one, Mapping) else one for one in shares]
    return kept


def _pushed_buckets(transport: Mapping[str, Any] | None) -> int | None:
    """The number of buckets that the workers listen for. None: nothing is pushed, or the field is missing or wrong."""
    if transport is None or not traits_of(transport["backend"]).pushed:
        return None
    if isinstance(shares := transport.get("shares"), list):  # of the ranks of a trainer
        counts = [
            _pushed_buckets({**one, "backend": transport["backend"]}) if isinstance(one, Mapping) else None
            for one in shares
        ]
        return None if None in counts else sum(count for count in counts if count is not None)
    manifest, count = transport.get("manifest"), transport.get("num_buckets")
    if isinstance(manifest, Mapping) and isinstance(manifest.get("buckets"), list):
        count = len(manifest["buckets"])
    return count if type(count) is int else None


def request_hash(body: Mapping[str, Any]) -> str:
    """A hash of an update's body without its policy: with a longer time-out it is still the same request."""
    asked = {key: value for key, value in body.items() if key != "policy" and value is not None}
    text = json.dumps(asked, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ---- unfinished entries: pure ----


def from_record(record: DecisionRecord, entry: UpdateEntry | None = None) -> UpdateEntry:
    """The entry of an update that was decided. `entry` adds what else is known about it."""
    version, source = record.made, record.made_source
    known = entry or UpdateEntry(record.update_id, version.label, "running")
    if record.missed is not None:  # the version before is back
        error = missed_error(record)
        summary = error.facts["canary"]
        return replace(
            known, outcome="aborted", ended_at=record.decided_at, error=short_error(error), canary=summary
        )
    return replace(
        known,
        label=version.label,
        outcome="committed",
        ended_at=record.decided_at,
        version=version,
        target=known.target or _target_in(record),
        transport=source.transport,
        digest=version.digest,
        cast=source.cast,
        refetchable=source.refetchable,
        encoding=source.encoding,
        base=source.base,
        before=source.before.to_wire() if source.before is not None else None,
        sent_bytes=source.sent_bytes,
        model_bytes=source.model_bytes,
    )


def way_back(record: DecisionRecord, failed: UpdateEntry | None = None) -> UpdateEntry | None:
    """The entry of the decision that brought the version before back. `failed`: the entry of the update that failed its
    canary. None: `record` is no such decision."""
    if record.missed is None:
        return None
    entry = UpdateEntry(
        record.update_id + WAY_BACK,
        record.version.label,
        "running",
        failed.who if failed is not None else "",
        began_at=record.decided_at,
        rollback={"label": record.version.label},
    )
    return from_record(replace(record, missed=None), entry)


def is_told_by(record: DecisionRecord, entry: UpdateEntry | None) -> bool:
    """Reports whether `entry` is the final entry of the record's update."""
    if entry is None or not entry.final:
        return False
    return entry.outcome == "aborted" if record.missed is not None else entry.version == record.made


def _target_in(record: DecisionRecord) -> dict[str, Any] | None:
    """The target of an update whose entry was lost with the store. None: the base weights."""
    if record.made == record.version:
        return None
    for name, adapter in record.adapters.items():
        if adapter.version == record.made:
            return {"kind": "lora", "op": "load", "name": name}
    return {"kind": "lora", "op": "unload", "name": ""}  # the record has no trace of an unloaded adapter's name


def evaluate_entry(
    entry: UpdateEntry,
    record: DecisionRecord | None,
    session: UpdateSession | None,
    holder: str | None,
) -> UpdateEntry:
    """Returns the entry with the outcome that follows from the record, the session, and `holder`, the update that holds
    the lock. A committed entry stays as it is, unless the canary took the update back afterwards."""
    if record is not None and record.update_id == entry.update_id and not is_told_by(record, entry):
        return entry if entry.outcome == "committed" and record.missed is None else from_record(record, entry)
    if entry.final:
        return entry
    if holder is not None and holder == entry.update_id:
        return entry
    if session is not None and session.update_id == entry.update_id:
        return replace(entry, outcome="prepared")
    left = UpdateAborted("its coordinator died, or fell silent, before the decision", fix="repeat it")
    return replace(entry, outcome="aborted", error=left.to_wire())


def short_error(error: PlaneError) -> dict[str, Any]:
    wire = {key: value for key, value in error.to_wire().items() if key not in ("workers", "phases", "elapsed_s")}
    if len(json.dumps(wire, default=str)) > MAX_FACTS_BYTES:
        wire = {key: wire[key] for key in ESSENTIAL if key in wire}
        wire["message"] = wire["message"][:MAX_MESSAGE_CHARS]
    return wire


# ---- reading ----


async def read_entry(bus: Bus, state: KeyValueBucket, update_id: str) -> UpdateEntry | None:
    """Reads an entry from the leader."""
    found = decoded(await bus.get(state, history_key(update_id)), UpdateEntry.decode)
    return found if found is not None and found.update_id == update_id else None


async def read_history(bus: Bus, state: KeyValueBucket, limit: int = KEEP) -> list[UpdateEntry]:
    """Reads the entries, the newest first, and completes unfinished ones."""
    stored, _ = await bus.read_keys(state, HISTORY_PREFIX + ">")
    entries = [found for entry in reversed(stored) if (found := decoded(entry, UpdateEntry.decode)) is not None]
    # The order matters. A coordinator that has lost the lock can't decide any more, and a coordinator makes its entry
    # final before it releases the lock. So the record decides about an entry that is still unfinished after this.
    holder = await read_holder(bus, state)
    record = await read_record(bus, state)
    session = await read_session(bus, state)
    whose = str(holder["update_id"]) if holder is not None and "update_id" in holder else None
    judged = []
    for entry in entries[:limit]:
        again = entry if entry.final else await read_entry(bus, state, entry.update_id) or entry
        judged.append(evaluate_entry(again, record, session, whose))
    if record is not None and all(entry.version != record.made for entry in [*judged, *entries[limit:]]):
        failed = next((entry for entry in judged if entry.update_id == record.update_id), None)
        if record.missed is not None and failed is None:
            judged.insert(0, from_record(record))
        judged.insert(0, way_back(record, failed) or from_record(record))
    return judged[:limit]


async def first_answer(bus: Bus, state: KeyValueBucket, update_id: str, request: str) -> UpdateEntry | None:
    """The entry of this request id, if its answer is to be repeated. None: the update may run, or continue from its
    decision. InvalidRequest: the id belongs to a different request."""
    entry = await read_entry(bus, state, update_id)
    if entry is None:
        return None
    if entry.request and entry.request != request:
        raise InvalidRequest(
            f"the request id {update_id!r} belongs to another update ({entry.label}, {entry.outcome})",
            field="Idempotency-Key",
            fix="use a new id for each different request",
        )
    if entry.outcome == "aborted" and entry.try_again:
        return None
    return entry if await is_answered(bus, state, entry) else None


async def is_answered(bus: Bus, state: KeyValueBucket, entry: UpdateEntry) -> bool:
    """Reports whether the entry's answer is final. If the outcome was not reported, it is not final while the version
    is the committed one, because its workers can be asked. If too few workers served the version, the canary may have
    taken it back since."""
    if not entry.final or entry.outcome == "aborted" or entry.error is None:
        return entry.final
    record = await read_record(bus, state)
    if record is None or record.update_id != entry.update_id:
        return True
    return not entry.outcome_unreported and record.missed is None
