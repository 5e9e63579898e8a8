"""The updates that there were and how each ended: entries in the state bucket, written under the lock.

An entry is `running` from where work begins, and final once it is `committed` or `aborted`. What a dead coordinator
left unfinished is judged by the decision record, which so counts as the newest entry; before the next update overwrites
the record, it makes sure that the record's own entry is final (`Journal.begin`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from rl_plane.bus.connection import Bus
from rl_plane.bus.lock import HeldLock, read_holder
from rl_plane.bus.state_store import read_record, read_session
from rl_plane.commit.canary_steps import missed_error
from rl_plane.commit.steps import Outcome as UpdateOutcome
from rl_plane.errors import (
    BusUnreachable,
    CanaryFailed,
    Conflict,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    PlaneError,
    StaleFence,
    Unavailable,
    UpdateAborted,
    error_from_wire,
)
from rl_plane.membership.core import Member
from rl_plane.protocol.record import DecisionRecord, Source, UpdateSession
from rl_plane.protocol.subjects import HISTORY_PREFIX, Bucket, Entry
from rl_plane.protocol.update_requests import PUSHED
from rl_plane.protocol.versions import WeightVersion

log = logging.getLogger("rl_plane.commit.history")

KEEP = 256
"""Entries: a day of steps of five minutes; at 1,024 workers about 20 MB in the store."""
MAX_ENTRY_BYTES = 512_000
"""Half of what a NATS message carries; beyond it (some 5,000 workers) only the workers that failed are listed."""
MAX_FACTS_BYTES = 8_000
"""Of an error; beyond it only its code, message, field and fix are kept."""
MAX_MESSAGE_CHARS = 500
SHOWN_VERSIONS = 20
"""That an error lists of those one could go back to."""

WAY_BACK = "/rollback"
"""Ends the id of the entry for the decision that brought the version before back, after the failed update's own id."""

Outcome = Literal["running", "prepared", "committed", "aborted"]
"""`prepared`: by a call of its own, and waits for complete or abort."""
ESSENTIAL = ("code", "message", "field", "fix")


