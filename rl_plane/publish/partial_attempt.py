"""Publishes one version as the tensors that differ from the version before, which it knows by their digests."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rl_plane.errors import InvalidRequest, NotAtBase, PlaneError
from rl_plane.protocol.record import MAX_DELTAS
from rl_plane.protocol.versions import (
    DTYPE_BYTES,
    DigestAlgorithm,
    HostTensor,
    TensorSpec,
    algorithm_of,
    tensor_digest,
    tensors_digest,
)
from rl_plane.publish.attempt import Attempt
from rl_plane.publish.host_copy import as_taken, as_tensors
from rl_plane.publish.publication import RunningPublication
from rl_plane.publish.send_plan import SendPlan
from rl_plane.publish.sources.base import Taken, WeightSource
from rl_plane.publish.taken_source import TakenSource, is_not_at_base, says_not_at_base
from rl_plane.transports.packing import Tensor, in_order, raw_bytes
from rl_plane.weights import delta_codec
from rl_plane.weights.checkpoint import open_checkpoint
from rl_plane.weights.read_ahead import host_memory

log = logging.getLogger("rl_plane.publish")


@runtime_checkable
class TrainableSource(WeightSource, Protocol):
    """A source that knows which of its tensors are trained."""

    def take_trainable(self) -> Taken:
        """The tensors that may have changed since the first version, in the order of `take`."""


@dataclass(frozen=True, slots=True)
class Link:
    """A version that was sent: the names and the size of its tensors."""

    digest: str
    names: frozenset[str]
    nbytes: int


class Baseline:
    """The version that this publisher has committed last: the digest of each tensor, and the versions on which it is
    built. For one thread at a time."""

    def __init__(self) -> None:
        self.digest: str | None = None
        """The version's digest. None: the next version is sent in full."""
        self.specs: Mapping[str, TensorSpec] = {}
        self.digests: Mapping[str, str] = {}
        self.chain: list[Link] = []
        """The full version, and each partial version that a late worker needs on top of it."""

    def set_full(self, digest: str, specs: Mapping[str, TensorSpec], digests: Mapping[str, str]) -> None:
        self.digest, self.specs, self.digests = digest, dict(specs), dict(digests)
        self.chain = [Link(digest, frozenset(specs), self.nbytes)]

    def set_checkpoint(self, path: Path, algorithm: DigestAlgorithm) -> None:
        """Takes a checkpoint for the version that is committed. InvalidWeights: there is none at `path`."""
        checkpoint = open_checkpoint(path, field="base")
        try:
            digests = checkpoint.tensor_digests(algorithm)
            self.set_full(checkpoint.digest_of(digests), checkpoint.specs, digests)
        finally:
            checkpoint.close()

    def set_partial(self, digest: str, digests: Mapping[str, str], chain: list[Link]) -> None:
        self.digest, self.digests, self.chain = digest, dict(digests), chain

    def forget(self) -> None:
        """Makes the next version go in full."""
        self.digest = None

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def is_long(self) -> bool:
        """True if a late worker has as many partial versions to fetch as pay: then a full one follows."""
        return len(self.chain) > MAX_DELTAS or sum(link.nbytes for link in self.chain[1:]) > self.nbytes

    def chain_before(self, names: frozenset[str]) -> list[Link]:
        """The chain without the versions whose tensors a version with these tensors replaces all."""
        chain = list(self.chain)
        while len(chain) > 1 and chain[-1].names <= names:
            chain.pop()
        return chain


