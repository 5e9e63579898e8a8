"""The addresses on which a frontend listens, and the keys that they need."""

from __future__ import annotations

import socket

import pytest

from frontend.server.listeners import bind, url_of
from rl_plane.errors import InvalidRequest


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with bind("rl_port", host, 0, None, False) as listener:
        assert url_of(listener).startswith("http://")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_beyond_loopback_needs_a_key_or_insecure(host: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bind("rl_port", host, 0, None, False)
    assert caught.value.facts["field"] == "host"
    assert "admin_key" in caught.value.facts["fix"]
    for key, insecure in (("k", False), (None, True)):
        with bind("http_port", "0.0.0.0", 0, key, insecure) as listener:
            assert url_of(listener).startswith("http://127.0.0.1:")


@pytest.mark.parametrize("field", ["rl_port", "http_port"])
def test_a_taken_port_is_named(field: str) -> None:
    with bind(field, "127.0.0.1", 0, None, False) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest) as caught:
            bind(field, "127.0.0.1", port, None, False)
    assert caught.value.facts["field"] == field
    assert str(port) in caught.value.message


@pytest.mark.parametrize(
    ("host", "key", "field"),
    [
        ("no such host.", None, "host"),
        ("203.0.113.1", "k", "rl_port"),
    ],
)
def test_an_address_that_can_not_be_bound_is_refused_by_its_field(host: str, key: str | None, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bind("rl_port", host, 0, key, False)
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]
