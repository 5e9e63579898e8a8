"""What both listeners share: JSON in and out, the shape of an error, and who may ask."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl_plane.errors import (
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    PlaneError,
    Unauthorized,
    Unsupported,
)
from rl_plane.protocol.envelope import MAX_ID_CHARS
from rl_plane.protocol.strict_json import parse_json_object

log = logging.getLogger("frontend.server.http")

MAX_BODY_BYTES = 1_000_000
"""What a NATS message carries: a longer body could not be passed on."""
MAX_NAMES_BYTES = 64_000_000
"""Of one that announces tensors: as many as an update may have, with long names. It is passed on in pieces."""
MAX_DISCARD_BYTES = 16_000_000
"""A body over its limit is read to its end up to here: a client that is cut off while it sends sees no 413."""
BODY_TIMEOUT_S = 30.0
"""A client that sends its body slower than this holds a connection for nothing."""
MIN_RETRY_S = 1
"""`Retry-After` has whole seconds."""

DIGEST_BYTES = 16
"""Of a request's body: no two that differ have the same."""

T = TypeVar("T")

LIFTED = ("workers", "epoch", "fingerprint")
"""Facts of an error that stand where a reply has them."""


class MethodNotAllowed(PlaneError):
    code = "method_not_allowed"
    http_status = 405


# ---- out ----


def _plain(value: Any) -> Any:
    """The same without what JSON lacks: NaN and infinities become null, keys strings, bytes hex."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return bytes(value).hex() if isinstance(value, (bytes, bytearray, memoryview)) else str(value)


def to_json(value: Any) -> bytes:
    """NaN and infinities become null."""
    try:
        return orjson.dumps(value)
    except TypeError:  # keys that are no strings, bytes, integers of over 64 bits, half a surrogate pair
        return json.dumps(_plain(value), separators=(",", ":")).encode()


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")


def error_body(error: PlaneError, elapsed_s: float) -> dict[str, Any]:
    """`{status: error, error: {code, message, …}, workers?, epoch?, fingerprint?, elapsed_s}`."""
    wire = error.to_wire()
    wire.pop("elapsed_s", None)
    lifted = {key: wire.pop(key) for key in LIFTED if key in wire}
    return {"status": "error", "error": wire, **lifted, "elapsed_s": elapsed_s}


ErrorShape = Callable[[PlaneError, float], dict[str, Any]]


def error_response(error: PlaneError, elapsed_s: float, shape: ErrorShape = error_body) -> Response:
    headers = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = str(error.facts.get("allow", ""))
    if isinstance(error, Unsupported):
        headers["x-should-retry"] = "false"  # OpenAI's clients would
    if error.http_status in (429, 503):
        headers["Retry-After"] = str(max(MIN_RETRY_S, math.ceil(error.facts.get("retry_after_s", MIN_RETRY_S))))
    return json_response(shape(error, elapsed_s), error.http_status, headers)


# ---- in ----


async def read_json(request: Request, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The request's body, within its limit."""
    return await _read_parsed(request, max_bytes, parse_json_object)


async def read_hashed(request: Request, max_bytes: int) -> tuple[dict[str, Any], str]:
    """The same, and by what an equal one is known."""
    return await _read_parsed(request, max_bytes, parse_hashed)


def parse_hashed(data: bytes) -> tuple[dict[str, Any], str]:
    """The body's object, which may be null, and a hash of the bytes."""
    digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
    return ({} if data.strip() == b"null" else parse_json_object(data)), digest


