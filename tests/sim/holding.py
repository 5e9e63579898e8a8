"""A scheduler that holds back chosen messages: chance alone would hardly ever delay the one write that matters for just
as long as another process needs to take the lock."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_plane.protocol.subjects import LOCK, RECORD, KeyValueBucket

if TYPE_CHECKING:
    from tests.sim.sim_client import SimConn
    from tests.sim.sim_nats import SimServer

LOOK_S = 0.01
DECISION = "decision"
"""Only writes of the record that decide something."""
MAX_HELD_S = 8.0
"""The longest time for which a path may stand still."""


class Holding:
    """Holds back what one client sends, from its n-th write of a key on, until another call has the lock.

    The messages keep their order, and die with their connection, as on a path that stands still."""

    def __init__(
        self,
        server: SimServer,
        bucket: KeyValueBucket,
        conn: SimConn,
        key: str,
        skip: int,
        after_s: float,
        begun: Callable[[], None],
    ) -> None:
        """`skip`: so many writes of the key pass before. `after_s`: between the other call's acquire and the release.
        `begun` is called when the first message has stopped."""
        self._server = server
        self._bucket = bucket
        self._conn = conn
        self._key = key
        self._skip = skip
        self._after_s = after_s
        self._begun = begun
        self._holds = False
        self._held: list[Callable[[], None]] = []
        self._holder: Any = None
        self._give_up = server.loop.now + MAX_HELD_S

    def sending(self, conn: SimConn, bucket: KeyValueBucket, key: str, value: bytes) -> None:
        """A write is about to be sent."""
        if self._holds or conn is not self._conn or bucket != self._bucket:
            return
        if key != self._key and not (self._key == DECISION and key == RECORD and self._decides(value)):
            return
        if self._skip:
            self._skip -= 1
            return
        self._holds, self._holder = True, self._now()
        self._give_up = self._server.loop.now + MAX_HELD_S
        self._begun()

    def takes(self, conn: SimConn) -> bool:
        return self._holds and conn is self._conn

    def add(self, send: Callable[[], None]) -> None:
        self._held.append(send)

    def start(self) -> None:
        self._server.holding = self
        self._server.later(LOOK_S, self._look)

    def release(self) -> None:
        if self._server.holding is self:
            self._server.holding = None
        held, self._held = self._held, []
        for send in held:
            send()

    def _look(self) -> None:
        taken = self._holds and self._now() not in (None, self._holder)
        if taken:
            self._server.later(self._after_s, self.release)
        elif self._server.loop.now > self._give_up:
            self.release()
        else:
            self._server.later(LOOK_S, self._look)

    def _decides(self, value: bytes) -> bool:
        """Returns True if the record is of another update than the present one."""
        there = self._server.value(self._bucket, RECORD)
        before = json.loads(there.value)["update_id"] if there is not None and there.value else ""
        return bool(json.loads(value)["update_id"] != before)

    def _now(self) -> tuple[str, str] | None:
        """The holder of the lock."""
        found = self._server.value(self._bucket, LOCK)
        holder = json.loads(found.value) if found is not None and found.value else None
        return (holder["owner"], holder["nonce"]) if holder is not None else None
