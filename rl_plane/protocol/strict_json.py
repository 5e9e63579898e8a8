"""Strict JSON: what gets through can be sent on as msgpack, and means the same to every reader."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from rl_plane.errors import InvalidRequest

MAX_DEPTH = 64
"""Nested arrays and objects; msgpack and Python's own stack end at some hundred."""

_LONG_NUMBER = re.compile(rb"\d{19}")
_INT64 = range(-(1 << 63), 1 << 64)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:32]} is too large a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)[:64]!r} stands twice in one object")
    return found


def _check_depth_and_numbers(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        inner: list[Any] = []
        for item in level:
            for child in item.values() if isinstance(item, dict) else item if isinstance(item, list) else ():
                if isinstance(child, (dict, list)):
                    inner.append(child)
                elif isinstance(child, int) and child not in _INT64:
                    raise ValueError(f"{str(child)[:32]}… has more than 64 bits")
        level = inner


def parse_json_object(data: bytes) -> dict[str, Any]:
    """The body's object (none: an empty one), or InvalidRequest: what gets through can be sent on to a worker."""
    if not data.strip():
        return {}
    try:
        value = json.loads(data, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique)
        if data.count(b"[") + data.count(b"{") > MAX_DEPTH or _LONG_NUMBER.search(data):
            _check_depth_and_numbers(value)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"this is not valid JSON: {str(error) or type(error).__name__}",
            field="body",
            fix="send one JSON object",
        ) from error
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"this is a JSON {type(value).__name__}, not an object", field="body", fix="send one JSON object"
        )
    return value
