"""The update that runs, as the op `state` of the fleet reports it."""

from __future__ import annotations

from typing import TypedDict


class RunningUpdate(TypedDict):
    """An update that has begun and not ended."""

    update_id: str
    label: str
    phase: str
    """A phase of `rl_plane.commit.steps.Phase`. Between two calls of a trainer: `receive` while the workers listen for
    what the trainer pushes, else `prepared`."""
    caller: str
    """The process that asked for it, with its address if it asked over HTTP."""
    asked_by: str
    """The id of the caller's key. Empty: it has none."""
    who: str
    """The process that coordinates it, or did so last."""
    transport: str | None
    """The name of the transport. None: nothing is received."""
    began_at: float | None
    """Unix seconds. None: it has not begun to ask the workers yet."""
    elapsed_s: float
    in_phase_s: float | None
    """Seconds since the phase began. None: not known."""
    deadline_in_s: float | None
    """Seconds until the phase must have ended. Negative: it is late. None: it has no bound of its own, or none that is
    known."""
    idle_limit_s: float | None
    """The update is dropped if its trainer is silent for so long. None: it does not wait for a call of its trainer."""
    waits_for: str
    """The thing that it waits for, in words."""
    workers: int
    """The number of workers that receive it or hold it staged."""
    bytes: int
    """The bytes that have come to these workers."""
    total_bytes: int
    """The bytes that these workers expect."""
    bytes_per_s: float
    """The sum of their rates."""
    since_progress_s: float | None
    """Seconds since the last bytes came to the slowest worker. None: no worker reports it."""
