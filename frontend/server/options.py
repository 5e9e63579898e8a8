"""The options of `rl-plane frontend`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from frontend.frontend_limits import LIMITS, FrontendLimits
from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.dialects import DIALECTS
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE, DEFAULT_NATS_URL
from rl_plane.protocol.update_requests import PART_TIMEOUT_S

DEFAULT_RL_PORT = 8002
DEFAULT_HTTP_PORT = 8000
DEFAULT_ADMISSION_WAIT_S = 10.0
"""An update closes all workers for a moment. After a longer wait the caller gets an error."""
DEFAULT_RECORD_FILES = 16
"""Files of 64 MiB: 1 GiB is some hours of a small fleet, and fits on any disk."""
MAX_COMPONENTS = 16
"""A frontend asks each member of each component for a sign of life. A run has a policy and a few models beside it."""


@dataclass(frozen=True, slots=True)
class FrontendOptions:
    """Everything that a frontend can be configured with. The settings of the command line check each value by itself;
    this class checks the values that must fit each other."""

    nats_url: str = DEFAULT_NATS_URL
    namespace: str = DEFAULT_NAMESPACE
    component: str = DEFAULT_COMPONENT
    """The frontend's own component: requests without a `model` and ops without a `component` mean it."""
    also_serve: tuple[str, ...] = ()
    """More components of the namespace, whose models requests may name."""
    host: str = "127.0.0.1"
    rl_port: int | None = DEFAULT_RL_PORT
    """The facade's port. 0: a free port. None: no facade."""
    http_port: int | None = DEFAULT_HTTP_PORT
    """The generation API's port. 0: a free port. None: no generation API."""
    admin_key: str | None = None
    """The key of the facade. Without a key it binds to loopback only."""
    api_key: str | None = None
    """The key of the generation API. Without a key it binds to loopback only."""
    keys_file: Path | None = None
    """A file with keys and their roles, for both listeners. It is read again when it changes."""
    insecure: bool = False
    """Bind beyond loopback without a key."""
    allowed_hosts: tuple[str, ...] = ()
    """Names of this machine in a `Host` header, for listeners without a key."""
    https_cert: Path | None = None
    """The certificate chain of both listeners, in PEM. With it they speak HTTPS only."""
    https_key: Path | None = None
    """The private key of the certificate. Both files are read again when they change."""
    dialects: tuple[str, ...] = tuple(DIALECTS)
    """The dialects of trainers' clients that the facade answers. With a dialect, the facade generates too."""
    expect: int = 0
    """The number of workers that must serve before the fleet is ready. 0: one is enough."""
    liveness_timeout_s: float = 5.0
    admission_wait_s: float = DEFAULT_ADMISSION_WAIT_S
    """The longest wait of a generation request for a worker."""
    drain_s: float = 30.0
    """The time for the choices under way after SIGTERM."""
    part_timeout_s: float = PART_TIMEOUT_S
    """The time until every rank has the tensors of one call, where a trainer's dialect has no field for it."""
    record: Path | None = None
    """The folder in which completions are recorded. None: they are not."""
    record_files: int = DEFAULT_RECORD_FILES
    """The files that stay in that folder."""
    limits: FrontendLimits = LIMITS
    credentials: NatsCredentials = NO_CREDENTIALS
    """The files by which the frontend connects to NATS."""

    def __post_init__(self) -> None:
        if len({self.component, *self.also_serve}) != 1 + len(self.also_serve):
            raise InvalidRequest(
                f"also_serve names a component twice, or the own component {self.component!r}",
                field="also_serve",
                fix="name each other component once",
            )
        if len(self.also_serve) >= MAX_COMPONENTS:
            raise InvalidRequest(
                f"also_serve names {len(self.also_serve)} components",
                field="also_serve",
                fix=f"at most {MAX_COMPONENTS - 1}: start another frontend for the rest",
            )
        if (self.https_cert is None) != (self.https_key is None):
            missing = "https_cert" if self.https_cert is None else "https_key"
            raise InvalidRequest(f"{missing} is missing", field=missing, fix="give the certificate and its key")

    @property
    def speaks(self) -> bool:
        """Whether the facade answers a dialect."""
        return self.rl_port is not None and bool(self.dialects)
