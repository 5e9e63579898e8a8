"""The outermost layer of a listener: checks the key, and turns each error into a typed reply."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import logging
import time
from collections.abc import Mapping

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.server.replies import ErrorShape, error_response
from rl_plane.errors import PlaneError, Unauthorized

log = logging.getLogger("frontend.server.guard")


class Guard:
    """ASGI middleware. `open_paths` need no key; `shapes` names the paths whose errors have a shape of their own."""

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
            log.debug("the client of %s has disconnected", scope["path"])
        except Exception as error:
            if not isinstance(error, PlaneError):
                log.exception("%s %s", scope["method"], scope["path"])
            if started:
                raise  # cuts the connection, so that no client takes half a reply for a whole one
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
        """Refuses pages of other sites. A listener without a key is on loopback, where a browser can reach it."""
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        host = headers.get(b"host", b"")
        if origin is not None and (origin.partition(b"://")[2] != host or not _is_loopback(host)):
            raise Unauthorized("a web page of another origin needs a key", field="Origin", fix="set a key")


def _is_own_page(headers: Mapping[bytes, bytes]) -> bool:
    """A browser stores a Basic password, and sends it for pages of other sites too."""
    origin = headers.get(b"origin")
    same = origin is None or origin.partition(b"://")[2] == headers.get(b"host", b"")
    return same and headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin")


def _key_in(authorization: bytes) -> bytes:
    """The key of `Bearer <key>`, or the password of `Basic`, for clients that can only put a key into their URL."""
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
    """Whether a `Host` header names this machine by address or as `localhost`. A DNS name may be an attacker's."""
    name = host.decode("latin-1").rsplit(":", 1)[0].strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
