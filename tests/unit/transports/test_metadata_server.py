"""Strangers at the server that gives receivers the place of a version in memory."""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rl_plane._util.accepting import STRANGERS
from rl_plane._util.framing import MAX_FRAME_BYTES, read_frame, send_frame
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.nixl.metadata_server import MetadataServer
from rl_plane.transports.nixl.tcp_reads import ReadableMemory
from rl_plane.transports.nixl.wire import PROTOCOL
from rl_plane.weights.manifest import Manifest, pack

BOUND_S = 10.0
SECRET = "5" * 32


@pytest.fixture
def bounds() -> dict[str, float]:
    """The bounds of `server` that are not the usual ones. A test gives them as a parameter."""
    return {}


@pytest.fixture
def server(bounds: dict[str, float]) -> Iterator[MetadataServer]:
    found = MetadataServer("127.0.0.1", 0, **bounds)
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
        strangers = [stack.enter_context(connected(server)) for _ in range(STRANGERS + 1)]
        assert strangers[0].recv(1) == b""
        assert answer(server, SECRET)["metadata"]


@pytest.mark.parametrize("bounds", [{"request_s": 0.1}])
def test_half_a_request_is_closed_after_its_time(server: MetadataServer) -> None:
    with connected(server) as stranger:
        stranger.sendall(b"\x00\x00\x00\x10half")
        assert stranger.recv(1) == b""


def test_an_offer_too_long_to_be_read_is_refused(server: MetadataServer) -> None:
    manifest = Manifest(pack([("a", TensorSpec("F32", (1,)))], 64))
    with pytest.raises(InvalidRequest, match="manifest is too large") as caught:
        server.offer("6" * 32, bytes(MAX_FRAME_BYTES), manifest, [[(1, 4)]])
    assert caught.value.facts["field"] == "tensors"
    assert answer(server, "6" * 32).keys() == {"error"}


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x01\xc1"])
def test_garbage_is_closed(server: MetadataServer, said: bytes) -> None:
    with connected(server) as stranger:
        stranger.sendall(said)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass  # closed with unread bytes
    assert answer(server, SECRET)["metadata"]


@pytest.mark.parametrize("bounds", [{"relay_look_s": 0.01}])
def test_a_peer_hears_of_a_bucket_that_is_verified_after_a_pause(server: MetadataServer) -> None:
    relay = server.offer_relay("7" * 32, b"how to read the memory", [[(1, 4)], [(8, 4)]])
    with connected(server) as peer:
        send_frame(peer, {"protocol": PROTOCOL, "secret": "7" * 32, "relay": True})
        assert read_frame(peer)["places"]
        for bucket in (1, 0):
            time.sleep(0.1)  # the server looks several times whether the peer has left
            relay.announce(bucket)
            assert read_frame(peer, within_s=BOUND_S) == {"verified": [bucket]}
        server.end_relay(relay)
        assert peer.recv(1) == b""


LARGE = 32 << 20
"""More than the kernel takes from a source whose reader reads nothing."""


@pytest.fixture
def readable(server: MetadataServer) -> tuple[bytearray, int]:
    """Memory that is offered under SECRET, and its address."""
    memory = bytearray(b"weights." * (LARGE // 8))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    manifest = Manifest(pack([("a", TensorSpec("U8", (LARGE,)))], LARGE))
    server.offer(SECRET, b"how to read the memory", manifest, [[(address, LARGE)]])
    return memory, address


def asked(connection: socket.socket, secret: str, *pieces: Any) -> None:
    send_frame(connection, {"protocol": PROTOCOL, "secret": secret, "read": True})
    send_frame(connection, {"pieces": [list(piece) for piece in pieces]})


def came(connection: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or fewer if the connection ends before."""
    found = b""
    try:
        while len(found) < nbytes and (piece := connection.recv(nbytes - len(found))):
            found += piece
    except ConnectionResetError:
        pass  # closed with unread bytes
    return found


def test_offered_memory_is_read_over_tcp(server: MetadataServer, readable: tuple[bytearray, int]) -> None:
    memory, address = readable
    with connected(server) as reader:
        asked(reader, SECRET, (address + 8, 3), (address, 7))
        assert came(reader, 10) == b"weiweights"
        send_frame(reader, {"pieces": [[address + LARGE - 2, 2]]})
        assert came(reader, 2) == bytes(memory[-2:])


@pytest.mark.parametrize(
    ("secret", "offset", "nbytes"),
    [
        ("6" * 32, 0, 8),
        (SECRET, LARGE - 4, 8),
        (SECRET, -8, 8),
        (SECRET, 0, 0),
        (SECRET, 8, -8),
        (SECRET, 0, (1 << 64) - 1),
        (SECRET, 0, 0.5),
    ],
)
def test_no_other_memory_is_read(
    server: MetadataServer, readable: tuple[bytearray, int], secret: str, offset: int, nbytes: Any
) -> None:
    _, address = readable
    with connected(server) as reader:
        asked(reader, secret, (address + offset, nbytes))
        assert came(reader, 1) == b""
    assert answer(server, SECRET)["metadata"]


@pytest.mark.parametrize("bounds", [{"leave_s": 10 * BOUND_S}])
def test_a_withdrawn_version_is_read_no_more_when_withdraw_returns(
    server: MetadataServer, readable: tuple[bytearray, int]
) -> None:
    """The reader hangs, so the source waits for it in the middle of a read."""
    memory, address = readable
    with connected(server) as reader:
        asked(reader, SECRET, (address, LARGE))
        assert came(reader, 1) == b"w"
        server.withdraw(SECRET)
        memory[:] = bytes(LARGE)
        assert b"\0" not in came(reader, LARGE)


def test_neighbouring_regions_are_read_as_one() -> None:
    memory = bytearray(b"0123456789")
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    found = ReadableMemory([(address + 4, 2), (address, 4), (address + 8, 0), (address + 7, 3)])
    assert bytes(found.view(address + 1, 5)) == b"12345"
    assert bytes(found.view(address + 7, 3)) == b"789"
    for at, nbytes in ((5, 2), (6, 1), (0, 7), (-1, 2)):
        with pytest.raises(ValueError, match="not offered"):
            found.view(address + at, nbytes)
