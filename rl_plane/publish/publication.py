"""One version on its way to the fleet, as its trainer sees it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

from rl_plane.errors import DeadlineExceeded, Locked

log = logging.getLogger("rl_plane.publish")

Stage = Literal["waiting", "sending", "committing", "committed", "failed"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a publication is."""

    stage: Stage
    buckets: int = 0
    """Handed to the transport so far."""
    of_buckets: int = 0
    nbytes: int = 0
    of_nbytes: int = 0
    elapsed_s: float = 0.0


class Publication:
    """One version on its way to the fleet. Its methods may be called from any thread."""

    def __init__(self, version: str | None, tell: Callable[[Progress], None] | None = None) -> None:
        self.version = version
        self.progress = Progress("waiting")
        self._tell = tell
        self._start = time.monotonic()
        self._read = threading.Event()
        self._asked = False
        self._refused_for: Publication | None = None
        """One that was still under way when this one's turn came."""
        self._outcome: Future[dict[str, Any] | None] = Future()
        self._outcome.set_running_or_notify_cancel()  # a wait that is cancelled must not cancel it: others wait too

    @property
    def read(self) -> bool:
        """Have all tensors been read? Then they may change."""
        return self._read.is_set()

    @property
    def done(self) -> bool:
        return self._outcome.done()

    def wait_read(self, timeout_s: float | None = None) -> None:
        """Until all tensors have been read, or the publication has failed: after it they may change."""
        if not self._read.wait(timeout_s):
            raise DeadlineExceeded(f"the tensors were not read within {timeout_s:g} s")

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The update's reply (`version`, `workers`, `excluded`, `phases`), or its error; the fleet is as before then.
        On other ranks than 0: empty, once the rank's part is done."""
        self._asked = True
        try:
            return self._outcome.result(timeout_s) or {}
        except TimeoutError:
            raise DeadlineExceeded(f"{self.version} was not committed within {timeout_s:g} s") from None

    async def wait(self) -> dict[str, Any]:
        """`result`, for asyncio. Cancelled, the publication goes on."""
        self._asked = True
        return await asyncio.wrap_future(self._outcome) or {}

    # ---- for the publisher ----

    def tell(self, stage: Stage, **facts: int) -> None:
        self.progress = replace(self.progress, stage=stage, elapsed_s=time.monotonic() - self._start, **facts)
        if self._tell is not None:
            self._tell(self.progress)

    def tensors_were_read(self) -> None:
        self._read.set()

    def end(self, reply: dict[str, Any] | None = None, error: BaseException | None = None) -> None:
        self._read.set()
        try:
            self.tell("committed" if error is None else "failed")
        except Exception:  # a callback of the trainer's, which changes nothing of the outcome
            log.exception("progress of %s", self.version)
        if error is None:
            self._outcome.set_result(reply)
        else:
            self._outcome.set_exception(error)

    def wait_for(self, before: Publication, bound_s: float) -> None:
        """Locked unless that one ends within the bound. An error that nobody has asked for is logged."""
        if not before._has_ended(bound_s):
            self._refused_for = before
            raise Locked(f"{before.version} is still under way", fix="wait for its result before the next publish")

    def settle(self, bound_s: float) -> None:
        """Waits so long at most."""
        self._has_ended(bound_s)

    def _has_ended(self, bound_s: float) -> bool:
        try:
            error = self._outcome.exception(bound_s)
        except TimeoutError:
            return False
        if self._refused_for is not None:  # then nothing has come after that one
            return self._refused_for._has_ended(bound_s)
        if error is not None and not self._asked:
            log.warning("%s was not published: %s", self.version, error)
        return True
