"""The outermost layer of a listener: checks the key, and turns each error into a typed reply."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Mapping

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.server.listener_keys import ANYBODY, Keys
from frontend.server.replies import ErrorShape, error_response, unanswered
from rl_plane._util.host_header import is_own_name, name_in
from rl_plane.errors import InvalidRequest, PlaneError, Unauthorized
from rl_plane.protocol.http_keys import Caller

log = logging.getLogger("frontend.server.guard")


CALLER = "rl_plane.caller"
"""The name in the request's scope under which the Guard puts the caller."""


class Guard:
    """ASGI middleware. It adds the caller to the scope, and each route checks what the caller may do."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        open_paths: frozenset[str],
        shape: ErrorShape,
        shapes: Mapping[str, ErrorShape],
        hosts: frozenset[str] = frozenset(),
    ) -> None:
        """`open_paths` need no key. `shapes` names the paths whose errors have a shape of their own. `hosts`: names by
        which clients without a key may call this machine, beside its addresses and names without a dot."""
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._shape = shape
        self._shapes = shapes
        self._hosts = hosts

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
            _check_framing(scope["headers"])
            path: str = scope["path"]
            if path not in self._open_paths and path.removesuffix("/") not in self._open_paths:
                scope[CALLER] = self._caller(scope)
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            log.debug("the client of %s has disconnected", scope["path"])
        except asyncio.CancelledError:  # the frontend ends
            if started:
                raise
            await self._answer(unanswered(), scope["path"], time.monotonic() - start)(scope, receive, send)
        except Exception as error:
            if not isinstance(error, PlaneError):
                log.exception("%s %s", scope["method"], scope["path"])
            if started:
                raise  # cuts the connection, so that no client takes half a reply for a whole one
            await self._answer(error, scope["path"], time.monotonic() - start)(scope, receive, send)

    def _answer(self, error: Exception, path: str, elapsed_s: float) -> Response:
        # A variable of the caller would keep the error, and with it the body of the request, until a collection.
        shown = error if isinstance(error, PlaneError) else PlaneError("an unexpected error; see the log")
        return error_response(shown, elapsed_s, self._shapes.get(path, self._shape))

    def _caller(self, scope: Scope) -> Caller:
        headers = dict(scope["headers"])
        if not self._keys:
            self._refuse_pages(headers)
            return ANYBODY
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if values and values[0][:6].lower() == b"basic " and not _is_own_page(headers):
            raise Unauthorized("a web page of another origin", field="Origin", fix="send a Bearer key")
        caller = self._keys.find(_key_in(values[0])) if len(values) == 1 else None
        if caller is None:
            raise Unauthorized(
                "the key is wrong" if values else "this needs a key",
                field="Authorization",
                fix="send the header `Authorization: Bearer <key>`",
            )
        return caller

    def _refuse_pages(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuses pages of other sites. A browser on this machine reaches a listener without a key."""
        host = name_in(headers.get(b"host", b"").decode("latin-1"))
        if not is_own_name(host) and host not in self._hosts:
            raise Unauthorized(
                f"a call to the name {host[:64]!r} needs a key: a web page can make its own name mean this machine",
                field="Host",
                fix="use the machine's address, allow the name (--allowed-host), or set a key",
            )
        if not _is_own_page(headers):
            raise Unauthorized("a web page of another origin needs a key", field="Origin", fix="set a key")


def _check_framing(headers: list[tuple[bytes, bytes]]) -> None:
    """Refuses a head whose two lengths a proxy may read in another way (RFC 9112, 6.3)."""
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise InvalidRequest(
            "the head has Content-Length and Transfer-Encoding", field="Content-Length", fix="send one of the two"
        )


def refuse_browser(headers: Mapping[str, str]) -> None:
    """Refuses a GET that changes something and comes from a browser: any page can make a browser send it."""
    names = ("origin", "referer", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest")
    if any(name in headers for name in names) or headers.get("user-agent", "").startswith("Mozilla/"):
        raise Unauthorized("a browser's GET changes nothing without a key", field="method", fix="send a POST")


def _is_own_page(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request comes from no web page, or from a page of this listener."""
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
