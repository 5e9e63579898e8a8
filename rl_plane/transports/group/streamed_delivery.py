"""Receives the tensors that a trainer broadcasts part by part, in groups that it has formed itself."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import Conflict, DeadlineExceeded, EngineFailed, InvalidWeights, PlaneError, Unavailable
from rl_plane.protocol.update_requests import ReceivePart
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import CheckSpecs, PartwiseDelivery
from rl_plane.transports.group.broadcast_plan import chunks
from rl_plane.transports.group.rank_layout import FORM_AGAIN
from rl_plane.transports.group.torch_group import AHEAD, Group

LOOK_S = 0.05
"""Seconds between two looks at `cancelled`, in a wait for the next part or for its end."""
TAKEN_S = 10.0
"""Seconds beyond a part's own time-out, in which its last tensors are staged."""


def received(
    group: Group, sizes: list[int], name: Callable[[int], str], deadline: float, cancelled: Cancelled
) -> Iterator[memoryview]:
    """Yields the trainer's next broadcasts, of `sizes` bytes each. Each is valid until the next one is asked for."""
    lanes = group.lanes(sizes)
    views = [memoryview(lane.numpy()) for lane in lanes]

    def begin(number: int) -> Any:
        return group.broadcast(lanes[number % AHEAD][: sizes[number]], cancelled)

    coming = [begin(number) for number in range(len(lanes))]
    for number, size in enumerate(sizes):
        coming[number % AHEAD].wait(name(number), deadline, cancelled)
        yield views[number % AHEAD][:size]
        if number + AHEAD < len(sizes):
            coming[number % AHEAD] = begin(number + AHEAD)


@dataclass(slots=True)
class _Coming:
    """A part that was announced, and is being received."""

    part: ReceivePart
    group: Group
    deadline: float
    """Monotonic seconds."""
    cancelled: Cancelled
    taken: threading.Event = field(default_factory=threading.Event)


class GroupPartwiseDelivery(PartwiseDelivery):
    """A delivery in which each part names the group by which it comes."""

    def __init__(self, group: Group, group_named: Callable[[str], Group], drop: Callable[[str], None]) -> None:
        """Makes the delivery.

        Args:
            group: the group of parts that name none.
            group_named: finds a group.
            drop: ends all groups, with a reason. After an update that ends early they are out of step.
        """
        self._specs: dict[str, TensorSpec] = {}
        self.specs: Mapping[str, TensorSpec] = self._specs
        self.cancelled: Cancelled = never
        """The argument of `tensors`."""
        self.ended = False
        self._whole = False
        self._asked_only = False
        """The trainer has only asked whether its tensors fit. It sends nothing before the answer, so groups are in
        step."""
        self._receiving = False
        self._groups = {group.place.group: group}
        self._first = group
        self._group_named = group_named
        self._drop = drop
        self._wanted: Mapping[str, TensorSpec] = {}
        self._tied: Mapping[str, str] = {}
        self._check_specs: CheckSpecs = lambda wanted, offered: None
        self._came: dict[str, TensorSpec] = {}
        self._asked: dict[str, TensorSpec] = {}
        """The tensors of a question that comes in several parts, of which the last is still to come."""
        self._error: BaseException | None = None
        self._coming: queue.SimpleQueue[_Coming | None] = queue.SimpleQueue()
        self._feeding = threading.Lock()

    def expect(self, wanted: Mapping[str, TensorSpec], tied: Mapping[str, str], check: CheckSpecs) -> None:
        self._specs.update(wanted)
        self._wanted, self._tied, self._check_specs = wanted, tied, check

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
            coming = _Coming(part, self._announce(part), deadline, cancelled)
            self._receiving = True  # until the whole part has come
            self._coming.put(coming)
            while not coming.taken.wait(LOOK_S):
                self._check_on()
                if time.monotonic() > deadline + TAKEN_S:
                    raise DeadlineExceeded(
                        f"the part did not come within its {part.timeout_s:g} s", fix=FORM_AGAIN
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

    @property
    def _in_step(self) -> bool:
        """True if the groups can stay: the trainer has sent nothing that this rank did not take.

        After a part of tied tensors only, nothing else comes.
        """
        only_tied = self._came.keys() <= self._tied.keys() and not self._receiving
        return self._whole or self._asked_only or (bool(self._came) and only_tied)

    def _check_on(self) -> None:
        if isinstance(self._error, PlaneError):
            raise type(self._error)(self._error.message, **self._error.facts)
        if self.ended:
            raise Unavailable("the update has ended", fix=FORM_AGAIN)

    def _check_whole(self, part: ReceivePart) -> None:
        """Checks the tensors that a trainer asks about, once the last part of its question has come."""
        self._asked.update(self._offered(part))
        if part.last:
            whole, self._asked = {**self._came, **self._asked}, {}
            self._check_specs(self._wanted, whole)

    def _announce(self, part: ReceivePart) -> Group:
        """Checks the specs of a part, and puts them into `specs`. Returns the group by which the part comes."""
        offered = self._offered(part)
        whole = {**self._came, **offered}
        wanted = (
            self._wanted if part.last else {name: one for name, one in self._wanted.items() if name in offered}
        )
        self._check_specs(wanted, whole if part.last else offered)
        group = self._first if part.group is None else self._group_named(part.group)
        if offered:
            group.check()
        self._groups[group.place.group] = group
        self._came = whole
        self._asked_only = False
        self._specs.update(offered)
        return group

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
        for name in self._specs.keys() - self._came.keys():
            del self._specs[name]  # it is tied to another tensor, and was left out
        self._whole = True
        coming.taken.set()

    def _next(self) -> _Coming:
        while True:
            try:
                coming = self._coming.get(timeout=LOOK_S)
            except queue.Empty:
                coming = None
            if self._error is not None:
                raise self._error
            if self.cancelled():
                raise EngineFailed("staging was cancelled")
            for group in self._groups.values() if self._missing else ():
                group.check()  # a trainer that has sent everything may leave
            if coming is not None:
                return coming

    def _received(self, coming: _Coming) -> Iterator[tuple[str, HostTensor]]:
        def cancelled() -> bool:
            return self.cancelled() or coming.cancelled()

        def name(number: int) -> str:
            first = parts[number][0][0]
            return first if len(parts[number]) == 1 else f"the bucket that begins with {first}"

        parts = chunks(coming.part)
        sizes = [sum(spec.nbytes for _, spec in one) for one in parts]
        buckets = received(coming.group, sizes, name, coming.deadline, cancelled)
        for one, data in zip(parts, buckets, strict=True):
            start = 0
            for named, spec in one:
                yield named, HostTensor(spec, data[start : start + spec.nbytes])
                start += spec.nbytes

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            if not self._in_step:
                self._drop(f"rank {self._first.place.rank} did not take the whole update")
