"""rl_plane: the control plane by which a reinforcement-learning trainer steers a fleet of inference engines.

This package is the SDK. It needs nats-py, msgpack and pydantic only; WeightPublisher needs the extra `publish`. Workers
and frontends are other packages.
"""

import importlib
import typing

from rl_plane.bus.credentials import NatsCredentials
from rl_plane.errors import (
    BusUnreachable,
    CanaryFailed,
    Conflict,
    DeadlineExceeded,
    DemandUnmet,
    EngineDied,
    EngineFailed,
    FenceRequired,
    FrontendEnding,
    InvalidRequest,
    InvalidWeights,
    Locked,
    MembershipChanged,
    NotAdmitted,
    NotAtBase,
    NotFound,
    NotPrepared,
    NoWorkers,
    OutcomeUnknown,
    Overloaded,
    PayloadTooLarge,
    PermissionDenied,
    PlaneError,
    StaleFence,
    StaleWeights,
    Stalled,
    Unauthorized,
    Unavailable,
    Unlabelled,
    Unsupported,
    UpdateAborted,
    WorkerLost,
    WrongIncarnation,
    WrongNumerics,
)
from rl_plane.membership.core import Changed, Member, Snapshot
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.versions import TensorSpec, WeightVersion
from rl_plane.rollouts.multi_turn import check_next_prompt, next_prompt
from rl_plane.rollouts.partial import Gathered, Rollout, gather_enough

if typing.TYPE_CHECKING:
    from rl_plane.client import RlClient
    from rl_plane.fleet.fleet import Fleet
    from rl_plane.membership.worker_calls import FanOut
    from rl_plane.protocol.canary import Canary
    from rl_plane.protocol.update_requests import BaseTarget, LoraTarget, UpdatePolicy
    from rl_plane.publish.publication import Publication
    from rl_plane.publish.publisher import WeightPublisher
    from rl_plane.sync import SyncRlClient
else:
    _LAZY = {
        "BaseTarget": "protocol.update_requests",
        "Canary": "protocol.canary",
        "FanOut": "membership.worker_calls",
        "Fleet": "fleet.fleet",
        "LoraTarget": "protocol.update_requests",
        "Publication": "publish",
        "RlClient": "client",
        "SyncRlClient": "sync",
        "UpdatePolicy": "protocol.update_requests",
        "WeightPublisher": "publish",
    }
    """Name → its module. A name is loaded at its first use, so that an engine's processes do not load nats-py, and the
    SDK does not load the extra `publish`."""

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = found
        return found


__all__ = [
    "BaseTarget",
    "BusUnreachable",
    "Canary",
    "CanaryFailed",
    "Changed",
    "Conflict",
    "DeadlineExceeded",
    "DemandUnmet",
    "EngineDied",
    "EngineFailed",
    "FanOut",
    "FenceRequired",
    "Fleet",
    "FrontendEnding",
    "Gathered",
    "InvalidRequest",
    "InvalidWeights",
    "Locked",
    "LoraTarget",
    "Member",
    "MembershipChanged",
    "NatsCredentials",
    "NoWorkers",
    "NotAdmitted",
    "NotAtBase",
    "NotFound",
    "NotPrepared",
    "OutcomeUnknown",
    "Overloaded",
    "PayloadTooLarge",
    "PermissionDenied",
    "PlaneError",
    "Publication",
    "RlClient",
    "Rollout",
    "Snapshot",
    "StaleFence",
    "StaleWeights",
    "Stalled",
    "SyncRlClient",
    "TensorSpec",
    "Unauthorized",
    "Unavailable",
    "Unlabelled",
    "Unsupported",
    "UpdateAborted",
    "UpdatePolicy",
    "WeightPublisher",
    "WeightVersion",
    "WorkerLost",
    "WorkerReply",
    "WrongIncarnation",
    "WrongNumerics",
    "check_next_prompt",
    "gather_enough",
    "next_prompt",
]
