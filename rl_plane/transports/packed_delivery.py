"""A Delivery of packed buckets, for every transport that moves buckets as runs of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import InvalidWeights
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import Delivery
from rl_plane.weights.checkpoint import Kind
from rl_plane.weights.manifest import Manifest, PackedBucket

Arrived = memoryview | Sequence[tuple[str, HostTensor]]
"""A bucket that has come: its bytes, or its tensors where they lie by themselves."""


class PackedDelivery(Delivery):
    """Unpacks buckets into tensors. A subclass or `buckets` may set `digest` and `tensor_digests` as they arrive."""

    def __init__(
        self,
        manifest: Manifest,
        buckets: Iterator[Arrived],
        *,
        refetchable: bool,
        owned: bool = False,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the delivery.

        Args:
            manifest: the tensors of each bucket.
            buckets: each bucket, in the manifest's order.
            refetchable: a worker can fetch the same bytes again later.
            owned: the bytes of a bucket stay valid; otherwise until the next bucket is asked for.
            close: frees what the transport holds; called by `close`, perhaps twice.
        """
        self.specs: Mapping[str, TensorSpec] = manifest.specs
        self.tensor_digests: Mapping[str, str] | None = manifest.tensor_digests
        self.digest: str | None = manifest.digest
        self.adapter_config_raw = manifest.adapter_config
        _ = self.adapter_config  # an error comes before the first byte
        self.refetchable = refetchable
        self.cancelled: Cancelled = never
        """The argument of `tensors`. A `buckets` that waits for bytes asks it."""
        self._manifest = manifest
        self._buckets = buckets
        self._owned = owned
        self._close = close

    @property
    def manifest(self) -> Manifest:
        """The tensors of each bucket, with their digests if the publisher has stated them before."""
        return self._manifest

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        self.cancelled = cancelled
        for number, bucket in enumerate(self._manifest.buckets):
            data = next(self._buckets, None)
            if data is None:
                raise _wrong(f"only {number} of {len(self._manifest.buckets)} buckets came")
            if not isinstance(data, memoryview):
                yield from data
                continue
            if data.nbytes != bucket.nbytes:
                raise _wrong(f"bucket {number} came with {data.nbytes} bytes, not {bucket.nbytes}")
            for placed in bucket.tensors:
                place = data[placed.offset : placed.offset + placed.spec.nbytes]
                yield placed.name, HostTensor(placed.spec, place, self._owned)
        if next(self._buckets, None) is not None:
            raise _wrong(f"more than {len(self._manifest.buckets)} buckets came")

    def find_places(self, bucket: PackedBucket) -> Mapping[str, memoryview] | None:
        """Returns the place of each tensor of a bucket. None: at least one of them has none."""
        found: dict[str, memoryview] = {}
        for placed in bucket.tensors:
            place = None if self.places is None else self.places(placed.name, placed.spec)
            if place is None or place.nbytes != placed.spec.nbytes:
                return None
            found[placed.name] = place
        return found

    def close(self) -> None:
        self._close()


def check_kind(manifest: Manifest, kind: Kind, field: str = "target.kind") -> None:
    """Raises InvalidWeights unless the manifest is of what the update's target needs."""
    if (manifest.adapter_config is None) != (kind == "base"):
        wanted, came = ("base weights", "an adapter") if kind == "base" else ("an adapter", "base weights")
        raise InvalidWeights(f"{came} came, not {wanted}", field=field, fix=f"send {wanted}")


def _wrong(what: str) -> InvalidWeights:
    return InvalidWeights(what, field="transport", fix="publish the weights again")
