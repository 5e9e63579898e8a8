"""A Delivery of buckets: what every transport that sends packed bytes has in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl_plane._util.tasks import never
from rl_plane.errors import InvalidWeights
from rl_plane.protocol.strict_json import load_json_object
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.reception import Cancelled
from rl_plane.weights.manifest import Manifest


class PackedDelivery:
    """`buckets`: the bytes of each of the manifest's buckets, in its order; a buffer is used up when the next one is
    asked for, unless they are `owned`. `close` ends it on every path. Digests that come with the buckets go into
    `tensor_digests` and `digest` as they come."""

    def __init__(
        self,
        manifest: Manifest,
        buckets: Iterator[memoryview],
        *,
        refetchable: bool,
        owned: bool = False,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.specs: Mapping[str, TensorSpec] = manifest.specs
        self.tensor_digests: Mapping[str, str] | None = manifest.tensor_digests
        self.digest: str | None = manifest.digest
        self.adapter_config_raw = manifest.adapter_config
        self.adapter_config: Mapping[str, Any] | None = _config(manifest.adapter_config)
        self.refetchable = refetchable
        self.cancelled: Cancelled = never
        """The argument of `tensors`. A `buckets` that waits for bytes asks it."""
        self._manifest = manifest
        self._buckets = buckets
        self._owned = owned
        self._close = close

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        self.cancelled = cancelled
        for number, bucket in enumerate(self._manifest.buckets):
            data = next(self._buckets, None)
            if data is None:
                raise _wrong(f"{number} of {len(self._manifest.buckets)} buckets came")
            if data.nbytes != bucket.nbytes:
                raise _wrong(f"bucket {number} came with {data.nbytes} bytes, not {bucket.nbytes}")
            for placed in bucket.tensors:
                place = data[placed.offset : placed.offset + placed.spec.nbytes]
                yield placed.name, HostTensor(placed.spec, place, self._owned)
        if next(self._buckets, None) is not None:
            raise _wrong(f"more than {len(self._manifest.buckets)} buckets came")

    def close(self) -> None:
        self._close()


def _config(raw: bytes | None) -> Mapping[str, Any] | None:
    if raw is None:
        return None
    try:
        return load_json_object(raw)
    except ValueError as error:
        raise _wrong(f"the adapter's config can't be read: {str(error)[:200]}") from error


def _wrong(what: str) -> InvalidWeights:
    return InvalidWeights(what, field="transport", fix="publish the weights again")
