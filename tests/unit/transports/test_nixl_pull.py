"""The bounds of a pull by `nixl`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane.errors import DeadlineExceeded
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.nixl.pull import SLICE_BYTES, Pull
from rl_plane.transports.nixl.reads import Piece, ReadLimits
from rl_plane.weights.manifest import Manifest, pack

SLICES = 4
NBYTES = SLICES * SLICE_BYTES


class SlowSource:
    """A source, and the Channel to it over TCP. Its reads come one after another. Each look at one takes a second."""

    by_tcp = True

    def __init__(self, parts: int, apart_s: int) -> None:
        """Each read comes in `parts` with `apart_s` seconds before each."""
        self.now = 0.0
        self._parts, self._apart_s = parts, apart_s
        self._coming: list[SlowRead] = []
        self._silent_s = 0

    def channel(self, agent: object) -> SlowSource:
        return self

    def begin(self, moves: Sequence[Piece], owner: Any) -> SlowRead:
        self._coming.append(SlowRead(self))
        return self._coming[-1]

    def look(self) -> None:
        self.now += 1
        self._silent_s += 1
        if self._silent_s == self._apart_s:
            self._silent_s = 0
            self._coming[0].arrived += 1
            if self._coming[0].arrived == self._parts:
                self._coming.pop(0).state = "DONE"

    def leave(self) -> None:
        pass

    def has_ended(self, within_s: float) -> bool:
        return True


class SlowRead:
    def __init__(self, source: SlowSource) -> None:
        self._source = source
        self.arrived = 0
        self.state = "PROC"

    def look(self) -> str:
        if self.state == "PROC":
            self._source.look()
        return self.state

    def release(self) -> None:
        pass


class Context:
    limits = ReadLimits(NBYTES)
    puller: Any = SimpleNamespace(agent=None, register=lambda places: None, release=lambda: None)

    def take(self, host: str) -> Any:
        return self.puller

    def give_back(self, puller: Any) -> None:
        pass


def pulled(source: Any) -> None:
    """Pulls one tensor of several slices into its place."""
    spec, place = TensorSpec("U8", (NBYTES,)), memoryview(bytearray(NBYTES))
    manifest = Manifest(pack([("a", spec)], NBYTES))
    context: Any = Context()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        here.setblocking(False)
        pieces = [[(0, (0, NBYTES, 0))]]
        pull = Pull(context, manifest, pieces, source, True, here, clock=lambda: source.now)
        pull.places = lambda name, _: place
        try:
            assert [name for name, _ in pull.tensors()] == ["a"]
        finally:
            pull.close()


def test_a_slow_source_that_is_never_silent_gives_all_its_bytes() -> None:
    """The last slice begins with the first one, and comes minutes later."""
    source = SlowSource(parts=3, apart_s=15)
    pulled(source)
    assert source.now == SLICES * 3 * 15


def test_a_silent_source_ends_the_pull() -> None:
    with pytest.raises(DeadlineExceeded, match="did not come in 20 s"):
        pulled(SlowSource(parts=3, apart_s=30))
