"""A blocking NATS connection for bulk bytes: payloads go from and to the caller's own buffers.

nats-py copies each payload some five times while it holds the interpreter: about 1 GB for each second of a core, where
this takes some 5. It is for one thread, and it never comes back by itself: what breaks it is an OSError (a time-out and
a protocol error included), after which its user makes another one and goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rl_plane.errors import Unsupported

DEFAULT_PORT = 4222
BUFFER_BYTES = 1 << 16
"""For protocol lines and headers; payloads don't pass through it, apart from what came with a line."""
MAX_LINE_BYTES = 1 << 15
"""The server's INFO is the longest; it lists a cluster's addresses."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message whose payload is still to be taken: `NatsSocket.take` or `take_into`, before the next one."""

    subject: str
    headers: dict[str, str]
    """`Status` too, where the server tells one."""
    nbytes: int

    @property
    def status(self) -> str | None:
        return self.headers.get("Status")


class NatsSocket:
    """Connects when made. `inbox` is subscribed to: whatever is published with a reply to it arrives here."""

    def __init__(self, url: str, name: str, bound_s: float) -> None:
        """`bound_s`: for the connection, and then for every read and write by itself."""
        where = urlsplit(url if "://" in url else f"nats://{url}")
        if where.scheme not in ("nats", "tls"):
            raise Unsupported(
                f"weights can't come over {where.scheme}://", field="nats_url", fix="use nats:// or tls://"
            )
        self.inbox = f"_INBOX.{secrets.token_hex(12)}"
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0
        self._left = 0  # of the payload that is to be taken
        self._socket = socket.create_connection((where.hostname or "", where.port or DEFAULT_PORT), bound_s)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            operation, _, rest = self._line().partition(b" ")
            if operation != b"INFO":
                raise ConnectionError("the server did not begin with INFO")
            info = json.loads(rest)
            self.max_payload = int(info["max_payload"])
            if where.scheme == "tls" or info.get("tls_required"):
                context = ssl.create_default_context()
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
            self._socket.sendall(b"CONNECT %b\r\nSUB %b 1\r\nPING\r\n" % (_json(options), self.inbox.encode()))
            while (line := self._line()) != b"PONG":
                self._told(line)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """From any thread: what blocks there ends with an OSError."""
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
        """`reply`: the answer is to come to the inbox."""
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
        """The next message; TimeoutError when none has begun to come within `bound_s`."""
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
                arrival = Arrival(parts[1].decode(), _parsed(bytes(raw)) if with_headers else {}, self._left)
                if not self._left:
                    self._skip_end()
                return arrival
            self._told(line)

    def take_into(self, view: memoryview) -> None:
        """The payload, which is as long as `view`."""
        assert len(view) == self._left
        if self._left:
            self._fill(view)
            self._left = 0
            self._skip_end()

    def take(self) -> bytes:
        payload = bytearray(self._left)
        self.take_into(memoryview(payload))
        return bytes(payload)

    def request(self, subject: str, body: dict[str, Any] | None, bound_s: float) -> dict[str, Any]:
        """JetStream's answer, `error` included; {} when nobody is there to give one. Nothing else may be due."""
        self.publish(subject, b"" if body is None else _json(body), reply=True)
        arrival = self.next(bound_s)
        answer = self.take()
        if arrival.status is not None:
            return {}
        found = json.loads(answer)
        if not isinstance(found, dict):
            raise ConnectionError("the answer is no object")
        return found

    # ---- the protocol ----

    def _told(self, line: bytes) -> None:
        if line == b"PING":
            self._socket.sendall(b"PONG\r\n")
        elif line.startswith(b"-ERR"):
            raise ConnectionError(f"the server says {line[5:].decode(errors='replace')}")

    def _line(self, give_up: float | None = None) -> bytes:
        """`give_up`: by when it must have come; a line that is not there yet is left for the next call."""
        seen = self._begin
        while True:
            found = bytes(self._buffer[seen : self._end]).find(b"\r\n")
            if found >= 0:
                line = bytes(self._buffer[self._begin : seen + found])
                self._begin = seen + found + 2
                return line
            if self._end - self._begin > MAX_LINE_BYTES:
                raise ConnectionError("the server sent no line")
            if self._begin:  # to the front
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
    """Headers: `NATS/1.0`, or with a status `NATS/1.0 404 Message Not Found`; then a line each."""
    first, *lines = block.decode(errors="replace").split("\r\n")
    headers = {key: value.strip() for key, _, value in (line.partition(":") for line in lines if line)}
    status = first.split(" ")[1:2]
    return {"Status": status[0], **headers} if status else headers
