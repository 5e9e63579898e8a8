"""Passes tensors to every rank through shared memory, window by window, for an update in place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import DeadlineExceeded, EngineFailed, PlaneError
from rl_plane.protocol.versions import HostTensor
from worker.receive.host_agent.areas import passed
from worker.receive.rank_agents.agent_messages import WithDescriptor
from worker.receive.staging_area import StagingArea, room_bytes

WINDOW_BYTES = 64 << 20
"""The most bytes of a window, unless one tensor is larger."""

AHEAD = 2
"""The windows that may be in memory: the ranks load one while the next one fills."""

RANKS_S = 300.0
"""The time in seconds that the ranks may take to load one window. A rank that hangs is found earlier by the worker."""

LOOK_S = 0.5
"""Seconds after which a rank that asks for a window is answered without one."""


class Windows:
    """One stream of tensors for several ranks. A thread puts tensors; each rank asks for windows in order."""

    def __init__(self, ranks: int, window_bytes: int = WINDOW_BYTES) -> None:
        self._window_bytes = window_bytes
        self._filling: StagingArea | None = None
        self._windows: dict[int, StagingArea] = {}
        """The windows that some rank still needs, by number."""
        self._made = 0
        self._asked = [0] * ranks
        """For each rank, the window that it has asked for: it is done with those before."""
        self._ended = False
        self._error: PlaneError | None = None
        self._changed = threading.Condition()

    # ---- on the thread that receives ----

    def put(self, name: str, tensor: HostTensor, check: Callable[[], None]) -> None:
        """Copies a tensor into the window that fills. `check` raises if the ranks or the caller have given up."""
        check()
        if self._filling is None or not self._filling.add(name, tensor.spec):
            self._pass_on(check)
            self._filling = StagingArea(max(self._window_bytes, room_bytes(tensor.spec)), shared=True)
            self._filling.add(name, tensor.spec)
        self._filling.put(name, tensor)
        if self._ranks_wait():  # a slow source does not make them wait for a full window
            self._pass_on(check)

    def _ranks_wait(self) -> bool:
        with self._changed:
            return min(self._asked) == self._made

    def end(self, check: Callable[[], None]) -> None:
        """Passes on the last window, and ends the stream."""
        self._pass_on(check)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def fail(self, error: PlaneError) -> None:
        """Raises the error in every rank that asks."""
        with self._changed:
            self._error = error
            self._windows.clear()
            self._filling = None
            self._changed.notify_all()

    def _pass_on(self, check: Callable[[], None]) -> None:
        until = time.monotonic() + RANKS_S
        with self._changed:
            window, self._filling = self._filling, None
            if window is None:
                return
            while len(self._windows) >= AHEAD:
                self._changed.wait(LOOK_S)
                check()
                if time.monotonic() > until:
                    raise DeadlineExceeded(f"the ranks did not load a part of the weights within {RANKS_S:g} s")
            self._windows[self._made] = window
            self._made += 1
            self._changed.notify_all()

    # ---- on the thread of a rank's call ----

    def ask(self, rank: int, number: int, cancelled: Cancelled) -> WithDescriptor | dict[str, Any]:
        """Returns a window, or `{end: true}`, or nothing yet."""
        with self._changed:
            self._asked[rank] = number
            done = min(self._asked)
            self._windows = {one: window for one, window in self._windows.items() if one >= done}
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._error is not None or self._ended or number in self._windows, LOOK_S
            )
            if self._error is not None:
                raise EngineFailed(f"the weights did not come: {self._error.message}")
            window = self._windows.get(number)
            if window is not None:
                return passed(window)
            return {"end": True} if self._ended and number == self._made else {}
