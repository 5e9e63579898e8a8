"""The sender of `object_store`: an error of the server that ends a connection, or that refuses a new one."""

from __future__ import annotations

import base64
import json
import secrets
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import nkeys
import pytest

from rl_plane.bus.credentials import NatsCredentials
from rl_plane.errors import Unauthorized
from rl_plane.transports.object_store.sender import ObjectStoreSender

EXPIRED = b"-ERR 'User Authentication Expired'\r\n"
INFO = {"max_payload": 1 << 20, "headers": True, "nonce": "n"}
DONE = b'{"success": true}'


class ExpiringServer(socketserver.ThreadingTCPServer):
    """A NATS server, as far as the sender needs one. After one answer the token of a connection expires."""

    daemon_threads = True

    def __init__(self, good: int) -> None:
        """`good`: the number of connections that it lets in. It refuses the later connections."""
        super().__init__(("127.0.0.1", 0), _Connection)
        self.good = good
        self.tokens: list[str] = []
        """The token of each connection that has come."""


class _Connection(socketserver.StreamRequestHandler):
    server: ExpiringServer

    def handle(self) -> None:
        self.wfile.write(f"INFO {json.dumps(INFO)}\r\n".encode())
        for line in self.rfile:  # until the sender closes the connection
            operation, *words = line.split()
            if operation == b"CONNECT":
                self.server.tokens.append(json.loads(line.partition(b" ")[2])["jwt"])
            elif operation == b"PING":
                self.wfile.write(b"PONG\r\n" if len(self.server.tokens) <= self.server.good else EXPIRED)
            elif operation == b"PUB":
                self.rfile.read(int(words[-1]) + 2)
                self.wfile.write(b"MSG %b 1 %d\r\n%b\r\n" % (words[1], len(DONE), DONE) + EXPIRED)


@contextmanager
def served(good: int) -> Iterator[ExpiringServer]:
    with ExpiringServer(good) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def write_token(file: Path, seed: bytes, lifetime_s: float) -> str:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": int(time.time() + lifetime_s)}).encode()).decode()
    token = f"e30.{claims.rstrip('=')}.sig"
    file.touch(mode=0o600)
    file.write_text(f"-----BEGIN NATS USER JWT-----\n{token}\n\n{seed.decode()}\n")
    return token


def sender_at(server: ExpiringServer, file: Path) -> ObjectStoreSender:
    url = f"nats://127.0.0.1:{server.server_address[1]}"
    return ObjectStoreSender(url, "n", "c", credentials=NatsCredentials(creds=file), outage_s=600)


def new_seed() -> bytes:
    return bytes(nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER))


def test_a_token_that_expires_on_an_open_connection_is_read_again_for_a_new_one(tmp_path: Path) -> None:
    seed, file = new_seed(), tmp_path / "user.creds"
    first = write_token(file, seed, 3600)
    with served(good=2) as server, closing(sender_at(server, file)) as sender:
        sender.remove("a")
        second = write_token(file, seed, 7200)
        sender.remove("b")
        assert server.tokens == [first, second]


def test_an_expired_token_that_was_not_renewed_ends_the_sender_at_once(tmp_path: Path) -> None:
    file = tmp_path / "user.creds"
    token = write_token(file, new_seed(), 3600)
    with served(good=1) as server, closing(sender_at(server, file)) as sender:
        sender.remove("a")
        with pytest.raises(Unauthorized, match="the token of this process has expired") as stays_out:
            sender.remove("b")
        assert str(file) in stays_out.value.facts["fix"]
        assert server.tokens == [token, token]
