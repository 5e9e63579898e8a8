"""Keeps a version in host memory, and changes it in place by deltas and by whole tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, InvalidWeights, NotAtBase
from rl_plane.protocol.record import Encoding
from rl_plane.protocol.update_requests import DeltaChainEntry
from rl_plane.protocol.versions import (
    DTYPE_BYTES,
    DigestAlgorithm,
    HostTensor,
    TensorSpec,
    algorithm_of,
    tensor_digest,
    tensors_digest,
)
from rl_plane.transports.base import Delivery
from rl_plane.weights import delta_codec
from rl_plane.weights.hashed_copy import copy
from rl_plane.weights.manifest import are_digests
from rl_plane.weights.read_ahead import host_memory
from worker.receive.received_bytes import ReceivedBytes
from worker.receive.staging import DigestingStream
from worker.receive.staging_area import StagingArea

EXCHANGE_BYTES = 1 << 20
"""The bytes that are exchanged at once: few enough to stay in a core's cache."""


class TensorChange(Protocol):
    """The change of one tensor. It is its own inverse: a second `apply` restores the bytes."""

    def apply(self, buffer: memoryview) -> None:
        """Changes the tensor's bytes in place."""


Changes = Mapping[str, TensorChange]
"""Tensor name → its change, which was checked against the tensor."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A tensor that replaces another one, by exchanging the bytes of both. So it holds the bytes before afterwards, and
    an update needs no memory but that of what it brings."""

    tensor: HostTensor
    digest: str

    def apply(self, buffer: memoryview) -> None:
        between = memoryview(bytearray(min(EXCHANGE_BYTES, len(buffer))))
        for start in range(0, len(buffer), EXCHANGE_BYTES):
            part, its = (data[start : start + EXCHANGE_BYTES] for data in (buffer, self.tensor.data))
            copy(between[: len(part)], part)
            copy(part, its)
            copy(its, between[: len(part)])


@dataclass(frozen=True, slots=True)
class KeptCopy:
    """A version in host memory beside the model, with exactly the bytes that were published."""

    digest: str
    tensors: Mapping[str, HostTensor]
    """Writable memory, by checkpoint name."""
    area: StagingArea
    """The area in which the tensors lie."""
    digests: Mapping[str, str]
    """The digest of each tensor. A tensor that a delta has changed since it was hashed has none."""
    changed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """For each version that was changed to make this one: its digest → the names of the tensors that differ from it. An
    engine that serves such a version loads only these."""

    def fits(self, wanted: Mapping[str, TensorSpec]) -> bool:
        """Returns whether a change for a model with these tensors can be made in the copy. After a cast it has
        others."""
        return {name: tensor.spec for name, tensor in self.tensors.items()} == dict(wanted)

    @property
    def nbytes(self) -> int:
        return sum(tensor.spec.nbytes for tensor in self.tensors.values())

    def change(self, changes: Changes, digest: str, cancelled: Cancelled) -> KeptCopy:
        """Applies the changes in place, and returns the copy as another version.

        If it is cancelled, it takes the changes back and raises EngineFailed. After any other error the copy is of no
        version."""
        done: dict[str, TensorChange] = {}
        for name, one in changes.items():
            if cancelled():
                self.take_back(done)
                raise EngineFailed("staging was cancelled")
            one.apply(self.tensors[name].data)
            done[name] = one
        names = frozenset(changes)
        changed = {before: others | names for before, others in {**self.changed, self.digest: names}.items()}
        # An engine that takes the version again may have to be repaired, so it loads everything.
        changed.pop(digest, None)
        return replace(self, digest=digest, digests=self._digests_after(changes), changed=changed)

    def _digests_after(self, changes: Changes) -> dict[str, str]:
        digests = {name: digest for name, digest in self.digests.items() if name not in changes}
        return {**digests, **digests_of(changes)}

    def digest_with(self, replaced: Mapping[str, str]) -> str | None:
        """Returns the digest of the version in which these tensors have other digests. None: a digest is missing or of
        another algorithm, or this version has no such tensors."""
        return self._version_digest({**self.digests, **replaced})

    def hashed(self, cancelled: Cancelled) -> KeptCopy:
        """Returns the copy with the digest of every tensor, and with the version digest that its bytes make. It hashes
        the tensors that deltas have changed, and tensors with a digest of another algorithm."""
        algorithm = algorithm_of(self.digest)
        digests = {name: digest for name, digest in self.digests.items() if algorithm_of(digest) == algorithm}
        for name, tensor in self.tensors.items():
            if cancelled():
                raise EngineFailed("staging was cancelled")
            if name not in digests:
                digests[name] = tensor_digest(tensor.data, algorithm)
        made = self._version_digest(digests)
        assert made is not None
        return replace(self, digest=made, digests=digests)

    def with_digests(self) -> dict[str, HostTensor]:
        """The tensors, each with its digest, of a copy that is `hashed`."""
        return {name: replace(tensor, digest=self.digests[name]) for name, tensor in self.tensors.items()}

    def _version_digest(self, digests: Mapping[str, str]) -> str | None:
        if digests.keys() != self.tensors.keys() or not are_digests(digests.values()):
            return None
        return tensors_digest((name, tensor.spec, digests[name]) for name, tensor in self.tensors.items())

    def check_fits(self, changes: Changes) -> None:
        """InvalidWeights for a change of a tensor that this version does not have, or has in another form."""
        for name, one in changes.items():
            has = self.tensors[name].spec if name in self.tensors else None
            brings = one.tensor.spec if isinstance(one, Replacement) else has
            if has is None or brings != has:
                raise InvalidWeights(
                    f"{name[:200]!r} arrived as {brings}, but the base {self.digest} has {has or 'no such tensor'}",
                    field="transport",
                    fix="send the tensors of the base, in its dtypes, and only one of two that are tied",
                )

    def take_back(self, changes: Changes) -> None:
        """Takes changes back: a change that is applied twice restores the bytes."""
        for name, one in changes.items():
            one.apply(self.tensors[name].data)


