"""A NATS node that hangs while its host is up: what is sent to it piles up, and nothing is closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

BUFFER_BYTES = 4096
"""The socket buffer of the node: small, so that a sender soon has bytes left."""


class Node:
    """Hands connections on to a real server."""

    def __init__(self, behind: str) -> None:
        where = urlsplit(behind)
        self.url = ""
        self._behind = where.hostname, where.port
        self._server: asyncio.Server | None = None
        self._flows = asyncio.Event()
        self._flows.set()
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        listening.bind(("127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{listening.getsockname()[1]}"
        self._server = await asyncio.start_server(self._accept, sock=listening, limit=BUFFER_BYTES)

    def hang(self, *, others_listen: bool = True) -> None:
        """The connections that there are stand still for ever. `others_listen`: new ones don't."""
        self._flows.clear()
        self._flows = asyncio.Event()
        self._flows.set()
        if not others_listen:
            assert self._server is not None
            self._server.close()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writers, flows = [writer], self._flows
        pumps: list[asyncio.Task[None]] = []
        with contextlib.suppress(asyncio.CancelledError, OSError):  # asyncio would complain of it
            there, back = await asyncio.open_connection(*self._behind)
            writers.append(back)
            for one, other in ((reader, back), (there, writer)):
                pumps.append(asyncio.create_task(_pump(one, other, flows)))
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        for each in writers:
            each.transport.abort()
        self._connections.discard(task)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
    """Returns at the end, unless it stands still."""
    with contextlib.suppress(OSError):
        while data := await reader.read(BUFFER_BYTES):
            await flows.wait()
            writer.write(data)
            await writer.drain()
    await flows.wait()


@asynccontextmanager
async def node_before(url: str) -> AsyncIterator[Node]:
    node = Node(url)
    await node.start()
    try:
        yield node
    finally:
        await node.close()
