"""Chooses the next read of one receiver in a relay: which bucket, from which source. Pure: events in, reads out.

A receiver takes the buckets of its own share from the trainer, and each other bucket from the first peer that has
verified it. It reads from several sources at once, one bucket at a time from each: with more, every bucket would come
later, and so would the buckets of its peers. The trainer has every bucket. It stands in for a peer that dies, hangs, is
slow, or never gets a bucket.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from rl_plane.protocol.relay import TRAINER, RelayPlan, SourceUse

HANG_S = 10.0
"""A receiver gives a peer up if nothing comes from it for so many seconds. The slowest useful link brings more."""

SLOW = 5.0
"""A peer is slow if a read takes so many times as long as this receiver's last reads. Reads that share links with
others take two or three times as long, and that is no reason for a change."""

SLOW_LEAST_S = 0.5
"""No read is called slow before so many seconds: in a busy machine a process may wait so long for a core."""

SLOW_READS = 4
"""No read is called slow before so many others have ended."""

PATIENCE_S = (0.25, 5.0)
"""A receiver to which nothing comes waits for as long as two of its reads take, within these bounds. Then it takes its
part of what no peer has from the trainer, one bucket after another, until a peer has something again."""

FIRST_PATIENCE_S = 1.0
"""The patience of a receiver none of whose reads has ended."""

MORE_PATIENCE = 4
"""It waits so many times as long for the other parts, which its peers take if they wait in vain too."""


BEHIND = 2 / 3
"""A receiver that has its own share does not wait for a share of which it lacks more than this part, and no peer has
it. The owner's link is a third as fast as its own, for a reason that lasts."""


@dataclass(frozen=True, slots=True)
class BucketRead:
    """One read of one bucket from one source."""

    bucket: int
    source: str


@dataclass(slots=True)
class _SourceState:
    name: str
    share: int | None = None
    has: set[int] = field(default_factory=set)
    offered: deque[int] = field(default_factory=deque)
    """Buckets that the peer has, in the order in which it got them. Some of them are verified here since."""
    reading: int | None = None
    """The bucket in flight."""
    begun: float = 0.0
    """The time at which the present or the last read began."""
    heard: float = 0.0
    """The time of the last progress of a read."""
    lost: bool = False
    slow: bool = False
    """Until the read in flight ends. What only slow peers have is read from the trainer."""
    rate: float | None = None
    """Bytes per second of one read. None: no read has ended yet."""
    nbytes: int = 0
    began: float | None = None
    ended: float = 0.0

    @property
    def good(self) -> bool:
        return not (self.lost or self.slow)