@dataclass(slots=True)
class KeptAdapter:
    """An adapter in host memory, with exactly the bytes that were published, for other workers."""

    config: bytes
    """Its `adapter_config.json`."""
    area: StagingArea
    place: Mapping[str, Any] | None = None
    """The transport that fetches it. None: it is not offered yet."""


def as_kept(digest: str, area: StagingArea, tied: Collection[str], digests: Mapping[str, str]) -> KeptCopy | None:
    """Returns the staged weights as a copy of the published version, whose tensors have these digests.

    None: a tensor came that is tied to another one. A change could be of only one of the two."""
    tensors = area.tensors()
    return KeptCopy(digest, tensors, area, dict(digests)) if tensors.keys().isdisjoint(tied) else None


def taken_changes(
    delivery: Delivery,
    encoding: Encoding,
    tensors: Mapping[str, TensorSpec],
    algorithm: DigestAlgorithm,
    cancelled: Cancelled,
    progress: ReceivedBytes | None = None,
) -> Changes:
    """Receives all deltas or tensors of a delivery, whose specs were checked. Closes the delivery.

    `algorithm`: the hash of the version that they make, and of the delivery if that states no digests before its
    tensors."""
    with closing(delivery):
        stream = DigestingStream(delivery, algorithm=algorithm, cancelled=cancelled, progress=progress)
        changes: dict[str, TensorChange] = {}
        for name, tensor in stream:
            if encoding == "partial":
                digest = stream.digests[name]
                if algorithm_of(digest) != algorithm:
                    digest = tensor_digest(tensor.data, algorithm)
                changes[name] = Replacement(_own(tensor), digest)
                continue
            blob = tensor.data if tensor.owned else bytes(tensor.data)
            of = tensors[name]
            changes[name] = delta_codec.check(blob, of.nbytes, DTYPE_BYTES[of.dtype], name)
        return changes


def digests_of(changes: Changes) -> dict[str, str]:
    """Returns the digests of the tensors that come whole."""
    return {name: one.digest for name, one in changes.items() if isinstance(one, Replacement)}


def _own(tensor: HostTensor) -> HostTensor:
    """Returns the tensor in memory that is this process's to write."""
    if tensor.owned and not tensor.data.readonly:
        return tensor
    data = host_memory(tensor.data.nbytes)
    data[:] = tensor.data
    return HostTensor(tensor.spec, data, owned=True)


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
            f"source_gone: this worker {has}, and {base}, which the update changes, can't be fetched again",
            field="base",
            base=kept.digest if kept is not None else None,
            fix="publish the full version",
        )
    return start, links
