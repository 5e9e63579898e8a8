"""The server ends a connection with an error: the process connects again, and says why."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import nkeys
import pytest

from rl_plane.bus.connection import Bus
from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.errors import BusUnreachable
from rl_plane.protocol.subjects import Subjects

BOUND_S = 10.0
INFO = {"server_id": "S", "version": "2.15.1", "max_payload": 1 << 20, "headers": True, "proto": 1, "nonce": "n"}


class SmallServer:
    """A NATS server, as far as a connection needs one. `end` ends each connection with an error."""

    def __init__(self) -> None:
        self.connects: list[dict[str, Any]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"INFO {json.dumps(INFO)}\r\n".encode())
        self._writers.append(writer)
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                if line.startswith(b"CONNECT "):
                    self.connects.append(json.loads(line.partition(b" ")[2]))
                elif line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
        writer.close()

    def end(self, error: str) -> None:
        for writer in self._writers:
            writer.write(f"-ERR '{error}'\r\n".encode())
            writer.close()
        self._writers.clear()


@asynccontextmanager
async def connected(credentials: NatsCredentials = NO_CREDENTIALS) -> AsyncIterator[tuple[SmallServer, Bus]]:
    small = SmallServer()
    async with await asyncio.start_server(small.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        bus = await Bus.connect(f"nats://127.0.0.1:{port}", "worker-a", credentials=credentials)
        try:
            yield small, bus
        finally:
            await bus.close()
            small.end("done")


def reconnected(bus: Bus) -> asyncio.Event:
    event = asyncio.Event()

    async def note() -> None:
        event.set()

    bus.on_reconnect(note)
    return event


def creds_of(seed: bytes, expires: float) -> str:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": int(expires)}).encode()).decode().rstrip("=")
    return f"-----BEGIN NATS USER JWT-----\ne30.{claims}.sig\n\n{seed.decode()}\n"


def new_seed() -> bytes:
    return bytes(nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER))


def token_in(file: Path) -> str:
    return file.read_text().splitlines()[1]


@pytest.mark.parametrize(
    "error", ["User Authentication Expired", "Authorization Violation", "Maximum Connections Exceeded"]
)
async def test_a_connection_that_the_server_ends_by_an_error_is_opened_again(
    error: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected() as (server, bus):
        again = reconnected(bus)
        server.end(error)
        async with asyncio.timeout(BOUND_S):
            await again.wait()
        assert bus.about["connected"]
        assert len(server.connects) == 2
    assert f"NATS has ended a connection: {error.lower()}" in caplog.messages
    assert "worker-a: the connection to NATS is lost; reconnecting" in caplog.messages


async def test_a_read_that_can_not_begin_leaves_no_callback() -> None:
    async with connected() as (_, bus):
        await bus.close()
        with pytest.raises(BusUnreachable):
            await bus.list_keys(Subjects("n", "c").state, ">")
        gc.collect()
        functions = [one for one in gc.get_objects() if isinstance(one, FunctionType)]
        assert not [one for one in functions if one.__qualname__.endswith("_batch_get.<locals>.denied")]


async def test_a_reconnect_proves_the_token_that_the_file_has_then(tmp_path: Path) -> None:
    seed, file = new_seed(), tmp_path / "user.creds"
    file.touch(mode=0o600)
    file.write_text(creds_of(seed, time.time() + 3600))
    first = token_in(file)
    async with connected(NatsCredentials(creds=file)) as (server, bus):
        again = reconnected(bus)
        file.write_text(creds_of(seed, time.time() + 7200))
        server.end("User Authentication Expired")
        async with asyncio.timeout(BOUND_S):
            await again.wait()
        assert [connect["jwt"] for connect in server.connects] == [first, token_in(file)]


@pytest.mark.parametrize("text", ["", "another key"])
async def test_a_file_without_this_key_leaves_the_first_token(text: str, tmp_path: Path) -> None:
    file = tmp_path / "user.creds"
    file.touch(mode=0o600)
    file.write_text(creds_of(new_seed(), time.time() + 3600))
    first = token_in(file)
    async with connected(NatsCredentials(creds=file)) as (server, bus):
        again = reconnected(bus)
        file.write_text(text and creds_of(new_seed(), time.time() + 7200))
        server.end("User Authentication Expired")
        async with asyncio.timeout(BOUND_S):
            await again.wait()
        assert [connect["jwt"] for connect in server.connects] == [first, first]


async def test_the_log_names_the_expired_token_when_the_server_refuses_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seed, file = new_seed(), tmp_path / "user.creds"
    file.touch(mode=0o600)
    file.write_text(creds_of(seed, time.time() + 3600))
    async with connected(NatsCredentials(creds=file)) as (server, bus):
        file.write_text(creds_of(seed, 1))
        again = reconnected(bus)
        server.end("User Authentication Expired")
        async with asyncio.timeout(BOUND_S):
            await again.wait()
        server.end("Authorization Violation")
        again.clear()
        async with asyncio.timeout(BOUND_S):
            await again.wait()
    assert any(f"the token in {file} has expired" in message for message in caplog.messages)
