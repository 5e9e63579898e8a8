"""Publishes one version from a host copy: a delta if little has changed, else every tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rl_plane.errors import PlaneError, Unsupported
from rl_plane.publish.attempt import Attempt
from rl_plane.publish.free_memory import free_memory
from rl_plane.publish.host_copy import Change, HostCopy, as_tensors
from rl_plane.publish.publication import RunningPublication
from rl_plane.publish.publish_options import Encoding
from rl_plane.publish.ranks.lead import Lead
from rl_plane.publish.send_plan import SendPlan
from rl_plane.publish.sources.base import Taken, WeightSource
from rl_plane.publish.taken_source import TakenSource, is_not_at_base, says_not_at_base
from rl_plane.transports.base import SharingSender
from rl_plane.weights.delta_codec import import_numba

log = logging.getLogger("rl_plane.publish")

ROOM = 3
"""`auto` makes a copy if so many times the model's size is free in memory: for the copy, for a copy that a transport
may keep, and for deltas of up to the same size."""
LEFT = 1
"""`auto` drops the copy if less than so many times the model's size is free beside it. A trainer's steps take memory
that its first version can't foresee."""


class DeltaAttempt(Attempt):
    """An Attempt that reads the tensors into the publisher's host copy, and sends from there.

    With the encoding `auto` it does so only where deltas pay, and is an ordinary Attempt elsewhere.
    """

    def __init__(
        self,
        plan: SendPlan,
        source: WeightSource,
        publication: RunningPublication,
        previous: RunningPublication | None,
        *,
        copy: HostCopy,
        encoding: Encoding,
        unless_digest: str | None,
        lends: bool,
        joins: int,
        make_lead: Callable[[], Lead],
    ) -> None:
        """`unless_digest`: a version of this digest is not sent."""
        super().__init__(plan, source, publication, previous, lends=lends, joins=joins, make_lead=make_lead)
        self._copy = copy
        self._encoding = encoding
        self._unless_digest = unless_digest
        self._deltas = False
        self._change: Change | None = None
        self._nbytes = 0
        """The size of the version."""
        self._sharing: Lead | None = None
        """Directs the other ranks, if each has a copy of the tensors that it owns."""

    def _send(self, taken: Taken) -> None:
        self._deltas = self._encoding == "delta"
        by_copy = self._deltas
        if self._unless_digest is not None:  # the version is only compared, which needs no sender
            by_copy = by_copy or self._has_room(taken)
        elif self._encoding == "auto":
            by_copy = self._deltas = self._pays(taken)
        if by_copy:
            self._joins = 0  # the source is not read again: a worker that joins gets the version from the copy
            self._nbytes = sum(spec.nbytes for _, spec in taken.specs)
            self._sharing = self._sharing_lead()
            if self._sharing is not None:
                self._change = self._sharing.read_copies(self._copy, taken)
            else:
                self._change = self._copy.read(taken)
        else:
            self._copy.drop()
            super()._send(taken)

    def _pays(self, taken: Taken) -> bool:
        """True if a delta saves time, and the copy leaves enough memory for the rest of this machine."""
        self._plan.ready_sender()
        if not self._plan.slow or not self._copy.is_tried():
            return False
        try:
            import_numba()
        except Unsupported as error:
            log.info("%s is sent in full: %s", self._publication.version, error)
            return False
        nbytes = sum(spec.nbytes for _, spec in taken.specs)
        free = free_memory()
        if free >= (LEFT if self._copy.specs else ROOM) * nbytes:
            return self._has_room(taken)
        log.info(
            "%s is sent in full: %d bytes are free beside a copy of %d", self._publication.version, free, nbytes
        )
        return False

    def _sharing_lead(self) -> Lead | None:
        """Directs the other ranks, if each of them can send the tensors that it owns."""
        if self._lead is None or not isinstance(self._plan.ready_sender(), SharingSender):
            return None
        return self._lead

    def _has_room(self, taken: Taken) -> bool:
        """Makes room for the copy. False if there is none."""
        sharing = self._sharing_lead()
        try:
            if sharing is not None:
                return sharing.has_room(self._copy, taken)
            self._copy.make_room(taken)
            return True
        except (MemoryError, OSError) as error:  # a limit that `free_memory` does not know
            log.info("%s is sent in full, without a copy: %s", self._publication.version, error)
            return False

    def _committed(self) -> dict[str, Any]:
        change = self._change
        try:
            return super()._committed() if change is None else self._committed_from_copy(change)
        finally:
            if not self._deltas:
                self._copy.drop()

    def _committed_from_copy(self, change: Change) -> dict[str, Any]:
        if self._error is not None:
            self._copy.take_back(change)
            raise self._error
        if change.digest == self._unless_digest and self._is_served(change.digest):
            log.info("the fleet serves %s already", self._publication.version)
            self._copy.forget()  # a delta needs a source of its base, which may have ended with the trainer before
            return {}
        copy, sizes = self._copy, change.sizes
        chain_bytes = copy.chain_bytes
        try:
            if sizes is not None and self._chain_has_room(sizes) and self._plan.is_kept(change.base):
                copy.chain_bytes += sum(sizes.values())
                try:
                    delta = {"encoding": "delta", "base": change.base, "digest": change.digest}
                    reply = self._send_taken(partial(self._from_copy, change, deltas=True), delta)
                    copy.in_vain = 0
                    if says_not_at_base(reply["workers"]):
                        copy.forget()  # only a full version brings back the workers that were left out
                    return reply
                except PlaneError as error:
                    if not is_not_at_base(error):
                        raise
                    log.info("%s is sent in full: %s", self._publication.version, error)
            copy.chain_bytes = 0
            reply = self._send_taken(partial(self._from_copy, change, deltas=False), {"digest": change.digest})
            copy.in_vain += change.base is not None
            return reply
        except BaseException:
            if not self.committed:
                copy.take_back(change)
                copy.chain_bytes = chain_bytes
            raise

    def _from_copy(self, change: Change, deltas: bool) -> Taken:
        """The version in full, or its deltas."""
        if self._sharing is not None:
            return self._sharing.from_copies(self._copy, change, deltas)
        if not deltas:
            return self._copy.whole()
        assert change.deltas is not None
        return as_tensors(change.deltas)

    def _keeps_copy(self) -> bool:
        return bool(self._copy.specs)

    def _chain_has_room(self, sizes: Mapping[str, int]) -> bool:
        """True if the deltas since the last full version are not larger than the full version.

        A worker that joins late fetches all of them, and their source has to hold them.
        """
        return self._copy.chain_bytes + sum(sizes.values()) <= self._nbytes

    def _is_served(self, digest: str) -> bool:
        """True if the fleet serves the digest under the publication's label now: another version may have come
        since."""
        label = self._publication.version
        return label is not None and self._plan.digest_of(label) == digest

    def _send_taken(self, take: Callable[[], Taken], fields: Mapping[str, Any]) -> dict[str, Any]:
        # The copy changes only with the next publication, which waits for the end of this one. A copy that was made for
        # a comparison is dropped after it, so it can't be lent: a sender holds on to memory that it was lent.
        lends = self._unless_digest is None
        if self._deltas:  # the next delta changes what the workers keep of this version
            fields = {**fields, "policy": {**self._plan.options.policy, "keep_staged": True}}
        return self._sent(TakenSource(take), fields, lends=lends, lead=self._sharing)[1]
