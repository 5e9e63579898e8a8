"""The URLs that a worker may fetch, and the fields of a request by URL."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.update_requests import without_secret
from rl_plane.transports.http.wire import parse_source, signed_until
from rl_plane.weights.allowed_urls import Allowed

ALLOWED = Allowed.of(["https://a.example/weights", "http://10.0.0.5:8080"])


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example/weights",
        "https://a.example/weights/step_1",
        "https://A.example:443/weights/step_1/",
        "https://a.example/weig%68ts/x",
        "https://a.example/weights/x?y=/../z",
        "http://10.0.0.5:8080/anything",
    ],
)
def test_urls_below_an_allowed_prefix_are_accepted(url: str) -> None:
    ALLOWED.check(url, "transport.url")


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example/weights",
        "https://a.example/weights2",
        "https://a.example/",
        "https://a.example.evil.example/weights/x",
        "https://a.example@evil.example/weights/x",
        "https://evil.example/https://a.example/weights",
        "https://a.example:444/weights",
        "https://a.example/weights/../secret",
        "https://a.example/weights/%2e%2e/secret",
        "https://a.example/weights/%252e%252e/secret",
        "https://a.example/weights/%25252e%25252e/secret",
        "https://a.example/weights/..%2fsecret",
        "https://a.example/weights\\..\\secret",
        "http://10.0.0.5/x",
        "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.1:8080/x",
        "file:///etc/passwd",
        "ftp://a.example/weights",
        "//a.example/weights",
        "https://a.example/weights#x",
        "https://a.example/wei ghts",
        "https://a.example:99999/weights",
        "https://[::1/weights",
        "https:///weights",
        "https://a.example/weights/" + "x" * 9000,
        "",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ALLOWED.check(url, "transport.url")
    assert caught.value.facts["field"] == "transport.url"


@pytest.mark.parametrize(
    "prefix",
    ["a.example", "https://", "https://u:p@a.example", "https://a.example/?x=1", "https://a.example/../x"],
)
def test_a_wrong_prefix_of_urls_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Allowed.of([prefix])
    assert caught.value.facts["field"] == "weight_url"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({}, "transport.url"),
        ({"url": 5}, "transport.url"),
        ({"url": "https://a.example/weights", "urls": {}}, "transport.url"),
        ({"urls": {}}, "transport.urls"),
        ({"urls": []}, "transport.urls"),
        ({"urls": {"../x": "https://a.example/weights/x"}}, "transport.urls"),
        ({"urls": {"x": None}}, "transport.urls"),
        ({"urls": {"x": "https://b.example/x"}}, "transport.urls"),
        ({"urls": {f"{n}.x": "https://a.example/weights/" + "x" * 1924 for n in range(260)}}, "transport.urls"),
        ({"url": "https://a.example/weights", "headers": []}, "transport.headers"),
        ({"url": "https://a.example/weights", "headers": {"Host": "x"}}, "transport.headers"),
        ({"url": "https://a.example/weights", "headers": {"range": "x"}}, "transport.headers"),
        ({"url": "https://a.example/weights", "headers": {"A": "x\r\nB: y"}}, "transport.headers"),
        ({"url": "https://a.example/weights", "headers": {"A B": "x"}}, "transport.headers"),
        ({"url": "https://a.example/weights", "headers": {"A": "x" * 9000}}, "transport.headers"),
    ],
)
def test_a_wrong_field_of_a_request_is_named_with_a_fix(request_: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_source({"backend": "http", **request_}, ALLOWED)
    assert (caught.value.facts["field"], bool(caught.value.facts["fix"])) == (field, True)


def test_the_url_of_a_file_has_the_query_and_the_shown_url_has_none() -> None:
    source = parse_source({"url": "https://a.example/weights/step_1/?sig=x"}, ALLOWED)
    assert source.url_of("model.safetensors") == "https://a.example/weights/step_1/model.safetensors?sig=x"
    assert source.shown == "https://a.example/weights/step_1/"
    assert "hush" not in repr(
        parse_source({"url": "https://a.example/weights", "headers": {"A": "hush"}}, ALLOWED)
    )


@pytest.mark.parametrize(
    ("query", "until"),
    [
        ("X-Amz-Date=20260101T000000Z&X-Amz-Expires=3600", 1767225600 + 3600),
        ("X-Goog-Date=20260101T000000Z&X-Goog-Expires=60", 1767225600 + 60),
        ("Expires=1767225600", 1767225600),
        ("X-Amz-Date=yesterday&X-Amz-Expires=3600", None),
        ("", None),
    ],
)
def test_the_end_of_a_signature_is_read_from_its_url(query: str, until: float | None) -> None:
    assert signed_until(f"https://a.example/weights/x?{query}") == until


def test_replies_show_no_signatures() -> None:
    transport = {
        "backend": "http",
        "url": "https://user:pass@a.example/w?sig=1#x",
        "urls": {"a": "http://a.example/a?sig=1", "b": "http://a.example/b"},
        "headers": {"Authorization": "Bearer x"},
        "secret": "s",
        "path": "/a?b",
        "port": 5,
    }
    assert without_secret(transport) == {
        "backend": "http",
        "url": "https://a.example/w?…",
        "urls": {"a": "http://a.example/a?…", "b": "http://a.example/b"},
        "path": "/a?b",
        "port": 5,
    }
