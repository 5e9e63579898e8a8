"""The events of the last hour, which a reader gets when it connects again."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from frontend.server.replies import to_json

KEPT_S = 3600.0
"""The time in seconds for which a frontend keeps events: an operator who is called looks within the hour."""

ID_STEP = 4096
"""The ids of one frontend are so far apart, and begin at a random one. So the ids of two frontends differ, and a reader
that moves from one to the other gets `missed`. The ids stay below 2^53, up to which JavaScript counts exactly, until
2039."""

Kind = Literal["member", "op", "update", "admission", "end"]

MISSED = b'event: missed\ndata: {"fix": "read the state: events before the next one are not kept any more"}\n\n'
"""It has no id, so a reader that connects again names the last event that it really got."""


@dataclass(frozen=True, slots=True)
class FleetEvent:
    id: int
    at: float
    """Unix seconds."""
    kind: Kind
    data: dict[str, Any]

    def to_wire(self) -> dict[str, Any]:
        return {"id": self.id, "at": self.at, "kind": self.kind, "data": self.data}

    def framed(self) -> bytes:
        """The event as server-sent bytes."""
        return b"id: %d\n" % self.id + passing(self.kind, self.data, self.at)


def passing(kind: Kind, data: dict[str, Any], at: float | None = None) -> bytes:
    """An event that is not kept, as server-sent bytes. It has no id, so a reader that connects again names the kept
    event before it. `at`: Unix seconds; None for now."""
    told = to_json({**data, "at": time.time() if at is None else at})
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), told)


def last_admissions(events: Iterable[FleetEvent]) -> dict[str, dict[str, Any]]:
    """The data of each worker's last `admission` event, by its instance id, for workers that have not left since.
    `events`: oldest first."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.kind == "admission":
            found[event.data["instance_id"]] = event.data
        elif event.kind == "member" and event.data.get("change") == "left":
            found.pop(event.data["instance_id"], None)
    return found


class KeptEvents:
    """Numbers the events of one frontend, and keeps the newest, also those of earlier frontends."""

    def __init__(self, max_events: int) -> None:
        self._last_id = int(time.time() * 1000) * ID_STEP + secrets.randbelow(ID_STEP)
        self._before = self._last_id
        """The id of the last event that is not kept any more."""
        self._kept: deque[FleetEvent] = deque()
        self._max_events = max_events

    def load(self, earlier: Sequence[FleetEvent]) -> None:
        """Takes the events of earlier frontends, oldest first. Call it before the first own event."""
        if earlier:
            self._before = earlier[0].id - ID_STEP
            ahead = max(0, earlier[-1].id - self._last_id)
            self._last_id += math.ceil(ahead / ID_STEP) * ID_STEP
        for event in earlier:
            self._keep(event)

    def new(self, kind: Kind, data: dict[str, Any]) -> FleetEvent:
        """Makes the next event, and keeps it."""
        self._last_id += ID_STEP
        event = FleetEvent(self._last_id, time.time(), kind, data)
        self._keep(event)
        return event

    def _keep(self, event: FleetEvent) -> None:
        self._kept.append(event)
        while len(self._kept) > self._max_events:
            self._before = self._kept.popleft().id

    def missed(self, after: int | None, since_s: float | None) -> list[bytes]:
        """The kept events that a reader has not got, oldest first. The event `missed` comes before them if events that
        it has not got are not kept any more. For the arguments see `FleetEvents.listen`."""
        now = time.time()
        while self._kept and now - self._kept[0].at > KEPT_S:
            self._before = self._kept.popleft().id
        if after is None:
            return [event.framed() for event in self._kept if since_s is not None and now - event.at <= since_s]
        if after == self._before or any(event.id == after for event in self._kept):
            return [event.framed() for event in self._kept if event.id > after]
        return [MISSED, *(event.framed() for event in self._kept)]
