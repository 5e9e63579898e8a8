"""One version on its way to the fleet: the trainer's handle, and the publisher's side of it."""

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

PublishPhase = Literal["waiting", "sending", "committing", "committed", "failed"]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a publication."""

    phase: PublishPhase
    buckets: int = 0
    """Buckets that the transport has taken so far, of `of_buckets`."""
    of_buckets: int = 0
    nbytes: int = 0
    """Bytes in these buckets, of `of_nbytes`."""
    of_nbytes: int = 0
    elapsed_s: float = 0.0
    """Seconds since `publish` was called."""


class Publication:
    """One version on its way to the fleet. Its methods may be called from any thread.

    If no code calls `result` or `wait`, the publisher logs a failure before the next version, or when it closes.
    """

    def __init__(self, version: str | None) -> None:
        self.version = version
        """The label of the version, as `publish` was given it."""
        self.progress = Progress("waiting")
        """The progress so far."""
        self._watched = False
        """The caller has asked for the outcome, so a failure need not be logged."""
        self._read = threading.Event()
        self._outcome: Future[dict[str, Any] | None] = Future()
        self._outcome.set_running_or_notify_cancel()  # cancelling one wait must not cancel the others

    @property
    def read(self) -> bool:
        """True once all tensors have been read. From then on the trainer may change them."""
        return self._read.is_set()

    @property
    def done(self) -> bool:
        """True once the version is committed, or has failed."""
        return self._outcome.done()

    def wait_read(self, timeout_s: float | None = None) -> None:
        """Blocks until all tensors have been read, or the publication has failed. Call it before `optimizer.step()`.

        Args:
            timeout_s: seconds; None waits without a bound.

        Raises:
            DeadlineExceeded: `timeout_s` ran out.
        """
        if not self._read.wait(timeout_s):
            raise DeadlineExceeded(f"the tensors were not read within {timeout_s:g} s")

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Blocks until the version is committed. Returns the update's reply.

        The reply has `version`, `workers`, `excluded` and `phases`. On ranks other than 0 the reply is empty. It comes
        with the outcome on rank 0 if the ranks gather the weights, and else at once.

        Args:
            timeout_s: seconds; None waits without a bound.

        Raises:
            DeadlineExceeded: `timeout_s` ran out. The publication continues.
            PlaneError: the update failed. The fleet serves what it served before, unless the error says otherwise.
        """
        self.mark_watched()
        try:
            return self._outcome.result(timeout_s) or {}
        except TimeoutError:
            if (
                timeout_s is None or self.done
            ):  # the error is the publication's own, or comes from a signal handler
                raise
            raise DeadlineExceeded(f"{self.version} was not committed within {timeout_s:g} s") from None

    async def wait(self) -> dict[str, Any]:
        """`result` for asyncio. If the caller is cancelled, the publication continues."""
        self.mark_watched()
        return await asyncio.wrap_future(self._outcome) or {}

    def mark_watched(self) -> None:
        """States that the caller learns of a failure, so that the publisher does not log it."""
        self._watched = True
        if self.done:
            _outcome_unreported.discard(self)


