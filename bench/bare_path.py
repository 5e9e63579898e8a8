"""The way of a stream's tokens with nothing in it: HTTP, NATS, a process that waits as the paced engine does, and back.

What it takes is what three processes take to wake up one after another, and to read and write what is sent.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import nats
from nats.aio.msg import Msg

SUBJECT = "bare.generate"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
TOKEN = b'data: {"token": 7}\n\n'
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
MAX_BODY_BYTES = 1 << 16


async def serve_engine(nats_url: str, tokens: int, pace_s: float) -> None:
    """Answers each request by so many messages, one after each pause."""
    connection = await nats.connect(nats_url)

    async def answer(reply: str) -> None:
        for _ in range(tokens):
            await asyncio.sleep(pace_s)
            await connection.publish(reply, TOKEN)
        await connection.publish(reply, END)

    under_way: set[asyncio.Task[None]] = set()

    async def request(message: Msg) -> None:
        task = asyncio.create_task(answer(message.reply))
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    await connection.subscribe(SUBJECT, cb=request)
    await connection.flush()
    await connection.flush()  # the first may overtake the subscription


async def serve_http(nats_url: str) -> dict[str, Any]:
    """Sends each request's body on, and what comes for it back. Where it listens."""
    connection = await nats.connect(nats_url)
    inbox, numbers = connection.new_inbox(), itertools.count()
    writers: dict[str, asyncio.StreamWriter] = {}

    async def answered(message: Msg) -> None:
        key = message.subject.rsplit(".", 1)[1]
        writers[key].write(message.data)
        if message.data == END:
            del writers[key]

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            body = await reader.readexactly(min(length, MAX_BODY_BYTES))
        except asyncio.IncompleteReadError:
            return  # the client has closed an unused connection
        key = str(next(numbers))
        writers[key] = writer
        writer.write(HEAD)
        await connection.publish(SUBJECT, body, reply=f"{inbox}.{key}")

    await connection.subscribe(f"{inbox}.*", cb=answered)
    await connection.flush()
    await connection.flush()
    server = await asyncio.start_server(client, "127.0.0.1", 0)
    return {"http_url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}
