"""What a trainer has opened by SGLang's calls, and will close: an entry of the fleet's state, so that any frontend
knows it. It ends by its trainer's silence; a pause, also by anybody else's pause or resume.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace

from frontend.dialects import DialectPlane
from rl_plane.record import read_pause
from rl_plane.subjects import OPENED
from rl_plane.update import SESSION_IDLE_S


@dataclass(frozen=True, slots=True)
class _Entry:
    begun_until: float = 0.0
    """Unix seconds: `begin_weight_update` came, and its trainer may be silent until then. 0: it did not, or is over."""
    pause: str = ""
    """The desired pause that `pause_generation` made, as it is written; at another one, the fleet's pause is not its.
    (Its end makes it one of its kind; its sequence would not: a call that fails to replace it writes it anew.)"""


class Opened:
    """Both may be open at once."""

    def __init__(self, plane: DialectPlane) -> None:
        self._bus = plane.calls.fleet.client.bus
        self._state = plane.view.subjects.state

    async def begin(self) -> None:
        await self._write(replace(await self._read(), begun_until=time.time() + SESSION_IDLE_S))

    async def pause(self) -> None:
        """The fleet was paused just now."""
        pause = await read_pause(self._bus, self._state)
        await self._write(replace(await self._read(), pause=pause.encode().decode()))

    async def is_begun(self) -> bool:
        return (await self._read()).begun_until > time.time()

    async def takes_more(self, *, was_begun: bool = False) -> bool:
        """A part has come: will more come, or an end? What was begun waits for it anew. `was_begun`: when the part was
        announced; its trainer was not silent since, however long that took."""
        entry = await self._read()
        if entry.begun_until > (0.0 if was_begun else time.time()):
            await self._write(replace(entry, begun_until=time.time() + SESSION_IDLE_S))
            return True
        return await self._in_pause(entry)

    async def is_open(self) -> bool:
        """Will an end come, of one or the other?"""
        entry = await self._read()
        return entry.begun_until > time.time() or await self._in_pause(entry)

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
        now = await read_pause(self._bus, self._state)
        return now.encode().decode() == entry.pause and now.left_s(time.time()) > 0

    async def _read(self) -> _Entry:
        found = await self._bus.get(self._state, OPENED)
        return _Entry(**json.loads(found.value)) if found is not None and found.value else _Entry()

    async def _write(self, entry: _Entry) -> None:
        await self._bus.put(self._state, OPENED, json.dumps(asdict(entry)).encode())
