"""What `rl-plane frontend` is told."""

from __future__ import annotations

from dataclasses import dataclass

from rl_plane.bus import DEFAULT_NATS_URL
from rl_plane.client import DEFAULT_COMPONENT, DEFAULT_NAMESPACE

DEFAULT_RL_PORT = 8002
DEFAULT_HTTP_PORT = 8000
DEFAULT_ADMISSION_WAIT_S = 10.0
"""An update closes all workers for moments; longer than that is for the caller to know."""


@dataclass(frozen=True, slots=True)
class FrontendOptions:
    nats_url: str = DEFAULT_NATS_URL
    namespace: str = DEFAULT_NAMESPACE
    component: str = DEFAULT_COMPONENT
    host: str = "127.0.0.1"
    rl_port: int | None = DEFAULT_RL_PORT
    """The facade's port; 0: a free one; None: no facade."""
    http_port: int | None = DEFAULT_HTTP_PORT
    """The generation API's port; likewise."""
    admin_key: str | None = None
    """Bearer key of the facade. Without one it binds to loopback only."""
    api_key: str | None = None
    """Bearer key of the generation API. Likewise."""
    insecure: bool = False
    """Bind beyond loopback without a key."""
    liveness_timeout_s: float = 5.0
    admission_wait_s: float = DEFAULT_ADMISSION_WAIT_S
    """How long a generation request waits for a worker that takes it."""
