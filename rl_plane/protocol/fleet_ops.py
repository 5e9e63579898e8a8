"""The table of the fleet's ops: name, route and typed request of each. `fleet.py` answers them; the HTTP facade, the
fleet subject, the command line and docs/reference.md derive from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, Field, create_model, field_validator

from rl_plane.protocol import update_requests, validation, worker_ops
from rl_plane.protocol.record import PauseMode

DEFAULT_WAIT_S = 5.0
"""How long a call waits for a fleet that is still coming up."""
MAX_WAIT_S = 3600.0


class Select(validation.Body):
    """Which workers a call means, beside the op's own fields. An HTTP query may carry these too."""

    component: list[str] | None = None
    """Names; a plain string is one. Default: the configured component."""
    workers: list[str] | None = Field(None, min_length=1)
    """Instance ids. Default: all."""
    epoch: int | None = Field(None, ge=0)
    """Of an earlier reply; as `fingerprint`."""
    fingerprint: str | None = Field(None, max_length=64)
    """The call fails with membership_changed unless the fleet is this one."""
    min_workers: int = Field(1, ge=0)
    """Wait until so many are there; 0: an empty fleet is a fleet."""
    wait_s: float = Field(DEFAULT_WAIT_S, ge=0, le=MAX_WAIT_S)
    """Seconds to wait for `min_workers`; `ready` waits for readiness only when this is given."""

    @field_validator("component", "workers", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [part for part in value.split(",") if part] if isinstance(value, str) else value


class WorkerResult(BaseModel):
    """One worker's part of a reply; the op's own reply fields stand beside these."""

    instance_id: str
    incarnation: str
    status: Literal["ok", "error", "skipped"]
    error: dict[str, Any] | None = None
    reason: str | None = None
    """Why it was skipped: the worker is beside a stage of a pipeline that has no weights and generates nothing."""


class FleetReply(BaseModel):
    """Every reply names every worker. Ops add their own fields."""

    status: Literal["ok"]
    epoch: int
    fingerprint: str
    workers: list[WorkerResult]
    version: worker_ops.Version | None = None
    excluded: list[str] | None = None
    """After an update: members that do not serve the new version; they heal by themselves."""
    updates: list[dict[str, Any]] | None = None
    """Of `updates`: newest first, each with the fields of `rl_plane.commit.history.UpdateEntry`."""
    elapsed_s: float


class LoadLora(validation.Body):
    lora_name: str = Field(min_length=1, max_length=validation.LABEL_CHARS, pattern=validation.PRINTABLE)
    lora_path: str = Field(min_length=1)
    cast: bool = False
    """Allow another float dtype than the engine's for it."""


class UnloadLora(validation.Body):
    lora_name: str = Field(min_length=1, max_length=validation.LABEL_CHARS, pattern=validation.PRINTABLE)


class UpdateId(validation.Body):
    update_id: str | None = Field(None, min_length=1, max_length=128)
    """As `prepare_weights_update` gave it; None: the one that is prepared."""


class ReceiveWeightsPart(update_requests.Part, UpdateId):
    """Of an update that was prepared with `transport: {backend, group, in_parts: true}`."""

    version: str | None = Field(
        None, min_length=1, max_length=validation.LABEL_CHARS, pattern=validation.PRINTABLE
    )
    """The update's label, for a trainer that says it with a part; None: as before."""
    pause_mode: PauseMode | None = None
    """From here on in place of the policy's, for a trainer that says it with a part; None: as before."""


class LabelUpdate(UpdateId):
    version: str = Field(min_length=1, max_length=validation.LABEL_CHARS, pattern=validation.PRINTABLE)
    """Its label, unless a later call has another."""


class CompleteUpdate(UpdateId):
    version: str | None = Field(
        None, min_length=1, max_length=validation.LABEL_CHARS, pattern=validation.PRINTABLE
    )
    """Its label, for a trainer that names it only now."""
    digest: str | None = Field(None, pattern=validation.DIGEST)
    """What was sent, for a trainer that knows it only now."""
    num_buckets: int | None = Field(None, ge=0)
    """How many buckets were sent: as many as the manifest has."""


@dataclass(frozen=True, slots=True)
class FleetOp:
    name: str
    method: Literal["GET", "POST"]
    path: str
    """Beneath /v1/rl/."""
    doc: str
    own: type[BaseModel]
    """The op's own fields, without the selection."""

    @property
    def request(self) -> type[Select]:
        return _request(self.name, self.own)


@cache
def _request(name: str, own: type[BaseModel]) -> type[Select]:
    """Made when it is needed: all of them take longer than the rest of the import."""
    make: Any = create_model  # its own types allow only bases of one type
    made: type[Select] = make(f"{name.title().replace('_', '')}Call", __base__=(Select, own))
    return made


def _fleet_op(
    name: str, own: type[BaseModel], doc: str, method: Literal["GET", "POST"] = "POST", path: str = ""
) -> FleetOp:
    return FleetOp(name, method, path or name, doc, own)


FLEET_OPS: dict[str, FleetOp] = {
    op.name: op
    for op in (
        _fleet_op("liveness", validation.Empty, "Each engine answers a real round trip, or 503.", "GET"),
        _fleet_op(
            "ready", validation.Empty, "Alive, and enough admitted workers at the committed version.", "GET"
        ),
        _fleet_op("state", validation.Empty, "The fleet and each worker, now.", "GET"),
        _fleet_op("workers", validation.Empty, "Who is in the fleet.", "GET"),
        _fleet_op(
            "weight_version", validation.Empty, "The one version that is served; 409 if there are two.", "GET"
        ),
        _fleet_op("describe", worker_ops.Describe, "What each engine is and can do.", "GET"),
        _fleet_op("pause", worker_ops.Pause, "Stop generation, with a lease."),
        _fleet_op("resume", validation.Empty, "Go on."),
        _fleet_op("flush_cache", validation.Empty, "Drop the prefix caches."),
        _fleet_op("abort_requests", worker_ops.AbortRequests, "End requests now, with their tokens so far."),
        _fleet_op("init_transport", update_requests.InitTransport, "Set up a weight transport."),
        _fleet_op("destroy_transport", update_requests.DestroyTransport, "Take it down."),
        _fleet_op("updates", update_requests.ListUpdates, "The updates that there were, newest first.", "GET"),
        _fleet_op("update_weights", update_requests.UpdateCall, "New weights on the whole fleet, or on none."),
        _fleet_op(
            "prepare_weights_update",
            update_requests.UpdateWeights,
            "Stage and verify, or listen for what is pushed; generation goes on.",
        ),
        _fleet_op(
            "receive_weights_part",
            ReceiveWeightsPart,
            "Receive what the trainer broadcasts now, everywhere.",
        ),
        _fleet_op("label_weights_update", LabelUpdate, "Label what was prepared, before it is committed."),
        _fleet_op("complete_weights_update", CompleteUpdate, "Commit what was prepared, or pushed."),
        _fleet_op("abort_weights_update", UpdateId, "Drop what was prepared."),
        _fleet_op(
            "new_run",
            validation.Empty,
            "Begin a new run: sequence 0 is the model that every worker was started with.",
        ),
        _fleet_op("release_memory", worker_ops.MemoryTags, "Give memory back (sleep)."),
        _fleet_op("resume_memory", worker_ops.MemoryTags, "Take it again (wake)."),
        _fleet_op("check_weights", worker_ops.CheckWeights, "Checksum, snapshot or compare the weights."),
        _fleet_op("load_lora_adapter", LoadLora, "Load or replace a LoRA adapter."),
        _fleet_op("unload_lora_adapter", UnloadLora, "Unload a LoRA adapter."),
        _fleet_op("enable", validation.Empty, "Admit a worker again.", path="workers/{id}/enable"),
        _fleet_op("disable", validation.Empty, "Take a worker out of routing.", path="workers/{id}/disable"),
    )
}

ONE_COMPONENT = frozenset(
    {
        "update_weights",
        "prepare_weights_update",
        "receive_weights_part",
        "label_weights_update",
        "complete_weights_update",
        "abort_weights_update",
        "load_lora_adapter",
        "unload_lora_adapter",
        "new_run",
    }
)
"""Ops that are all or nothing, which only one fleet can be."""
