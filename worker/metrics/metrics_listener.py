"""Serves a worker's metrics by HTTP: one page, bounded in every way, beside the worker's NATS loop."""

from __future__ import annotations

import asyncio
import hmac
import importlib.util
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from email.message import Message
from email.parser import BytesParser
from http import HTTPStatus

from rl_plane._util.extras import missing_module
from rl_plane._util.host_header import is_own_name, name_in
from rl_plane._util.listening import listen_at
from rl_plane.errors import InvalidRequest

log = logging.getLogger("worker.metrics.metrics_listener")

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_S = 5.0
"""The bound of one request, from the connection to the answer's last byte. A scrape takes milliseconds."""
MAX_CONNECTIONS = 8
"""A worker has one scraper or two. A further connection is closed at once."""
MAX_HEAD_BYTES = 16_384


def open_metrics_port(host: str, port: int, key: str | None) -> socket.socket:
    """Opens the listener's socket, before the engine is loaded.

    Raises:
        InvalidRequest: the port or the address can't be had, or others can reach the address and there is no key.
        PlaneError: prometheus_client is not installed.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise missing_module(ModuleNotFoundError(name="prometheus_client"), "metrics")
    try:
        listener = listen_at(host, port)
    except InvalidRequest as error:
        of_port = error.facts.get("field") == "options.port"
        raise InvalidRequest(
            error.message,
            field="metrics_port" if of_port else "metrics_host",
            fix="choose a free port, or 0" if of_port else "give an address of this machine",
        ) from error
    if key is None and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        listener.close()
        raise InvalidRequest(
            f"{host} can be reached from elsewhere, and there is no metrics_key",
            field="metrics_host",
            fix="set metrics_key (RL_PLANE_METRICS_KEY), or bind to 127.0.0.1",
        )
    return listener


class MetricsListener:
    """Answers `GET /metrics`, and nothing else. `key`: what a scraper must send as `Authorization: Bearer KEY`."""

    def __init__(
        self,
        listener: socket.socket,
        text: Callable[[], Awaitable[bytes]],
        key: str | None,
        *,
        request_s: float = REQUEST_S,
    ) -> None:
        self._request_s = request_s
        self._listener = listener
        self._text = text
        self._key = key
        self._open = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, sock=self._listener, limit=MAX_HEAD_BYTES)
        host, port = self._listener.getsockname()[:2]
        log.info("metrics: http://%s:%d%s", f"[{host}]" if ":" in host else host, port, PATH)

    def close(self) -> None:
        """Ends the listener. A request under way ends with its loop."""
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._open += 1
        try:
            async with asyncio.timeout(self._request_s):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            log.debug("a scraper's connection: %r", error)
        except Exception:
            log.exception("the metrics could not be shown")
        finally:
            self._open -= 1
            writer.transport.abort()

    async def _answer(self, head: bytes) -> bytes:
        first, _, rest = head.partition(b"\r\n")
        method, _, target = first.decode("latin-1").rpartition(" ")[0].partition(" ")
        headers = BytesParser().parsebytes(rest, headersonly=True)
        if target.partition("?")[0] != PATH:
            return _reply(HTTPStatus.NOT_FOUND, f"only {PATH} is here\n")
        if method != "GET":
            return _reply(HTTPStatus.METHOD_NOT_ALLOWED, "use GET\n")
        if (refusal := self._refusal(headers)) is not None:
            return _reply(HTTPStatus.UNAUTHORIZED, refusal + "\n")
        return _reply(HTTPStatus.OK, await self._text(), CONTENT_TYPE)

    def _refusal(self, headers: Message) -> str | None:
        """Why the request may not read the page. Without a key, it must mean this machine."""
        if self._key is None:
            if is_own_name(name_in(str(headers.get("Host", "")))):
                return None
            return "use this machine's address, or set metrics_key (RL_PLANE_METRICS_KEY)"
        given = headers.get_all("Authorization", [])
        wanted = f"Bearer {self._key}".encode()
        if len(given) == 1 and hmac.compare_digest(str(given[0]).encode("latin-1", "replace"), wanted):
            return None
        return "send the header `Authorization: Bearer <key>`"


def _reply(status: HTTPStatus, body: bytes | str, content_type: str = "text/plain; charset=utf-8") -> bytes:
    data = body.encode() if isinstance(body, str) else body
    more = "WWW-Authenticate: Bearer\r\n" if status == HTTPStatus.UNAUTHORIZED else ""
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n{more}\r\n"
    )
    return head.encode() + data
