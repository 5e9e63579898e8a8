"""The seam on the trainer's side: how packed buckets leave.

Life of one update: `open(manifest)` gives the `transport` object of the request, and receivers may come from then on;
for each bucket, in order, `buffer(number)` gives the place to pack it into (it blocks until that is free) and
`send(number)` sends it; `finish(digests)` tells what the tensors' digests are and waits until every receiver that is
still there has everything; `close()` frees what it held, on every path, twice included. All block: they are for a
thread. They raise Unavailable when nobody is left to send to, DeadlineExceeded when a bound ran out.

A KeepingSender is pulled from, one-sided, whenever a receiver likes: its update is sent to the fleet only after
`finish`. Once that is committed, `keep` holds on to the weights, so that workers can heal from them; without it `close`
withdraws them, and those kept before stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rl_plane.manifest import Manifest


class Sender(Protocol):
    backend: str

    def open(self, manifest: Manifest) -> dict[str, Any]: ...

    def buffer(self, number: int) -> memoryview: ...

    def send(self, number: int) -> None: ...

    def finish(self, digests: Mapping[str, str] | None) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class KeepingSender(Sender, Protocol):
    def keep(self, adapter: str | None = None) -> None:
        """What was sent last is committed, as the base weights or as this adapter; it stays until the next is kept."""
