"""What `rl-plane frontend` is told."""

from __future__ import annotations

from dataclasses import dataclass

from rl_plane.cli.settings import DIALECTS
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE, DEFAULT_NATS_URL
from rl_plane.protocol.update_requests import MAX_PART_TIMEOUT_S, PART_TIMEOUT_S

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
    dialects: tuple[str, ...] = DIALECTS
    """Of trainers' own clients, spoken by the facade, which then generates too. Empty: none."""
    liveness_timeout_s: float = 5.0
    admission_wait_s: float = DEFAULT_ADMISSION_WAIT_S
    """How long a generation request waits for a worker that takes it."""
    drain_s: float = 30.0
    """How long SIGTERM lets the choices under way take."""
    part_timeout_s: float = PART_TIMEOUT_S
    """How long one call's tensors may take until every rank has them, where a trainer's dialect has no word for it."""

    def __post_init__(self) -> None:
        for name in self.dialects:
            if name not in DIALECTS:
                raise InvalidRequest(
                    f"there is no dialect {name[:64]!r}",
                    field="dialects",
                    fix=f"name some of {', '.join(DIALECTS)}",
                )
        if not 0 < self.part_timeout_s <= MAX_PART_TIMEOUT_S:
            raise InvalidRequest(
                f"part_timeout_s is {self.part_timeout_s!r}",
                field="part_timeout_s",
                fix=f"seconds, above 0 and at most {MAX_PART_TIMEOUT_S:g}",
            )

    @property
    def speaks(self) -> bool:
        """Does the facade speak a dialect?"""
        return self.rl_port is not None and bool(self.dialects)
