"""Receives the tensors that a trainer broadcasts part by part, in groups that it has formed itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.broadcast_plan import chunks
from rl_plane.protocol.update_requests import ReceivePart
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.announced_delivery import AnnouncedDelivery, Coming
from rl_plane.transports.group.rank_layout import FORM_AGAIN
from rl_plane.transports.group.torch_group import AHEAD, Group


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


def cut(data: memoryview, tensors: Iterable[tuple[str, TensorSpec]]) -> Iterator[tuple[str, HostTensor]]:
    """Yields the tensors of one broadcast, which lie side by side in `data`."""
    start = 0
    for name, spec in tensors:
        yield name, HostTensor(spec, data[start : start + spec.nbytes])
        start += spec.nbytes


class GroupPartwiseDelivery(AnnouncedDelivery[Group]):
    """A delivery in which each part names the group by which it comes."""

    def __init__(self, group: Group, group_named: Callable[[str], Group], drop: Callable[[str], None]) -> None:
        """Makes the delivery.

        Args:
            group: the group of parts that name none.
            group_named: finds a group.
            drop: ends all groups, with a reason. After an update that ends early they are out of step.
        """
        super().__init__(FORM_AGAIN)
        self._groups = {group.place.group: group}
        self._first = group
        self._group_named = group_named
        self._drop = drop

    @property
    def _in_step(self) -> bool:
        """True if the groups can stay: the trainer has sent nothing that this rank did not take.

        After a part of tied tensors only, nothing else comes.
        """
        only_tied = self._came.keys() <= self._tied.keys() and not self._receiving
        return self._whole or self._asked_only or (bool(self._came) and only_tied)

    def _source(self, part: ReceivePart) -> Group:
        if part.places is not None:
            raise InvalidRequest(
                "this update comes by broadcasts, not by places", field="places", fix="leave them out"
            )
        group = self._first if part.group is None else self._group_named(part.group)
        if part.names:
            group.check()
        self._groups[group.place.group] = group
        return group

    def _check_waiting(self) -> None:
        for group in self._groups.values():
            group.check()

    def _received(self, coming: Coming[Group]) -> Iterator[tuple[str, HostTensor]]:
        def cancelled() -> bool:
            return self.cancelled() or coming.cancelled()

        def name(number: int) -> str:
            first = parts[number][0][0]
            return first if len(parts[number]) == 1 else f"the bucket that begins with {first}"

        parts = chunks(coming.part)
        sizes = [sum(spec.nbytes for _, spec in one) for one in parts]
        buckets = received(coming.source, sizes, name, coming.deadline, cancelled)
        for one, data in zip(parts, buckets, strict=True):
            yield from cut(data, one)

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            if not self._in_step:
                self._drop(f"rank {self._first.place.rank} did not take the whole update")
