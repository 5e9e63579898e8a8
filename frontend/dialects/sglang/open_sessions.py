"""Stores what a trainer has opened by SGLang's calls and will close, as an entry of the fleet's state that every
frontend reads. The entry ends when its trainer is silent. A pause also ends with any other pause or resume. The id of
the update that has taken parts stays until that update is committed or the next one is opened, so that an end can
report that the update is lost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from frontend.dialects.common.context import DialectContext
from rl_plane.bus.entries import decoded
from rl_plane.bus.state_store import read_pause
from rl_plane.protocol.subjects import OPENED


@dataclass(frozen=True, slots=True)
class _SessionEntry:
    begun_until: float = 0.0
    """Until when the trainer may be silent after `begin_weight_update`, in Unix seconds of the NATS server. 0: the
    trainer has not begun, or has ended."""
    pause: str = ""
    """The desired pause that `pause_generation` has written. If the fleet's pause differs, it is another caller's. (The
    end of a pause makes it unique. Its sequence would not: a call that fails to replace the pause writes it again.)"""
    sent: str = ""
    """The update that has taken parts and whose commit no frontend has seen. It stays after the update itself has
    ended, so that each end reports the loss."""


_ENTRY = TypeAdapter(_SessionEntry)


class Opened:
    """The openings of a trainer: an update that was begun, a pause, or both."""

    def __init__(self, context: DialectContext) -> None:
        self._bus = context.bus
        self._state = context.state
        self._idle_s = context.session_idle_s

    async def begin(self) -> None:
        await self._write(replace(await self._read(), begun_until=await self._now() + self._idle_s, sent=""))

    async def pause(self, *, anew: bool) -> None:
        """The fleet was paused just now. `anew`: for an update of which no part has come yet."""
        pause = (await read_pause(self._bus, self._state)).encode().decode()
        entry = replace(await self._read(), pause=pause)
        await self._write(replace(entry, sent="") if anew else entry)

    async def is_begun(self) -> bool:
        return (await self._read()).begun_until > await self._now()

    async def takes_more(self, update_id: str, *, was_begun: bool = False) -> bool:
        """A part of the update has come. Whether more parts, or an end, will follow. Extends the time of an update that
        was begun. `was_begun`: it was begun when the part was announced, and its trainer was not silent since."""
        entry = await self._read()
        begun = entry.begun_until > (0.0 if was_begun else await self._now())
        until = await self._now() + self._idle_s if begun else entry.begun_until
        noted = replace(entry, sent=update_id, begun_until=until)
        if noted != entry:
            await self._write(noted)
        return begun or await self._in_pause(entry)

    async def sent(self) -> str:
        """The update that has taken parts, and may be lost by now. Empty: there is none since the last commit or
        opening."""
        return (await self._read()).sent

    async def is_open(self) -> bool:
        """Whether an end will follow, of the update or of the pause."""
        entry = await self._read()
        return entry.begun_until > await self._now() or await self._in_pause(entry)

    async def in_pause(self) -> bool:
        """Whether `continue_generation` will follow."""
        return await self._in_pause(await self._read())

    async def end(self, *, committed: bool = True) -> None:
        """Ends what was begun. A pause ends with the fleet's own. Not `committed`: the parts that were sent are
        lost."""
        entry = await self._read()
        over = replace(entry, begun_until=0.0, sent="" if committed else entry.sent)
        if over != entry:
            await self._write(over)

    async def _in_pause(self, entry: _SessionEntry) -> bool:
        if not entry.pause:
            return False
        now = await read_pause(self._bus, self._state)
        return now.encode().decode() == entry.pause and now.left_s(await self._now()) > 0

    async def _now(self) -> float:
        """The server's clock, because the next call may reach another frontend."""
        return await self._bus.server_time(self._state)

    async def _read(self) -> _SessionEntry:
        found = await self._bus.get(self._state, OPENED)
        return decoded(found, _ENTRY.validate_json) or _SessionEntry()

    async def _write(self, entry: _SessionEntry) -> None:
        await self._bus.put(self._state, OPENED, _ENTRY.dump_json(entry))
