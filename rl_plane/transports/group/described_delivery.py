"""Receives weights that a trainer describes in the group itself, as prime-rl does: `{backend, group, format}`.

The trainer broadcasts what comes next before it comes, so no call of the fleet announces it. A description that does
not fit the model is refused before memory is made for its tensors. The group is dropped then, because the trainer has
begun to send them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import InvalidWeights
from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.described_tensors import SelfDescribedDelivery
from rl_plane.transports.group.prime_rl_wire import (
    MAX_STATE_DICTS,
    NUMBER_BYTES,
    read_description,
    read_number,
    refused,
)
from rl_plane.transports.group.streamed_delivery import cut, received
from rl_plane.transports.group.torch_group import Group
from rl_plane.weights.pickle_reader import MAX_PICKLE_BYTES


class DescribedDelivery(SelfDescribedDelivery):
    """The delivery of one version in prime-rl's format (`prime_rl_wire`)."""

    def __init__(self, group: Group, drop: Callable[[str], None]) -> None:
        """`drop`: ends all groups, with a reason. After an update that ends early they are out of step."""
        super().__init__()
        self.ended = False
        self._group = group
        self._drop = drop
        self._deadline = time.monotonic() + group.place.timeout_s
        self._in_step = False
        """This rank has taken all that the trainer has sent."""

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        number = self._number("the number of state dicts", MAX_STATE_DICTS, cancelled)
        for at in range(number):
            which = f"state dict {at + 1} of {number}"
            length = self._number(f"the length of the description of {which}", MAX_PICKLE_BYTES, cancelled)
            (data,) = self._broadcasts([length], f"the description of {which}", cancelled)
            buckets = read_description(data)
            self._announce(dict(tensor for bucket in buckets for tensor in bucket))
            sizes = [sum(spec.nbytes for _, spec in bucket) for bucket in buckets]
            coming = self._broadcasts(sizes, which, cancelled)
            for bucket, bytes_of_all in zip(buckets, coming, strict=True):
                yield from cut(bytes_of_all, bucket)
        self._in_step = True
        self._check_whole()

    def _broadcasts(self, sizes: list[int], what: str, cancelled: Cancelled) -> Iterator[memoryview]:
        yield from received(self._group, sizes, lambda number: what, self._deadline, cancelled)

    def _number(self, what: str, most: int, cancelled: Cancelled) -> int:
        (data,) = self._broadcasts([NUMBER_BYTES], what, cancelled)
        return read_number(data, most, what)

    def _refused(self, what: str) -> InvalidWeights:
        return refused(what)

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            if not self._in_step:
                self._drop(f"rank {self._group.place.rank} did not take the whole update")
