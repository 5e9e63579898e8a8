"""`GET /v1/rl/about`: the frontend itself, from its own memory. It answers also while NATS is away."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

from rl_plane._util.own_version import own_version
from rl_plane.protocol.http_keys import Caller

AboutFrontend = Callable[[], dict[str, Any]]

ABOUT_DOC = """What this frontend knows without a question to another process:

- `frontend`: its name, host, pid and version of rl_plane; `clock`, its Unix seconds
- `key`: the id and the role of the caller's key
- `nats`: the server's address without its password, `connected`, `lost_s` (seconds since the connection was lost),
  the server's version, `max_payload` in bytes, and whether it has JetStream
- `namespace`: the namespace of all components that it serves
- `component`: the frontend's own component. The next five are about it
- `serving_lease`: whether it may route generation. Null: it delivers no tokens
- `lock`: `{owner, held_s}` of the component's lock. Null: it is free
- `pause_left_s`: seconds that the fleet's pause still lasts; 0: it is not paused
- `expected`: `--expect`, or null
- `workers`: the number of workers in each state: `open`, `paused`, `closed`, `unknown`
- `components`: each component that it serves, its own first → the same five
"""


def about(caller: Caller, frontend: str, facts: dict[str, Any]) -> dict[str, Any]:
    """The reply. `facts`: what `ABOUT_DOC` lists beside the frontend and the key."""
    return {
        "status": "ok",
        "frontend": {
            "name": frontend,
            "host": platform.node(),
            "pid": os.getpid(),
            "version": own_version(),
            "clock": time.time(),
        },
        "key": {"id": caller.id, "role": caller.role},
        **facts,
    }
