"""The events of the last hour, which a reader gets when it connects again."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from frontend.server.replies import to_json

KEPT_S = 3600.0
"""The time for which events are kept: an operator who is called looks within the hour."""

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

    def framed(self) -> bytes:
        """The event as server-sent bytes."""
        data = to_json({**self.data, "at": self.at})
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self.id, self.kind.encode(), data)


class KeptEvents:
    """Numbers the events of one frontend, and keeps the newest."""

    def __init__(self, max_events: int) -> None:
        self._last_id = int(time.time() * 1000)
        self._first_id = self._last_id
        """Ids up to this one are of an earlier frontend."""
        self._kept: deque[FleetEvent] = deque(maxlen=max_events)

    def new(self, kind: Kind, data: dict[str, Any], *, keep: bool) -> FleetEvent:
        """Makes the next event. `keep`: readers that connect later may get it too."""
        self._last_id += 1
        event = FleetEvent(self._last_id, time.time(), kind, data)
        if keep:
            self._kept.append(event)
        return event

    def missed(self, after: int | None, since_s: float | None) -> list[bytes]:
        """The kept events that a reader has not got, oldest first. The event `missed` comes before them if events that
        it has not got are not kept any more. For the arguments see `FleetEvents.listen`."""
        now = time.time()
        kept = [event for event in self._kept if now - event.at <= KEPT_S]
        if after is None:
            return [event.framed() for event in kept if since_s is not None and now - event.at <= since_s]
        wanted = [event.framed() for event in kept if event.id > after]
        first = kept[0].id if kept else self._last_id + 1
        dropped = len(kept) < len(self._kept) or len(self._kept) == self._kept.maxlen
        complete = self._first_id <= after <= self._last_id and (not dropped or after >= first - 1)
        return wanted if complete else [MISSED, *wanted]
