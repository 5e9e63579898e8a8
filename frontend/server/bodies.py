"""Reads a request: a bounded body of strict JSON, the query beside it, and the request's id."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import typing
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from frontend.server.large_bodies import parse_large_object
from frontend.server.large_memory import LargeMemory
from rl_plane.errors import InvalidRequest, PayloadTooLarge, Unavailable
from rl_plane.protocol.envelope import MAX_ID_CHARS
from rl_plane.protocol.strict_json import parse_json_object

MAX_BODY_BYTES = 1_000_000
"""The size of one NATS message, which passes the body on."""
MAX_PROMPTS_BYTES = 8_000_000
"""A body of prompts: 1,000 of 1,000 tokens each. Each choice is a message of its own. Parsing takes some 80 MB, and up
to 0.25 s, in which the frontend passes no token on."""
MAX_NAMES_BYTES = 64_000_000
"""A body that announces tensors: as many as an update may have, with long names. The plane passes it on in pieces."""
MAX_DISCARD_BYTES = 16_000_000
"""The listener reads a body over its limit to its end up to here. A client that loses its connection while it sends
never sees the 413."""
LONG_WORK = "send weights by a transport, and long work in several requests"
BODY_TIMEOUT_S = 30.0
"""A client that sends its body slower than this occupies a connection for nothing."""
DIGEST_BYTES = 16
"""A hash of this size never confuses two different bodies."""
MAX_PARSED_AT_ONCE = 65_536
"""A larger body is parsed in a thread, one after the other, so that many of them don't stop the loop for long."""
MAX_BRACKETS = 50_000
"""Arrays and objects in a body of at most MAX_PROMPTS_BYTES: a batch of prompts has some thousands."""
MAX_LARGE = 4
"""Bodies of more than MAX_BODY_BYTES under way: up to 1 GB, and several connections of one trainer."""
LARGE_WAIT_S = 30.0
"""The wait for one of these places. A client's own limit is 60 s or more."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_MEDIUM = ThreadPoolExecutor(1, "medium-body")
_LARGE = ThreadPoolExecutor(1, "large-body")


async def read_json(request: Request, within_s: float = BODY_TIMEOUT_S) -> dict[str, Any]:
    """Reads and parses a body of at most MAX_BODY_BYTES. An empty body is an empty object. Raises InvalidRequest if the
    body is not there within `within_s`."""
    return await _parsed(await _read_body(request, MAX_BODY_BYTES, None, within_s))


async def read_prompts_body(request: Request) -> dict[str, Any]:
    """Reads and parses a body of at most MAX_PROMPTS_BYTES, as `read_json` does."""
    fix = "send the prompts in several requests"
    return await _parsed(await _read_body(request, MAX_PROMPTS_BYTES, None, BODY_TIMEOUT_S, fix))


class LargeBodyPlace:
    """A context for one request. If its body is large, it occupies one of MAX_LARGE places until the context ends."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._occupied = False

    async def occupy(self) -> None:
        if self._occupied:
            return
        try:
            async with asyncio.timeout(LARGE_WAIT_S):
                await self._places.acquire()
        except TimeoutError as error:
            raise Unavailable(
                f"{MAX_LARGE} bodies of more than {MAX_BODY_BYTES} bytes are under way here", retry_after_s=1.0
            ) from error
        self._occupied = True

    def __enter__(self) -> LargeBodyPlace:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._occupied:
            self._places.release()


async def read_hashed(request: Request, max_bytes: int, place: LargeBodyPlace) -> tuple[dict[str, Any], str]:
    """Reads and parses the body, and adds the hash by which `InFlight` recognises an equal one. `null` is an empty
    object."""
    data = await _read_body(request, max_bytes, place, BODY_TIMEOUT_S)
    digest = await asyncio.to_thread(lambda: hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest())
    if len(data) <= MAX_BODY_BYTES:
        return {} if data.strip() == b"null" else await _parsed(data), digest
    return await asyncio.get_running_loop().run_in_executor(_LARGE, _parse_large, data), digest


