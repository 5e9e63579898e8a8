"""The table of the fleet's ops: the name, the route, the request, the reply and the traits of each.

`fleet/fleet.py` answers the ops. The HTTP facade, the fleet subject, the command line and docs/reference.md derive from
this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, Field, create_model, field_validator

from rl_plane.protocol import fleet_reply_types as replies
from rl_plane.protocol import update_requests, validation, worker_ops
from rl_plane.protocol.record import KvPolicy, PauseMode

DEFAULT_WAIT_S = 5.0
"""The longest wait of a call for a fleet that is still starting."""
MAX_WAIT_S = 3600.0


class Select(validation.Body):
    """The workers that a call means. Every op has these fields beside its own. They may also be in an HTTP query."""

    component: list[str] | None = Field(None, min_length=1)
    """Names. A plain string is one name. Default: the configured component."""
    workers: list[str] | None = Field(None, min_length=1)
    """Instance ids. Default: all."""
    epoch: int | None = Field(None, ge=0)
    """The epoch of an earlier reply. The call fails with membership_changed unless the fleet is the same."""
    fingerprint: str | None = Field(None, max_length=64)
    """The call fails with membership_changed unless the fleet is this one."""
    min_workers: int = Field(1, ge=0)
    """Wait until the fleet has this many workers. 0: an empty fleet is fine."""
    wait_s: float = Field(DEFAULT_WAIT_S, ge=0, le=MAX_WAIT_S)
    """Seconds to wait for `min_workers`. `ready` waits for readiness only if this is given."""

    @field_validator("component", "workers", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [part for part in value.split(",") if part] if isinstance(value, str) else value


class LoadLora(validation.Body):
    lora_name: validation.Label
    lora_path: str = Field(min_length=1)
    cast: bool = False
    """Allow an adapter of another float dtype than the engine's. It is converted."""


class UnloadLora(validation.Body):
    lora_name: validation.Label


class UpdateId(validation.Body):
    update_id: str | None = Field(None, min_length=1, max_length=128)
    """The id in the reply of `prepare_weights_update`. None: the prepared update."""


class AbortWeightsUpdate(UpdateId):
    """The update to end. It may be prepared, or still be received: then its own call ends with an error."""

    by: str | None = Field(None, min_length=1, max_length=200, pattern=validation.PRINTABLE)
    """The person or process that aborts it, in words for its trainer, such as `an operator on host a`. None: the
    process that calls, as it names itself."""


class ReceiveWeightsPart(update_requests.Part, UpdateId):
    """A part of an update that was prepared with `transport: {backend, group, in_parts: true}`, or with `{backend: ipc,
    in_parts: true}`."""

    version: validation.Label | None = None
    """The update's label, for a trainer that gives it with a part. None: no change."""
    pause_mode: PauseMode | None = None
    """Replaces the policy's pause mode, for a trainer that gives it with a part. None: no change."""
    kv: KvPolicy | None = None
    """Replaces the policy's `kv`, for a trainer that gives it with a part. None: no change."""


class LabelUpdate(UpdateId):
    version: validation.Label
    """The update's label, until a later call changes it."""


class CompleteUpdate(UpdateId):
    version: validation.Label | None = None
    """The update's label, for a trainer that gives it only now."""
    digest: str | None = Field(None, pattern=validation.DIGEST)
    """The digest of the sent weights, for a trainer that knows it only now."""
    num_buckets: int | None = Field(None, ge=0)
    """The number of buckets that were sent. It must be the manifest's number."""
    kv: KvPolicy | None = None
    """Replaces the policy's `kv`, for a trainer that gives it only now. None: no change."""


@dataclass(frozen=True, slots=True)
class FleetOp:
    """A row of the table: one op of the fleet."""

    name: str
    own: type[BaseModel]
    """The op's own fields, without the selection."""
    reply: type[Any]
    """A TypedDict: the merged reply of a call for one component."""
    doc: str
    method: Literal["GET", "POST"] = "POST"
    at: str = ""
    """The route under /v1/rl/, if it is not the name."""
    coalesce: bool = False
    """Equal calls that are under way share one answer, because the op must happen once. Other ops may be repeated."""
    one_component: bool = False
    """The op is all or nothing, so one call means one component."""
    admin: bool = False
    """Only an operator calls it, so over HTTP it needs a key with the role `admin`."""
    brings_weights: bool = False
    """The body names weights, which `cast` may convert to the engine's dtype."""
    begins_update: bool = False
    """The call's request id is the id of an update. The other ops of an update name the update in their body."""
    prepare_waits: int = 0
    """The number of times that the call may wait for the policy's `prepare_timeout_s`: once for the workers, and once
    more for a lock that another call holds as long."""
    describes_stages: bool = False
    """The reply describes pipeline stages too, so the op also answers for a fleet without engines."""
    worker_op: str = ""
    """The worker's op that the call carries out, if it has another name."""

    @property
    def commits(self) -> bool:
        """Reports whether a call that succeeds has committed a version."""
        return self.reply is replies.UpdateReply

    @property
    def worker_in_path(self) -> bool:
        """Reports whether the route names the one worker that a call over HTTP means."""
        return "{id}" in self.at

    @property
    def path(self) -> str:
        """The route under /v1/rl/."""
        return self.at or self.name

    @property
    def request(self) -> type[Select]:
        """The model of the whole body."""
        return _request(self.name, self.own)


