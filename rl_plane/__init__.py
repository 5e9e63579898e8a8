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
    from rl_plane.fleet.fleet_methods import UpdateKeywords
    from rl_plane.membership.worker_calls import FanOut
    from rl_plane.protocol.canary import Canary
    from rl_plane.protocol.fleet_reply_types import (
        AbortedRequests,
        AbortedUpdate,
        DoneOnAll,
        FleetAdmission,
        FleetDescription,
        FleetLiveness,
        FleetMemory,
        FleetReadiness,
        FleetState,
        FleetWeightChecks,
        FleetWorkers,
        FlushedFleet,
        FormedTransport,
        LabelledUpdate,
        PastUpdates,
        PausedFleet,
        PreparedUpdate,
        ReceivedPart,
        Selection,
        ServedVersion,
        UpdateReply,
    )
    from rl_plane.protocol.update_requests import BaseTarget, LoraTarget, Transport, UpdatePolicy
    from rl_plane.publish.publication import Publication
    from rl_plane.publish.publisher import WeightPublisher
    from rl_plane.sync import SyncRlClient
else:
    _LAZY = {
        "AbortedRequests": "protocol.fleet_reply_types",
        "AbortedUpdate": "protocol.fleet_reply_types",
        "BaseTarget": "protocol.update_requests",
        "Canary": "protocol.canary",
        "DoneOnAll": "protocol.fleet_reply_types",
        "FanOut": "membership.worker_calls",
        "Fleet": "fleet.fleet",
        "FleetAdmission": "protocol.fleet_reply_types",
        "FleetDescription": "protocol.fleet_reply_types",
        "FleetLiveness": "protocol.fleet_reply_types",
        "FleetMemory": "protocol.fleet_reply_types",
        "FleetReadiness": "protocol.fleet_reply_types",
        "FleetState": "protocol.fleet_reply_types",
        "FleetWeightChecks": "protocol.fleet_reply_types",
        "FleetWorkers": "protocol.fleet_reply_types",
        "FlushedFleet": "protocol.fleet_reply_types",
        "FormedTransport": "protocol.fleet_reply_types",
        "LabelledUpdate": "protocol.fleet_reply_types",
        "LoraTarget": "protocol.update_requests",
        "PastUpdates": "protocol.fleet_reply_types",
        "PausedFleet": "protocol.fleet_reply_types",
        "PreparedUpdate": "protocol.fleet_reply_types",
        "Publication": "publish",
        "ReceivedPart": "protocol.fleet_reply_types",
        "RlClient": "client",
        "Selection": "protocol.fleet_reply_types",
        "ServedVersion": "protocol.fleet_reply_types",
        "SyncRlClient": "sync",
        "Transport": "protocol.update_requests",
        "UpdateKeywords": "fleet.fleet_methods",
        "UpdatePolicy": "protocol.update_requests",
        "UpdateReply": "protocol.fleet_reply_types",
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
    "AbortedRequests",
    "AbortedUpdate",
    "BaseTarget",
    "BusUnreachable",
    "Canary",
    "CanaryFailed",
    "Changed",
    "Conflict",
    "DeadlineExceeded",
    "DemandUnmet",
    "DoneOnAll",
    "EngineDied",
    "EngineFailed",
    "FanOut",
    "FenceRequired",
    "Fleet",
    "FleetAdmission",
    "FleetDescription",
    "FleetLiveness",
    "FleetMemory",
    "FleetReadiness",
    "FleetState",
    "FleetWeightChecks",
    "FleetWorkers",
    "FlushedFleet",
    "FormedTransport",
    "FrontendEnding",
    "Gathered",
    "InvalidRequest",
    "InvalidWeights",
    "LabelledUpdate",
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
    "PastUpdates",
    "PausedFleet",
    "PayloadTooLarge",
    "PermissionDenied",
    "PlaneError",
    "PreparedUpdate",
    "Publication",
    "ReceivedPart",
    "RlClient",
    "Rollout",
    "Selection",
    "ServedVersion",
    "Snapshot",
    "StaleFence",
    "StaleWeights",
    "Stalled",
    "SyncRlClient",
    "TensorSpec",
    "Transport",
    "Unauthorized",
    "Unavailable",
    "Unlabelled",
    "Unsupported",
    "UpdateAborted",
    "UpdateKeywords",
    "UpdatePolicy",
    "UpdateReply",
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
