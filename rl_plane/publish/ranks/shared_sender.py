"""The sender of a version whose tensors the ranks of the trainer own: rank 0's part, which directs the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from rl_plane.protocol.versions import TensorSpec
from rl_plane.publish.ranks.ownership import shares_of
from rl_plane.transports.base import KeepingSender, PushingSender, SharingSender
from rl_plane.transports.packing import Buffer
from rl_plane.weights.manifest import Manifest, PackedBucket


class OtherRanks(Protocol):
    """The other ranks of the trainer, as rank 0 commands them in one version."""

    owners: Mapping[str, int] | None
    """The owner of each tensor, while the version is open on all ranks."""
    filled_by: str
    """The command by which the ranks pack their shares."""

    def tell(self, op: str, bodies: Mapping[int, Any]) -> None:
        """Sends a command to some ranks, to each its own body."""

    def tell_all(self, op: str, body: Mapping[str, Any] | None = None) -> None:
        """Sends a command to all ranks."""

    def replies(self, op: str, ranks: Collection[int] | None = None) -> dict[int, Any]:
        """Waits for the replies of these ranks (None: all) to the last command of this kind."""


class SharedSender(KeepingSender):
    """Opens, finishes, keeps and closes a version on all ranks. `buffer` and `send` are for rank 0's own share."""

    def __init__(self, inner: SharingSender, others: OtherRanks, owners: Mapping[str, int]) -> None:
        """`inner`: rank 0's own sender."""
        self.backend = inner.backend
        self.receivers_from = inner.receivers_from
        self.bucket_bytes = inner.bucket_bytes
        self.slow = inner.slow
        self.own_share = Manifest(())
        """The tensors that rank 0 sends itself. It always owns some."""
        self._inner = inner
        self._others = others
        self._owners = owners
        self._manifests: dict[int, Manifest] = {}
        self._open = False

    def pack(self, specs: Iterable[tuple[str, TensorSpec]], bucket_bytes: int) -> tuple[PackedBucket, ...]:
        """Packs the share of each owner for itself."""
        shares = shares_of(list(specs), self._owners)
        self._manifests = {rank: Manifest(self._inner.pack(share, bucket_bytes)) for rank, share in shares.items()}
        return tuple(bucket for manifest in self._manifests.values() for bucket in manifest.buckets)

    def open(self, manifest: Manifest) -> dict[str, Any]:
        inner, ranks = self._inner, [rank for rank in self._manifests if rank]
        own = self.own_share = self._manifests[0]
        inner.device = self.device
        self._open = True
        plan = inner.plan_shares(self._manifests)
        offers = self._on_each("announce", lambda: inner.announce(plan), dict.fromkeys(ranks, plan))
        inner.assemble(plan, offers)
        shares = {rank: {"manifest": self._manifests[rank].to_wire(), "plan": plan} for rank in ranks}
        parts = self._on_each("open", lambda: inner.open_share(0, own, plan), shares)
        self._others.owners = self._owners
        return inner.joined(parts)

    def _on_each(
        self, op: str, own: Callable[[], dict[str, Any]], bodies: Mapping[int, Any]
    ) -> dict[int, dict[str, Any]]:
        """Runs an op on each rank that has a share. Returns the results by rank."""
        self._others.tell(op, bodies)
        first = {0: own()}
        replies = self._others.replies(op, bodies)
        return {**first, **{rank: replies[rank] for rank in sorted(bodies)}}

    def buffer(self, number: int) -> Buffer:
        return self._inner.buffer(number)

    def send(self, number: int) -> None:
        self._inner.send(number)

    def collect(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Waits until each rank has packed and hashed its share. Returns the digests of all tensors."""
        found = dict(digests)
        for reply in self._others.replies(self._others.filled_by).values():
            found.update(reply["digests"])
        return found

    def finish(self, digests: Mapping[str, str] | None) -> None:
        assert digests is not None, "every rank hashes its share"
        self._others.tell_all("finish")
        self._inner.finish({name: digests[name] for name in self.own_share.specs})
        self._others.replies("finish")
        self._inner.seal(digests)

    def keep(self, adapter: str | None = None, onto_previous: bool = False, earlier: int | None = None) -> None:
        if not isinstance(self._inner, KeepingSender):
            return
        self._others.tell_all("keep", {"onto_previous": onto_previous, "earlier": earlier})
        self._inner.keep(adapter, onto_previous, earlier)
        self._others.replies("keep")

    def close(self) -> None:
        if self._open:
            self._open = False
            self._others.owners = None
            self._others.tell_all("close")
        self._inner.close()


class PushingSharedSender(SharedSender, PushingSender):
    """A SharedSender whose receivers listen before anything is sent."""

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """The fingerprint of the fleet for which rank 0's own sender was opened."""
        assert isinstance(self._inner, PushingSender)
        return self._inner.fingerprint