@cache
def _request(name: str, own: type[BaseModel]) -> type[Select]:
    """Builds the model when it is first needed: all of them take longer than the rest of the import."""
    make: Any = create_model  # its own types allow only bases of one type
    made: type[Select] = make(
        f"{name.title().replace('_', '')}Call",
        __base__=(Select, own),
        __cls_kwargs__={"use_attribute_docstrings": False},  # the fields have theirs, and the search is slow
    )
    return made


FLEET_OPS: dict[str, FleetOp] = {
    op.name: op
    for op in (
        FleetOp(
            "liveness",
            validation.Empty,
            replies.FleetLiveness,
            "Each engine answers a real round trip, or 503.",
            "GET",
        ),
        FleetOp(
            "ready",
            validation.Empty,
            replies.FleetReadiness,
            "Alive, and enough admitted workers at the committed version.",
            "GET",
        ),
        FleetOp(
            "state",
            validation.Empty,
            replies.FleetState,
            "The fleet and each worker, now.",
            "GET",
            describes_stages=True,
        ),
        FleetOp(
            "workers",
            validation.Empty,
            replies.FleetWorkers,
            "The members of the fleet.",
            "GET",
            describes_stages=True,
        ),
        FleetOp(
            "weight_version",
            validation.Empty,
            replies.ServedVersion,
            "The one version that is served; 409 if there are two.",
            "GET",
        ),
        FleetOp(
            "describe", worker_ops.Describe, replies.FleetDescription, "What each engine is and can do.", "GET"
        ),
        FleetOp("pause", worker_ops.Pause, replies.PausedFleet, "Stop generation, with a lease."),
        FleetOp("resume", validation.Empty, replies.PausedFleet, "Continue generation."),
        FleetOp("flush_cache", worker_ops.FlushCache, replies.FlushedFleet, "Drop the prefix caches."),
        FleetOp(
            "abort_requests",
            worker_ops.AbortRequests,
            replies.AbortedRequests,
            "End requests now, with their tokens so far.",
        ),
        FleetOp(
            "init_transport",
            update_requests.InitTransport,
            replies.FormedTransport,
            "Set up a weight transport.",
            coalesce=True,
        ),
        FleetOp(
            "destroy_transport",
            update_requests.DestroyTransport,
            replies.DoneOnAll,
            "Take a weight transport down.",
        ),
        FleetOp(
            "updates",
            update_requests.ListUpdates,
            replies.PastUpdates,
            "The updates that there were, newest first.",
            "GET",
        ),
        FleetOp(
            "update_weights",
            update_requests.UpdateCall,
            replies.UpdateReply,
            "New weights on the whole fleet, or on none.",
            coalesce=True,
            one_component=True,
            brings_weights=True,
            begins_update=True,
            prepare_waits=1,
        ),
        FleetOp(
            "prepare_weights_update",
            update_requests.UpdateWeights,
            replies.PreparedUpdate,
            "Stage and verify, or listen for what is pushed; generation continues.",
            coalesce=True,
            one_component=True,
            brings_weights=True,
            begins_update=True,
            prepare_waits=1,
        ),
        FleetOp(
            "receive_weights_part",
            ReceiveWeightsPart,
            replies.ReceivedPart,
            "Receive on every worker what the trainer broadcasts now.",
            coalesce=True,
            one_component=True,
        ),
        FleetOp(
            "label_weights_update",
            LabelUpdate,
            replies.LabelledUpdate,
            "Label what was prepared, before it is committed.",
            one_component=True,
        ),
        FleetOp(
            "complete_weights_update",
            CompleteUpdate,
            replies.UpdateReply,
            "Commit what was prepared, or pushed.",
            coalesce=True,
            one_component=True,
            prepare_waits=2,
        ),
        FleetOp(
            "abort_weights_update",
            AbortWeightsUpdate,
            replies.AbortedUpdate,
            "End an update before its decision, and drop what was prepared.",
            coalesce=True,
            one_component=True,
        ),
        FleetOp(
            "new_run",
            validation.Empty,
            replies.UpdateReply,
            "Begin a new run: sequence 0 is the model that every worker was started with.",
            one_component=True,
            begins_update=True,
            prepare_waits=1,
        ),
        FleetOp("release_memory", worker_ops.MemoryTags, replies.FleetMemory, "Give memory back (sleep)."),
        FleetOp("resume_memory", worker_ops.MemoryTags, replies.FleetMemory, "Take it again (wake)."),
        FleetOp(
            "check_weights",
            worker_ops.CheckWeights,
            replies.FleetWeightChecks,
            "Checksum, snapshot or compare the weights.",
        ),
        FleetOp(
            "load_lora_adapter",
            LoadLora,
            replies.UpdateReply,
            "Load or replace a LoRA adapter.",
            coalesce=True,
            one_component=True,
            brings_weights=True,
            begins_update=True,
            prepare_waits=1,
        ),
        FleetOp(
            "unload_lora_adapter",
            UnloadLora,
            replies.UpdateReply,
            "Unload a LoRA adapter.",
            coalesce=True,
            one_component=True,
            begins_update=True,
            prepare_waits=1,
        ),
        FleetOp(
            "enable",
            validation.Empty,
            replies.FleetAdmission,
            "Admit a worker again.",
            at="workers/{id}/enable",
            admin=True,
            worker_op="set_admission",
        ),
        FleetOp(
            "disable",
            validation.Empty,
            replies.FleetAdmission,
            "Take a worker out of routing.",
            at="workers/{id}/disable",
            admin=True,
            worker_op="set_admission",
        ),
    )
}
