"""The parts of the frontend that need no fleet: queries, errors, envelopes, listeners, names of requests."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from frontend.completions.caller_ids import CallerIds
from frontend.completions.openai_replies import openai_error
from frontend.facade.nats_service import call_body
from frontend.server.bodies import list_fields, merge_query
from frontend.server.listeners import bind, url_of
from frontend.server.replies import error_body, error_response, to_json
from rl_plane.errors import (
    EngineDied,
    InvalidRequest,
    NoWorkers,
    PlaneError,
    Unauthorized,
    Unavailable,
)
from rl_plane.protocol.envelope import Request
from rl_plane.protocol.fleet_ops import FLEET_OPS
from rl_plane.protocol.strict_json import parse_json_object

# ---- JSON ----


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b'"a"',
        b"3",
        b"null",
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": 1, "a": 2}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": 99999999999999999999999}',
        b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_could_not_be_passed_on_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_json_object(data)
    assert caught.value.facts["field"] == "body"
    assert caught.value.facts["fix"]


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", {}),
        (b" \r\n", {}),
        (b"{}", {}),
        (b'{"a": "\\u00e9\\ud83d\\ude00"}', {"a": "é😀"}),
        (b'{"seed": 9223372036854775807}', {"seed": (1 << 63) - 1}),
        (b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}", None),
    ],
)
def test_a_body_is_an_object_or_nothing(data: bytes, value: dict[str, Any] | None) -> None:
    found = parse_json_object(data)
    assert value is None or found == value


def test_a_reply_never_has_nan() -> None:
    value = {"a": float("nan"), "b": [float("-inf"), 1.5], 3: b"\x01", "t": (1, True, None)}
    assert to_json(value) == b'{"a":null,"b":[null,1.5],"3":"01","t":[1,true,null]}'


# ---- errors ----


def test_an_error_has_its_rows_where_a_reply_has_them() -> None:
    error = NoWorkers("none", field="workers", workers=[], epoch=3, fingerprint="f", elapsed_s=9.0)
    assert error_body(error, 0.5) == {
        "status": "error",
        "error": {"code": "no_workers", "message": "none", "field": "workers"},
        "workers": [],
        "epoch": 3,
        "fingerprint": "f",
        "elapsed_s": 0.5,
    }


@pytest.mark.parametrize(("wait_s", "header"), [(None, "1"), (0.2, "1"), (1.0, "1"), (2.1, "3")])
def test_a_503_says_when_to_come_back(wait_s: float | None, header: str) -> None:
    response = error_response(Unavailable("not now", retry_after_s=wait_s), 0.0)
    assert (response.status_code, response.headers["retry-after"]) == (503, header)
    assert response.headers["content-length"] == str(len(response.body))


def test_the_503_of_a_dead_engine_says_when_to_retry() -> None:
    response = error_response(EngineDied("its process ended"), 0.0)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_a_401_says_how_to_authenticate() -> None:
    assert error_response(Unauthorized("no"), 0.0).headers["www-authenticate"] == "Bearer"


def test_openai_clients_find_their_keys() -> None:
    error = openai_error(InvalidRequest("wrong", field="n", fix="less"), 0.0)["error"]
    assert error == {
        "code": "invalid_request",
        "message": "wrong",
        "field": "n",
        "fix": "less",
        "type": "invalid_request_error",
        "param": "n",
    }
    assert openai_error(PlaneError("broke"), 0.0)["error"]["type"] == "server_error"


# ---- the facade's query ----


def test_lists_come_by_comma_or_repeated() -> None:
    lists = list_fields(FLEET_OPS["release_memory"].request)
    assert {"workers", "component", "tags"} <= lists
    query = [("tags", "weights,kv_cache"), ("workers", "a"), ("workers", "b"), ("epoch", "3")]
    assert merge_query(query, {}, lists) == {
        "tags": ["weights", "kv_cache"],
        "workers": ["a", "b"],
        "epoch": "3",
    }


def test_query_and_body_may_agree_but_not_differ() -> None:
    lists = frozenset({"workers"})
    body = {"mode": "keep", "clear_cache": True, "lease_s": 5, "workers": ["a"]}
    query = [("mode", "keep"), ("clear_cache", "true"), ("lease_s", "5"), ("workers", "a")]
    assert merge_query(query, body, lists) == body
    for key, text in (("mode", "abort"), ("clear_cache", "false"), ("lease_s", "6"), ("workers", "b")):
        with pytest.raises(InvalidRequest) as caught:
            merge_query([(key, text)], body, lists)
        assert caught.value.facts["field"] == key
    with pytest.raises(InvalidRequest):
        merge_query([("mode", "keep"), ("mode", "abort")], {}, lists)


# ---- the fleet subject's envelope ----


def test_the_envelopes_selection_goes_into_the_body() -> None:
    request = Request("pause", {"mode": "keep"}, targets=("a",), epoch=4, fingerprint="f")
    assert call_body(request) == {"mode": "keep", "workers": ["a"], "epoch": 4, "fingerprint": "f"}
    assert call_body(Request("state", {"workers": ["a"]}, targets=("a",))) == {"workers": ["a"]}


@pytest.mark.parametrize(
    "request_",
    [
        Request("state", {"workers": ["b"]}, targets=("a",)),
        Request("state", {"epoch": 1}, epoch=2),
        Request("pause", fence=3),
        Request("pause", incarnation="x"),
    ],
)
def test_an_envelope_that_contradicts_itself_is_refused(request_: Request) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call_body(request_)
    assert caught.value.facts["field"]


# ---- listeners ----


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
def test_what_can_not_be_bound_is_named(host: str, key: str | None, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bind("rl_port", host, 0, key, False)
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


def test_requests_by_the_names_that_their_callers_gave_them() -> None:
    ids = CallerIds()
    with ids.under(["mine", "made-1"], "made-1"), ids.under(["mine", "other"], "made-2"):
        assert ids.made_of(["mine"]) == ["made-1", "made-2"]
        assert ids.made_of(["other", "mine", "made-1"]) == ["made-2", "made-1"]
        assert ids.made_of(["mine-0", "made-1-3", "nobody", "nobody-1"]) == [
            "made-1-0",
            "made-2-0",
            "made-1-3",
            "nobody",
            "nobody-1",
        ]
    assert ids.made_of(["mine"]) == ["mine"], "they have ended"
