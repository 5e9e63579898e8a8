"""A blocking NATS connection for bulk bytes, whose payloads go from and to the caller's own buffers.

nats-py copies each payload about five times and holds the interpreter meanwhile: it moves about 1 GB per second of a
core, this connection about 5. It is for one thread and does not reconnect. It ends with an OSError, time-outs and
protocol errors included; its user then makes another connection, and continues where the first one ended.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rl_plane.bus.connect_errors import refusal_of
from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.errors import Unsupported
from rl_plane.protocol.subjects import DEFAULT_NATS_PORT

BUFFER_BYTES = 1 << 16
"""The buffer for protocol lines and headers. Of payloads only the bytes that came with a line pass through it."""
MAX_LINE_BYTES = 1 << 15
"""The longest protocol line: the server's INFO, which lists a cluster's addresses."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message whose payload must be taken, by `NatsSocket.take` or `take_into`, before the next message."""

    headers: dict[str, str]
    """The message's headers, with `Status` if the server sends one."""
    nbytes: int

    @property
    def status(self) -> str | None:
        return self.headers.get("Status")


class NatsSocket:
    """A connection that subscribes to an inbox of its own. It connects when it is made."""

    def __init__(self, url: str, name: str, bound_s: float, credentials: NatsCredentials = NO_CREDENTIALS) -> None:
        """`bound_s`: the time in seconds to connect, and then for each single read and write."""
        where = urlsplit(url if "://" in url else f"nats://{url}")
        if where.scheme not in ("nats", "tls"):
            raise Unsupported(
                f"weights can't come over {where.scheme}://", field="nats_url", fix="use nats:// or tls://"
            )
        login = credentials.load()
        self.inbox = f"{login.inbox}.{secrets.token_hex(12)}"
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0
        self._login = login
        self._left = 0  # of the payload that is to be taken
        self._socket = socket.create_connection((where.hostname or "", where.port or DEFAULT_NATS_PORT), bound_s)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            operation, _, rest = self._line().partition(b" ")
            if operation != b"INFO":
                raise ConnectionError("the server did not begin with INFO")
            info = json.loads(rest)
            self.max_payload = int(info["max_payload"])
            if credentials.wants_tls(url) or info.get("tls_required"):
                context = credentials.tls_context()
                self._socket = context.wrap_socket(self._socket, server_hostname=where.hostname)
            options: dict[str, Any] = {
                "verbose": False,
                "pedantic": False,
                "headers": True,
                "no_responders": True,
                "protocol": 1,
            }
            options |= {"lang": "python", "version": "1", "name": name}
            if where.username is not None:
                user = {"user": where.username, "pass": where.password}
                options |= user if where.password is not None else {"auth_token": where.username}
            options |= login.answer(str(info.get("nonce", "")))
            self._socket.sendall(b"CONNECT %b\r\nSUB %b 1\r\nPING\r\n" % (_json(options), self.inbox.encode()))
            while (line := self._line()) != b"PONG":
                self._handle(line)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection, from any thread. A call that blocks in it ends with an OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def publish(
        self,
        subject: str,
        payload: bytes | memoryview,
        *,
        reply: bool = False,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Sends a message. `reply`: the answer comes to the inbox."""
        to = f"{subject} {self.inbox}" if reply else subject
        if headers:
            head = "".join(["NATS/1.0\r\n", *(f"{key}: {value}\r\n" for key, value in headers.items()), "\r\n"])
            first = f"HPUB {to} {len(head)} {len(head) + len(payload)}\r\n{head}".encode()
        else:
            first = f"PUB {to} {len(payload)}\r\n".encode()
        if len(payload) < BUFFER_BYTES:
            self._socket.sendall(b"%b%b\r\n" % (first, bytes(payload)))
        else:
            self._socket.sendall(first)
            self._socket.sendall(payload)
            self._socket.sendall(b"\r\n")

    def next(self, bound_s: float) -> Arrival:
        """The next message. Raises TimeoutError if none begins to arrive within `bound_s` seconds."""
        assert not self._left, "the payload before was not taken"
        give_up = time.monotonic() + bound_s
        while True:
            line = self._line(give_up)
            parts = line.split()
            if parts and parts[0] in (b"MSG", b"HMSG"):
                with_headers = parts[0] == b"HMSG"
                head, total = int(parts[-2]) if with_headers else 0, int(parts[-1])
                self._left = total - head
                raw = bytearray(head)
                self._fill(memoryview(raw))
                arrival = Arrival(_parsed(bytes(raw)) if with_headers else {}, self._left)
                if not self._left:
                    self._skip_end()
                return arrival
            self._handle(line)

    def take_into(self, view: memoryview) -> None:
        """Reads the payload into `view`, which has the same length."""
        assert len(view) == self._left
        if self._left:
            self._fill(view)
            self._left = 0
            self._skip_end()

    def take(self) -> bytes:
        """Reads the payload."""
        payload = bytearray(self._left)
        self.take_into(memoryview(payload))
        return bytes(payload)

    def request(self, subject: str, body: dict[str, Any] | None, bound_s: float) -> dict[str, Any]:
        """JetStream's answer, perhaps an `error`; {} if no JetStream answers. No other message may be due."""
        self.publish(subject, b"" if body is None else _json(body), reply=True)
        arrival = self.next(bound_s)
        answer = self.take()
        if arrival.status is not None:
            return {}
        found = json.loads(answer)
        if not isinstance(found, dict):
            raise ConnectionError("the answer is not a JSON object")
        return found

    # ---- the protocol ----

    def _handle(self, line: bytes) -> None:
        if line == b"PING":
            self._socket.sendall(b"PONG\r\n")
        elif line.startswith(b"-ERR"):
            said = ConnectionError(f"the server says {line[5:].decode(errors='replace')}")
            denied = refusal_of(said, self._login)
            raise denied[2] if denied is not None else said

    def _line(self, give_up: float | None = None) -> bytes:
        """The next protocol line. `give_up`: the monotonic time by which it must be here, or TimeoutError; the next
        call then continues."""
        seen = self._begin
        while True:
            found = bytes(self._buffer[seen : self._end]).find(b"\r\n")
            if found >= 0:
                line = bytes(self._buffer[self._begin : seen + found])
                self._begin = seen + found + 2
                return line
            if self._end - self._begin > MAX_LINE_BYTES:
                raise ConnectionError("the server sent a line that is too long")
            if self._begin:  # move the rest to the front
                rest = bytes(self._buffer[self._begin : self._end])
                self._buffer[: len(rest)] = rest
                self._begin, self._end = 0, len(rest)
            seen = max(self._begin, self._end - 1)
            self._end += self._received(self._buffer[self._end :], give_up)

    def _fill(self, view: memoryview) -> None:
        done = min(len(view), self._end - self._begin)
        view[:done] = self._buffer[self._begin : self._begin + done]
        self._begin += done
        while done < len(view):
            done += self._received(view[done:], None)

    def _skip_end(self) -> None:
        self._fill(memoryview(bytearray(2)))

    def _received(self, view: memoryview, give_up: float | None) -> int:
        bound_s = self._socket.gettimeout()
        try:
            if give_up is not None:
                self._socket.settimeout(max(give_up - time.monotonic(), 0.001))
            count = self._socket.recv_into(view)
        finally:
            self._socket.settimeout(bound_s)
        if not count:
            raise ConnectionError("the server closed the connection")
        return count


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _parsed(block: bytes) -> dict[str, str]:
    """Parses headers: a line `NATS/1.0`, perhaps with a status (`NATS/1.0 404 Message Not Found`), then one line
    each."""
    first, *lines = block.decode(errors="replace").split("\r\n")
    headers = {key: value.strip() for key, _, value in (line.partition(":") for line in lines if line)}
    status = first.split(" ")[1:2]
    return {"Status": status[0], **headers} if status else headers
