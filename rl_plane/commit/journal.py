"""Writes the history's entry of one update, while its coordinator holds the lock."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_plane._util.log_format import fields
from rl_plane.bus.connection import Bus
from rl_plane.bus.lock import HeldLock
from rl_plane.bus.state_store import read_record, read_session
from rl_plane.commit.history import (
    KEEP,
    MAX_MESSAGE_CHARS,
    UpdateEntry,
    first_answer,
    from_record,
    history_key,
    is_told_by,
    read_entry,
    short_error,
    short_sources,
    way_back,
)
from rl_plane.commit.steps import Outcome
from rl_plane.errors import (
    BusUnreachable,
    CanaryFailed,
    Conflict,
    OutcomeUnknown,
    PlaneError,
    StaleFence,
    Unavailable,
)
from rl_plane.protocol.record import DecisionRecord
from rl_plane.protocol.relay import SourceUse
from rl_plane.protocol.subjects import HISTORY_PREFIX, KeyValueBucket
from rl_plane.protocol.update_requests import UpdateWeights

log = logging.getLogger("rl_plane.commit.journal")


class Journal:
    """Writes one update's entry while its coordinator holds the lock."""

    def __init__(
        self,
        bus: Bus,
        state: KeyValueBucket,
        held: HeldLock,
        who: str,
        update_id: str,
        body: UpdateWeights | None,
        label: str = "",
        request: str = "",
        rollback: Mapping[str, Any] | None = None,
        asked_by: str = "",
        caller: str = "",
        called_at: float | None = None,
    ) -> None:
        """`body`: the update's body. None: a new run, or an update whose body no store has any more. `label`: the
        label of a version without a body. `request`: the hash of the request, which for a roll-back is another body.
        `asked_by`: whose key asked, as `UpdateEntry` has it. `caller`: the caller's process or address. `called_at`:
        monotonic seconds at which the call came. None: now."""
        self._called_at = time.monotonic() if called_at is None else called_at
        self._bus = bus
        self._state = state
        self._held = held
        self._begun = False
        begun = UpdateEntry(update_id, label, "running") if body is None else UpdateEntry.of(update_id, body)
        self._entry = replace(begun, who=who, asked_by=asked_by, caller=caller, rollback=rollback, request=request)

    @property
    def entry(self) -> UpdateEntry:
        """The entry that was written last, or that is to be written."""
        return self._entry

    def note_sources(self, sources: Mapping[str, Sequence[SourceUse]]) -> None:
        """Notes the bytes that each worker took from each source. The next write of the entry has them."""
        self._entry = replace(self._entry, sources=short_sources(sources))

    async def first_answer(self) -> UpdateEntry | None:
        """The entry whose answer is to be repeated, as `history.first_answer` returns it. This call has the lock, so an
        unfinished entry has lost its coordinator: the update runs now, or continues from its decision."""
        found = await first_answer(self._bus, self._state, self._entry.update_id, self._entry.request)
        if found is None:
            await self.go_on()
        return found

    async def go_on(self) -> None:
        """Takes up the update's entry if the update was decided and not answered."""
        if await self.settle_own():
            await self.take_up()

    async def settle_own(self) -> bool:
        """Reports whether the record is this update's decision, and makes its entry final then. It stays so even if the
        workers report later decisions, which the store may have lost."""
        record = await read_record(self._bus, self._state)
        if record is None or record.update_id != self._entry.update_id:
            return False
        await self._settle(record)
        return True

    async def begin(self, record: DecisionRecord | None) -> None:
        """Begins the entry. `record`: the committed version, which this update may replace."""
        found = await read_entry(self._bus, self._state, self._entry.update_id)
        if (
            found is not None and found.outcome_unreported
        ):  # the store had lost a later decision, which workers reported
            raise found.first_error()
        await self._settle(record)
        label = self._entry.label or str(record.sequence + 1 if record else 1)
        waited_s = time.monotonic() - self._called_at
        began_at = time.time() - waited_s
        await self._write(replace(self._entry, label=label, began_at=began_at, phases={"wait_s": waited_s}))
        self._begun = True
        log.info("%s began: %s, asked by %s", self._name, *self._facts(), extra=self._fields("began"))

    @property
    def _name(self) -> str:
        return f"update {self._entry.update_id} ({self._entry.label})"

    def _facts(self) -> tuple[str, str]:
        """Returns the transport, and the process and the key that asked for the update."""
        entry = self._entry
        backend = (entry.transport or {}).get("backend")
        key = f" with the key {entry.asked_by}" if entry.asked_by else ""
        return f"by {backend}" if backend else "nothing to receive", f"{entry.caller or entry.who}{key}"

    def decided(self, record: DecisionRecord) -> None:
        """Logs that the update is decided. From here on only a new decision replaces it. Logs nothing if `record`
        brings the version before back, or is of another update, which this call has finished."""
        if record.missed is not None or record.update_id != self._entry.update_id:
            return
        log.info(
            "%s is committed as sequence %d, asked by %s",
            self._name,
            record.sequence,
            self._facts()[1],
            extra=self._fields("committed", sequence=record.sequence),
        )

    def _log_end(self, entry: UpdateEntry) -> None:
        seconds = (entry.ended_at or 0.0) - (entry.began_at or 0.0)
        phases = ", ".join(f"{name.removesuffix('_s')} {spent:.3f} s" for name, spent in entry.phases.items())
        well = sum(row.get("status") == "ok" for row in entry.workers.values()) + entry.workers_left_out
        count = f" on {well} of {len(entry.workers) + entry.workers_left_out} workers" if entry.workers else ""
        why = f": {entry.error.get('code')}: {entry.error.get('message')}" if entry.error else ""
        log.info(
            "%s ended: %s%s in %.3f s (%s), asked by %s%s",
            self._name,
            entry.outcome,
            count,
            seconds,
            phases,
            self._facts()[1],
            why,
            extra=self._fields(
                "ended",
                outcome=entry.outcome,
                seconds=seconds,
                phases=dict(entry.phases),
                workers_ok=well,
                workers=len(entry.workers) + entry.workers_left_out,
                error=entry.error.get("code") if entry.error else None,
            ),
        )

    def _fields(self, change: str, **more: Any) -> dict[str, Any]:
        entry = self._entry
        return fields(
            change=change,
            update_id=entry.update_id,
            label=entry.label,
            transport=(entry.transport or {}).get("backend"),
            caller=entry.caller,
            asked_by=entry.asked_by,
            who=entry.who,
            **more,
        )

    async def _settle(self, record: DecisionRecord | None) -> None:
        """Makes the record's own entry final before another decision replaces the record. The entry is made from the
        record alone: the workers' replies before the decision do not show which of them serve it."""
        if record is None:
            return
        entry = await read_entry(self._bus, self._state, record.update_id)
        if not is_told_by(record, entry):
            # No caller has asked for sequence 0, and the record has the whole outcome of an update that was taken back.
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
        """Takes up the entry of an update that another call has prepared, or that was decided and not answered."""
        found = await read_entry(self._bus, self._state, self._entry.update_id)
        if found is not None and (found.outcome_unreported or not found.final):
            self._entry = found
            self._begun = True

    async def prepared(self, replies: Iterable[Mapping[str, Any]], digest: str | None) -> None:
        """Notes that the update was prepared. `digest` None: its bytes are still to come."""
        if not self._begun:  # a repeated call found it prepared
            await self.take_up()
        before, began_at = self._entry.phases, self._entry.began_at
        prepare_s = time.time() - began_at - sum(before.values()) if began_at is not None else 0.0
        entry = replace(
            self._entry,
            outcome="prepared",
            workers=_outcomes(replies),
            digest=digest or self._entry.digest,
            phases={**before, "prepare_s": before.get("prepare_s", max(0.0, prepare_s))},
        )
        await self._write_if_held(entry)

    async def committed(
        self,
        outcome: Outcome,
        replies: Iterable[Mapping[str, Any]],
        phases: Mapping[str, float],
    ) -> Mapping[str, float]:
        """Ends the entry with the reply of the update, and with the source in the record. Returns all phases."""
        try:
            record = await read_record(self._bus, self._state)
        except BusUnreachable:
            return phases  # the record takes the place of the entry
        if record is None or record.update_id != self._entry.update_id:
            return phases  # the first answer was repeated, or another coordinator has committed since
        return await self._end(
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
        """Ends the entry with an error. If the update was decided, the entry is committed and has the error. An update
        that still waits for another call has not ended, so its entry stays as it is."""
        if not self._begun or isinstance(error, OutcomeUnknown):
            return  # nothing was begun; or the record shows the outcome, once it can be read
        workers = _outcomes(error.facts.get("workers", ()))
        canary = error.facts.get("canary")
        entry = replace(
            self._entry, error=short_error(error), workers=workers or self._entry.workers, canary=canary
        )
        try:
            record = await read_record(self._bus, self._state)
            session = await read_session(self._bus, self._state)
        except BusUnreachable:
            return
        decided = record is not None and record.update_id == entry.update_id
        if not decided and session is not None and session.update_id == entry.update_id:
            return
        if self._entry.outcome_unreported and not (decided and type(error) in (Conflict, CanaryFailed)):
            return  # still unreported: the only answers are too few workers that serve it, and a failed canary
        phases = {**entry.phases, **error.facts.get("phases", {})}
        ended = from_record(record, entry) if decided and record else replace(entry, outcome="aborted")
        if not (decided and record and record.missed) or isinstance(error, CanaryFailed):
            ended = replace(ended, error=entry.error)  # else the record says more than this error
        await self._end(replace(ended, phases=phases))
        back = way_back(record, ended) if decided and record else None
        if back is not None:
            await self._put_if_held(replace(back, workers=_serving(error)))

    async def _end(self, entry: UpdateEntry) -> Mapping[str, float]:
        """Writes the end. Returns the phases, with the time that no phase was measured in."""
        ended_at = time.time()
        entry = replace(entry, ended_at=ended_at, phases=self._with_rest(entry.phases, ended_at))
        # Both at once: the entry exists already, so it is counted whichever comes first.
        await asyncio.gather(self._write_if_held(entry), self._shorten())
        self._log_end(entry)
        return entry.phases

    def _with_rest(self, phases: Mapping[str, float], ended_at: float) -> Mapping[str, float]:
        """Adds the rest of the time. Where one call prepares and another completes, the rest is `receive_s`: the
        trainer sends between the two. Else it is `other_s`: surveys, and writes of the record and the history."""
        began_at = self._entry.began_at
        rest = ended_at - began_at - sum(phases.values()) if began_at is not None else 0.0
        name = "receive_s" if self._entry.outcome == "prepared" else "other_s"
        return {**phases, name: phases.get(name, 0.0) + rest} if rest > 0 else phases

    async def _shorten(self) -> None:
        try:
            await self._bus.keep_newest(self._state, HISTORY_PREFIX + ">", KEEP)
        except BusUnreachable as error:
            log.warning("the history was not shortened: %s", error)

    async def _write(self, entry: UpdateEntry) -> None:
        await self._held.put(history_key(entry.update_id), entry.encode())
        self._entry = entry

    async def _write_if_held(self, entry: UpdateEntry) -> None:
        """Writes the entry. If the lock is lost, the outcome stands all the same: the record and the next holder show
        it."""
        self._entry = entry if await self._put_if_held(entry) else self._entry

    async def _put_if_held(self, entry: UpdateEntry) -> bool:
        try:
            await self._held.put(history_key(entry.update_id), entry.encode())
        except (BusUnreachable, StaleFence) as error:
            log.warning("the history of %s could not be written: %s", entry.update_id, error)
            return False
        return True


def _outcome_unreported(record: DecisionRecord, entry: UpdateEntry | None) -> UpdateEntry:
    error = Unavailable("its coordinator ended before it could tell how many workers serve it")
    return replace(from_record(record, entry), error=error.to_wire(), workers={})


def _serving(error: PlaneError) -> dict[str, dict[str, Any]]:
    """The workers of the way back, by the answer of the update that failed."""
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
