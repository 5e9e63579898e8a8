"""Decides which rank of the trainer owns each tensor of a version. No I/O."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

from rl_plane.protocol.versions import TensorSpec

MAX_OWNERS = 256
"""The most ranks that own tensors. Each owner is a connection of every receiver, and a file of a checkpoint."""

Specs = Sequence[tuple[str, TensorSpec]]


def owners_of(specs: Specs, shared: Collection[str], ranks: int) -> dict[str, int]:
    """The owner of each tensor, balanced by bytes. Every rank computes the same result.

    The largest tensor goes first, always to the rank that owns the fewest bytes so far.

    Args:
        specs: the tensors in the order in which they are sent.
        shared: names of the tensors that any rank may own. Rank 0 owns all others.
        ranks: the number of ranks.
    """
    owners = {name: 0 for name, _ in specs if name not in shared}
    own_bytes = sum(spec.nbytes for name, spec in specs if name in owners)
    loads = [(own_bytes, 0), *((0, rank) for rank in range(1, min(ranks, MAX_OWNERS)))]
    heapq.heapify(loads)
    for name, spec in sorted(specs, key=lambda one: -one[1].nbytes):
        if name in shared:
            load, rank = heapq.heappop(loads)
            owners[name] = rank
            heapq.heappush(loads, (load + spec.nbytes, rank))
    return owners


def own_specs(specs: Specs, owners: Mapping[str, int], rank: int) -> list[tuple[str, TensorSpec]]:
    """The tensors that a rank owns, in the order of `specs`."""
    return [(name, spec) for name, spec in specs if owners[name] == rank]


def shares_of(specs: Specs, owners: Mapping[str, int]) -> dict[int, list[tuple[str, TensorSpec]]]:
    """The tensors of each owner, in the order of `specs`. A rank that owns none is missing."""
    found: dict[int, list[tuple[str, TensorSpec]]] = {}
    for name, spec in specs:
        found.setdefault(owners[name], []).append((name, spec))
    return dict(sorted(found.items()))
