"""The seam on the trainer's side: how packed buckets leave.

Life of one update: `open(manifest)` gives the `transport` object of the request, and receivers may come from then on;
for each bucket, in order, `buffer(number)` gives the place to pack it into (it blocks until that is free) and
`send(number)` sends it; `finish(digests)` tells what the tensors' digests are and waits until every receiver that is
still there has everything; `close()` frees what it held, on every path, twice included. All block: they are for a
thread. They raise Unavailable when nobody is left to send to, DeadlineExceeded when a bound ran out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rl_plane.manifest import Manifest


class Sender(Protocol):
    backend: str

    def open(self, manifest: Manifest) -> dict[str, Any]: ...

    def buffer(self, number: int) -> memoryview: ...

    def send(self, number: int) -> None: ...

    def finish(self, digests: Mapping[str, str] | None) -> None: ...

    def close(self) -> None: ...
