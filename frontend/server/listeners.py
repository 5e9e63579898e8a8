"""The sockets and servers of the two listeners."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from frontend.frontend_limits import LIMITS, FrontendLimits
from rl_plane._util.limited_log import LimitedLog
from rl_plane.errors import InvalidRequest

log = logging.getLogger("frontend.server.listeners")

BACKLOG = 2048
KEEP_ALIVE_S = 30
"""Longer than uvicorn's 5 s, because a trainer's step lies between two of its calls."""


def bind(
    field: str, host: str, port: int, key: str | None, insecure: bool, keys_file: bool = False
) -> socket.socket:
    """Opens a listening socket. `field`: the option that names the port, for errors. `keys_file`: a file has keys."""
    if not 0 <= port <= 65_535:  # the system would take another port for it
        raise InvalidRequest(f"{field} is {port}", field=field, fix="use 1 to 65535, or 0 for a free one")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(
            f"{host!r} is no address here: {error}", field="host", fix="such as 127.0.0.1"
        ) from error
    # Checked after the name was resolved, because the address that is bound decides.
    is_open = not (key or keys_file or insecure)
    if is_open and not ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback:
        name = "admin_key" if field == "rl_port" else "api_key"
        raise InvalidRequest(
            f"{host} can be reached from elsewhere, and there is no {name}",
            field="host",
            fix=f"set {name} (RL_PLANE_{name.upper()}) or keys_file, bind to 127.0.0.1, or say --insecure",
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


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.split("%")[0])
    if address.is_unspecified:
        host = "127.0.0.1"
    elif address.version == 6:
        host = f"[{host}]"
    return f"{scheme}://{host}:{port}"


class _Joined:
    """A transport that sends all writes of one turn of the loop together. A reply's head and its first event then share
    a packet. Sending is the largest cost of an event."""

    def __init__(self, transport: asyncio.Transport, stall_s: float) -> None:
        """`stall_s`: a client that does not take what was written loses the connection after this time."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self._stall_s = stall_s
        self._stalled: asyncio.TimerHandle | None = None

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
        if self._transport.get_write_buffer_size():  # asyncio closes only after all of it is sent
            self.begin_stall()

    def begin_stall(self) -> None:
        if self._stalled is None:
            self._stalled = self._loop.call_later(self._stall_s, self._transport.abort)

    def end_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Heads:
    """The connections of one listener from which the head of a request is due, the oldest first."""

    def __init__(self, limits: FrontendLimits) -> None:
        self.limits = limits
        self.closing = LimitedLog(log)
        self.waiting: dict[_Protocol, asyncio.TimerHandle] = {}
        self.idle: dict[_Protocol, None] = {}
        """The connections whose last request was answered, and which have sent nothing since."""

    def oldest_unused(self) -> _Protocol | None:
        return next(iter((*self.waiting, *self.idle)), None)

    def wait(self, connection: _Protocol) -> None:
        if connection not in self.waiting:
            timer = asyncio.get_running_loop().call_later(self.limits.head_timeout_s, connection.close_silent)
            self.waiting[connection] = timer

    def end(self, connection: _Protocol) -> None:
        self.idle.pop(connection, None)
        if (timer := self.waiting.pop(connection, None)) is not None:
            timer.cancel()


class _Protocol(H11Protocol):
    """HTTP/1.1 over a joining transport. A stranger's connections last `head_timeout_s`, and are bounded in number."""

    @property
    def _heads(self) -> _Heads:
        heads: _Heads = self.config.heads  # type: ignore[attr-defined]
        return heads

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._joined = _Joined(transport, self._heads.limits.token_stall_s)
        super().connection_made(self._joined)  # type: ignore[arg-type]
        if len(self.connections) > self._heads.limits.connections:
            self._heads.closing.warning(
                "a connection was closed, because this listener has %d already: let clients share connections, raise "
                "the hard limit of open files (ulimit -Hn), or start another frontend",
                self._heads.limits.connections,
            )
            # The oldest connection without a request makes room. If each has one, there is no room.
            (self._heads.oldest_unused() or self).close_silent()
        if not self.transport.is_closing():
            self._heads.wait(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        next_is_here = not self.cycle.response_complete
        if not (next_is_here or self.transport.is_closing()):
            self._heads.idle[self] = None

    def data_received(self, data: bytes) -> None:
        self._heads.idle.pop(self, None)
        super().data_received(data)
        if self.cycle is None:
            return  # the first head is not complete
        if not self.cycle.response_complete:
            self._heads.end(self)
        elif not self.transport.is_closing():
            # Any byte ends uvicorn's timer, also a byte of the last request's body or of the next head.
            self._heads.wait(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._joined.begin_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._joined.end_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        self._heads.end(self)
        self._joined.end_stall()
        super().connection_lost(exc)

    def close_silent(self) -> None:
        """Closes a connection that has sent no whole head."""
        self._heads.end(self)
        self.transport.close()


class Certificate:
    """The TLS context of both listeners. `reload` reads the files again, for the connections that come after it.

    Raises:
        InvalidRequest: a file can't be read, or the two don't belong together.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self.context = _server_context(*self._files)
        self._stamp = self._stamps()

    def reload(self) -> None:
        """Reads the files if they have changed. A pair that does not fit, such as a file that is being written, is read
        again later."""
        if (stamp := self._stamps()) == self._stamp:
            return
        _server_context(*self._files)  # a context takes half of a wrong pair, so another one tries first
        self.context.load_cert_chain(*self._files)
        self._stamp = stamp

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        return tuple((found.st_mtime_ns, found.st_ino) for found in (file.stat() for file in self._files))

    async def follow(self, every_s: float) -> None:
        """Reloads the files when they change, until the task is cancelled. `every_s`: seconds between two looks."""
        failed = ""
        while True:
            await asyncio.sleep(every_s)
            try:
                self.reload()
                failed = ""
            except (InvalidRequest, OSError) as error:
                if failed != str(error):
                    failed = str(error)
                    log.error("the certificate before stays: %s", error)


def _server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for field, file in (("https_cert", certificate), ("https_key", key)):
        try:
            mode = file.stat().st_mode
        except OSError as error:
            raise InvalidRequest(
                f"can't read {file}: {error.strerror}", field=field, fix="check the path"
            ) from error
        if field == "https_key" and mode & 0o037:
            raise InvalidRequest(f"others can read {file}", field=field, fix=f"chmod 600 {file}")
    try:
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(
            f"{certificate} and {key} are no certificate and its key: {error}",
            field="https_cert",
            fix="give a chain and its unencrypted key in PEM",
        ) from error
    return context


class Server(uvicorn.Server):
    """A uvicorn server that handles no signals, because two servers run, and says when it accepts connections."""

    def __init__(
        self, app: Starlette, certificate: Certificate | None = None, limits: FrontendLimits = LIMITS
    ) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=limits.grace_s,
        )
        config.load()
        config.heads = _Heads(limits)  # type: ignore[attr-defined]
        if certificate is not None:
            config.ssl = certificate.context
        super().__init__(config)
        self._handshake_s = limits.head_timeout_s
        self.accepting = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens as uvicorn does. But uvicorn leaves a TLS handshake 60 s, and only then the connection counts."""
        await self.lifespan.startup()
        make = partial(
            _Protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        loop, secured = asyncio.get_running_loop(), self.config.ssl
        handshake_s = self._handshake_s if secured is not None else None
        self.servers = [
            await loop.create_server(
                make, sock=one, ssl=secured, backlog=BACKLOG, ssl_handshake_timeout=handshake_s
            )
            for one in sockets or ()
        ]
        self.started = True
        self.accepting.set()
