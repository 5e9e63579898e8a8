"""Sockets that listen at the address that was asked for, and the interfaces of this machine."""

from __future__ import annotations

import os
import socket

import pytest

from rl_plane._util.framing import read_frame
from rl_plane._util.interfaces import other_interfaces
from rl_plane._util.listening import listen_at
from rl_plane.errors import InvalidRequest
from tests.support.listeners import listeners


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_listener_has_the_address_that_was_asked_for(host: str) -> None:
    before = listeners([os.getpid()])
    try:
        listener = listen_at(host)
    except InvalidRequest:
        assert host == "::1", "IPv6 may be off"
        pytest.skip("there is no IPv6 here")
    with listener:
        (found,) = listeners([os.getpid()]) - before
        assert (found.address, found.port) == listener.getsockname()[:2]
    assert found.loopback
    assert not found.everywhere


def test_the_error_distinguishes_a_used_port_from_an_address_of_another_machine() -> None:
    with listen_at("127.0.0.1") as taken, pytest.raises(InvalidRequest) as refused:
        listen_at("127.0.0.1", taken.getsockname()[1])
    assert refused.value.facts["field"] == "options.port"
    for host in ("192.0.2.200", "a..b"):
        with pytest.raises(InvalidRequest, match="can't listen") as refused:
            listen_at(host)
        assert refused.value.facts["field"] == "options.host"


def test_the_other_interfaces_are_all_but_the_one_of_the_address() -> None:
    others = other_interfaces("127.0.0.1")
    assert "lo" not in others
    assert set(others) <= {name for _, name in socket.if_nameindex()}
    assert other_interfaces("192.0.2.200") == []
    assert other_interfaces("0.0.0.0") == []
    assert other_interfaces("a..b") == []


def test_a_frame_that_comes_byte_by_byte_has_one_bound() -> None:
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.sendall(b"\x00\x00\x00\x10half")
        with pytest.raises(TimeoutError):
            read_frame(reader, within_s=0.2)
