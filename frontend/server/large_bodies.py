"""Parses a body of more than 1 MB in small steps.

`json.loads` holds the interpreter's lock from the first byte to the last one, so a large body would stop every other
request, also from another thread. A streaming parser (ijson) releases the lock every few milliseconds. It would read a
long string again for each step, so long strings are taken out before.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from rl_plane.protocol.strict_json import INT64, MAX_DEPTH, MAX_KEY_CHARS

LONG_TEXT_BYTES = 65_536
"""A longer string is a tensor. Every other string of a request is a name, a path or a label."""
MAX_LONG_TEXTS = 1024
"""Tensors that come in one body: an element for each rank of the largest engine."""
MAX_VALUES = 2_500_000
"""Values, keys and brackets in one body: 262,144 tensors, each with a name, a dtype and a shape of four numbers."""
MAX_CONTAINERS = 600_000
"""Arrays and objects in one body, two for each tensor. The garbage collector stops the process to look at them."""
STEP_BYTES = 65_536
"""The parser's step. It takes less than 5 ms."""
SEARCH_BYTES = 4 << 20
"""The step in which a byte is searched for. It takes less than 1 ms, in which nothing else runs."""

_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_LONG_NUMBER = re.compile(rb"[0-9]{1000}")
"""The parser would read a longer number again for each step."""


class LongText:
    """A JSON string of more than LONG_TEXT_BYTES bytes without escapes, in place in the body."""

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LongText) and self.data == other.data

    def __len__(self) -> int:
        return len(self.data)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.is_instance_schema(cls)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string"}


def parse_large_object(body: bytearray) -> dict[str, Any]:
    """Parses one JSON object. A string of more than LONG_TEXT_BYTES becomes a `LongText`.

    ValueError: the body is another value, or it has a key twice, NaN, an infinity, an integer of more than 64 bits, an
    escaped surrogate, more than MAX_DEPTH levels, MAX_VALUES values, MAX_CONTAINERS containers or MAX_LONG_TEXTS long
    strings."""
    mark = secrets.token_hex(8)
    pieces, texts = _without_long_texts(body, mark)
    builder = _Builder({f"{mark}:{number}": text for number, text in enumerate(texts)})
    import ijson  # only the frontend has it
    from ijson.common import JSONError

    events = ijson.sendable_list()
    parser = ijson.basic_parse_coro(events, use_float=True)
    try:
        for step in _steps(pieces):
            if _SURROGATE.search(step):
                raise ValueError("a surrogate is escaped; write the character itself in UTF-8")
            if _LONG_NUMBER.search(step):
                raise ValueError("a number has 1000 digits or more")
            parser.send(step)
            builder.take(events)
            events.clear()
        parser.close()
        builder.take(events)
    except JSONError as error:
        raise ValueError(" ".join(str(error).split())[:200]) from None
    if not isinstance(builder.value, dict):
        raise ValueError(f"a JSON {type(builder.value).__name__}, not an object")
    return builder.value


def _without_long_texts(body: bytearray, mark: str) -> tuple[list[memoryview | bytes], list[LongText]]:
    """The pieces of the body between its long strings, each of which a short string replaces, and the long strings."""
    view = memoryview(body)
    pieces: list[memoryview | bytes] = []
    texts: list[LongText] = []
    kept = 0
    for start, end in _strings(body):
        if end - start <= LONG_TEXT_BYTES:
            continue
        if len(texts) == MAX_LONG_TEXTS:
            raise ValueError(f"more than {MAX_LONG_TEXTS} strings of more than {LONG_TEXT_BYTES} bytes")
        if _find(body, b"\\", start, end) >= 0:
            raise ValueError(f"a string of more than {LONG_TEXT_BYTES} bytes has an escape")
        pieces += [view[kept:start], f"{mark}:{len(texts)}".encode()]
        texts.append(LongText(view[start:end]))
        kept = end
    pieces.append(view[kept:])
    return pieces, texts


def _strings(body: bytearray) -> Iterator[tuple[int, int]]:
    """The first byte and the end of each string, without its quotes."""
    start, quotes = 0, 0  # start: after the quote that opens a string, or 0
    position = _find(body, b'"', 0, len(body))
    while position >= 0:
        quotes += 1
        if quotes > 2 * MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} strings")
        if not start:
            start = position + 1
        elif not _is_escaped(body, start, position):
            yield start, position
            start = 0
        position = _find(body, b'"', position + 1, len(body))
    if start:
        raise ValueError("a string has no end")


def _find(body: bytearray, byte: bytes, start: int, end: int) -> int:
    """The first place of one byte from `start` on and before `end`, or -1. It searches in steps."""
    for at in range(start, end, SEARCH_BYTES):
        if (found := body.find(byte, at, min(at + SEARCH_BYTES, end))) >= 0:
            return found
    return -1


def _is_escaped(body: bytearray, start: int, quote: int) -> bool:
    first = quote
    while first > start and body[first - 1] == ord("\\"):
        first -= 1
    return (quote - first) % 2 == 1


def _steps(pieces: list[memoryview | bytes]) -> Iterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), STEP_BYTES):
            yield bytes(piece[start : start + STEP_BYTES])


class _Builder:
    """Builds the value from the parser's events, and checks what the parser leaves unchecked."""

    def __init__(self, texts: dict[str, LongText]) -> None:
        self.value: Any = None
        self._texts = texts
        self._values = 0
        self._opened = 0
        self._containers: list[dict[str, Any] | list[Any]] = []
        self._keys: list[str] = []
        """The open key of each open object, the innermost last."""

    def take(self, events: list[tuple[str, Any]]) -> None:
        self._values += len(events)
        if self._values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        for event, value in events:
            if event == "map_key":
                self._open_key(value)
            elif event == "start_map":
                self._open({})
                self._keys.append("")
            elif event == "end_map":
                self._containers.pop()
                self._keys.pop()
            elif event == "start_array":
                self._open([])
            elif event == "end_array":
                self._containers.pop()
            elif event == "string":
                self._put(self._texts.get(value, value))
            else:
                self._put(_number(value) if event == "number" else value)

    def _open_key(self, key: str) -> None:
        if key in self._containers[-1]:
            raise ValueError(f"the key {key[:MAX_KEY_CHARS]!r} is there twice")
        self._keys[-1] = key

    def _open(self, container: dict[str, Any] | list[Any]) -> None:
        self._put(container)
        self._containers.append(container)
        self._opened += 1
        if self._opened > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} arrays and objects")
        if len(self._containers) > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")

    def _put(self, value: Any) -> None:
        if not self._containers:
            self.value = value
            return
        container = self._containers[-1]
        if isinstance(container, list):
            container.append(value)
        else:
            container[self._keys[-1]] = value


def _number(value: int | float) -> int | float:
    if isinstance(value, int) and value not in INT64:
        raise ValueError(f"{str(value)[:32]}… has more than 64 bits")
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value
