"""The sender of the `nixl` transport: weights that stay in the trainer's memory, for engines to pull when they like.

One agent, whose registered memory holds the version that is committed beside the one that is being filled. Nobody waits
for anybody: a receiver that is slow or dead costs the others nothing, and one that comes late, to heal, finds the
committed version for as long as the trainer lives.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal, Self

from rl_plane.errors import InvalidRequest
from rl_plane.manifest import Manifest
from rl_plane.publish.nixl_desk import Desk
from rl_plane.publish.nixl_wire import BACKEND, Memory, make_agent
from rl_plane.publish.sender import Surroundings

log = logging.getLogger("rl_plane.publish.nixl")


@dataclass(frozen=True, slots=True, eq=False)
class _Area:
    """Memory for one version."""

    memory: Memory
    metadata: bytes
    """What an agent needs to read it, and nothing else of ours."""


@dataclass(slots=True)
class _Version:
    manifest: Manifest
    key: str
    area: _Area
    offsets: list[int]
    """Of the buckets, and of their end."""


class NixlSender:
    """A Sender that is pulled from: fill all buckets and `finish`, and only then send the update; `keep` what is
    committed. `host`: this machine's address, as the workers reach it. `destroy` ends it all."""

    backend = BACKEND
    receivers_from: ClassVar[Literal["open", "finish"]] = "finish"

    bucket_bytes = 32 << 20
    """What its buckets are best packed by: a receiver has two of them."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._agent = make_agent(f"rl-plane-{secrets.token_hex(8)}")
        self._desk = Desk(host, port)
        self._free: list[_Area] = []
        self._kept: dict[str | None, list[_Version]] = {}
        """Of each target, the full version and its deltas."""
        self._opened: _Version | None = None

    def open(self, manifest: Manifest) -> dict[str, Any]:
        self.close()
        offsets = [0, *accumulate(bucket.nbytes for bucket in manifest.buckets)]
        key = secrets.token_hex(16)
        self._opened = _Version(manifest, key, self._area(offsets[-1]), offsets)
        return self._desk.transport(key)

    def buffer(self, number: int) -> memoryview:
        version = self._open_version()
        return version.area.memory.view(version.offsets[number], version.manifest.buckets[number].nbytes)

    def send(self, number: int) -> None:
        """It is there to be pulled once all are."""
        self._open_version()

    def finish(self, digests: Mapping[str, str] | None) -> None:
        version = self._open_version()
        manifest = version.manifest if digests is None else version.manifest.digested(digests)
        address = version.area.memory.address
        places = [
            [(address + offset, bucket.nbytes)]
            for offset, bucket in zip(version.offsets, manifest.buckets, strict=False)
        ]
        self._desk.offer(version.key, version.area.metadata, manifest, places)

    def keep(self, adapter: str | None = None, onto_previous: bool = False) -> None:
        """What was sent last is committed, as the base weights or as this adapter: it stays until the next one is.
        `onto_previous`: a delta, with what it changes."""
        version, self._opened = self._open_version(), None
        before = self._kept.setdefault(adapter, [])
        if onto_previous:
            before.append(version)
            return
        self._kept[adapter] = [version]
        for old in before:
            self._withdraw(old)

    def close(self) -> None:
        """What was sent last, and not kept, can't be pulled any more."""
        version, self._opened = self._opened, None
        if version is not None:
            self._withdraw(version)

    def destroy(self) -> None:
        """Nothing can be pulled any more."""
        self._desk.close()
        self._agent = None  # before the memory that it has registered
        self._opened = None
        self._kept.clear()
        self._free.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def _withdraw(self, version: _Version) -> None:
        """Its memory is free once nobody reads it any more."""
        self._desk.withdraw(version.key)
        memory = version.area.memory
        kept = [one.area.memory.nbytes for versions in self._kept.values() for one in versions]
        if memory.nbytes in kept:  # the next version of that fits there
            self._free.append(version.area)
        elif self._agent is not None:
            self._agent.deregister_memory(memory.registered)

    def _area(self, nbytes: int) -> _Area:
        for number, area in enumerate(self._free):
            if area.memory.nbytes == max(nbytes, 1):
                return self._free.pop(number)
        if self._agent is None:
            raise InvalidRequest("this sender was stopped", field="sender", fix="make another one")
        memory = Memory(self._agent, nbytes)
        metadata = self._agent.get_partial_agent_metadata(memory.registered, True, ["UCX"])
        return _Area(memory, metadata)

    def _open_version(self) -> _Version:
        if self._opened is None:
            raise InvalidRequest("no version is open", field="sender", fix="open one first")
        return self._opened


def build(around: Surroundings) -> NixlSender:
    """Options: see `Surroundings.address`."""
    around.check_options(BACKEND, "host", "port")
    return NixlSender(*around.address())
