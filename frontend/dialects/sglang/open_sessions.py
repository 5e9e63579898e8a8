"""What a trainer has opened by SGLang's calls, and will close: an entry of the fleet's state, so that any frontend
knows it. It ends by its trainer's silence; a pause, also by anybody else's pause or resume. Which update has parts here
is kept until that one is committed, or the next is opened: an end must not call a lost one nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from frontend.dialects.common.context import DialectContext
from rl_plane.bus.state_store import read_pause
from rl_plane.commit.sessions import SESSION_IDLE_S
from rl_plane.protocol.subjects import OPENED


@dataclass(frozen=True, slots=True)
class _Entry:
    begun_until: float = 0.0
    """Unix seconds of the NATS server until which the trainer may be silent after `begin_weight_update`. 0: it has not
    begun, or it has ended."""
    pause: str = ""
    """The desired pause that `pause_generation` made, as it is written; at another one, the fleet's pause is not its.
    (Its end makes it one of its kind; its sequence would not: a call that fails to replace it writes it anew.)"""
    sent: str = ""
    """The update that has taken parts, as long as nobody has seen its commit. It outlasts the update itself: who ends
    it then is told that it is lost, as often as asked."""


class Opened:
    """Both may be open at once."""

    def __init__(self, context: DialectContext) -> None:
        self._bus = context.calls.fleet.client.bus
        self._state = context.view.subjects.state

    async def begin(self) -> None:
        await self._write(replace(await self._read(), begun_until=await self._now() + SESSION_IDLE_S, sent=""))

    async def pause(self, *, anew: bool) -> None:
        """The fleet was paused just now. `anew`: for an update of which nothing has come yet."""
        pause = (await read_pause(self._bus, self._state)).encode().decode()
        entry = replace(await self._read(), pause=pause)
        await self._write(replace(entry, sent="") if anew else entry)

    async def is_begun(self) -> bool:
        return (await self._read()).begun_until > await self._now()

    async def takes_more(self, update_id: str, *, was_begun: bool = False) -> bool:
        """A part of it has come: will more come, or an end? What was begun waits for it anew. `was_begun`: when the
        part was announced; its trainer was not silent since, however long that took."""
        entry = await self._read()
        begun = entry.begun_until > (0.0 if was_begun else await self._now())
        until = await self._now() + SESSION_IDLE_S if begun else entry.begun_until
        noted = replace(entry, sent=update_id, begun_until=until)
        if noted != entry:
            await self._write(noted)
        return begun or await self._in_pause(entry)

    async def sent(self) -> str:
        """The update that has taken parts, and may be lost by now; empty: none, since the last was committed or the
        next was opened."""
        return (await self._read()).sent

    async def is_open(self) -> bool:
        """Will an end come, of one or the other?"""
        entry = await self._read()
        return entry.begun_until > await self._now() or await self._in_pause(entry)

    async def in_pause(self) -> bool:
        """Will `continue_generation` come?"""
        return await self._in_pause(await self._read())

    async def end(self, *, committed: bool = True) -> None:
        """What was begun is over. (A pause ends with the fleet's own.) Not `committed`: what was sent is lost."""
        entry = await self._read()
        over = replace(entry, begun_until=0.0, sent="" if committed else entry.sent)
        if over != entry:
            await self._write(over)

    async def _in_pause(self, entry: _Entry) -> bool:
        if not entry.pause:
            return False
        now = await read_pause(self._bus, self._state)
        return now.encode().decode() == entry.pause and now.left_s(await self._now()) > 0

    async def _now(self) -> float:
        """By the server's clock: the next call may come by another frontend."""
        return await self._bus.server_time(self._state)

    async def _read(self) -> _Entry:
        found = await self._bus.get(self._state, OPENED)
        return _Entry(**json.loads(found.value)) if found is not None and found.value else _Entry()

    async def _write(self, entry: _Entry) -> None:
        await self._bus.put(self._state, OPENED, json.dumps(asdict(entry)).encode())
