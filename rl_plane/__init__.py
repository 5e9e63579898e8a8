"""rl_plane: the control plane that a reinforcement-learning trainer uses to steer a fleet of inference engines.

This package is the SDK: it needs nats-py, msgpack and pydantic only. Workers and frontends are other packages.
"""

import importlib
import typing

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
    from rl_plane.client import FanOut, RlClient
    from rl_plane.fleet.fleet import Fleet
    from rl_plane.sync import SyncRlClient
else:
    _ON_NATS = {"FanOut": "client", "Fleet": "fleet.fleet", "RlClient": "client", "SyncRlClient": "sync"}
    """Name → its module. Loaded when asked for: what has the model (an engine's processes, an engine by itself) does
    without nats-py."""

    def __getattr__(name: str) -> object:
        if name not in _ON_NATS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_ON_NATS[name]}"), name)
        globals()[name] = found
        return found


__all__ = [
    "BusUnreachable",
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
    "Member",
    "MembershipChanged",
    "NoWorkers",
    "NotAdmitted",
    "NotAtBase",
    "NotFound",
    "NotPrepared",
    "OutcomeUnknown",
    "Overloaded",
    "PayloadTooLarge",
    "PlaneError",
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
    "WeightVersion",
    "WorkerLost",
    "WorkerReply",
    "WrongIncarnation",
    "WrongNumerics",
    "check_next_prompt",
    "gather_enough",
    "next_prompt",
]