async def _read_parsed(request: Request, max_bytes: int, parse: Callable[[bytes], T]) -> T:
    most = max(max_bytes, MAX_DISCARD_BYTES)
    stated = request.headers.get("content-length", "0")
    size = int(stated) if stated.isascii() and stated.isdigit() else 0
    # A client that waits for "100 Continue" learns of the limit before it sends anything.
    if size > most or (size > max_bytes and "expect" in request.headers):
        raise _too_large(size, max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            data = await _read_body(request, max_bytes, most)
            if len(data) > MAX_BODY_BYTES:  # so much takes its time
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


# ---- around every route ----


class Guard:
    """The outermost layer: asks for the key, and turns whatever is raised into a typed reply."""

    def __init__(
        self,
        app: ASGIApp,
        key: str | None,
        open_paths: frozenset[str],
        shape: ErrorShape,
        shapes: Mapping[str, ErrorShape],
    ) -> None:
        self._app = app
        self._key = key.encode() if key else None
        self._open_paths = open_paths
        self._shape = shape
        self._shapes = shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, started = time.monotonic(), False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            if scope["path"] not in self._open_paths:
                self._check_key(scope)
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            log.debug("the client of %s has gone", scope["path"])
        except Exception as error:
            if not isinstance(error, PlaneError):
                log.exception("%s %s", scope["method"], scope["path"])
            if started:
                raise  # the connection is cut: nobody may take half a reply for a whole one
            shown = error if isinstance(error, PlaneError) else PlaneError("an unexpected error; see the log")
            shape = self._shapes.get(scope["path"], self._shape)
            await error_response(shown, time.monotonic() - start, shape)(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        if self._key is None:
            self._check_origin(scope)
            return
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if values and values[0][:6].lower() == b"basic " and not _is_own_page(dict(scope["headers"])):
            raise Unauthorized("a web page of another origin", field="Origin", fix="send a Bearer key")
        if len(values) != 1 or not hmac.compare_digest(_key_in(values[0]), self._key):
            raise Unauthorized(
                "the key is wrong" if values else "this needs a key",
                field="Authorization",
                fix="send the header `Authorization: Bearer <key>`",
            )

    @staticmethod
    def _check_origin(scope: Scope) -> None:
        """Without a key only this machine reaches us, and on it a browser: another site's page may not steer."""
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        host = headers.get(b"host", b"")
        if origin is not None and (origin.partition(b"://")[2] != host or not _is_loopback(host)):
            raise Unauthorized("a web page of another origin needs a key", field="Origin", fix="set a key")


def _is_own_page(headers: Mapping[bytes, bytes]) -> bool:
    """A browser keeps a password that it was given once, and sends it for other sites' pages too."""
    origin = headers.get(b"origin")
    same = origin is None or origin.partition(b"://")[2] == headers.get(b"host", b"")
    return same and headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin")


def _key_in(authorization: bytes) -> bytes:
    """The key of `Bearer <key>`; or the password of `Basic`, which a client that sets no header can have in its URL."""
    kind, _, given = authorization.partition(b" ")
    if kind.lower() == b"bearer":
        return given.strip()
    if kind.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _is_loopback(host: bytes) -> bool:
    """A name that an attacker's DNS points here is none."""
    name = host.decode("latin-1").rsplit(":", 1)[0].strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _raise_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        raise NotFound(f"there is no route {path[:200]}", field="path", fix="GET /docs lists the routes")
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        raise MethodNotAllowed(f"{path[:200]} takes {allow}", field="method", fix=f"use {allow}", allow=allow)
    raise InvalidRequest(str(error.detail))


class _Route(APIRoute):
    """FastAPI describes it, and no more: each handler takes the request alone and reads it itself. What it would look
    for before a handler and clear up after it took as long as the handler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def make_app(
    title: str,
    key: str | None,
    open_paths: frozenset[str],
    shape: ErrorShape = error_body,
) -> FastAPI:
    """`app.state.shapes`: path → the shape of its errors, where that is another."""
    app = FastAPI(title=title, redirect_slashes=False, redoc_url=None)
    app.router.route_class = _Route
    app.state.shapes = {}
    app.add_middleware(Guard, key=key, open_paths=open_paths, shape=shape, shapes=app.state.shapes)
    app.add_exception_handler(HTTPException, _raise_http_error)
    return app
