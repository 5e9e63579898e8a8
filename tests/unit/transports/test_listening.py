"""Sockets that listen at the address that was asked for, and the interfaces of this machine."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
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
    here = psutil.net_if_addrs()
    others = other_interfaces("127.0.0.1", here)
    assert "lo" not in others
    assert set(others) <= {name for _, name in socket.if_nameindex()}
    for host in ("192.0.2.200", "0.0.0.0", "a..b"):
        assert other_interfaces(host, here) == []


def test_an_interface_has_its_further_addresses_too() -> None:
    """Such as a virtual address beside the host's own. A label like `eth0:1` is no interface."""

    def address(text: str, family: int = socket.AF_INET) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=text)

    found = {
        "lo": [address("127.0.0.1"), address("00:00:00:00:00:00", socket.AF_PACKET)],
        "eth0": [
            address("192.0.2.1"),
            address("192.0.2.2"),
            address("2001:db8::1", socket.AF_INET6),
            address("fe80::1%eth0", socket.AF_INET6),
        ],
        "eth0:1": [address("192.0.2.3")],
        "eth1": [address("198.51.100.1")],
        "down0": [address("00:00:00:00:00:00", socket.AF_PACKET)],
    }
    for host in ("192.0.2.1", "192.0.2.2", "192.0.2.3", "2001:db8::1", "fe80::1"):
        assert other_interfaces(host, found) == ["eth1", "lo"], host


def test_a_frame_that_comes_byte_by_byte_has_one_bound() -> None:
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.sendall(b"\x00\x00\x00\x10half")
        with pytest.raises(TimeoutError):
            read_frame(reader, within_s=0.2)