class PartialAttempt(Attempt):
    """An Attempt that sends only what differs from the version before, once the workers keep that one.

    It reads all tensors (with `trainable_only` all that are trained), hashes them, and copies each tensor that differs
    to host memory. The trainer may change the tensors as soon as that is done.
    """

    def __init__(
        self,
        plan: SendPlan,
        source: WeightSource,
        publication: RunningPublication,
        previous: RunningPublication | None,
        *,
        baseline: Baseline,
        trainable_only: bool,
        lends: bool,
        joins: int,
    ) -> None:
        kept = {"policy": {**plan.options.policy, "keep_staged": True}}
        super().__init__(plan, source, publication, previous, kept, lends=lends, joins=joins)
        self._baseline = baseline
        self._trainable_only = trainable_only
        self._partial = False
        self._changed: dict[str, HostTensor] = {}
        self._new_digests: dict[str, str] = {}

    def _take(self) -> Taken:
        try:
            self._partial = self._is_possible()
        except Exception as error:  # the other ranks wait for the decision; opening the full version fails again
            log.info("%s is sent in full: %s", self._publication.version, error)
        if self._trainable_only and self._source.collective:
            agree(self._partial)
        return taken_of(self._source, self._partial and self._trainable_only)

    def _is_possible(self) -> bool:
        """True if every worker has the version before, or can fetch it."""
        baseline = self._baseline
        return baseline.digest is not None and not baseline.is_long and self._plan.is_kept(baseline.digest)

    def _send(self, taken: Taken) -> None:
        if not self._partial:
            super()._send(taken)
            return
        self._joins = 0  # a worker that joins gets the version from the copies
        baseline, lent = self._baseline, taken.held if self._lends else {}
        assert baseline.digest is not None
        algorithm = algorithm_of(baseline.digest)
        for name, tensor in in_order(taken.specs, self._known(taken)):
            data = raw_bytes(tensor)
            digest = tensor_digest(data, algorithm)
            self._new_digests[name] = digest
            if digest != baseline.digests[name]:
                self._changed[name] = HostTensor(baseline.specs[name], data if name in lent else _copied(data))

    def _known(self, taken: Taken) -> Iterator[tuple[str, Tensor]]:
        """The tensors. Raises InvalidRequest if the source has other tensors than before."""
        specs = dict(taken.specs)
        other = [name for name, spec in specs.items() if self._baseline.specs.get(name) != spec]
        if not self._trainable_only:
            other += self._baseline.specs.keys() - specs.keys()
        if other:
            self._baseline.forget()
            raise InvalidRequest(
                f"{sorted(other)[0]!r} is not as it was in the version before",
                field="source",
                fix="give the same tensors each time, or publish again: the next version is sent in full",
            )
        return taken.tensors

    def _committed(self) -> dict[str, Any]:
        baseline = self._baseline
        try:
            if not self._partial:
                return self._noted_full(self, super()._committed())
            if self._error is not None:
                raise self._error
            return self._committed_partial()
        except BaseException:
            if not self._partial or self.committed:
                baseline.forget()
            raise

    def _noted_full(self, attempt: Attempt, reply: dict[str, Any]) -> dict[str, Any]:
        """Remembers the digests of a full version."""
        manifest = attempt.manifest
        digests = attempt.digests
        known = manifest is not None and digests.keys() == manifest.specs.keys()
        if manifest is not None and known and manifest.digested(digests).digest == reply["version"]["digest"]:
            self._baseline.set_full(reply["version"]["digest"], manifest.specs, digests)
        else:
            self._baseline.forget()  # it was sent once more, for a worker that joined
        return reply

    def _committed_partial(self) -> dict[str, Any]:
        baseline, changed = self._baseline, self._changed
        assert baseline.digest is not None
        digests = {**baseline.digests, **self._new_digests}
        digest = tensors_digest((name, spec, digests[name]) for name, spec in baseline.specs.items())
        names = frozenset(changed)
        chain = baseline.chain_before(names)
        fields: dict[str, Any] = {
            **self._fields,
            "encoding": "partial",
            "base": chain[-1].digest,
            "digest": digest,
        }
        taken = partial(as_taken, changed)
        if len(changed) == len(baseline.specs):
            reply = self._sent(
                TakenSource(taken), {**self._fields, "digest": digest}, lends=self._lends, earlier=0
            )[1]
            baseline.set_full(digest, baseline.specs, digests)
            return reply
        if not changed:  # a version must have at least one tensor: the delta of one has 24 bytes
            fields |= {"encoding": "delta", "base": baseline.digest}
            taken = partial(_unchanged, baseline.specs)
        try:
            reply = self._sent(TakenSource(taken), fields, lends=self._lends, earlier=len(chain))[1]
        except PlaneError as error:
            if not is_not_at_base(error):
                raise
            return self._full_instead(error)
        if says_not_at_base(reply["workers"]):
            baseline.forget()  # only a full version brings back the workers that were left out
        elif changed:
            nbytes = sum(tensor.spec.nbytes for tensor in changed.values())
            if digest != chain[-1].digest:  # else the tensors are as they were in that version
                chain.append(Link(digest, names, nbytes))
            baseline.set_partial(digest, digests, chain)
        return reply

    def _full_instead(self, error: PlaneError) -> dict[str, Any]:
        """Sends the full version, because some worker lacks the base. The source must still be as it was."""
        self._baseline.forget()
        if not self._lends or self._source.collective:
            raise NotAtBase(
                f"{error.message}; the tensors may have changed since they were read",
                field="encoding",
                fix="publish again: the next version is sent in full",
            ) from error
        log.info("%s is sent in full: %s", self._publication.version, error)
        attempt, reply = self._sent(self._source, self._fields, lends=self._lends, earlier=0)
        return self._noted_full(attempt, reply)


def _copied(data: memoryview) -> memoryview:
    copy = host_memory(data.nbytes)
    copy[:] = data
    return copy


def _unchanged(specs: Mapping[str, TensorSpec]) -> Taken:
    name, spec = min(specs.items(), key=lambda one: one[1].nbytes)
    return as_tensors({name: delta_codec.nothing(spec.nbytes, DTYPE_BYTES[spec.dtype])})


def taken_of(source: WeightSource, trainable_only: bool) -> Taken:
    """Returns the tensors of a version: all of them, or only the trained tensors."""
    if not trainable_only:
        return source.take()
    assert isinstance(source, TrainableSource), "the publisher has checked it"
    return source.take_trainable()


def agree(partial: bool) -> bool:
    """Rank 0's decision, on all ranks of the trainer: whether this version is a partial one. Collective."""
    import torch.distributed as dist

    decided = [partial]
    dist.broadcast_object_list(decided, src=0)
    return decided[0]
