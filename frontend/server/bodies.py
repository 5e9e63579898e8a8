"""Reads a request: a bounded body of strict JSON, the query beside it, and the request's id."""

from __future__ import annotations

import asyncio
import hashlib
import json
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from rl_plane.errors import InvalidRequest, PayloadTooLarge
from rl_plane.protocol.envelope import MAX_ID_CHARS
from rl_plane.protocol.strict_json import parse_json_object

MAX_BODY_BYTES = 1_000_000
"""The size of one NATS message, which passes the body on."""
MAX_NAMES_BYTES = 64_000_000
"""A body that announces tensors: as many as an update may have, with long names. The plane passes it on in pieces."""
MAX_DISCARD_BYTES = 16_000_000
"""The listener reads a body over its limit to its end up to here. A client that loses its connection while it sends
never sees the 413."""
BODY_TIMEOUT_S = 30.0
"""A client that sends its body slower than this occupies a connection for nothing."""
DIGEST_BYTES = 16
"""A hash of this size never confuses two different bodies."""

T = TypeVar("T")


async def read_json(request: Request, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """Reads and parses the body. An empty body is an empty object."""
    return await _read_parsed(request, max_bytes, parse_json_object)


async def read_hashed(request: Request, max_bytes: int) -> tuple[dict[str, Any], str]:
    """Reads and parses the body, and adds the hash by which `InFlight` recognises an equal one."""
    return await _read_parsed(request, max_bytes, parse_hashed)


def parse_hashed(data: bytes) -> tuple[dict[str, Any], str]:
    """The body's object and a hash of its bytes. `null` is an empty object."""
    digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
    return ({} if data.strip() == b"null" else parse_json_object(data)), digest


async def _read_parsed(request: Request, max_bytes: int, parse: Callable[[bytes], T]) -> T:
    most = max(max_bytes, MAX_DISCARD_BYTES)
    stated = request.headers.get("content-length", "0")
    size = int(stated) if stated.isascii() and stated.isdigit() else 0
    # A client that waits for "100 Continue" sees the limit before it sends anything.
    if size > most or (size > max_bytes and "expect" in request.headers):
        raise _too_large(size, max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            data = await _read_body(request, max_bytes, most)
            if len(data) > MAX_BODY_BYTES:  # parsing it would block the loop
                return await asyncio.to_thread(parse, data)
            return parse(data)
    except TimeoutError as error:
        raise InvalidRequest(
            f"the body was not there within {BODY_TIMEOUT_S:g} s", field="body", fix="send it at once"
        ) from error


async def _read_body(request: Request, max_bytes: int, most: int) -> bytes:
    chunks: list[bytes] = []
    read = 0
    async for chunk in request.stream():
        read += len(chunk)
        if read <= max_bytes:
            chunks.append(chunk)
        elif read > most:
            break
    if read > max_bytes:
        raise _too_large(read, max_bytes)
    return b"".join(chunks)


def _too_large(size: int, most: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the body has {size} bytes or more; at most {most} are read",
        field="body",
        fix="send weights by a transport, and long work in several requests",
    )


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
