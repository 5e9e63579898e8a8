"""Makes staging areas, from the memory of an earlier one where that is safe."""

from __future__ import annotations

from collections.abc import Mapping

from rl_plane.protocol.versions import TensorSpec
from worker.receive.staging_area import StagingArea, room_bytes


class AreaPool:
    """Keeps the memory of one shared area for the next one, since touching new memory takes longer than filling it.

    An area is used again only if no other process reads it: the ranks must have returned an area that was lent to them.
    """

    def __init__(self, *, shared: bool) -> None:
        """`shared`: other processes map the areas. Memory of this process alone is used again in any case: see
        `rl_plane.weights.read_ahead.host_memory`."""
        self._shared = shared
        self._spare: StagingArea | None = None
        self._lent: dict[str, StagingArea] = {}
        """Staging name → an area that the ranks load, or have not reported as loaded."""

    @property
    def spare_bytes(self) -> int:
        """The memory that waits for its next use, in bytes."""
        return 0 if self._spare is None else self._spare.resident_bytes

    def make(self, specs: Mapping[str, TensorSpec]) -> StagingArea:
        spare, self._spare = self._spare, None
        if spare is not None and spare.nbytes == sum(map(room_bytes, specs.values())):
            spare.lay_out(specs)
            return spare
        if spare is not None:
            spare.close()  # first, to make room
        return StagingArea.for_specs(specs, shared=self._shared)

    def lend(self, staging: str, area: StagingArea) -> None:
        """Notes that the ranks load this area from now on."""
        if self._shared:
            self._lent = {staging: area}  # one before was never given back, and the ranks may have it still

    def returned(self, staging: str) -> StagingArea | None:
        """Notes that all ranks have loaded what was lent under this name, and returns the area."""
        return self._lent.pop(staging, None)

    def give_back(self, area: StagingArea) -> None:
        """Takes an area that this process does not use any more."""
        lent = any(area is one for one in self._lent.values())
        if not self._shared or lent:
            area.close()
            return
        if self._spare is not None:
            self._spare.close()
        self._spare = area
