"""An update by checkpoint-engine's parameter server, whose ZeroMQ sockets are on the workers' machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import begun

TIMEOUT_S = 3600.0
"""The time for a whole update in seconds. The server sends bucket by bucket, and bounds nothing."""


async def from_checkpoint_engine(
    context: DialectContext,
    handles: Any,
    request_id: str,
    *,
    label: str | None = None,
    policy: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Receives and commits the whole update. `handles`: the address of each GPU's socket, by its UUID."""
    body = {
        "transport": {"backend": "ipc", "zmq_handles": handles},
        "policy": {"prepare_timeout_s": TIMEOUT_S, **(policy or {})},
        "version": label,
    }
    with begun():
        return await context.calls.run("update_weights", body, request_id)
