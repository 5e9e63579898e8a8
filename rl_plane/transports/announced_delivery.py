"""A delivery whose trainer announces its tensors part by part: what all transports of such deliveries share."""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import Conflict, DeadlineExceeded, EngineFailed, InvalidWeights, PlaneError, Unavailable
from rl_plane.protocol.update_requests import ReceivePart
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import PartwiseDelivery

LOOK_S = 0.05
"""Seconds between two looks at `cancelled`, in a wait for the next part or for its end."""
TAKEN_S = 10.0
"""Seconds beyond a part's own time-out, in which its last tensors are staged."""

S = TypeVar("S")


@dataclass(slots=True)
class Coming(Generic[S]):
    """A part that was announced, and is being received."""

    part: ReceivePart
    source: S
    """The place that its bytes come from."""
    deadline: float
    """Monotonic seconds."""
    cancelled: Cancelled
    taken: threading.Event = field(default_factory=threading.Event)


class AnnouncedDelivery(PartwiseDelivery, Generic[S]):
    """Hands each announced part from the thread of `receive_part` to that of `tensors`. A transport says where the
    bytes of a part come from, and reads them."""

    def __init__(self, again: str) -> None:
        """`again`: what the trainer does after an update that has failed, in words."""
        super().__init__()
        self.cancelled: Cancelled = never
        """The argument of `tensors`."""
        self.ended = False
        self._again = again
        self._whole = False
        self._asked_only = False
        """Whether the trainer only asked if its tensors fit. It sends nothing before the answer, so groups are in
        step."""
        self._receiving = False
        self._asked: dict[str, TensorSpec] = {}
        """The tensors of a question that comes in several parts, of which the last is still to come."""
        self._error: BaseException | None = None
        self._coming: queue.SimpleQueue[Coming[S] | None] = queue.SimpleQueue()
        self._feeding = threading.Lock()

    # ---- what a transport adds ----

    @abstractmethod
    def _source(self, part: ReceivePart) -> S:
        """Finds where the bytes of a part come from, and checks all that needs none of them."""

    @abstractmethod
    def _received(self, coming: Coming[S]) -> Iterator[tuple[str, HostTensor]]:
        """Yields the tensors of a part."""

    def _check_waiting(self) -> None:
        """Called while the delivery waits for a part. Raises if none can come."""

    # ---- on the thread of `receive_part` ----

    def receive_part(self, part: ReceivePart, cancelled: Cancelled) -> int:
        deadline = time.monotonic() + part.timeout_s
        if not self._feeding.acquire(blocking=False):
            raise Conflict("another part of this update is being received", fix="send one part after another")
        try:
            self._check_on()
            if part.check_only:
                self._asked_only = not self._came
                self._check_whole(part)
                return 0
            coming = Coming(part, self._announce(part), deadline, cancelled)
            self._receiving = True  # until the whole part has come
            self._coming.put(coming)
            while not coming.taken.wait(LOOK_S):
                self._check_on()
                if time.monotonic() > deadline + TAKEN_S:
                    raise DeadlineExceeded(
                        f"the part did not come within its {part.timeout_s:g} s", fix=self._again
                    )
            self._receiving = False
            return self._missing
        except PlaneError as error:
            self._error = self._error or error
            self._coming.put(None)
            raise
        finally:
            self._feeding.release()

    @property
    def _missing(self) -> int:
        return len(self._wanted.keys() - self._tied.keys() - self._came.keys())

    def _check_on(self) -> None:
        if isinstance(self._error, PlaneError):
            raise type(self._error)(self._error.message, **self._error.facts)
        if self.ended:
            raise Unavailable("the update has ended", fix=self._again)

    def _check_whole(self, part: ReceivePart) -> None:
        """Checks the tensors that a trainer asks about, once the last part of its question has come."""
        self._asked.update(self._offered(part))
        if part.last:
            whole, self._asked = {**self._came, **self._asked}, {}
            self._check_specs(self._wanted, whole)

    def _announce(self, part: ReceivePart) -> S:
        """Checks the specs of a part, and puts them into `specs`. Returns where its bytes come from."""
        offered = self._offered(part)
        whole = {**self._came, **offered}
        wanted = (
            self._wanted if part.last else {name: one for name, one in self._wanted.items() if name in offered}
        )
        self._check_specs(wanted, whole if part.last else offered)
        source = self._source(part)
        self._came = whole
        self._asked_only = False
        self._specs.update(offered)
        return source

    def _offered(self, part: ReceivePart) -> dict[str, TensorSpec]:
        offered = dict(zip(part.names, part.specs, strict=True))
        twice = sorted(offered.keys() & self._came.keys())
        if twice:
            raise InvalidWeights(
                f"{len(twice)} tensors come twice; the first is {twice[0]}", field="names", fix="send each once"
            )
        return offered

    # ---- on the thread of `tensors` ----

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        self.cancelled = cancelled
        try:
            while True:
                coming = self._next()
                yield from self._received(coming)
                if coming.part.last:
                    break
                coming.taken.set()
        except Exception as error:
            self._error = self._error or error
            raise
        self._leave_out_tied()
        self._whole = True
        coming.taken.set()

    def _next(self) -> Coming[S]:
        while True:
            try:
                coming = self._coming.get(timeout=LOOK_S)
            except queue.Empty:
                coming = None
            if self._error is not None:
                raise self._error
            if self.cancelled():
                raise EngineFailed("staging was cancelled")
            if self._missing:  # a trainer that has sent everything may leave
                self._check_waiting()
            if coming is not None:
                return coming
