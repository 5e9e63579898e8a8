"""The limits that bound a frontend's waits, queues and tables."""

from __future__ import annotations

from dataclasses import dataclass

from rl_plane._util.descriptors import open_limit
from rl_plane.commit.steps import SESSION_IDLE_S
from rl_plane.fleet.fleet import FORM_WAIT_S
from rl_plane.protocol.generation import MAX_STREAMS
from rl_plane.protocol.record import LEASE_MARGIN_S, SERVING_LEASE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendLimits:
    """The limits of one frontend. Each default is right for every fleet; another value is for tests and experiments."""

    head_timeout_s: float = 10.0
    """From the connection, or from the first byte of a further request, to the end of its head. Until then no key is
    known. A client sends a head at once. A TLS handshake before it has the same time."""
    connections: int = max(64, min(16_384, open_limit() * 3 // 8))
    """The bound of one listener. Both leave a quarter of the process's descriptors for everything else."""
    certificate_reload_s: float = 5.0
    """The interval at which the frontend looks at the certificate's files."""
    grace_s: int = 3
    """The time that each part of a stop waits for the work under way. Open event streams never end, and a container is
    killed after 10 s."""
    accept_timeout_s: float = 10.0
    """A worker's NATS loop answers at once, also while its engine is paused. The membership finds a hung one within
    8 s."""
    stale_wait_s: float = 60.0
    """The longest wait for a version that is still to be committed: a trainer's step and its update. After that the
    caller gets an error."""
    stale_after_s: float = SERVING_LEASE_S + LEASE_MARGIN_S
    """This long after the end of an update, no worker that follows the record makes tokens by the weights before."""
    away_s: float = 60.0
    """A worker that left less than this ago, or while a request waits, may return, because a restart takes this long. A
    request that only this worker can serve waits for it, and then ends with an error that says to retry it."""
    worker_streams: int = MAX_STREAMS
    """Requests of all frontends at one worker. The worker itself refuses more than the default."""
    session_idle_s: int = SESSION_IDLE_S
    """An update that a trainer has prepared or begun ends if the trainer is silent for this long."""
    drop_wait_s: float = FORM_WAIT_S
    """A trainer that forms a new group waits this long until the fleet has dropped its unfinished update."""
    held_idle_s: float = 120.0
    """Tensors that a frontend holds until their update is whole are dropped if the trainer is silent for this long."""
    sessions: int = 65_536
    """The number of sessions that the router remembers, the latest ones: about 20 MB."""
    choices: int = 4096
    """Choices under way in one frontend for one component, so that requests for one model never crowd out those for
    another. A worker takes no more streams than that either."""
    lease_key_ttl_s: int = 15
    """Three leases. A frontend that may still route stays listed, and one or two updates wait for a frontend that has
    ended."""
    confirm_interval_s: float = SERVING_LEASE_S / 3
    """The interval of the lease's confirmations. The lease survives the loss of two."""
    fleet_calls: int = 256
    """Messages on the fleet subject under way in one frontend. Each waits for a whole fleet, and all share one core."""
    event_listeners: int = 64
    """Readers of fleet events. Each is an open connection and a queue. One fleet has fewer readers than this."""
    kept_events: int = 4096
    """The newest events, which a reader that connects again gets. With some 500 bytes each they take 2 MB."""
    queued_events: int = 4096
    """The number of events that a reader may be behind: a fleet of a thousand workers makes 2,000 in one update."""
    event_keep_alive_s: float = 15.0
    """Proxies cut a connection that is silent for 30 s or more."""
    event_stall_s: float = 30.0
    """A stream of fleet events ends if its reader takes nothing for this long. Its socket's buffers are full by
    then."""
    token_stall_s: float = 600.0
    """A stream of tokens ends if its reader takes nothing for this long, and so does any connection that has bytes to
    send. The reader may be busy with earlier tokens, and occupies a place meanwhile."""


LIMITS = FrontendLimits()
