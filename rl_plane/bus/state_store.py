"""Reads the keys of the state bucket: the decision record, the session, the desired pause and memory, the frontends."""

from __future__ import annotations

from rl_plane.bus.connection import Bus
from rl_plane.protocol.record import DecisionRecord, DesiredMemory, DesiredPause, UpdateSession
from rl_plane.protocol.subjects import FRONTEND_PREFIX, MEMORY, PAUSE, RECORD, SESSION, Entry, KeyValueBucket


def record_of(entry: Entry | None) -> DecisionRecord | None:
    """The record in an entry. None: the key is absent."""
    return DecisionRecord.decode(entry.value) if entry is not None and entry.value else None


def pause_of(entry: Entry | None) -> DesiredPause:
    """The pause in an entry. An absent key means that the fleet runs."""
    return DesiredPause.decode(entry.value) if entry is not None and entry.value else DesiredPause(False)


def session_of(entry: Entry | None) -> UpdateSession | None:
    """The session in an entry. None: the key is absent."""
    return UpdateSession.decode(entry.value) if entry is not None and entry.value else None


async def read_record(bus: Bus, state: KeyValueBucket) -> DecisionRecord | None:
    """Reads the record from the leader. None: no worker has fixed sequence 0 yet."""
    return record_of(await bus.get(state, RECORD))


async def read_pause(bus: Bus, state: KeyValueBucket) -> DesiredPause:
    """Reads the desired pause from the leader."""
    return pause_of(await bus.get(state, PAUSE))


async def read_memory(bus: Bus, state: KeyValueBucket) -> DesiredMemory | None:
    """Reads the desired memory from the leader. None: no memory was released yet, or the store has lost the key."""
    entry = await bus.get(state, MEMORY)
    return DesiredMemory.decode(entry.value) if entry is not None and entry.value else None


async def read_session(bus: Bus, state: KeyValueBucket) -> UpdateSession | None:
    """Reads the update that waits for its next call. None: there is none, or its trainer was silent for too long."""
    return session_of(await bus.get(state, SESSION))


async def read_frontends(bus: Bus, state: KeyValueBucket) -> list[str]:
    """Reads the ids of the frontends that may deliver tokens now.

    A frontend writes its key, which expires, before it confirms the record. So a frontend that is not listed after a
    decision learns that decision before it routes a request."""
    entries = await bus.list_keys(state, FRONTEND_PREFIX + ">")
    return [entry.key[len(FRONTEND_PREFIX) :] for entry in entries if entry.value is not None]