async def _parsed(data: bytearray) -> dict[str, Any]:
    if len(data) <= MAX_PARSED_AT_ONCE:
        return _parse(data)
    return await asyncio.get_running_loop().run_in_executor(_MEDIUM, _parse, data)


def _parse(data: bytearray) -> dict[str, Any]:
    _check_brackets(data)
    return parse_json_object(bytes(data))


def _parse_large(data: bytearray) -> dict[str, Any]:
    try:
        return parse_large_object(data)
    except ValueError as error:
        raise InvalidRequest(
            f"this is not valid JSON: {error}", field="body", fix="send one JSON object"
        ) from error


def _check_brackets(data: bytearray) -> None:
    """Parsing takes time and memory for each array and object, so their number is bounded before."""
    if data.count(b"[") + data.count(b"{") <= MAX_BRACKETS:
        return
    outside = _STRING.sub(b"", data)  # a prompt may have any number of brackets
    if outside.count(b"[") + outside.count(b"{") > MAX_BRACKETS:
        raise InvalidRequest(
            f"the body has more than {MAX_BRACKETS} arrays and objects", field="body", fix="send several requests"
        )


async def _read_body(
    request: Request, max_bytes: int, place: LargeBodyPlace | None, within_s: float, fix: str = LONG_WORK
) -> bytearray:
    most = max(max_bytes, MAX_DISCARD_BYTES)
    stated = request.headers.get("content-length", "0")
    size = int(stated) if stated.isascii() and stated.isdigit() else 0
    # A client that waits for "100 Continue" sees the limit before it sends anything.
    if size > most or (size > max_bytes and "expect" in request.headers):
        raise _too_large(size, max_bytes, fix)
    data, read = bytearray(), 0
    try:
        async with asyncio.timeout(within_s) as limit:
            async for chunk in request.stream():
                read += len(chunk)
                if read > most:
                    break
                if read > max_bytes:
                    data.clear()
                    continue
                data += chunk
                if len(data) > MAX_BODY_BYTES and place is not None:
                    limit.reschedule(None)  # waiting for a place is not the client's fault
                    await place.occupy()
                    limit.reschedule(asyncio.get_running_loop().time() + within_s)
                    data, place = LargeMemory(data), None
    except TimeoutError as error:
        raise InvalidRequest(
            f"the body was not there within {within_s:g} s", field="body", fix="send it at once"
        ) from error
    if read > max_bytes:
        raise _too_large(read, max_bytes, fix)
    return data


def _too_large(size: int, most: int, fix: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body has {size} bytes or more; at most {most} are read", field="body", fix=fix)


def idempotency_key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if len(key) > MAX_ID_CHARS or not key.isprintable():
        raise InvalidRequest(
            f"Idempotency-Key must be at most {MAX_ID_CHARS} printable characters",
            field="Idempotency-Key",
            fix="send a shorter one, such as a UUID",
        )
    return key


def list_fields(model: type[BaseModel]) -> frozenset[str]:
    """The fields that a query may give as `a,b`."""
    found = set()
    for name, field in model.model_fields.items():
        options = (field.annotation, *typing.get_args(field.annotation))
        if any(typing.get_origin(option) is list for option in options):
            found.add(name)
    return frozenset(found)


def merge_query(query: list[tuple[str, str]], body: dict[str, Any], lists: frozenset[str]) -> dict[str, Any]:
    """Joins query and body. A field that both give must have the same value in both."""
    given: dict[str, Any] = {}
    for key, text in query:
        if key in lists:
            given.setdefault(key, []).extend(part for part in text.split(",") if part)
        elif given.setdefault(key, text) != text:
            raise InvalidRequest(f"the query gives {key} twice", field=key, fix="give it once")
    for key, value in given.items():
        if key in body and not _is_same(body[key], value):
            raise InvalidRequest(
                f"the query and the body differ in {key}", field=key, fix="give it in one of the two"
            )
    return {**given, **body}


def _is_same(in_body: Any, in_query: str | list[str]) -> bool:
    if isinstance(in_query, list):
        return bool(in_body == in_query or in_body == ",".join(in_query))
    return bool(in_body == in_query or json.dumps(in_body) == in_query)
