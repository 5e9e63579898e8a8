"""What a trainer has opened by SGLang's calls, and will close: an entry of the fleet's state, so that any frontend
knows it. It ends by its trainer's silence; a pause, also by anybody else's pause or resume.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace

from frontend.dialects import DialectPlane
from rl_plane.record import pause_of
from rl_plane.subjects import OPENED, PAUSE
from rl_plane.update import SESSION_IDLE_S


@dataclass(frozen=True, slots=True)
class _Entry:
    begun_until: float = 0.0
    """Unix seconds: `begin_weight_update` came, and its trainer may be silent until then. 0: it did not, or is over."""
    pause: int = 0
    """The sequence of the desired pause that `pause_generation` made; at another one, the fleet's pause is not its."""


class Opened:
    """Both may be open at once."""

    def __init__(self, plane: DialectPlane) -> None:
        self._bus = plane.calls.fleet.client.bus
        self._state = plane.view.subjects.state

    async def begin(self) -> None:
        await self._write(replace(await self._read(), begun_until=time.time() + SESSION_IDLE_S))

    async def pause(self) -> None:
        """The fleet was paused just now."""
        entry = await self._bus.get(self._state, PAUSE)
        await self._write(replace(await self._read(), pause=entry.sequence if entry is not None else 0))

    async def takes_more(self) -> bool:
        """A part has come: will more come, or an end? What was begun waits for it anew."""
        entry = await self._read()
        if entry.begun_until > time.time():
            await self._write(replace(entry, begun_until=time.time() + SESSION_IDLE_S))
            return True
        return await self._in_pause(entry)

    async def in_pause(self) -> bool:
        """Will `continue_generation` come?"""
        return await self._in_pause(await self._read())

    async def end(self) -> None:
        """What was begun is over. (A pause ends with the fleet's own.)"""
        entry = await self._read()
        if entry.begun_until:
            await self._write(replace(entry, begun_until=0.0))

    async def _in_pause(self, entry: _Entry) -> bool:
        if not entry.pause:
            return False
        now = await self._bus.get(self._state, PAUSE)
        return now is not None and now.sequence == entry.pause and pause_of(now).left_s(time.time()) > 0

    async def _read(self) -> _Entry:
        found = await self._bus.get(self._state, OPENED)
        return _Entry(**json.loads(found.value)) if found is not None and found.value else _Entry()

    async def _write(self, entry: _Entry) -> None:
        await self._bus.put(self._state, OPENED, json.dumps(asdict(entry)).encode())
