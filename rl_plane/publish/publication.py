"""One version on its way to the fleet, as its trainer sees it."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from rl_plane.errors import DeadlineExceeded, Locked, UpdateAborted

log = logging.getLogger("rl_plane.publish")

T = TypeVar("T")

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
        self.policy: Mapping[str, Any] = {}
        """This version's own part of its update's policy."""
        self.progress = Progress("waiting")
        self._tell = tell
        self._start = time.monotonic()
        self._read = threading.Event()
        self._lock = threading.Lock()
        """Over the next three."""
        self._idle = True
        """Nobody reads the tensors just now; they may be read (again)."""
        self._given_up: UpdateAborted | None = None
        self._end_sending: Callable[[], object] | None = None
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
        self.is_asked()
        try:
            return self._outcome.result(timeout_s) or {}
        except TimeoutError:
            if timeout_s is None or self.done:  # its own, or a signal's
                raise
            raise DeadlineExceeded(f"{self.version} was not committed within {timeout_s:g} s") from None

    async def wait(self) -> dict[str, Any]:
        """`result`, for asyncio. Cancelled, the publication goes on."""
        self.is_asked()
        return await asyncio.wrap_future(self._outcome) or {}

    # ---- for the publisher ----

    def is_asked(self) -> None:
        """Somebody learns of its error: else it is logged."""
        self._asked = True
        if self.done:
            _untold.discard(self)

    def begins(self) -> None:
        """To be ended by `end`."""
        _untold.add(self)

    def tell(self, stage: Stage, **facts: int) -> None:
        self.progress = replace(self.progress, stage=stage, elapsed_s=time.monotonic() - self._start, **facts)
        if self._tell is not None:
            self._tell(self.progress)

    def goes_by(self, end_sending: Callable[[], object] | None) -> None:
        """What ends its sending, if it is given up; None: it is decided. Raises if it was given up."""
        with self._lock:
            if self._given_up is not None and end_sending is not None:
                raise self._given_up
            self._end_sending = end_sending

    def reading(self, tensors: Iterator[T]) -> Iterator[T]:
        """The same, until it is given up: then this raises."""
        self.begins_to_read()
        for tensor in tensors:
            yield tensor
            self.begins_to_read()

    def begins_to_read(self) -> None:
        """Raises if it was given up."""
        with self._lock:
            if self._given_up is not None:
                raise self._given_up
            self._idle = False

    def pauses_reading(self) -> None:
        with self._lock:
            self._idle = True
            if self._given_up is not None:
                self._read.set()

    def tensors_were_read(self) -> None:
        self._read.set()

    @property
    def given_up(self) -> UpdateAborted | None:
        return self._given_up

    def give_up(self, error: BaseException) -> None:
        """Nobody waits for it any more: no tensor is read after the one that is just being read, what is not sent is
        not sent any more, and what is not committed by then will hardly be."""
        with self._lock:
            self._given_up = UpdateAborted(f"{self.version} was given up: {type(error).__name__}")
            if self._idle:
                self._read.set()
            if self._end_sending is not None:
                self._end_sending()

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
        if error is None or self._asked:
            _untold.discard(self)

    def wait_for(self, before: Publication, bound_s: float) -> None:
        """Locked unless that one ends within the bound. An error that nobody has asked for is logged."""
        if not before._has_ended(bound_s):
            self._refused_for = before
            raise Locked(f"{before.version} is still under way", fix="wait for its result before the next publish")

    @property
    def under_way(self) -> bool:
        """It, or one that it was refused for."""
        return not self.done or (self._refused_for is not None and self._refused_for.under_way)

    def settle(self, bound_s: float) -> None:
        """Waits so long at most."""
        self._has_ended(bound_s)

    def _has_ended(self, bound_s: float) -> bool:
        try:
            error = self._outcome.exception(bound_s)
        except TimeoutError:
            return False
        if error is not None and not self._asked:
            log.warning("%s was not published: %s", self.version, error)
        self.is_asked()
        # If that one has not ended, nothing has come after it.
        return self._refused_for is None or self._refused_for._has_ended(bound_s)


_untold: set[Publication] = set()
"""Under way, or failed, which nobody has been told of."""
os.register_at_fork(after_in_child=_untold.clear)


@atexit.register
def _tell_what_is_lost() -> None:
    """Nothing can be sent any more: the executors of Python have ended by now."""
    for one in list(_untold):
        if one.done:
            one.settle(0.0)
        else:
            log.error(
                "%s is lost, unless it is committed just now: this process ends while it is under way; wait for its "
                "result, or close the publisher",
                one.version,
            )
