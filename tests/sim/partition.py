"""A partition: two groups of processes can't reach each other, and both reach all others.

A cluster of NATS servers has this fault: the route between two of the servers is cut, and each server passes on only
what its own clients send. A process that is connected to a third server reaches both groups. The buckets lie on one of
the servers (each bucket has one copy), so one of the groups may lose its way to the buckets too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tests.sim.process import Process

Way = Literal["lost", "late", "refused"]
"""The fate of a message that the partition cuts. `lost`: its sender gets no error. `late`: the message arrives, in
order, when the partition heals. `refused`: the servers have noticed, so a request that only the other group could
answer gets a 503."""


class Partition:
    def __init__(
        self,
        sides: Sequence[Sequence[Process | None]],
        directions: Sequence[tuple[int, int]],
        way: Way,
    ) -> None:
        """`directions`: from which side to which side messages are cut; both directions, or one."""
        self.way = way
        self.processes = [process for side in sides for process in side if process is not None]
        self._side = {process: number for number, side in enumerate(sides) for process in side}
        self._directions = frozenset(directions)
        self._held: list[Callable[[], None]] = []

    def cuts(self, source: Process | None, to: Process | None) -> bool:
        """Does a message from the one to the other not arrive? None: the server that has the buckets."""
        return (self._side.get(source), self._side.get(to)) in self._directions

    def take(self, source: Process | None, to: Process | None, send: Callable[[], None]) -> None:
        """Loses a message that it cuts, or keeps it until the heal."""
        for process in (source, to):
            if process is not None:
                process.cut_messages += 1
        if self.way == "late":
            self._held.append(send)

    def heal(self) -> None:
        """Sends the waiting messages."""
        held, self._held = self._held, []
        for send in held:
            send()
