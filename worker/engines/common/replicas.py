"""Replicas of data parallelism inside one engine: which one a process belongs to, and whether all compute alike."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from rl_plane.errors import EngineFailed, InvalidRequest
from rl_plane.protocol.canary import ROUNDING_WITHIN_KIND, WITHIN_KIND_HALF, Tolerance

SAME_NUMBERS = Tolerance(WITHIN_KIND_HALF, ROUNDING_WITHIN_KIND)
"""The largest difference between the scores of two replicas: as between two engines of one kind."""

_IN_NAME = re.compile(r"_DP(\d+)")
"""Both engines write the number of the replica into the names of its processes."""


def check_replicas(replicas: int, hosts: int, field: str) -> None:
    """Raises InvalidRequest for a number of replicas that an engine can't have."""
    if replicas < 1:
        raise InvalidRequest(f"{replicas} replicas can't run", field=f"engine_arg.{field}", fix="give 1 or more")
    if replicas > 1 and hosts > 1:
        raise InvalidRequest(
            "data parallelism inside an engine is for one host",
            field=f"engine_arg.{field}",
            fix="run one worker on each host, without --nnodes",
        )


def replica_of(pid: int, names: Mapping[int, str], parents: Mapping[int, int]) -> int | None:
    """Returns the replica of a process, by its name or by that of a process that has started it. None: it belongs to
    all of them. `names`, `parents`: of the engine's processes."""
    while pid in names:
        if (found := _IN_NAME.search(names[pid])) is not None:
            return int(found[1])
        pid = parents.get(pid, 0)
    return None


def scores_of_replicas(scores: Sequence[list[list[float]]]) -> list[list[float]]:
    """Returns the scores of one replica. Raises EngineFailed if two replicas compute different numbers. Then at least
    one has wrong weights, and the scores don't show which."""
    first = scores[0]
    for replica, rows in enumerate(scores[1:], 1):
        for number, (ones, others) in enumerate(zip(first, rows, strict=True)):
            for place, (one, other) in enumerate(zip(ones, others, strict=True), 1):
                if not _agree(one, other):
                    raise EngineFailed(
                        f"replicas 0 and {replica} of the engine disagree: the log probability of token {place} of "
                        f"sequence {number} is {one:.4f} and {other:.4f}"
                    )
    return first


def _agree(one: float, other: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)  # the caller refuses NaN, with a reason of its own
    return one == other or abs(one - other) <= SAME_NUMBERS.at(one)
