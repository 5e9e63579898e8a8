"""The sockets and servers of the two listeners."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl_plane.errors import InvalidRequest

BACKLOG = 2048
GRACE_S = 3
"""How long each part of a stop waits for the work under way. Open event streams never end, and a container is killed
after 10 s."""
KEEP_ALIVE_S = 30
"""Longer than uvicorn's 5 s, because a trainer's step lies between two of its calls."""


def bind(field: str, host: str, port: int, key: str | None, insecure: bool) -> socket.socket:
    """Opens a listening socket. `field`: the option that names the port, for errors."""
    if not 0 <= port <= 65_535:
        raise InvalidRequest(f"{field} is {port}", field=field, fix="use 1 to 65535, or 0 for a free one")
    if key is not None and key != key.strip():
        raise InvalidRequest(
            f"the key of {field} begins or ends with a space, which no header carries",
            field="admin_key" if field == "rl_port" else "api_key",
            fix="set it without",
        )
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(
            f"{host!r} is no address here: {error}", field="host", fix="such as 127.0.0.1"
        ) from error
    # Checked after the name was resolved, because the address that is bound decides.
    if not key and not insecure and not ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback:
        name = "admin_key" if field == "rl_port" else "api_key"
        raise InvalidRequest(
            f"{host} can be reached from elsewhere, and there is no {name}",
            field="host",
            fix=f"set {name} (RL_PLANE_{name.upper()}), bind to 127.0.0.1, or say --insecure",
        )
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # With SO_REUSEADDR, two sockets may bind until one listens. Only now the port is surely free.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidRequest(
                f"port {port} on {host} is in use",
                field=field,
                fix=f"choose another with {field} (0: a free one), or stop what listens there",
            ) from error
        raise InvalidRequest(
            f"can't listen on {host}:{port}: {error}", field=field, fix="choose another"
        ) from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.split("%")[0])
    if address.is_unspecified:
        host = "127.0.0.1"
    elif address.version == 6:
        host = f"[{host}]"
    return f"http://{host}:{port}"


class _Joined:
    """A transport that sends all writes of one turn of the loop together. A reply's head and its first event then share
    a packet. Sending is the largest cost of an event."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self._send)
        self._waiting.append(data)

    def _send(self) -> None:
        if self._waiting:
            data = b"".join(self._waiting)
            self._waiting.clear()
            self._transport.write(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Protocol(H11Protocol):
    """HTTP/1.1 over a joining transport."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Joined(transport))  # type: ignore[arg-type]


class Server(uvicorn.Server):
    """A uvicorn server that handles no signals, because two servers run, and says when it accepts connections."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self.accepting = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.accepting.set()
