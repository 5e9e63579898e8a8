"""The seam on the trainer's side: how packed buckets leave.

Life of one update: `open(manifest)` gives the `transport` object of the request; for each bucket, in order,
`buffer(number)` gives the place to pack it into (it blocks until that is free) and `send(number)` sends it; its bytes
stay as they are until the next place is asked for, since they are hashed meanwhile;
`finish(digests)` tells what the tensors' digests are and waits until every receiver that is still there has everything;
`close()` frees what the update held, on every path, twice included. Then the next one may be opened; what outlasts an
update (a group, registered memory) goes with `destroy()`.

All block: they are for a thread. `close` may come from another thread in the middle: then what blocks ends. They raise
Unavailable when nobody is left to send to, DeadlineExceeded when a bound ran out.

A LendingSender's receivers may read tensors where they are: then these are not packed.

A PushingSender's receivers must listen before it sends: its update is prepared before the first bucket, and completed
after `finish`, on the fleet that it was opened for.

From a KeepingSender workers may fetch whenever they like, late ones too: once the update is committed, and before it is
closed, `keep` holds on to the weights; without it `close` withdraws them, and those kept before stay.

A sender is made by an entry point of the group `rl_plane.senders`, called `<backend>`: a function that takes
Surroundings. What can't work here, for lack of a package, say, is Unsupported; an option that is wrong, unknown or
missing is an InvalidRequest of the field `options.<name>`. After either, `auto` goes on to the next transport.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from rl_plane.errors import InvalidRequest
from rl_plane.membership.worker_reply import engine_replies
from rl_plane.transports.packing import Place, Tensor
from rl_plane.weights.manifest import Manifest

Run = Callable[[str, dict[str, Any]], dict[str, Any]]


class Sender(Protocol):
    """It may have `bucket_bytes`: by what its buckets are best packed, unless the trainer says otherwise; `pack(specs,
    bucket_bytes)`, which packs them in another way than `rl_plane.weights.manifest.pack`; and `slow`: do bytes take
    longer by it than to compare them with those before? Else they do where some worker is on another machine."""

    backend: str
    receivers_from: ClassVar[Literal["open", "finish"]] = "open"
    """When the fleet is asked to receive: at once, or when everything is there to be fetched."""

    def open(self, manifest: Manifest) -> dict[str, Any]: ...

    def buffer(self, number: int) -> Place: ...

    def send(self, number: int) -> None: ...

    def finish(self, digests: Mapping[str, str] | None) -> None: ...

    def close(self) -> None: ...

    def destroy(self) -> None: ...


@runtime_checkable
class DeviceSender(Sender, Protocol):
    device: str
    """Where the tensors of the next update are, as torch calls it; told before `open`."""


@runtime_checkable
class KeepingSender(Sender, Protocol):
    def keep(self, adapter: str | None = None, onto_previous: bool = False) -> None:
        """What was sent last is committed, as the base weights or as this adapter; it stays until the next is kept.
        `onto_previous`: it is a delta of the one before, which stays as long as it does."""


@runtime_checkable
class LendingSender(Sender, Protocol):
    def lend(self, tensors: Mapping[str, Tensor]) -> Collection[int]:
        """Between `open` and the first `buffer`: these, contiguous and as they are sent, stay where and as they are
        until the update is closed. Which buckets are read from there: `buffer` is not asked for those. Their memory is
        not freed before the next version, or `destroy`."""


@runtime_checkable
class PushingSender(Sender, Protocol):
    fingerprint: str
    """Of the fleet that it was opened for."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a sender may want to know of the fleet that it sends to."""

    run: Run
    """An op of the fleet, such as `workers` or `init_transport`: its body in, its merged reply out; it blocks."""
    root: Path | None = None
    """A directory that trainer and workers share, if the trainer named one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The transport's own, as the trainer gave them; a sender refuses those that it doesn't know."""
    nats_url: str | None = None
    """Of the fleet, as its namespace and component; None where the trainer knows only the facade."""
    namespace: str | None = None
    component: str | None = None
    adapter: str | None = None
    """What is published: the adapter of this name; None: base weights."""
    stays: bool = True
    """The trainer's process does, after its versions are committed, so that workers may fetch them from it."""

    def workers(self) -> Sequence[Mapping[str, Any]]:
        """As `GET /v1/rl/workers` lists them, now."""
        return members(self.run("workers", {}))

    def colocated(self, workers: Sequence[Mapping[str, Any]]) -> bool:
        """Are they all on this machine?"""
        return all(worker["host"] == platform.node() for worker in workers)

    def address(self) -> tuple[str, int]:
        """Where this machine is reached by the workers: the options `host` and `port` (0: any that is free)."""
        host, port = self.options.get("host"), self.options.get("port", 0)
        if host is None and self.colocated(self.workers()):
            host = "127.0.0.1"
        if not isinstance(host, str):
            raise InvalidRequest(
                "there are workers on other machines, and they must reach this one",
                field="options.host",
                fix="options={'host': ADDRESS} (--option host=ADDRESS), of this machine",
            )
        if type(port) is not int or not 0 <= port < 1 << 16:
            raise InvalidRequest(f"port is {port!r}", field="options.port", fix="give a free port, or 0")
        return host, port

    def check_options(self, backend: str, *known: str) -> None:
        unknown = sorted(self.options.keys() - set(known))
        if unknown:
            raise InvalidRequest(
                f"the {backend} transport has no option {unknown[0]!r}",
                field=f"options.{unknown[0]}",
                fix=f"use {', '.join(known)}" if known else "leave it out",
            )

    def publisher(self) -> str:
        """Who publishes, by a name that is the same after a restart: what it has left behind is told by it from what
        others have. The option `publisher`, or this machine's name and what is published."""
        default = f"{platform.node()}/{'base' if self.adapter is None else f'adapter {self.adapter}'}"
        name = self.options.get("publisher", default)
        if not isinstance(name, str) or not name:
            raise InvalidRequest(
                f"publisher is {name!r}", field="options.publisher", fix="give a name of its own to each publisher"
            )
        return name

    def sources(self) -> list[Mapping[str, Any]] | None:
        """The transports by which a worker that heals fetches what is committed; None while that is not known."""
        state = self.run("state", {})
        return None if state["version"] is None else state["sources"]


def members(reply: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The engines' rows of a reply to `workers`, without those that have left meanwhile: only their names are known."""
    return [row for row in engine_replies(reply) if "transports" in row]


def world_size(workers: Sequence[Mapping[str, Any]]) -> int:
    """Of a group of the trainer's rank 0 and every rank of every engine: replicas (DP) are workers of their own, and
    each counts its TP and PP ranks."""
    return 1 + sum(int(worker["world_size"]) for worker in workers)
