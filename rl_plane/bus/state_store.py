"""Reads the keys of the state bucket: the decision record, the session, the desired pause and memory, the frontends.

An entry that can't be decoded counts as absent (`bus/entries.py`), except the record: see `read_record`."""

from __future__ import annotations

from rl_plane.bus.connection import Bus
from rl_plane.bus.entries import decoded, is_unreadable
from rl_plane.errors import BusUnreachable
from rl_plane.protocol.record import DecisionRecord, DesiredMemory, DesiredPause, UpdateSession
from rl_plane.protocol.subjects import (
    DISABLED,
    ENABLED,
    FRONTEND_PREFIX,
    MEMORY,
    PAUSE,
    RECORD,
    SESSION,
    Entry,
    KeyValueBucket,
)


def record_of(entry: Entry | None) -> DecisionRecord | None:
    """The record in an entry. None: the key is absent, or `is_unreadable`."""
    return decoded(entry, DecisionRecord.decode)


def unreadable_record() -> BusUnreachable:
    """The error of a caller that finds an unreadable record and does not know the committed version itself."""
    return BusUnreachable(
        "the entry `record` of the state bucket can't be read, so the committed version is not known; a worker or "
        "frontend that knows it writes it back within seconds",
        fix="if no process knows it, purge the key `record`: then the workers begin a new run from their own model",
        retry_after_s=2.0,
    )


def pause_of(entry: Entry | None) -> DesiredPause:
    """The pause in an entry. An absent key means that the fleet runs."""
    return decoded(entry, DesiredPause.decode) or DesiredPause(False)


def session_of(entry: Entry | None) -> UpdateSession | None:
    """The session in an entry. None: the key is absent."""
    return decoded(entry, UpdateSession.decode)


async def read_record(bus: Bus, state: KeyValueBucket) -> DecisionRecord | None:
    """Reads the record from the leader. None: no worker has fixed sequence 0 yet.

    BusUnreachable: the record can't be decoded. That never means that nothing is committed."""
    entry = await bus.get(state, RECORD)
    record = record_of(entry)
    if is_unreadable(entry, record):
        raise unreadable_record()
    return record


async def read_pause(bus: Bus, state: KeyValueBucket) -> DesiredPause:
    """Reads the desired pause from the leader."""
    return pause_of(await bus.get(state, PAUSE))


async def read_later_pause(bus: Bus, state: KeyValueBucket, fence: int) -> DesiredPause | None:
    """Reads from the leader the desired pause that the holder of this fence, or a later one, has stored.

    None: no such call has stored one, or the store has lost it."""
    entry = await bus.get(state, PAUSE)
    if entry is None or entry.sequence < fence:  # a fence is a sequence of the same bucket
        return None
    return decoded(entry, DesiredPause.decode)


async def read_memory(bus: Bus, state: KeyValueBucket) -> DesiredMemory | None:
    """Reads the desired memory from the leader. None: no memory was released yet, or the store has lost the key."""
    return decoded(await bus.get(state, MEMORY), DesiredMemory.decode)


async def read_session(bus: Bus, state: KeyValueBucket) -> UpdateSession | None:
    """Reads the update that waits for its next call. None: there is none, or its trainer was silent for too long."""
    return session_of(await bus.get(state, SESSION))


def admission_of(entry: Entry | None) -> bool | None:
    """Whether an operator has opened the worker (True) or closed it. None: no operator has, or the store has lost the
    key."""
    return decoded(entry, _decode_admission)


def _decode_admission(value: bytes) -> bool:
    if value not in (ENABLED, DISABLED):
        raise ValueError(f"it is neither {ENABLED.decode()!r} nor {DISABLED.decode()!r}")
    return value == ENABLED


async def read_frontends(bus: Bus, state: KeyValueBucket) -> list[str]:
    """Reads the ids of the frontends that may deliver tokens now.

    A frontend writes its key, which expires, before it confirms the record. So a frontend that is not listed after a
    decision learns that decision before it routes a request."""
    entries = await bus.list_keys(state, FRONTEND_PREFIX + ">")
    return [entry.key[len(FRONTEND_PREFIX) :] for entry in entries if entry.value is not None]
