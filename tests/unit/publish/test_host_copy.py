"""The copy that a trainer keeps of what it has published: it shows what a version changes."""

from __future__ import annotations

import torch

from rl_plane.protocol.versions import HostTensor
from rl_plane.publish.host_copy import HostCopy
from rl_plane.publish.sources.base import Taken
from tests.support.small_versions import Road, Tensors, same, spec_of, step, weights


def taken(tensors: Tensors) -> Taken:
    return Taken([(name, spec_of(tensor)) for name, tensor in tensors.items()], iter(tensors.items()))


def test_the_copy_finds_changed_tensors() -> None:
    """The copy finds changes in torch's tensors, however they lie in memory."""
    wide = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    one = {**weights(), "slanted": wide.t(), "yes": torch.tensor([True, False])}
    two = {**step(weights(), 1), "slanted": wide.clone().t(), "yes": torch.tensor([True, True])}
    road, copy = Road(), HostCopy()
    digests = [road.put(path, tensors) for path, tensors in (("one", one), ("two", two))]
    first = copy.read(taken(one))
    assert (first.digest, first.base, first.deltas) == (digests[0], None, None)
    change = copy.read(taken(two))
    assert (change.digest, change.base, copy.digest) == (digests[1], digests[0], digests[1])
    assert change.deltas is not None
    assert change.deltas.keys() == {"a", "n", "yes"}
    assert same({name: tensor for name, tensor in copy.whole().tensors if isinstance(tensor, HostTensor)}, two)
    copy.take_back(change)
    assert copy.digest == digests[0]
    assert copy.read(taken(two)).deltas == change.deltas
    unchanged = copy.read(taken(two))
    assert unchanged.deltas is not None
    assert len(unchanged.deltas) == 1, "a version is never of no tensors"
    # What does not pay goes whole, and there is no way back from it.
    other = copy.read(taken({**two, "slanted": torch.randn(8, 8), "b": torch.randn(5), "a": weights(3)["a"]}))
    assert other.deltas is None
    copy.take_back(other)
    assert copy.digest is None
    assert copy.read(taken(one)).deltas is None
