"""Brings weights into the staging of an engine in this process, as a worker does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plane._util.tasks import never
from rl_plane.protocol.update_requests import ReceiveRequest, Transport


async def stage(engine: Any, name: str, transport: Mapping[str, Any], **more: Any) -> Mapping[str, Any]:
    """Stages one version, and returns the engine's reply.

    Args:
        name: The name of the staging, which is also the update's id and label.
        transport: As in the body of `update_weights`.
        more: Further fields of the `ReceiveRequest`.
    """
    where = Transport.model_validate(transport)
    request = ReceiveRequest(update_id=name, label=name, transport=where, **more)
    await asyncio.to_thread(engine.receiver.open, name, request)
    reply: Mapping[str, Any] = await asyncio.to_thread(engine.receiver.receive, name, never)
    return reply


def from_files(directory: Path) -> dict[str, str]:
    """The transport of a checkpoint."""
    return {"backend": "filesystem", "path": str(directory)}
