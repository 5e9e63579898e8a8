"""TLS to NATS: an address with tls:// means TLS or nothing, client certificates, and each error in one line."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trustme

from rl_plane.bus.connection import Bus
from rl_plane.bus.credentials import NatsCredentials
from rl_plane.bus.key_folder import KeyFolder, ServerTls
from rl_plane.bus.server import NatsServer
from rl_plane.errors import Unauthorized
from rl_plane.transports.object_store.bulk_socket import NatsSocket

REFUSED = "(?i)ssl|tls|eof|reset|closed"
CLIENTS = 2
"""The client of messages, and the one of weights."""
WAIT_S = 30.0
"""Longer than any refusal takes, which must come at once."""


class Certificates:
    """An authority, and what it has signed, as files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca = trustme.CA()
        self.ca_file = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, name: str, *, expired: bool = False, host: str = "127.0.0.1") -> tuple[Path, Path]:
        day = datetime.timedelta(days=1)
        now = datetime.datetime.now(datetime.UTC)
        end = now - day if expired else now + day
        made = self.ca.issue_cert(host, not_before=now - 2 * day, not_after=end)
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        made.cert_chain_pems[0].write_to_path(cert)
        key.touch(mode=0o600)
        made.private_key_pem.write_to_path(key)
        return cert, key


@pytest.fixture
def ours(tmp_path: Path) -> Certificates:
    (tmp_path / "ours").mkdir()
    return Certificates(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Certificates:
    (tmp_path / "theirs").mkdir()
    return Certificates(tmp_path / "theirs")


@contextmanager
def tls_server(tmp_path: Path, cert: tuple[Path, Path], client_ca: Path | None = None) -> Iterator[NatsServer]:
    folder = KeyFolder(tmp_path / "keys")
    folder.init("demo", ["engine"], ServerTls(*cert, client_ca))
    server = NatsServer(config=folder.config)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def key(tmp_path: Path) -> Path:
    return KeyFolder(tmp_path / "keys").seed_of("operator")


@asynccontextmanager
async def plaintext_server() -> AsyncIterator[tuple[int, list[bytes], asyncio.Event]]:
    """A server, or a man in the middle, that offers no TLS, and reads what clients send."""
    heard: list[bytes] = []
    both = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "S", "version": "2.15.1", "max_payload": 1 << 20, "headers": True, "nonce": "n"}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        heard.append(await reader.read(4096))
        if len(heard) == CLIENTS:
            both.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heard, both
    finally:
        server.close()
        await server.wait_closed()


async def connects(url: str, credentials: NatsCredentials) -> None:
    """Connects both clients: the one of messages, and the one of weights."""
    bus = await Bus.connect(url, wait_s=WAIT_S, credentials=credentials)
    await bus.close()
    socket = await asyncio.to_thread(NatsSocket, url, "weights", WAIT_S, credentials)
    socket.close()


async def refused(url: str, credentials: NatsCredentials, match: str) -> str:
    with pytest.raises(Unauthorized, match=match) as error:
        await Bus.connect(url, wait_s=WAIT_S, credentials=credentials)
    with pytest.raises(OSError, match=REFUSED):
        await asyncio.to_thread(NatsSocket, url, "weights", WAIT_S, credentials)
    assert "\n" not in error.value.message
    return str(error.value.facts["fix"])


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_nothing_is_sent_to_a_server_without_tls(scheme: str, ours: Certificates) -> None:
    """An authority asks for TLS too, whatever the scheme."""
    files = NatsCredentials(ca=ours.ca_file) if scheme == "nats" else NatsCredentials()
    async with plaintext_server() as (port, heard, both):
        url = f"{scheme}://user:hunter2secret@127.0.0.1:{port}"
        with pytest.raises(Unauthorized, match="offers no TLS, so nothing was sent") as error:
            await Bus.connect(url, wait_s=WAIT_S, credentials=files)
        assert "hunter2secret" not in error.value.message
        with pytest.raises(OSError, match=REFUSED):
            await asyncio.to_thread(NatsSocket, url, "weights", WAIT_S, files)
        async with asyncio.timeout(10):
            await both.wait()
    assert b"hunter2secret" not in b"".join(heard)
    assert b"CONNECT" not in b"".join(heard)


