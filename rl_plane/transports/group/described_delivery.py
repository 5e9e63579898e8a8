"""Receives weights that a trainer describes in the group itself, as prime-rl does: `{backend, group, format}`.

The trainer broadcasts what comes next before it comes, so no call of the fleet announces it. A description that does
not fit the model is refused before memory is made for its tensors. The group is dropped then, because the trainer has
begun to send them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import InvalidRequest, InvalidWeights
from rl_plane.protocol.update_requests import ReceivePart
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import CheckSpecs, PartwiseDelivery
from rl_plane.transports.group.prime_rl_wire import (
    FIX,
    MAX_STATE_DICTS,
    NUMBER_BYTES,
    read_description,
    read_number,
)
from rl_plane.transports.group.streamed_delivery import received
from rl_plane.transports.group.torch_group import Group
from rl_plane.weights.pickle_reader import MAX_PICKLE_BYTES


class DescribedDelivery(PartwiseDelivery):
    """The delivery of one version in prime-rl's format (`prime_rl_wire`)."""

    def __init__(self, group: Group, drop: Callable[[str], None]) -> None:
        """`drop`: ends all groups, with a reason. After an update that ends early they are out of step."""
        self._specs: dict[str, TensorSpec] = {}
        self.specs: Mapping[str, TensorSpec] = self._specs
        self.ended = False
        self._group = group
        self._drop = drop
        self._deadline = time.monotonic() + group.place.timeout_s
        self._in_step = False
        """The trainer has sent nothing that this rank did not take."""
        self._wanted: Mapping[str, TensorSpec] = {}
        self._tied: Mapping[str, str] = {}
        self._check_specs: CheckSpecs = lambda wanted, offered: None
        self._came: dict[str, TensorSpec] = {}

    def expect(self, wanted: Mapping[str, TensorSpec], tied: Mapping[str, str], check: CheckSpecs) -> None:
        self._specs.update(wanted)
        self._wanted, self._tied, self._check_specs = wanted, tied, check

    def receive_part(self, part: ReceivePart, cancelled: Cancelled) -> int:
        raise InvalidRequest(
            "this update is described by its trainer in the group, not part by part",
            field="update_id",
            fix="complete_weights_update commits it",
        )

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        number = self._number("the number of state dicts", MAX_STATE_DICTS, cancelled)
        for at in range(number):
            which = f"state dict {at + 1} of {number}"
            length = self._number(f"the length of the description of {which}", MAX_PICKLE_BYTES, cancelled)
            (data,) = self._broadcasts([length], f"the description of {which}", cancelled)
            buckets = read_description(data)
            self._offer(dict(tensor for bucket in buckets for tensor in bucket))
            sizes = [sum(spec.nbytes for _, spec in bucket) for bucket in buckets]
            coming = self._broadcasts(sizes, which, cancelled)
            for bucket, bytes_of_all in zip(buckets, coming, strict=True):
                start = 0
                for name, spec in bucket:
                    yield name, HostTensor(spec, bytes_of_all[start : start + spec.nbytes])
                    start += spec.nbytes
        self._in_step = True
        self._check_specs(self._wanted, self._came)
        for name in self._specs.keys() - self._came.keys():
            del self._specs[name]  # it is tied to another tensor, and was left out

    def _broadcasts(self, sizes: list[int], what: str, cancelled: Cancelled) -> Iterator[memoryview]:
        yield from received(self._group, sizes, lambda number: what, self._deadline, cancelled)

    def _number(self, what: str, most: int, cancelled: Cancelled) -> int:
        (data,) = self._broadcasts([NUMBER_BYTES], what, cancelled)
        return read_number(data, most, what)

    def _offer(self, offered: Mapping[str, TensorSpec]) -> None:
        """Checks what a state dict brings, before memory is made for it."""
        twice = sorted(offered.keys() & self._came.keys())
        if twice:
            raise InvalidWeights(
                f"{len(twice)} tensors come twice; the first is {twice[0]}", field="transport.format", fix=FIX
            )
        self._check_specs({name: one for name, one in self._wanted.items() if name in offered}, offered)
        self._came.update(offered)
        self._specs.update(offered)

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            if not self._in_step:
                self._drop(f"rank {self._group.place.rank} did not take the whole update")