class RunningPublication(Publication):
    """The publisher's side of a Publication: it reports progress, guards tensors that are read, and sets the
    outcome."""

    def __init__(self, version: str | None, progress: Callable[[Progress], None] | None) -> None:
        """`progress`: called with each Progress, on the publisher's threads."""
        super().__init__(version)
        self.policy: Mapping[str, Any] = {}
        """The part of the update's policy that holds for this version alone."""
        self.number = 0
        """The version's number, which all ranks of the trainer count."""
        self.tell_ranks: Callable[[BaseException | None], object] = lambda error: None
        """Tells the other ranks the outcome of a version that rank 0 sends alone."""
        self._report = progress
        self._start = time.monotonic()
        self._lock = threading.Lock()
        """Guards `_idle`, `_given_up` and `_end_sending`."""
        self._idle = True
        """No thread reads the tensors at the moment."""
        self._given_up: UpdateAborted | None = None
        self._end_sending: Callable[[], object] | None = None
        self._refused_for: RunningPublication | None = None
        """The publication that was still under way when the turn of this one came."""

    def begin(self) -> None:
        """From here on the publication has to be ended by `end`."""
        _outcome_unreported.add(self)

    def report(self, phase: PublishPhase, **facts: int) -> None:
        """Updates `progress`, and calls the trainer's callback."""
        self.progress = replace(self.progress, phase=phase, elapsed_s=time.monotonic() - self._start, **facts)
        if self._report is not None:
            self._report(self.progress)

    def on_give_up(self, end_sending: Callable[[], object] | None) -> None:
        """Sets what ends the sending if the publication is given up. None: the outcome is decided.

        Raises UpdateAborted if the publication has been given up already.
        """
        with self._lock:
            if self._given_up is not None and end_sending is not None:
                raise self._given_up
            self._end_sending = end_sending

    def readable(self, tensors: Iterator[T]) -> Iterator[T]:
        """Yields the tensors until the publication is given up; then it raises UpdateAborted."""
        self.begin_reading()
        for tensor in tensors:
            yield tensor
            del tensor  # its memory is free before the next one is gathered
            self.begin_reading()

    def begin_reading(self) -> None:
        """Raises UpdateAborted if the publication has been given up."""
        with self._lock:
            if self._given_up is not None:
                raise self._given_up
            self._idle = False

    def pause_reading(self) -> None:
        """Says that no thread reads the tensors until the next `begin_reading`."""
        with self._lock:
            self._idle = True
            if self._given_up is not None:
                self._read.set()

    def finish_reading(self) -> None:
        """All tensors have been read: the trainer may change them."""
        self._read.set()

    @property
    def given_up(self) -> UpdateAborted | None:
        """The error of a publication that was given up."""
        return self._given_up

    def give_up(self, error: BaseException) -> None:
        """Ends the publication early, because the caller no longer waits for it (Ctrl-C).

        The tensor that is being read is read to its end, and no further one. The sender is closed. A commit that is
        under way at this moment may still succeed.
        """
        with self._lock:
            self._given_up = UpdateAborted(f"{self.version} was given up: {type(error).__name__}")
            if self._idle:
                self._read.set()
            if self._end_sending is not None:
                self._end_sending()

    def end(self, reply: dict[str, Any] | None = None, error: BaseException | None = None) -> None:
        """Sets the outcome: the update's reply, or its error."""
        self._read.set()
        try:
            self.report("committed" if error is None else "failed")
        except Exception:  # from the trainer's callback, which does not change the outcome
            log.exception("progress of %s", self.version)
        if error is None:
            self._outcome.set_result(reply)
        else:
            self._outcome.set_exception(error)
        if error is None or self._watched:
            _outcome_unreported.discard(self)

    def wait_for(self, previous: RunningPublication, bound_s: float) -> None:
        """Blocks until the previous publication has ended. Raises Locked after `bound_s` seconds."""
        if not previous.settle(bound_s):
            self._refused_for = previous
            raise Locked(
                f"{previous.version} is still under way", fix="wait for its result before the next publish"
            )

    @property
    def under_way(self) -> bool:
        """True if this publication has not ended, or was refused because of another that has not ended."""
        return not self.done or (self._refused_for is not None and self._refused_for.under_way)

    def settle(self, bound_s: float) -> bool:
        """Waits at most `bound_s` seconds until the publication has ended. Returns whether it has.

        Logs an error that no caller saw."""
        try:
            error = self._outcome.exception(bound_s)
        except TimeoutError:
            return False
        if error is not None and not self._watched:
            log.warning("%s was not published: %s", self.version, error)
        self.mark_watched()
        # While the publication that this one was refused for runs, no later one can have begun.
        return self._refused_for is None or self._refused_for.settle(bound_s)


_outcome_unreported: set[Publication] = set()
"""Publications that are under way, or whose failure the caller has not seen."""
os.register_at_fork(after_in_child=_outcome_unreported.clear)


@atexit.register
def _report_lost_publications() -> None:
    """Logs what this process leaves unfinished. At exit Python has ended its executors, so sending is over."""
    for one in list(_outcome_unreported):
        if isinstance(one, RunningPublication) and one.done:
            one.settle(0.0)
        else:
            log.error(
                "%s is lost, unless it is committed just now: this process ends while it is under way; wait for its "
                "result, or close the publisher",
                one.version,
            )