class Chooser:
    """Chooses the reads of one receiver. The methods take the time in seconds, by any clock that never goes back."""

    def __init__(self, plan: RelayPlan, sizes: Sequence[int], now: float) -> None:
        """`sizes`: the bytes of each bucket."""
        self._plan = plan
        self._sizes = sizes
        self._missing = set(range(len(sizes)))
        """Buckets that are not verified yet."""
        self._flying: dict[int, set[str]] = {}
        """Bucket → the sources from which it comes, until it is verified."""
        self._trainer = _SourceState(TRAINER)
        self._peers = {peer.worker: _SourceState(peer.worker, share=peer.share) for peer in plan.peers}
        start = self._first_turn(plan.share or 0)
        self._turn = (*range(start, len(sizes)), *range(start))
        """All buckets, from a place that differs for each worker: receivers that take the buckets of a lost peer from
        the trainer don't begin with the same one."""
        self._own = deque(self._of_share(plan.share)) if plan.share is not None else deque[int]()
        """Buckets to take from the trainer: the own share, then those of lost and of slow peers."""
        self._idle_since = now
        """The time at which the last read ended. Reads that replace a read from a peer do not count."""
        self._behind: set[int] = set()
        """Shares that were found behind. They stay so, because their buckets come from other receivers then."""
        self._instead: set[int] = set()
        """Buckets that were read from the trainer because no peer had them."""
        self._read_s: deque[float] = deque(maxlen=8)

    def _first_turn(self, share: int) -> int:
        return len(self._sizes) * share // self._plan.shares

    def _of_share(self, share: int) -> Sequence[int]:
        return [bucket for bucket in self._turn if self._plan.share_of(bucket) == share]

    # ---- events ----

    def announced(self, peer: str, buckets: Iterable[int]) -> None:
        """The peer has verified these buckets."""
        source = self._peers[peer]
        new = [bucket for bucket in buckets if 0 <= bucket < len(self._sizes) and bucket not in source.has]
        source.has.update(new)
        source.offered.extend(bucket for bucket in new if bucket in self._missing)

    def progressed(self, read: BucketRead, now: float) -> None:
        """A part of the read has come."""
        self._source(read.source).heard = now

    def arrived(self, read: BucketRead, now: float) -> None:
        """All bytes of the bucket have come. `verified`, `superseded` or `failed` follows."""
        source, nbytes = self._source(read.source), self._sizes[read.bucket]
        seconds = max(now - source.begun, 1e-9)
        source.rate = nbytes / seconds if source.rate is None else (source.rate + nbytes / seconds) / 2
        source.nbytes += nbytes
        source.ended = source.heard = now
        source.reading, source.slow = None, False
        self._read_s.append(seconds)
        if read.source != TRAINER or read.bucket not in self._instead:
            self._idle_since = now

    def verified(self, read: BucketRead) -> None:
        """The bucket has the right digests."""
        self._missing.discard(read.bucket)
        self._end(read)

    def superseded(self, read: BucketRead) -> None:
        """The bucket has come from another source before."""
        self._end(read)

    def failed(self, peer: str) -> None:
        """The peer is gone, hangs, or has given wrong bytes. Its reads never end, and it is not used again."""
        source = self._peers[peer]
        if source.lost:
            return
        source.lost = True
        self._inherit(source)
        source.reading = None
        for bucket, sources in list(self._flying.items()):
            if peer in sources:
                self._end(BucketRead(bucket, peer))

    # ---- decisions ----

    @property
    def done(self) -> bool:
        return not self._missing

    def is_missing(self, bucket: int) -> bool:
        return bucket in self._missing

    def hanging(self, now: float) -> list[str]:
        """The peers whose reads have made no progress for HANG_S."""
        return [
            peer.name for peer in self._peers.values() if peer.reading is not None and now - peer.heard > HANG_S
        ]

    def next(self, now: float) -> BucketRead | None:
        """The next read, which begins now. None: there is nothing to begin. Ask again after each event, and several
        times a second."""
        self._find_slow(now)
        read = self._from_trainer() or self._from_peer() or self._instead_of_peers(now)
        if read is None:
            return None
        source = self._source(read.source)
        source.began = now if source.began is None else source.began
        source.reading, source.begun, source.heard = read.bucket, now, now
        self._flying.setdefault(read.bucket, set()).add(read.source)
        return read

    def uses(self) -> list[SourceUse]:
        """The bytes that came from each source, the largest first."""
        found = [
            SourceUse(source=one.name, bytes=one.nbytes, seconds=round(one.ended - (one.began or 0.0), 4))
            for one in (*self._peers.values(), self._trainer)
            if one.nbytes
        ]
        return sorted(found, key=lambda one: -one["bytes"])

    # ---- the parts of a decision ----

    def _from_trainer(self) -> BucketRead | None:
        if self._trainer.reading is not None:
            return None
        while self._own:
            bucket = self._own.popleft()
            if bucket in self._missing and not self._comes(bucket):
                return BucketRead(bucket, TRAINER)
        return None

    def _comes(self, bucket: int) -> bool:
        """Whether the bucket is read now, or can be read, from a source that is not slow."""
        if any(self._source(name).good for name in self._flying.get(bucket, ())):
            return True
        return any(peer.good and bucket in peer.has for peer in self._peers.values())

    def _from_peer(self) -> BucketRead | None:
        """A read from the fastest peer that has something."""
        ready = [peer for peer in self._peers.values() if peer.good and peer.offered and peer.reading is None]
        for peer in sorted(ready, key=lambda peer: -(peer.rate or 0.0)):
            for _ in range(len(peer.offered)):
                bucket = peer.offered.popleft()
                if bucket not in self._missing:
                    continue
                if not any(self._source(name).good for name in self._flying.get(bucket, ())):
                    return BucketRead(bucket, peer.name)
                peer.offered.append(bucket)  # in case the other source fails
        return None

    def _instead_of_peers(self, now: float) -> BucketRead | None:
        """A read from the trainer of a bucket that no peer has. It is one of this receiver's part first, and its peers
        take the other parts."""
        if self._own or self._trainer.reading is not None:
            return None
        waits = any(peer.good for peer in self._peers.values())
        found = [bucket for bucket in self._turn if bucket in self._missing and not self._comes(bucket)]
        if waits:
            self._find_behind(found)
            found = [bucket for bucket in found if self._may_take(bucket, now - self._idle_since)]
        if not found:
            return None
        bucket = min(found, key=self._distance)
        self._instead.add(bucket)
        return BucketRead(bucket, TRAINER)

    def _find_behind(self, lacking: Iterable[int]) -> None:
        """Marks the shares of which no peer has much, though this receiver has the whole of its own."""
        if self._plan.share is not None:
            counts = Counter(self._plan.share_of(bucket) for bucket in lacking)
            self._behind.update(one for one, count in counts.items() if count > BEHIND * len(self._of_share(one)))

    def _may_take(self, bucket: int, waited_s: float) -> bool:
        """Whether this receiver takes a bucket from the trainer that no peer has."""
        least_s, most_s = PATIENCE_S
        patience_s = min(max(2 * median(self._read_s), least_s), most_s) if self._read_s else FIRST_PATIENCE_S
        if self._heir(bucket) != self._plan.share:
            return waited_s >= MORE_PATIENCE * patience_s
        return waited_s >= patience_s or self._plan.share_of(bucket) in self._behind

    def _distance(self, bucket: int) -> tuple[int, int]:
        """Orders the buckets that may be taken: the own part first, and of each share first what its owner takes
        last."""
        share = self._plan.share_of(bucket)
        after = (self._heir(bucket) - (self._plan.share or 0)) % self._plan.shares
        return after, -((bucket - self._first_turn(share)) % len(self._sizes))

    def _find_slow(self, now: float) -> None:
        if len(self._read_s) < SLOW_READS:
            return
        long_s = max(SLOW * median(self._read_s), SLOW_LEAST_S)
        for source in (self._trainer, *self._peers.values()):
            if source.reading is not None and now - source.begun > long_s:
                source.slow = True  # of the trainer: a peer may have got the bucket meanwhile

    def _inherit(self, peer: _SourceState) -> None:
        """Takes a part of this peer's share from the trainer. The other receivers take the other parts."""
        if peer.share is None or self._plan.share is None:
            return
        own = (bucket for bucket in self._of_share(peer.share) if self._heir(bucket) == self._plan.share)
        self._own.extend(bucket for bucket in own if bucket in self._missing)

    def _heir(self, bucket: int) -> int:
        """The share to which a bucket belongs if its own share's receiver does not get it."""
        share, heir = self._plan.share_of(bucket), bucket // self._plan.shares % self._plan.shares
        return heir if heir != share else (heir + 1) % self._plan.shares

    def _end(self, read: BucketRead) -> None:
        sources = self._flying.get(read.bucket, set())
        sources.discard(read.source)
        if not sources:
            self._flying.pop(read.bucket, None)

    def _source(self, name: str) -> _SourceState:
        return self._trainer if name == TRAINER else self._peers[name]
