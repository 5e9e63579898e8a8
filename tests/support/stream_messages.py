"""Reads a token stream message by message."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from rl_plane.bus.token_stream import IncomingStream


async def messages_of(stream: IncomingStream) -> AsyncGenerator[dict[str, Any], None]:
    """Yields each message in order. Raises the error of the worker. Closing it closes the stream."""
    async with aclosing(stream.batches()) as batches:
        async for batch in batches:
            for message in batch:
                yield message
