"""The base of the deliveries whose trainer describes its tensors by the way of their bytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import InvalidRequest, InvalidWeights
from rl_plane.protocol.update_requests import ReceivePart
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.base import PartwiseDelivery


class SelfDescribedDelivery(PartwiseDelivery):
    """A delivery whose trainer sends the descriptions by the way of the tensors. No call of the fleet announces a
    part."""

    def receive_part(self, part: ReceivePart, cancelled: Cancelled) -> int:
        raise InvalidRequest(
            "the trainer of this update describes its tensors itself, not part by part",
            field="update_id",
            fix="send no parts: complete_weights_update commits the update",
        )

    @abstractmethod
    def _refused(self, what: str) -> InvalidWeights:
        """Makes the error for a description. `what`: what the trainer has sent."""

    def _announce(self, offered: Mapping[str, TensorSpec]) -> None:
        """Checks the next tensors before memory is made for them, and puts them into `specs`."""
        if twice := sorted(offered.keys() & self._came.keys()):
            raise self._refused(f"{len(twice)} tensors twice, the first of which is {twice[0]}")
        self._check_specs({name: one for name, one in self._wanted.items() if name in offered}, offered)
        self._came.update(offered)
        self._specs.update(offered)

    def _check_whole(self) -> None:
        """Checks after the last tensor that none is missing."""
        self._check_specs(self._wanted, self._came)
        self._leave_out_tied()