async def test_a_real_server_without_tls_gets_nothing_either() -> None:
    server = NatsServer()
    server.start()
    try:
        with pytest.raises(Unauthorized, match="offers no TLS"):
            await Bus.connect(server.url.replace("nats://", "tls://"), wait_s=WAIT_S)
    finally:
        server.stop()


async def test_tls_with_our_authority_works_by_both_clients(tmp_path: Path, ours: Certificates) -> None:
    with tls_server(tmp_path, ours.issue("server")) as server:
        assert server.url.startswith("tls://")
        await connects(server.url, NatsCredentials(nkey=key(tmp_path), ca=ours.ca_file))


async def test_a_refused_key_is_one_error_and_no_warning(
    tmp_path: Path, ours: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    other = KeyFolder(tmp_path / "other")
    other.init("demo", ["engine"])
    with tls_server(tmp_path, ours.issue("server")) as server:
        wrong = NatsCredentials(nkey=other.seed_of("trainer"), ca=ours.ca_file)
        with pytest.raises(Unauthorized, match="does not know a key of the role trainer"):
            await Bus.connect(server.url, wait_s=WAIT_S, credentials=wrong)
        await connects(server.url, NatsCredentials(nkey=key(tmp_path), ca=ours.ca_file))
    assert not [record.getMessage() for record in caplog.records if record.name.startswith("asyncio")]


async def test_a_client_certificate_works_where_the_server_wants_one(tmp_path: Path, ours: Certificates) -> None:
    with tls_server(tmp_path, ours.issue("server"), ours.ca_file) as server:
        cert, cert_key = ours.issue("client")
        files = NatsCredentials(nkey=key(tmp_path), ca=ours.ca_file, cert=cert, cert_key=cert_key)
        await connects(server.url, files)
        without = NatsCredentials(nkey=key(tmp_path), ca=ours.ca_file)
        assert "--nats-cert" in await refused(server.url, without, "wants a client certificate")


async def test_a_client_certificate_of_another_authority_is_refused(
    tmp_path: Path, ours: Certificates, theirs: Certificates
) -> None:
    with tls_server(tmp_path, ours.issue("server"), ours.ca_file) as server:
        cert, cert_key = theirs.issue("client")
        files = NatsCredentials(nkey=key(tmp_path), ca=ours.ca_file, cert=cert, cert_key=cert_key)
        await refused(server.url, files, "does not accept the certificate")


async def test_an_expired_client_certificate_is_refused(tmp_path: Path, ours: Certificates) -> None:
    with tls_server(tmp_path, ours.issue("server"), ours.ca_file) as server:
        cert, cert_key = ours.issue("client", expired=True)
        files = NatsCredentials(nkey=key(tmp_path), ca=ours.ca_file, cert=cert, cert_key=cert_key)
        await refused(server.url, files, "certificate has expired|does not accept the certificate")


@pytest.mark.parametrize(
    ("made", "match", "fix"),
    [
        (lambda ours, theirs: theirs.issue("server"), "is not signed by .*ca.pem", "--nats-ca"),
        (lambda ours, theirs: ours.issue("server", expired=True), "has expired", "renew the server's"),
        (
            lambda ours, theirs: ours.issue("server", host="nats.example"),
            "is for another name",
            "a name in the URL",
        ),
    ],
    ids=["of another authority", "expired", "for another name"],
)
async def test_a_wrong_server_is_refused(
    made: Callable[[Certificates, Certificates], tuple[Path, Path]],
    match: str,
    fix: str,
    tmp_path: Path,
    ours: Certificates,
    theirs: Certificates,
) -> None:
    with tls_server(tmp_path, made(ours, theirs)) as server:
        assert fix in await refused(server.url, NatsCredentials(nkey=key(tmp_path), ca=ours.ca_file), match)


async def test_without_an_authority_the_systems_count(tmp_path: Path, ours: Certificates) -> None:
    with tls_server(tmp_path, ours.issue("server")) as server:
        await refused(server.url, NatsCredentials(nkey=key(tmp_path)), "is not signed by the system's authorities")