@dataclass(frozen=True, slots=True)
class UpdateEntry:
    """One update, as `GET /v1/rl/updates` tells it."""

    update_id: str
    """The request id; empty for sequence 0, the workers' own model."""
    label: str
    outcome: Outcome
    who: str = ""
    """The client that coordinated it; empty where only the record is left to tell."""
    began_at: float | None = None
    """Unix seconds."""
    ended_at: float | None = None
    """Unix seconds; None: not ended, or its coordinator died."""
    version: WeightVersion | None = None
    """None: nothing was committed."""
    error: Mapping[str, Any] | None = None
    """Its wire form, without `workers`. Of a committed one: too few served it, or nobody was told how many."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """`prepare_s`, `gate_s`, `commit_s`, `open_s`."""
    workers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """instance_id → `{incarnation, status, error?}`."""
    workers_left_out: int = 0
    """Workers that did well and are not listed, for size."""
    excluded: Sequence[str] = ()
    canary: Mapping[str, Any] | None = None
    """What the numeric canary has shown: see `rl_plane.commit.canary_rules.Settlement.summary`."""
    target: Mapping[str, Any] | None = None
    transport: Mapping[str, Any] | None = None
    """The request's; None for sequence 0."""
    digest: str | None = None
    """Committed, or as the caller stated it."""
    cast: bool = False
    refetchable: bool = True
    encoding: str = "full"
    base: str | None = None
    """Of a delta: the digest of the version that it changed."""
    before: Mapping[str, Any] | None = None
    """Of a delta: that version's Source."""
    rollback: Mapping[str, Any] | None = None
    """The version that it went back to, as it was asked for."""
    num_buckets: int | None = None
    """So many were pushed; None: the workers fetched it."""
    step: int | None = None
    """The trainer's, as its request said it."""
    min_ready: int = 1
    """Its policy's, for a `complete` that comes again and does not know it."""
    request: str = ""
    """A hash of what was asked: another request under the same id is a mistake. Empty: not known."""

    @property
    def final(self) -> bool:
        return self.outcome in ("committed", "aborted")

    def _fields(self) -> dict[str, Any]:
        """Not `asdict`, which copies each worker's row."""
        wire = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**wire, "version": self.version.to_wire() if self.version is not None else None}

    def encode(self) -> bytes:
        data = json.dumps(self._fields(), default=str).encode()
        if len(data) <= MAX_ENTRY_BYTES:
            return data
        failed = {key: reply for key, reply in self.workers.items() if reply.get("status") != "ok"}
        if len(failed) == len(self.workers):  # even their errors are too many
            failed = dict(list(failed.items())[: len(failed) // 2])
        left_out = self.workers_left_out + len(self.workers) - len(failed)
        excluded = self.excluded if failed else self.excluded[: len(self.excluded) // 2]
        return replace(self, workers=failed, excluded=excluded, workers_left_out=left_out).encode()

    @classmethod
    def decode(cls, data: bytes) -> UpdateEntry:
        wire = json.loads(data)
        version = wire.pop("version")
        return cls(**wire, version=WeightVersion.from_wire(version) if version else None)

    def to_wire(self) -> dict[str, Any]:
        wire = self._fields()
        del wire["request"], wire["before"], wire["min_ready"]
        always = ("version", "transport", "ended_at")
        return {key: value for key, value in wire.items() if value is not None or key in always}

    def replies(self) -> list[dict[str, Any]]:
        """The workers as an update's reply has them."""
        return [{"instance_id": key, **reply} for key, reply in sorted(self.workers.items())]

    @property
    def try_again(self) -> bool:
        """Its error was of the moment (503): asked again, it may go well."""
        return self.error is not None and isinstance(error_from_wire(dict(self.error)), Unavailable)

    @property
    def outcome_unreported(self) -> bool:
        """Committed, and nobody could be answered how many workers serve it."""
        return self.outcome == "committed" and self.try_again

    @property
    def unserved(self) -> bool:
        """Committed, and every worker failed its canary."""
        return self.outcome == "committed" and (self.error or {}).get("code") == CanaryFailed.code

    def first_error(self) -> PlaneError:
        """What the caller was answered, again: of an aborted update, or of one that hardly any worker serves. Where the
        outcome was not reported: that it can't be answered any more."""
        if self.outcome_unreported:
            return Conflict(
                f"{self.label} was committed, and another one since; how many workers served it is not known",
                version=self.version.to_wire() if self.version is not None else None,
                fix="don't send it again: read the state",
                repeated=True,
            )
        error = error_from_wire(dict(self.error or UpdateAborted("it was aborted").to_wire()))
        if self.workers:
            error.facts["workers"] = self.replies()
        error.facts["repeated"] = True
        return error


def history_key(update_id: str) -> str:
    return HISTORY_PREFIX + hashlib.blake2b(update_id.encode(), digest_size=8).hexdigest()


def request_hash(body: Mapping[str, Any]) -> str:
    """Of an update's body without its policy: asked again with more patience, it still is the same."""
    asked = {key: value for key, value in body.items() if key != "policy" and value is not None}
    text = json.dumps(asked, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ---- unfinished entries: the pure half ----


def from_record(record: DecisionRecord, entry: UpdateEntry | None = None) -> UpdateEntry:
    """The entry of an update that was decided, whatever else is known of it."""
    version, source = record.made, record.made_source
    known = entry or UpdateEntry(record.update_id, version.label, "running")
    if record.missed is not None:  # the version before is back
        error = missed_error(record)
        summary = error.facts["canary"]
        return replace(known, outcome="aborted", ended_at=record.decided_at, error=_kept(error), canary=summary)
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


def _is_told_by(record: DecisionRecord, entry: UpdateEntry | None) -> bool:
    """Reports whether the history already has the final entry of the record's update."""
    if entry is None or not entry.final:
        return False
    return entry.outcome == "aborted" if record.missed is not None else entry.version == record.made


def _outcome_unreported(record: DecisionRecord, entry: UpdateEntry | None) -> UpdateEntry:
    error = Unavailable("its coordinator ended before it could tell how many workers serve it")
    return replace(from_record(record, entry), error=error.to_wire(), workers={})


def _target_in(record: DecisionRecord) -> dict[str, Any] | None:
    """What an update was of whose entry was lost with the store; None: of the base."""
    if record.made == record.version:
        return None
    for name, adapter in record.adapters.items():
        if adapter.version == record.made:
            return {"kind": "lora", "op": "load", "name": name}
    return {"kind": "lora", "op": "unload", "name": ""}  # the record does not know it any more


def evaluate_entry(
    entry: UpdateEntry,
    record: DecisionRecord | None,
    session: UpdateSession | None,
    holder: str | None,
) -> UpdateEntry:
    """How an entry stands that isn't committed: `holder` is the update that the lock is held for."""
    if record is not None and record.update_id == entry.update_id and not _is_told_by(record, entry):
        return entry if entry.outcome == "committed" and record.missed is None else from_record(record, entry)
    if entry.final:
        return entry
    if holder is not None and holder == entry.update_id:
        return entry
    if session is not None and session.update_id == entry.update_id:
        return replace(entry, outcome="prepared")
    left = UpdateAborted("its coordinator died, or fell silent, before it was decided", fix="repeat it")
    return replace(entry, outcome="aborted", error=left.to_wire())


def rollback_target(
    newest_first: Sequence[UpdateEntry], run: str, label: str | None, sequence: int | None
) -> UpdateEntry:
    """The committed version that is meant; NotFound names those that there are."""
    known = [(entry, entry.version) for entry in newest_first if entry.outcome == "committed"]
    mine = [(entry, version) for entry, version in known if version is not None and version.run == run]
    unserved = [entry for entry, version in mine if entry.unserved and _is_named(version, label, sequence)]
    mine = [(entry, version) for entry, version in mine if not entry.unserved]
    found = [entry for entry, version in mine if _is_named(version, label, sequence)]
    if unserved and not found:
        raise Conflict(
            f"every worker failed the numeric canary of {unserved[0].label}, so no worker has ever served it",
            field="rollback",
            fix="publish it again with on_canary_failure=warn, or go back to another version",
        )
    there = [{"sequence": version.sequence, "label": version.label} for _, version in mine[:SHOWN_VERSIONS]]
    names = ", ".join(f"{one['sequence']} ({one['label']})" for one in there)
    if not found:
        what = f"sequence {sequence}" if sequence is not None else f"label {label!r}"
        raise NotFound(
            f"the history has no committed version of {what}",
            field="rollback",
            fix=f"it has {names}" if names else "nothing was committed yet",
            versions=there,
        )
    if len({entry.digest for entry in found}) > 1:
        raise NotFound(
            f"several versions with different weights are called {label!r}",
            field="rollback.label",
            fix=f"name the sequence; there are {names}",
            versions=there,
        )
    return found[0]


def _is_named(version: WeightVersion, label: str | None, sequence: int | None) -> bool:
    return version.sequence == sequence if sequence is not None else version.label == label


def target_of(entry: UpdateEntry, loaded: Iterable[str]) -> dict[str, Any]:
    """The target that makes this version again. `loaded`: the adapters that are there now."""
    target = dict(entry.target or {"kind": "base"})
    if target["kind"] == "lora":
        if target["op"] == "unload":
            raise Conflict(
                f"{entry.label} unloaded the adapter {target['name']!r}: there are no weights to go back to",
                field="rollback",
                fix="name a version that was loaded, or unload the adapter",
            )
        target["op"] = "swap" if target["name"] in loaded else "load"
    return target


def before_of(entry: UpdateEntry) -> Source | None:
    """Of a version that was sent as a delta: where the one came from that it changed."""
    return Source.from_wire(entry.before) if entry.before is not None else None


def source_of(entry: UpdateEntry, members: Iterable[Member]) -> dict[str, Any]:
    """The transport that brings a committed version again, or an error that says why none does."""
    label, before = entry.label, before_of(entry)
    if not entry.refetchable or (before is not None and not before.from_scratch):
        raise Conflict(
            f"the weights of {label} can't be fetched again from where they came",
            field="rollback",
            fix="publish them anew, and update by transport",
        )
    if entry.transport is not None:
        return dict(entry.transport)
    # Sequence 0 is each worker's own model; one transport says it for all where they all have it in one place.
    paths = sorted({str(member.info["model_path"]) for member in members})
    if len(paths) != 1:
        raise Conflict(
            f"the workers started from {len(paths)} model directories, so no one transport brings {label} to all",
            field="rollback",
            fix="update by transport, from a directory that all workers can read",
            paths=paths[:SHOWN_VERSIONS],
        )
    return {"backend": "filesystem", "path": paths[0]}


# ---- reading ----


def _decoded(entry: Entry | None) -> UpdateEntry | None:
    return UpdateEntry.decode(entry.value) if entry is not None and entry.value else None


async def read_entry(bus: Bus, state: Bucket, update_id: str) -> UpdateEntry | None:
    """As it was last written, from the leader."""
    found = _decoded(await bus.get(state, history_key(update_id)))
    return found if found is not None and found.update_id == update_id else None


async def read_history(bus: Bus, state: Bucket, limit: int = KEEP) -> list[UpdateEntry]:
    """Newest first."""
    stored, _ = await bus.read_keys(state, HISTORY_PREFIX + ">")
    entries = [found for entry in reversed(stored) if (found := _decoded(entry)) is not None]
    # In this order: a coordinator that lost the lock can't decide any more, and one that released it has made its
    # entry final before; so what is still unfinished after the record was read is as the record says.
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


# ---- writing ----


def _without_manifest(transport: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A manifest is long; the record has it, if anybody can fetch by it."""
    return None if transport is None else {key: value for key, value in transport.items() if key != "manifest"}


def pushed_buckets(transport: Mapping[str, Any] | None) -> int | None:
    """How many the workers listen for; None: nothing is pushed to them, or it is not said as it should."""
    if transport is None or transport.get("backend") not in PUSHED:
        return None
    manifest, count = transport.get("manifest"), transport.get("num_buckets")
    if isinstance(manifest, Mapping) and isinstance(manifest.get("buckets"), list):
        count = len(manifest["buckets"])
    return count if type(count) is int else None


class Journal:
    """Keeps one update's entry while its coordinator holds the lock."""

    def __init__(
        self,
        bus: Bus,
        state: Bucket,
        held: HeldLock,
        who: str,
        update_id: str,
        body: Mapping[str, Any],
        request: str = "",
        rollback: Mapping[str, Any] | None = None,
    ) -> None:
        """`body`: the update's; `request`: the hash of what was asked for, where that was a roll-back."""
        self._bus = bus
        self._state = state
        self._held = held
        self._begun = False
        self._entry = UpdateEntry(
            update_id,
            str(body.get("version") or ""),
            "running",
            who,
            target=body.get("target"),
            transport=_without_manifest(body.get("transport")),
            digest=body.get("digest"),
            cast=bool(body.get("cast")),
            encoding=str(body.get("encoding") or "full"),
            base=body.get("base"),
            rollback=rollback,
            num_buckets=pushed_buckets(body.get("transport")),
            step=body.get("step"),
            min_ready=(body.get("policy") or {}).get("min_ready", 1),
            request=request,
        )

    @property
    def entry(self) -> UpdateEntry:
        """As it was last written, or is to be."""
        return self._entry

    async def first_answer(self) -> UpdateEntry | None:
        """As the function of this name. The lock is ours, so one that is unfinished has lost its coordinator: it runs
        now, or goes on from its decision."""
        found = await first_answer(self._bus, self._state, self._entry.update_id, self._entry.request)
        if found is None:
            await self.go_on()
        return found

    async def go_on(self) -> None:
        """With the update's own entry, if it was decided: the answer is still to come."""
        if await self.settle_own():
            await self.take_up()

    async def settle_own(self) -> bool:
        """Was it decided? Then its entry says so from now on, whatever the workers tell of later ones: the store may
        have lost those."""
        record = await read_record(self._bus, self._state)
        if record is None or record.update_id != self._entry.update_id:
            return False
        await self._settle(record)
        return True

    async def begin(self, record: DecisionRecord | None) -> None:
        """Work begins. `record`: the committed version, which may become the one before."""
        found = await read_entry(self._bus, self._state, self._entry.update_id)
        if (
            found is not None and found.outcome_unreported
        ):  # the store had lost a later decision, which the workers have told
            raise found.first_error()
        await self._settle(record)
        label = self._entry.label or str(record.sequence + 1 if record else 1)
        await self._write(replace(self._entry, label=label, began_at=time.time()))
        self._begun = True

    async def _settle(self, record: DecisionRecord | None) -> None:
        """The record's own entry is final before another decision overwrites the record. By the record alone: what its
        workers were before the decision tells nothing of who serves it."""
        if record is None:
            return
        entry = await read_entry(self._bus, self._state, record.update_id)
        if not _is_told_by(record, entry):
            # No caller has asked for sequence 0, and the record tells the whole outcome of an update that it took back.
            known = not record.update_id or record.missed is not None
            settled = from_record(record, entry) if known else _outcome_unreported(record, entry)
            await self._held.put(history_key(record.update_id), settled.encode())
        back = way_back(record, entry)
        if back is not None and not await self._has(back):
            await self._held.put(history_key(back.update_id), back.encode())

    async def _has(self, entry: UpdateEntry) -> bool:
        found = await read_entry(self._bus, self._state, entry.update_id)
        return found is not None and found.version == entry.version

    async def take_up(self) -> None:
        """Goes on with an update that another call has prepared, or that was decided and not answered."""
        found = await read_entry(self._bus, self._state, self._entry.update_id)
        if found is not None and (found.outcome_unreported or not found.final):
            self._entry = found
            self._begun = True

    async def prepared(self, replies: Iterable[Mapping[str, Any]], digest: str | None, prepare_s: float) -> None:
        """`digest` None: its bytes are still to come."""
        entry = replace(
            self._entry,
            outcome="prepared",
            workers=_outcomes(replies),
            digest=digest or self._entry.digest,
            phases={"prepare_s": prepare_s},
        )
        await self._write_if_held(entry)

    async def committed(
        self,
        outcome: UpdateOutcome,
        replies: Iterable[Mapping[str, Any]],
        phases: Mapping[str, float],
    ) -> None:
        """The end, with what the reply says; what the record says of the source stands there."""
        try:
            record = await read_record(self._bus, self._state)
        except BusUnreachable:
            return  # the record stands for it
        if record is None or record.update_id != self._entry.update_id:
            return  # the first answer was given again, or another coordinator went on
        await self._end(
            replace(
                from_record(record, self._entry),
                error=None,
                version=outcome.version,
                workers=_outcomes(replies),
                excluded=list(outcome.excluded),
                phases={**self._entry.phases, **phases},
                canary=outcome.canary,
            )
        )

    async def failed(self, error: PlaneError) -> None:
        """The end by an error; after the decision the version stands all the same."""
        if not self._begun or isinstance(error, OutcomeUnknown):
            return  # nothing to tell; or the record tells it, once it can be read
        workers = _outcomes(error.facts.get("workers", ()))
        canary = error.facts.get("canary")
        entry = replace(self._entry, error=_kept(error), workers=workers or self._entry.workers, canary=canary)
        try:
            record = await read_record(self._bus, self._state)
        except BusUnreachable:
            return
        decided = record is not None and record.update_id == entry.update_id
        if self._entry.outcome_unreported and not (decided and type(error) in (Conflict, CanaryFailed)):
            return  # still unreported: only too few who serve it are an answer, or a failed canary
        phases = {**entry.phases, **error.facts.get("phases", {})}
        ended = from_record(record, entry) if decided and record else replace(entry, outcome="aborted")
        if not (decided and record and record.missed) or isinstance(error, CanaryFailed):
            ended = replace(ended, error=entry.error)  # else the record tells more than this error
        await self._end(replace(ended, phases=phases))
        back = way_back(record, ended) if decided and record else None
        if back is not None:
            await self._write_if_held(replace(back, workers=_serving(error)), mine=False)

    async def _end(self, entry: UpdateEntry) -> None:
        # At once: the entry is there already, so it is counted however they come.
        await asyncio.gather(self._write_if_held(replace(entry, ended_at=time.time())), self._shorten())

    async def _shorten(self) -> None:
        try:
            await self._bus.keep_newest(self._state, HISTORY_PREFIX + ">", KEEP)
        except BusUnreachable as error:
            log.warning("the history was not shortened: %s", error)

    async def _write(self, entry: UpdateEntry) -> None:
        await self._held.put(history_key(entry.update_id), entry.encode())
        self._entry = entry

    async def _write_if_held(self, entry: UpdateEntry, mine: bool = True) -> None:
        """The outcome stands already; without the lock, the record and the next holder tell it. `mine`: it is this
        journal's own entry."""
        try:
            if mine:
                await self._write(entry)
            else:
                await self._held.put(history_key(entry.update_id), entry.encode())
        except (BusUnreachable, StaleFence) as error:
            log.warning("the history of %s could not be written: %s", entry.update_id, error)


async def first_answer(bus: Bus, state: Bucket, update_id: str, request: str) -> UpdateEntry | None:
    """The entry of this request id, whose answer is given again; None: there is none, and the update may run or go on.
    InvalidRequest: the id was used for something else."""
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


async def is_answered(bus: Bus, state: Bucket, entry: UpdateEntry) -> bool:
    """Can this answer change no more? Where the outcome was not reported, it can while the version is the committed
    one: its workers can be asked. Where hardly any worker served it, the canary may have taken it back since."""
    if not entry.final or entry.outcome == "aborted" or entry.error is None:
        return entry.final
    record = await read_record(bus, state)
    if record is None or record.update_id != entry.update_id:
        return True
    return not entry.outcome_unreported and record.missed is None


def _outcomes(replies: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for reply in replies:
        kept = {key: reply[key] for key in ("incarnation", "status") if key in reply}
        if error := reply.get("error"):
            kept["error"] = {
                "code": error.get("code"),
                "message": str(error.get("message", ""))[:MAX_MESSAGE_CHARS],
            }
        found[str(reply["instance_id"])] = kept
    return found


def _serving(error: PlaneError) -> dict[str, dict[str, Any]]:
    """The workers' rows for the way back, by what the failed update was answered with."""
    serving = error.facts.get("serving")
    if serving is None:
        return {}
    behind = {"code": "not_admitted", "message": "it did not serve the version yet when the update was answered"}
    every = {str(row["instance_id"]): row for row in error.facts.get("workers", ())}
    return {
        key: {
            **({"incarnation": every[key]["incarnation"]} if "incarnation" in every.get(key, {}) else {}),
            **({"status": "ok"} if key in serving else {"status": "error", "error": behind}),
        }
        for key in sorted({*every, *serving})
    }


def _kept(error: PlaneError) -> dict[str, Any]:
    wire = {key: value for key, value in error.to_wire().items() if key not in ("workers", "phases", "elapsed_s")}
    if len(json.dumps(wire, default=str)) > MAX_FACTS_BYTES:
        wire = {key: wire[key] for key in ESSENTIAL if key in wire}
        wire["message"] = wire["message"][:MAX_MESSAGE_CHARS]
    return wire
