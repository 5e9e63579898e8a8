"""JSON bodies that a caller sends: which are refused, and what the others become."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.strict_json import parse_json_object


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
