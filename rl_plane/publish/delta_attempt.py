"""One version by way of the publisher's own copy, which it is compared with: whole, or what has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_plane.errors import NotAtBase, PlaneError, Unsupported
from rl_plane.publish.attempt import JOINS, Attempt
from rl_plane.publish.free_memory import free_memory
from rl_plane.publish.host_copy import Change, HostCopy, as_tensors
from rl_plane.publish.publication import RunningPublication
from rl_plane.publish.publish_options import Encoding
from rl_plane.publish.send_plan import SendPlan
from rl_plane.publish.sources.base import Taken, WeightSource
from rl_plane.weights.delta_codec import import_numba

log = logging.getLogger("rl_plane.publish")

ROOM, LEFT = 3, 1
"""Times the weights have to be free in memory before `auto` makes a copy of them, since a transport may keep one too,
and as much of deltas; and beside the copy, or it goes: the steps of a trainer take memory that its first version can't
see."""


class DeltaAttempt(Attempt):
    """By way of the publisher's copy: `read` brings the tensors into it, `end` sends what pays from there. `auto`: only
    where that pays; else as any other."""

    def __init__(
        self,
        plan: SendPlan,
        source: WeightSource,
        publication: RunningPublication,
        previous: RunningPublication | None,
        *,
        copy: HostCopy,
        encoding: Encoding,
        unless_digest: str | None = None,
        lends: bool = False,
        joins: int = 0,
    ) -> None:
        """`unless_digest`: nothing is sent if this is its digest."""
        super().__init__(plan, source, publication, previous, lends=lends, joins=joins)
        self._copy = copy
        self._encoding = encoding
        self._unless_digest = unless_digest
        self._deltas = False
        self._change: Change | None = None

    def _send(self, taken: Taken) -> None:
        self._deltas = self._encoding == "delta"
        by_copy = self._deltas
        if self._unless_digest is not None:  # to be compared alone, it needs no sender yet
            by_copy = by_copy or self._has_room(taken)
        elif self._encoding == "auto":
            by_copy = self._deltas = self._pays(taken)
        if by_copy:
            self._joins = 0  # the source is not read again: what joins gets it from the copy
            self._change = self._copy.read(taken)
        else:
            self._copy.drop()
            super()._send(taken)

    def _pays(self, taken: Taken) -> bool:
        """Where a delta saves time, and the copy leaves room for what else this machine does."""
        self._plan.ready_sender()
        if not self._plan.slow or not self._copy.is_tried():
            return False
        try:
            import_numba()
        except Unsupported as error:
            log.info("%s goes whole: %s", self._publication.version, error)
            return False
        nbytes = sum(spec.nbytes for _, spec in taken.specs)
        free = free_memory()
        if free >= (LEFT if self._copy.specs else ROOM) * nbytes:
            return self._has_room(taken)
        log.info("%s goes whole: %.0f bytes are free beside a copy of %d", self._publication.version, free, nbytes)
        return False

    def _has_room(self, taken: Taken) -> bool:
        try:
            self._copy.make_room(taken)
            return True
        except (MemoryError, OSError) as error:  # by a limit that `free_memory` does not know
            log.info("%s goes whole, without a copy: %s", self._publication.version, error)
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
            self._copy.forget()  # its source may have gone with the trainer before: a delta needs one
            return {}
        copy, deltas = self._copy, change.deltas
        chain_bytes = copy.chain_bytes
        try:
            if deltas is not None and self._goes_on(deltas) and self._is_kept(change.base):
                copy.chain_bytes += sum(map(len, deltas.values()))
                try:
                    delta = {"encoding": "delta", "base": change.base, "digest": change.digest}
                    reply = self._sent(lambda: as_tensors(deltas), delta)
                    copy.in_vain = 0
                    if _says_not_at_base(reply["workers"]):
                        copy.forget()  # a full version brings back who was left out
                    return reply
                except PlaneError as error:
                    if not _not_at_base(error):
                        raise
                    log.info("%s is sent whole: %s", self._publication.version, error)
            copy.chain_bytes = 0
            reply = self._sent(copy.whole, {"digest": change.digest})
            copy.in_vain += change.base is not None
            return reply
        except BaseException:
            if not self.committed:
                copy.take_back(change)
                copy.chain_bytes = chain_bytes
            raise

    def _goes_on(self, deltas: Mapping[str, bytes]) -> bool:
        """Whoever comes late fetches the chain of deltas, and what it is fetched from holds it: no more of it than of
        the whole version."""
        return self._copy.chain_bytes + sum(map(len, deltas.values())) <= self._copy.nbytes

    def _is_served(self, digest: str) -> bool:
        """Under the publication's label, asked anew: since it was asked first, another version may have come."""
        label = self._publication.version
        return label is not None and self._plan.digest_of(label) == digest

    def _is_kept(self, base: str | None) -> bool:
        """By all workers; or by some, and the others can fetch it: they would be left out of the update. To fetch it
        does not help who serves it and does not keep it: its model ties tensors, say, so that it never will."""
        self._plan.ready_sender()
        if self._plan.changes_sender:
            return False  # what it is a delta of would go with the sender before
        workers = self._plan.workers()
        lacking = [row for row in workers if row.get("kept") != base]
        if any((row.get("version") or {}).get("digest") == base for row in lacking):
            return False
        return not lacking or (len(lacking) < len(workers) and self._plan.is_refetchable(base))

    def _sent(self, take: Callable[[], Taken], more: Mapping[str, Any]) -> dict[str, Any]:
        # The publisher's copy changes with the next publication, which waits for the end of this one. One that was made
        # for this comparison is to go with it, and a sender holds on to what it was lent.
        lends = self._unless_digest is None
        if self._deltas:  # what is kept at the workers is what the next one changes
            more = {**more, "policy": {**self._plan.options.policy, "keep_staged": True}}
        attempt = Attempt(self._plan, _Copied(take), self._publication, None, more, lends=lends, joins=JOINS)
        attempt.read()
        try:
            return attempt.committed_by_all()
        finally:
            self.committed = attempt.committed


@dataclass(frozen=True, slots=True)
class _Copied:
    """A WeightSource: what the publisher's copy holds."""

    take: Callable[[], Taken]
    collective = False
    adapter = False


def _not_at_base(error: PlaneError) -> bool:
    """Does it say that a delta can't be applied, there or on some worker?"""
    return isinstance(error, NotAtBase) or _says_not_at_base(error.facts.get("workers"))


def _says_not_at_base(rows: object) -> bool:
    """Does a worker's row of a reply or of an error?"""
    codes = [(row.get("error") or {}).get("code") for row in rows] if isinstance(rows, list) else []
    return NotAtBase.code in codes
