"""Keeps a version in host memory, and changes it in place by deltas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, NotAtBase
from rl_plane.protocol.update_requests import DeltaChainEntry
from rl_plane.protocol.versions import DTYPE_BYTES, DigestAlgorithm, HostTensor, TensorSpec
from rl_plane.transports.base import Delivery
from rl_plane.weights import delta_codec
from rl_plane.weights.delta_codec import Delta
from worker.receive.staging import DigestingStream
from worker.receive.staging_area import StagingArea

Changes = Mapping[str, Delta]
"""Tensor name → its checked delta."""


@dataclass(frozen=True, slots=True)
class KeptCopy:
    """A version in host memory beside the model, with exactly the bytes that were published."""

    digest: str
    tensors: Mapping[str, HostTensor]
    """Writable memory, by checkpoint name."""
    area: StagingArea
    """The area in which the tensors lie."""

    def fits(self, wanted: Mapping[str, TensorSpec]) -> bool:
        """Returns whether a delta for a model with these tensors can change the copy. After a cast it has others."""
        return {name: tensor.spec for name, tensor in self.tensors.items()} == dict(wanted)

    def change(self, changes: Changes, digest: str, cancelled: Cancelled) -> KeptCopy:
        """Applies the changes in place, and returns the copy as another version.

        If it is cancelled, it takes the changes back and raises EngineFailed. After any other error the copy is of no
        version."""
        done: dict[str, Delta] = {}
        for name, one in changes.items():
            if cancelled():
                self.take_back(done)
                raise EngineFailed("staging was cancelled")
            one.apply(self.tensors[name].data)
            done[name] = one
        return replace(self, digest=digest)

    def take_back(self, changes: Changes) -> None:
        """Takes changes back: a delta that is applied twice restores the bytes."""
        for name, one in changes.items():
            one.apply(self.tensors[name].data)


def as_kept(digest: str, area: StagingArea, tied: Collection[str]) -> KeptCopy | None:
    """Returns the staged weights as a copy of the published version.

    None: a tensor came that is tied to another one. A delta could change only one of the two."""
    tensors = area.tensors()
    return KeptCopy(digest, tensors, area) if tensors.keys().isdisjoint(tied) else None


def taken_changes(
    delivery: Delivery, tensors: Mapping[str, TensorSpec], algorithm: DigestAlgorithm, cancelled: Cancelled
) -> Changes:
    """Receives all deltas of a delivery and checks them against the tensors that they change. Closes the delivery.

    `algorithm`: the hash if the delivery states no digests before its tensors."""
    try:
        stream = DigestingStream(delivery, algorithm=algorithm, cancelled=cancelled)
        changes = {}
        for name, tensor in stream:
            blob = tensor.data if tensor.owned else bytes(tensor.data)
            of = tensors[name]
            changes[name] = delta_codec.check(blob, of.nbytes, DTYPE_BYTES[of.dtype], name)
        return changes
    finally:
        delivery.close()


def missing_links(
    kept: KeptCopy | None, before: Sequence[DeltaChainEntry], base: str
) -> tuple[KeptCopy | None, Sequence[DeltaChainEntry]]:
    """Returns the copy to start from, and the versions to fetch from there up to `base`.

    None instead of a copy: the first version to fetch is the full one. NotAtBase: a version can't be fetched."""
    start, links = None, before
    if kept is not None:
        digests = [link.digest for link in before]
        if kept.digest == base:
            start, links = kept, ()
        elif kept.digest in digests:
            start, links = kept, before[digests.index(kept.digest) + 1 :]
    gone = start is None and not before
    if gone or not all(link.refetchable for link in links):
        has = f"has a copy of {kept.digest}" if kept is not None else "has no copy of a version"
        raise NotAtBase(
            f"source_gone: this worker {has}, and {base}, which the delta changes, can't be fetched again",
            field="base",
            base=kept.digest if kept is not None else None,
            fix="publish the full version",
        )
    return start, links
