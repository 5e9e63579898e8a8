"""Strict JSON: an object that passes means the same to every reader, and can be sent on as msgpack."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from rl_plane.errors import InvalidRequest

MAX_DEPTH = 64
"""Levels of nested arrays and objects. msgpack and Python's own stack end at a few hundred."""

MAX_KEY_CHARS = 64
"""The part of a key that an error message shows."""

_LONG_NUMBER = re.compile(rb"\d{19}")
INT64 = range(-(1 << 63), 1 << 64)


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
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {again[:MAX_KEY_CHARS]!r} is there twice")
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
                elif isinstance(child, int) and child not in INT64:
                    raise ValueError(f"{str(child)[:32]}… has more than 64 bits")
        level = inner


def load_json_object(data: bytes) -> dict[str, Any]:
    """Parses one JSON object in UTF-8. ValueError: it is another value, or it has a key twice, NaN, an infinity, an
    integer of more than 64 bits, half a surrogate pair, or more than MAX_DEPTH levels."""
    text = data.decode("utf-8")
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH or _LONG_NUMBER.search(data):
        _check_depth_and_numbers(value)
    if b"\\u" in data:
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is not text
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    return value


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Parses a request's body. An empty body is an empty object. InvalidRequest: `load_json_object` refuses it."""
    if not data.strip():
        return {}
    try:
        return load_json_object(data)
    except ValueError as error:
        raise InvalidRequest(
            f"this is not valid JSON: {error}", field="body", fix="send one JSON object"
        ) from error
