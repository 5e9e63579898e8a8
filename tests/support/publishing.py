"""Sources for tests of publications, and the versions that a fleet serves."""

from __future__ import annotations

import contextlib
import itertools
import platform
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_plane.client import RlClient
from rl_plane.errors import BusUnreachable, Unavailable
from rl_plane.publish import WeightPublisher, delta_attempt
from rl_plane.publish.send_plan import SenderFactory, SendPlan
from rl_plane.publish.sources.base import Taken, WeightSource
from rl_plane.publish.sources.directory import DirectorySource
from rl_plane.transports.base import Sender, SenderContext
from rl_plane.transports.filesystem.sender import FilesystemSender
from rl_plane.weights.manifest import Manifest
from rl_plane.weights.safetensors_file import write_safetensors
from tests.conftest import Plane
from tests.support.delta_updates import tensors_in
from tests.support.fleet_updates import all_serve
from worker.receive.staging import model_digest

BOUND_S = 60.0
HEAL_S = 120.0
"""Seconds for a worker to start, and to import torch and nixl to fetch."""


def publisher_by(make: SenderFactory, source: Any, fleet: Any, **options: Any) -> WeightPublisher:
    """A WeightPublisher whose senders `make` makes."""

    class Own(WeightPublisher):
        def make_sender(self, backend: str, context: SenderContext) -> Sender:
            return make(backend, context)

    return Own(source, fleet, **options)


@contextlib.contextmanager
def on_another_machine() -> Iterator[None]:
    """The trainer in this process is on another machine than the workers of its fleet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "node", lambda: "elsewhere")
        yield


@contextlib.contextmanager
def with_free_memory(nbytes: int) -> Iterator[None]:
    """This machine has so many bytes of free memory, as its publishers see it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_attempt, "free_memory", lambda: nbytes)
        yield


@contextlib.contextmanager
def unnoticed_loss() -> Iterator[None]:
    """The workers lose the version before after the publisher has asked for it: it takes that version for kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SendPlan, "is_kept", lambda *_: True)
        yield


def root_of(plane: Plane) -> Path:
    return plane.tmp / "weights" / "published"


async def serve(client: RlClient, label: str) -> bool:
    """True if all workers serve the label. On a busy machine a call may get no answer."""
    with contextlib.suppress(BusUnreachable):
        return await all_serve(client, label)
    return False


async def all_keep(client: RlClient, model: Path) -> bool:
    rows = (await client.run("workers"))["workers"]
    return {row.get("kept") for row in rows} == {model_digest(model)}


async def served(plane: Plane) -> set[tuple[str, str, int]]:
    """(label, digest, sequence) of every worker that is open."""
    fleet = await plane.fleet("state")

    async def answered() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (await fleet.run("state"))["workers"]
        return rows if all(row["status"] == "ok" for row in rows) else []

    rows = await plane.until(answered, BOUND_S)  # a busy machine takes more than a second to answer
    assert all(row["admission"]["open"] for row in rows)
    return {(row["version"]["label"], row["version"]["digest"], row["sequence"]) for row in rows}


class Broken(DirectorySource):
    """Fails after some tensors."""

    good = 10

    def take(self) -> Taken:
        taken = super().take()

        def tensors() -> Iterator[Any]:
            yield from itertools.islice(taken.tensors, self.good)
            raise RuntimeError("out of memory, say")

        return Taken(taken.specs, tensors(), None, taken.close)


class Held:
    """A source that stops in the middle until the test releases it."""

    collective = False
    adapter = False

    def __init__(self, path: Path) -> None:
        self._inner = DirectorySource(path)
        self.begun = threading.Event()
        self.go = threading.Event()

    def take(self) -> Taken:
        taken = self._inner.take()

        def tensors() -> Iterator[Any]:
            self.begun.set()
            assert self.go.wait(BOUND_S)
            yield from taken.tensors

        return Taken(taken.specs, tensors(), taken.adapter_config, taken.close)


class Gathering(Held):
    """A collective source, like sharded weights: every rank must use up the iterator."""

    collective = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go.set()
        self.taken = 0
        self.thread: threading.Thread | None = None

    def take(self) -> Taken:
        taken = super().take()

        def tensors() -> Iterator[Any]:
            self.thread = threading.current_thread()
            for pair in taken.tensors:
                self.taken += 1
                yield pair

        return Taken(taken.specs, tensors(), None, taken.close)


class Changing:
    """The weights of `source`, or else those of the directory `path`. A test changes either between two versions."""

    collective = False
    adapter = False

    def __init__(self) -> None:
        self.path = Path()
        self.source: WeightSource | None = None

    def take(self) -> Taken:
        return (self.source or DirectorySource(self.path)).take()


def nudged(plane: Plane, model: Path, number: int) -> Path:
    """A model that differs in a few bits of one tensor."""
    tensors = tensors_in(model)
    name = sorted(tensors)[number % len(tensors)]
    spec, data = tensors[name]
    tensors[name] = (spec, bytes([data[0] ^ (1 + number)]) + data[1:])
    path = plane.tmp / "weights" / f"{model.name}+{number}"
    path.mkdir()
    write_safetensors(path / "model.safetensors", tensors)
    return path


class Streaming(Sender):
    """A sender whose receivers find nothing."""

    backend = "filesystem"

    def __init__(self, around: SenderContext) -> None:
        self._root = around.root
        self._closed = threading.Event()
        self.events: list[str] = []

    def open(self, manifest: Manifest) -> dict[str, Any]:
        self._sizes = [bucket.nbytes for bucket in manifest.buckets]
        return {"backend": "filesystem", "path": f"{self._root}/nothing"}

    def buffer(self, number: int) -> memoryview:
        return memoryview(bytearray(self._sizes[number]))

    def send(self, number: int) -> None:
        # Waits for receivers that never come, until the thread that asked the fleet closes this sender.
        assert self._closed.wait(BOUND_S)
        raise Unavailable("no receiver is left")

    def finish(self, digests: Mapping[str, str] | None) -> None:
        raise AssertionError("it failed before")

    def close(self) -> None:
        self._closed.set()
        self.events.append("closed")

    def destroy(self) -> None:
        self.events.append("destroyed")


class Lending(Streaming):
    """A sender that fails as `Streaming` does, when tensors are lent to it."""

    def lend(self, tensors: Mapping[str, Any]) -> set[int]:
        self.send(0)
        return set()


class Noted(FilesystemSender):
    """Lists its name in `alive` until it is destroyed."""

    def __init__(self, name: str, root: Path, alive: list[str]) -> None:
        super().__init__(root)
        self.alive, self.name = alive, name
        alive.append(name)

    def destroy(self) -> None:
        self.alive.remove(self.name)


def loaded(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(model / "model.safetensors")
    return found
