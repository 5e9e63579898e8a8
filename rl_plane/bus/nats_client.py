"""The client of nats-py, without its endless waits, with TLS that is not optional, and with a reconnect after each
error of the server."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport, WebSocketTransport

from rl_plane._util.limited_log import LimitedLog
from rl_plane.bus.connect_errors import NO_TLS
from rl_plane.bus.credentials import Login, NatsCredentials
from rl_plane.errors import InvalidRequest

log = logging.getLogger("rl_plane.bus.nats_client")

KEEPS_CONNECTION = "permissions violation"
"""The error, in lower case as nats-py has it, after which the server keeps the connection."""
CLOSE_TIMEOUT_S = 2.0
"""`close` sends what was published last. A server that has not taken it in this time hangs."""


class NatsClient(Client):  # type: ignore[misc]  # nats-py has no types
    """One connection. nats-py blocks every publisher while a server hangs that has not taken the pending bytes."""

    def __init__(self, credentials: NatsCredentials, login: Login, wants_tls: bool) -> None:
        super().__init__()
        self._credentials = credentials
        self._login = login
        self._wants_tls = wants_tls
        self._warnings = LimitedLog(log)
        self.unread: InvalidRequest | None = None
        """Why the last connection could not read the credentials again. None: it could."""
        self._inbox_prefix = bytearray(login.inbox.encode())

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """The context for one connection. The files are read again, because certificates are renewed."""
        try:
            return self._credentials.tls_context()
        except InvalidRequest as error:  # nats-py tries again after its own errors only
            raise nats.errors.Error(f"nats: {error}") from error

    def _read_login_again(self) -> None:
        """Reads the credentials for one connection, because tokens are renewed. The first key stays: another one would
        need other inboxes."""
        try:
            login = self._credentials.load()
        except InvalidRequest as error:
            self.unread = error
            return
        self.unread = None
        if login.public == self._login.public:
            self._login = login

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Takes the server's INFO. The first one of a connection comes before this client sends its password."""
        over_tls = info.get("tls_required") or isinstance(self._transport, WebSocketTransport)
        if initial_connection and self._wants_tls and not over_tls:
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, NO_TLS)
        await super()._process_info(info, initial_connection)

    def _connect_command(self) -> bytes:
        self._end_without_warning()
        self._read_login_again()
        command: bytes = super()._connect_command()
        proof = self._login.answer(str(self._server_info.get("nonce", "")))
        if not proof:
            return command
        options = json.loads(command.partition(b" ")[2])
        return b"CONNECT " + json.dumps({**options, **proof}).encode() + b"\r\n"

    def _end_without_warning(self) -> None:
        """Tells the stream that it is over TLS. nats-py does not, and asyncio would log a warning at its end."""
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None
        if writer is not None and writer.get_extra_info("ssl_object") is not None:
            writer._protocol._over_ssl = True

    def abort(self) -> None:
        """Drops the connection, and the bytes that were not sent."""
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            self._transport._io_writer.transport.abort()

    async def _process_err(self, err_msg: str) -> None:
        """Takes an error of the server. nats-py would close the connection for good, without a word."""
        if KEEPS_CONNECTION in err_msg or not self.options["allow_reconnect"]:
            await super()._process_err(err_msg)
            return
        words = err_msg.strip("'")
        self._warnings.warning("NATS has ended a connection: %s", words)
        error = nats.errors.Error(f"nats: {words}")
        await self._error_cb(error)
        await self._process_op_err(error)

    async def _attempt_reconnect(self) -> None:
        self.abort()  # a close would first send the pending bytes
        await super()._attempt_reconnect()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        giving_up = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self.abort)
        try:
            await super()._close(status, do_cbs)
        finally:
            giving_up.cancel()

    async def _process_pong(self) -> None:
        """Takes the answer to a flush. If the flush has given up before, nats-py would end its reading loop."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """Waits while 2 MB are pending. nats-py swallows a cancellation in this wait, so it is raised again here."""
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        flushed = await super()._flush_pending(force_flush)
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
        return flushed
