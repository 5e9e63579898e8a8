"""The relay of one update: which worker takes which buckets from the trainer, and from which workers it takes the rest.

The coordinator makes a RelayPlan for each worker (`rl_plane.commit.relay_plan`), and sends it with the request. A
worker whose engine spans several hosts gets one for each of them: each host receives the weights by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.validation import Body

TRAINER = "trainer"
"""The trainer's name among the sources."""

MAX_PEERS = 8
"""The most hosts from which one host reads. It has a thread and a connection for each of them."""
MAX_WORKERS = 1 << 16
MAX_ADDRESS_CHARS = 255
MAX_NAME_CHARS = 128


class OpenRelay(Body):
    workers: int = Field(ge=1, le=MAX_WORKERS)
    """The number of workers that receive the update. A single one has peers only if its engine spans several hosts."""


class RelayAddress(TypedDict):
    """The address at which a worker serves the buckets of an update to its peers."""

    host: str
    """The worker's machine. Workers with the same name share a network link."""
    address: str
    port: int


class RelayPeer(Body):
    """A worker from which another worker reads."""

    worker: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    address: str = Field(min_length=1, max_length=MAX_ADDRESS_CHARS)
    port: int = Field(ge=1, le=65535)
    share: int | None = Field(None, ge=0, lt=MAX_WORKERS)
    """The share of the buckets that this peer takes from the trainer. None: the peer takes no share."""


class RelayPlan(Body):
    """The sources of one worker: bucket `b` belongs to the share `b % shares`.

    The worker takes the buckets of its own share from the trainer. It takes each other bucket from the first of its
    peers that has it, and from the trainer if no peer gets it."""

    worker: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    """The worker that this plan is for, as `name_of_host` names it."""
    share: int | None = Field(None, ge=0, lt=MAX_WORKERS)
    """The number of the share that this worker takes from the trainer. None: another worker on its host takes one."""
    shares: int = Field(ge=1, le=MAX_WORKERS)
    peers: tuple[RelayPeer, ...] = Field(max_length=MAX_PEERS)
    """In the order of preference."""

    @model_validator(mode="after")
    def _shares_exist(self) -> RelayPlan:
        for one in (self.share, *(peer.share for peer in self.peers)):
            if one is not None and one >= self.shares:
                raise InvalidRequest(
                    f"share {one} is not one of {self.shares}", field="relay.share", fix="count the shares from 0"
                )
        return self

    def share_of(self, bucket: int) -> int:
        return bucket % self.shares


class OpenRelayReply(TypedDict):
    relay: list[RelayAddress]
    """The address at which peers reach each host of this worker's engine, by node rank. Empty: it can't serve them."""


class SourceUse(TypedDict):
    """The bytes that a worker took from one source during an update."""

    source: str
    """A worker, as `name_of_host` names it, or `trainer`."""
    bytes: int
    seconds: float
    """From the first read of this source until the last one ended."""


def name_of_host(worker: str, node_rank: int) -> str:
    """The name of one host of a worker's engine among the sources: the worker's instance id, with the node rank behind
    it for a host that is not the first."""
    return f"{worker}/{node_rank}" if node_rank else worker


def summed(uses: Iterable[SourceUse]) -> list[SourceUse]:
    """Sums the uses of hosts that took their bytes side by side: one use of each source."""
    found: dict[str, SourceUse] = {}
    for one in uses:
        before = found.get(one["source"], SourceUse(source=one["source"], bytes=0, seconds=0.0))
        seconds = max(before["seconds"], one["seconds"])
        found[one["source"]] = SourceUse(
            source=one["source"], bytes=before["bytes"] + one["bytes"], seconds=seconds
        )
    return list(found.values())


def largest(uses: Sequence[SourceUse], most: int) -> list[SourceUse]:
    """The largest uses, and the sum of all smaller ones as `others`: at most so many."""
    ordered = sorted(uses, key=lambda one: -one["bytes"])
    shown, rest = ordered[: most - 1], ordered[most - 1 :]
    if len(rest) <= 1:
        return ordered
    seconds = max(one["seconds"] for one in rest)
    return [*shown, SourceUse(source="others", bytes=sum(one["bytes"] for one in rest), seconds=seconds)]
