"""The version that a receiver keeps in host memory, and how deltas change it in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rl_plane.errors import EngineFailed, NotAtBase
from rl_plane.protocol.update_requests import DeltaChainEntry
from rl_plane.protocol.versions import DTYPE_BYTES, HostTensor, TensorSpec
from rl_plane.transports.receiver_base import Delivery
from rl_plane.transports.reception import Cancelled, KeepableStaged, Staged
from rl_plane.weights import delta_codec
from rl_plane.weights.delta_codec import Delta
from worker.receive.staging import DigestingStream

Changes = Mapping[str, Delta]
"""By the tensor's name; checked."""


@dataclass(frozen=True, slots=True)
class KeptCopy:
    """A version in host memory, beside the model: exactly what was published, tensor by tensor."""

    digest: str
    tensors: Mapping[str, HostTensor]
    """Writable; by checkpoint name."""
    staged: KeepableStaged
    """The same memory, as the engine's swap takes it."""

    def change(self, changes: Changes, digest: str, cancelled: Cancelled) -> KeptCopy:
        """Applies them in place: from now on this is another version. Cancelled: none of them, and EngineFailed. What
        else is raised leaves it of no version."""
        done: dict[str, Delta] = {}
        for name, one in changes.items():
            if cancelled():
                self.take_back(done)
                raise EngineFailed("staging was cancelled")
            one.apply(self.tensors[name].data)
            done[name] = one
        return replace(self, digest=digest)

    def take_back(self, changes: Changes) -> None:
        """Applied again, they bring back what was there before."""
        for name, one in changes.items():
            one.apply(self.tensors[name].data)


def as_kept(digest: str, staged: Staged, specs: Mapping[str, TensorSpec]) -> KeptCopy | None:
    """What was staged of a version of these tensors. None: it is not exactly that, because it was cast, or because the
    model ties some; or the engine stages in another form."""
    if not isinstance(staged, KeepableStaged):
        return None
    tensors = staged.host_tensors()
    same = {name: tensor.spec for name, tensor in tensors.items()} == dict(specs)
    return KeptCopy(digest, tensors, staged) if same else None


def taken_changes(delivery: Delivery, tensors: Mapping[str, TensorSpec], cancelled: Cancelled) -> Changes:
    """All of a delivery's deltas, in memory, checked against the tensors that they are of. Closes the delivery."""
    try:
        stream = DigestingStream(delivery, cancelled=cancelled)
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
    """(what can be built on, the versions to fetch from there on until `base`). None: from the full version, the first
    of them. NotAtBase when one can't be fetched."""
    start, links = None, before
    if kept is not None:
        digests = [link.digest for link in before]
        if kept.digest == base:
            start, links = kept, ()
        elif kept.digest in digests:
            start, links = kept, before[digests.index(kept.digest) + 1 :]
    gone = start is None and not before
    if gone or not all(link.refetchable for link in links):
        has = f"keeps {kept.digest}" if kept is not None else "keeps no version"
        raise NotAtBase(
            f"source_gone: this worker {has}, and {base}, which the delta changes, can't be fetched again",
            field="base",
            base=kept.digest if kept is not None else None,
            fix="publish the full version",
        )
    return start, links
