"""Exit code 0 if the worker of this container is in the fleet, and its engine answers a real round trip."""

from __future__ import annotations

import asyncio
import os
import platform
import sys

from rl_plane import NatsCredentials, PlaneError, RlClient
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE

TIMEOUT_S = 8.0
"""Below the health check's own time-out, so that its log has a reason."""

FILES = {
    "nkey": "RL_PLANE_HEALTH_NATS_NKEY",
    "creds": "RL_PLANE_HEALTH_NATS_CREDS",
    "ca": "RL_PLANE_NATS_CA",
    "cert": "RL_PLANE_NATS_CERT",
    "cert_key": "RL_PLANE_NATS_CERT_KEY",
}
"""The variables of the files for NATS. The key is not the worker's own, because a worker's role may ask no worker."""


async def check() -> str:
    """Why it is not healthy; empty when it is."""
    client = await RlClient.connect(
        os.environ["RL_PLANE_NATS_URL"],
        os.environ.get("RL_PLANE_NAMESPACE") or DEFAULT_NAMESPACE,
        os.environ.get("RL_PLANE_COMPONENT") or DEFAULT_COMPONENT,
        name="health",
        credentials=NatsCredentials(**{field: os.environ.get(name) or None for field, name in FILES.items()}),
    )
    async with client:
        here = [one for one in await client.list_workers() if one.info["host"] == platform.node()]
        for member in here:
            await client.call(member.instance_id, "liveness", timeout_s=TIMEOUT_S / 2)
    return "" if here else f"no worker of {platform.node()} is in the fleet"


def main() -> int:
    try:
        reason = asyncio.run(asyncio.wait_for(check(), TIMEOUT_S))
    except PlaneError as error:
        reason = error.message
    except TimeoutError:
        reason = f"no answer within {TIMEOUT_S:g} s"
    print(reason or "ok")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
