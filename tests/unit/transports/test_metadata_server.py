"""Strangers at the server that tells receivers where in memory a version is."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rl_plane._util.framing import read_frame, send_frame
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.nixl import metadata_server
from rl_plane.transports.nixl.metadata_server import MetadataServer
from rl_plane.transports.nixl.wire import PROTOCOL
from rl_plane.weights.manifest import Manifest, pack

BOUND_S = 10.0
SECRET = "5" * 32


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    found = MetadataServer("127.0.0.1", 0)
    found.offer(
        SECRET, b"how to read the memory", Manifest(pack([("a", TensorSpec("F32", (1,)))], 64)), [[(1, 4)]]
    )
    yield found
    found.close()


def connected(server: MetadataServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), BOUND_S)


def answer(server: MetadataServer, secret: Any) -> dict[str, Any]:
    with connected(server) as connection:
        send_frame(connection, {"protocol": PROTOCOL, "secret": secret})
        return read_frame(connection)


@pytest.mark.parametrize("secret", ["", "5" * 31, "6" * 32, "\u00e9", None, 5])
def test_only_the_holder_of_the_secret_gets_an_answer(server: MetadataServer, secret: Any) -> None:
    assert answer(server, secret).keys() == {"error"}
    assert answer(server, SECRET)["metadata"] == b"how to read the memory"


def test_silent_connections_are_bounded_and_disturb_no_receiver(server: MetadataServer) -> None:
    with ExitStack() as stack:
        strangers = [stack.enter_context(connected(server)) for _ in range(metadata_server.STRANGERS + 1)]
        assert strangers[0].recv(1) == b""
        assert answer(server, SECRET)["metadata"]


def test_half_a_request_is_closed_after_its_time(server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_server, "REQUEST_S", 0.1)
    with connected(server) as stranger:
        stranger.sendall(b"\x00\x00\x00\x10half")
        assert stranger.recv(1) == b""


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x01\xc1"])
def test_garbage_is_closed(server: MetadataServer, said: bytes) -> None:
    with connected(server) as stranger:
        stranger.sendall(said)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass  # closed with unread bytes
    assert answer(server, SECRET)["metadata"]
