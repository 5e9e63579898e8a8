"""Knows the choices under way in this frontend, for people who ask why one does not end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from frontend.routing.progress import GenerationProgress
from rl_plane.protocol.generation import names_of

MAX_LISTED = 1000
"""The choices in one reply, the longest waits first: about 300 KB."""


class RunningChoice:
    """One choice: which worker has it, and when its last token came."""

    def __init__(self, progress: GenerationProgress, now: float) -> None:
        self.began_at = self.last_at = now
        """Monotonic seconds. `last_at`: of the last token, or of the move to another worker."""
        self.worker: str | None = None
        """The instance id of the worker that has the request. None: the request waits for a worker."""
        self.tries = 0
        """The number of workers that the frontend has sent the request to."""
        self._progress = progress

    def sent_to(self, worker: str, now: float) -> None:
        self.worker, self.last_at = worker, now
        self.tries += 1

    def to_wire(self, now: float, given: Callable[[str], list[str]]) -> dict[str, Any]:
        """`given` returns the callers' names of a reply's id."""
        progress = self._progress
        _, choice, reply = names_of(progress.request.id)
        spans = progress.labelled()
        return {
            "id": choice,
            "names": given(reply),
            "worker": self.worker,
            "tries": self.tries,
            "tokens": len(progress.token_ids),
            "max_tokens": progress.request.max_tokens,
            "version": {"label": spans[-1].version, "sequence": spans[-1].sequence} if spans else None,
            "elapsed_s": now - self.began_at,
            "since_progress_s": now - self.last_at,
        }


class RunningRequests:
    """All choices under way of one component. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.given: Callable[[str], list[str]] = lambda reply: []
        """Returns the names that callers have given the request with this reply."""
        self._choices: set[RunningChoice] = set()

    @contextmanager
    def of(self, progress: GenerationProgress) -> Iterator[RunningChoice]:
        choice = RunningChoice(progress, self.clock())
        self._choices.add(choice)
        try:
            yield choice
        finally:
            self._choices.discard(choice)

    def rows(self) -> list[dict[str, Any]]:
        now = self.clock()
        return [choice.to_wire(now, self.given) for choice in self._choices]


def listed_requests(running: Mapping[str, RunningRequests], begins: str = "") -> dict[str, Any]:
    """Returns the choices of which the id, or a name that the caller gave, begins with `begins`, and the number of all
    of them. The choice that has waited longest comes first. `running`: component → its choices."""
    rows = [{**row, "component": name} for name, one in running.items() for row in one.rows()]
    rows = [row for row in rows if any(one.startswith(begins) for one in (row["id"], *row["names"]))]
    rows.sort(key=lambda row: -float(row["since_progress_s"]))
    return {"status": "ok", "requests": rows[:MAX_LISTED], "count": len(rows)}
