"""The bodies of a weight update, as the fleet is told it and as each worker is."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, Self, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.canary import Canary, OnCanaryFailure, PolicyCanary
from rl_plane.protocol.record import DecisionRecord, Encoding, PauseMode, Source
from rl_plane.protocol.validation import (
    DIGEST,
    LABEL_CHARS,
    MAX_TIMEOUT_S,
    PAUSE_WORDS,
    PRINTABLE,
    Body,
    without_sglangs_names,
)
from rl_plane.protocol.versions import DTYPE_BYTES, MAX_RANK, TensorSpec, VersionReply, checked_name

PUSHED = frozenset({"gloo", "nccl"})
"""Transports whose sender waits for its receivers: `prepare_weights_update` only makes them listen, and
`complete_weights_update` waits for what they have received."""

PART_TIMEOUT_S = 300.0
"""Of one part of a fed update, unless it says otherwise: nobody waits so long for a trainer that has announced it."""
MAX_PART_TIMEOUT_S = 3600.0
"""As long as the most patient trainer (AReaL) waits for the answer. The fleet's lock is held meanwhile."""
MAX_PART_TENSORS = 1 << 18
"""Twice the tensors of the largest public checkpoints."""
DEFAULT_PACKED_BYTES = 1 << 30
"""As vLLM packs."""
MAX_PART_BYTES = 1 << 40
MAX_STEP = 1 << 53
"""A number that every JSON reader keeps."""

PART_DTYPES = {
    **{name: name for name in DTYPE_BYTES},
    "float64": "F64", "double": "F64", "float32": "F32", "float": "F32", "float16": "F16", "half": "F16",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "long": "I64", "int32": "I32", "int": "I32", "int16": "I16", "short": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""As trainers say them → as safetensors does."""


class BaseTarget(Body):
    kind: Literal["base"] = "base"
    adapters: Literal["keep", "drop"] = "keep"
    """What becomes of the adapters that are loaded."""


class LoraTarget(Body):
    kind: Literal["lora"]
    op: Literal["load", "swap", "unload"]
    """`load`: a new name; `swap`: in place of the adapter of this name; `unload`: it goes (no transport)."""
    name: str = Field(min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)


class Transport(BaseModel):
    """`backend` names a WeightTransport; its own fields stand beside it and are checked by it."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    backend: str = Field(min_length=1, max_length=64)


class InitTransport(Transport):
    """Sets up what outlives one update. Idempotent."""


class DestroyTransport(Body):
    backend: str = Field(min_length=1, max_length=64)
    group: str | None = Field(None, min_length=1, max_length=256, pattern=PRINTABLE)
    """Of several that a trainer has formed by itself, only this one."""


class Prepare(Body):
    """Receive into staging and verify; generation goes on."""

    update_id: str = Field(min_length=1, max_length=128)
    target: BaseTarget | LoraTarget = Field(default_factory=BaseTarget, discriminator="kind")
    transport: Transport | None = None
    """None only to unload an adapter."""
    encoding: Encoding = "full"
    base: str | None = Field(None, pattern=DIGEST)
    """Of a delta: the version that it changes."""
    before: Source | None = None
    """Of a delta: where that one can be fetched, for a worker that does not keep it."""
    label: str = Field(min_length=1, max_length=LABEL_CHARS)
    digest: str | None = Field(None, pattern=DIGEST)
    """What the trainer published; None: the first worker's is held against the others'."""
    cast: bool = False
    staging: Literal["host", "none"] = "host"
    keep_staged: bool = False
    pause_mode: PauseMode = "keep"
    """With staging `none`: how running requests are treated before the first byte."""
    canary_file: bool = False
    """Reads the `canary.json` beside the checkpoint: the update gives no canary."""

    @model_validator(mode="after")
    def _whole_delta(self) -> Self:
        _check_digests(self)
        return self


class ListeningReply(TypedDict):
    """The receivers listen, in every rank; `prepare_update` under the same id waits for what they receive."""

    listening: Literal[True]


class PreparedReply(TypedDict):
    digest: str
    tensors: int
    bytes: int
    refetchable: bool
    canary: NotRequired[dict[str, Any]]
    """The `canary.json` beside the checkpoint, where there is one: see `rl_plane.protocol.canary.Canary`."""
    ranks: NotRequired[list[dict[str, Any]]]
    """What each rank staged, `{rank, digest, tensors, bytes}`: on the wire the reply's `rank_results`."""


class Part(Body):
    """Tensors of a fed update that the trainer broadcasts now, from rank 0 of its group, in this order."""

    names: list[str] = Field(max_length=MAX_PART_TENSORS)
    dtypes: list[str]
    """As torch calls them (`bfloat16`) or safetensors (`BF16`)."""
    shapes: list[list[int]]
    layout: Literal["each", "flat", "packed"] = "each"
    """`each`: a broadcast for each tensor. `flat`: one, of all their bytes one after another. `packed`: likewise, and a
    new one after each that is larger than `bucket_bytes`."""
    bucket_bytes: int = Field(DEFAULT_PACKED_BYTES, gt=0, le=MAX_PART_BYTES)
    """Of layout `packed`."""
    group: str | None = Field(None, min_length=1, max_length=256, pattern=PRINTABLE)
    """In which they are broadcast; None: the one that the update was prepared with."""
    timeout_s: float = Field(PART_TIMEOUT_S, gt=0, le=MAX_PART_TIMEOUT_S)
    """Until every rank has them."""
    check_only: bool = False
    """Only hold them against the model, as all that is to come of this update; nothing is received. For a trainer that
    knows it before it sends."""

    @property
    def specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(PART_DTYPES[dtype.removeprefix("torch.")], tuple(shape))
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]

    @model_validator(mode="after")
    def _described(self) -> Self:
        for field in ("dtypes", "shapes"):
            if len(getattr(self, field)) != len(self.names):
                raise InvalidRequest(
                    f"there are {len(self.names)} names and {len(getattr(self, field))} {field}",
                    field=field,
                    fix="give one for each name",
                )
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            if not checked_name(name):
                raise InvalidRequest(f"no tensor may be called {name[:100]!r}", field="names", fix="see the model")
            if dtype.removeprefix("torch.") not in PART_DTYPES:
                raise InvalidRequest(
                    f"{name} is said to be {dtype[:50]!r}",
                    field="dtypes",
                    fix=f"one of {', '.join(sorted(PART_DTYPES))}",
                )
            if len(shape) > MAX_RANK or not all(0 <= side < 1 << 40 for side in shape):
                raise InvalidRequest(
                    f"{name} can't have the shape {shape}", field="shapes", fix="its sides, none negative"
                )
        if len(set(self.names)) != len(self.names):
            raise InvalidRequest("a name is given twice", field="names", fix="name each tensor once")
        if sum(spec.nbytes for spec in self.specs) > MAX_PART_BYTES:
            raise InvalidRequest(
                f"they are more than {MAX_PART_BYTES} bytes", field="shapes", fix="are the shapes right?"
            )
        return self


class ReceivePart(Part):
    update_id: str = Field(min_length=1, max_length=128)
    last: bool = False
    """No more will come: what is missing is an error. With `check_only`: no more is asked about."""


class PartReply(TypedDict):
    """Every rank has staged them."""

    tensors: int
    bytes: int
    missing: int
    """Tensors that the model needs and that have not come yet."""


class FollowRecord(Body):
    """What the fleet has decided. A record that is not open closes admission until it is; the answer says that the
    worker has learnt it."""

    record: DecisionRecord
    sequence: int = Field(ge=0)
    """Of its write in the state bucket."""


class FollowedReply(TypedDict):
    sequence: int | None
    """Of the newest record that is known here, which may be a newer one."""


class ReportRecord(Body):
    """No fields."""


class RecordReport(TypedDict):
    """What this worker knows to be committed: the truth to reconcile a store with that lost a write."""

    record: dict[str, Any] | None
    """The newest DecisionRecord that it has heard of."""
    admitted: bool
    model_digest: str
    """Of the model that it was started with."""
    failed: str | None
    """The update that it listened for, and can't receive any more."""
    canary: NotRequired[CanaryLimits | None]
    """What its engine can score. None: nothing."""


class CanaryLimits(TypedDict):
    vocab_size: int
    max_model_len: int


class Commit(FollowRecord):
    """The decision. Swap the staged weights in, or say NotPrepared."""

    update_id: str = Field(min_length=1, max_length=128)
    pause_s: float = Field(0.0, ge=0)
    """So long the fleet is to stay paused, from now on; 0: it runs."""


class CommittedReply(TypedDict):
    version: VersionReply
    cache_flushed: bool
    swap_s: float
    """Seconds for which generation stood still."""
    canary: NotRequired[ScoresReply]
    """Absent: the record has no canary, the engine can't score, or its memory is released."""
    ranks: NotRequired[list[dict[str, Any]]]
    """What each rank had staged, and has swapped in: see PreparedReply."""


class ScoresReply(TypedDict):
    """What the engine computes with the weights that it holds now, for the sequences of the record's canary."""

    kind: str
    """The engine kind: engines of one kind must agree closely."""
    vectors: list[list[float]]
    """For each sequence the log probability of each token but the first, in nats. Empty: the engine could not say."""


class AbortUpdate(Body):
    update_id: str | None = Field(None, max_length=128)
    """None: whatever is staged."""


class AbortUpdateReply(TypedDict):
    discarded: bool


class UpdatePolicy(Body):
    barrier: Literal["strict", "rolling"] = "strict"
    """`strict`: two versions are never served at once. `rolling`: worker by worker, tokens labelled."""
    staging: Literal["host", "none"] = "host"
    """`none`, for a model that doesn't fit twice: it is written over the served weights, so each worker is closed from
    the first byte to the commit, and a failure heals it to the committed version."""
    keep_staged: bool = False
    """Each rank keeps the base weights in host memory after the swap, until others come: one copy of the model, which
    the next update's delta is applied to, and from which others may heal."""
    pause_mode: PauseMode = Field("keep", json_schema_extra={"enum": [*PAUSE_WORDS]})
    """As the mode of `pause`. `retract` is `keep` with `flush_cache`, `in_place` is `keep` without."""
    on_prepare_failure: Literal["abort", "exclude"] = "abort"
    min_ready: int = Field(1, ge=1)
    """With `exclude`: how many must have prepared."""
    keep_pause: bool = False
    """Leave the fleet paused after the commit."""
    flush_cache: bool = True
    """False changes nothing: no new request may reuse KV of older weights. The reply's `cache_flushed` tells."""
    prepare_timeout_s: float = Field(300.0, gt=0, le=MAX_TIMEOUT_S)
    gate_timeout_s: float = Field(2.0, gt=0, le=MAX_TIMEOUT_S)
    """To close and to open admission; a worker's NATS loop answers at once."""
    commit_timeout_s: float = Field(60.0, gt=0, le=MAX_TIMEOUT_S)
    canary: PolicyCanary = None
    """The token sequences that every worker scores after the swap, before it serves the version. None: sequences that
    follow from the size of the vocabulary. `off`: no worker scores anything."""
    on_canary_failure: OnCanaryFailure = "rollback"
    """What happens if every worker fails the canary. `rollback`: the fleet returns to the version before. `exclude`: no
    worker serves the version. `warn`: the workers serve it, and the answer says so. A worker that fails
    while another passes is excluded."""

    @model_validator(mode="wrap")
    @classmethod
    def _sglang_names(cls, body: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        return without_sglangs_names(body, "pause_mode", "flush_cache", check, "policy.")


class _Update(Body):
    target: BaseTarget | LoraTarget = Field(default_factory=BaseTarget, discriminator="kind")
    encoding: Encoding = "full"
    """`delta`: only what has changed since `base`, as `rl_plane.weights.delta_codec` encodes it: a U8 tensor for each
    that has. Then `digest` must be given: it is the full version's, and so is `base`."""
    base: str | None = Field(None, pattern=DIGEST)
    """Of a delta: the digest of the committed version, to which it is applied."""
    version: str | None = Field(None, min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)
    """The trainer's word for it, such as `step_17`; None: the sequence number."""
    step: int | None = Field(None, ge=0, le=MAX_STEP)
    """The trainer's step, for the history (`GET /v1/rl/updates`), where the label does not say it."""
    digest: str | None = Field(None, pattern=DIGEST)
    cast: bool = False
    """Allow float tensors of another float dtype than the engine's."""
    policy: UpdatePolicy = UpdatePolicy()

    @model_validator(mode="after")
    def _one_at_a_time(self) -> Self:
        if self.target.kind == "lora" and self.policy.staging == "none":
            raise InvalidRequest(
                "an adapter is staged: it is small, and the base weights stay as they are",
                field="policy.staging",
                fix="use staging host",
            )
        if self.target.kind == "lora" and isinstance(self.policy.canary, Canary):
            raise InvalidRequest(
                "a canary scores the base weights, which an adapter's update leaves as they are",
                field="policy.canary",
                fix="leave it out",
            )
        _check_delta(self)
        if self.policy.staging == "none" and self.policy.keep_staged:
            raise InvalidRequest(
                "what is not staged can't be kept",
                field="policy.keep_staged",
                fix="use staging host, or leave it out",
            )
        if self.policy.barrier == "rolling" and self.policy.staging == "none":
            raise InvalidRequest(
                "a rolling update serves the version before while the next one arrives, so it needs staging",
                field="policy.staging",
                fix="use staging host, or barrier strict",
            )
        return self


def _check_delta(update: _Update) -> None:
    """What a delta needs, and what it can't be together with."""
    _check_digests(update)
    if update.encoding == "full":
        return
    if update.target.kind == "lora":
        raise InvalidRequest(
            "an adapter is sent whole: it is small", field="encoding", fix="leave encoding out, or send full"
        )
    if update.cast:
        raise InvalidRequest(
            "a delta changes bits, which a cast would not keep",
            field="cast",
            fix="leave it out, or send full weights",
        )
    if update.policy.staging == "none":
        raise InvalidRequest(
            "a delta is applied to the copy that a worker keeps in host memory",
            field="policy.staging",
            fix="use staging host, or send full weights",
        )


def _check_in_parts(update: _Update) -> None:
    """A trainer's own calls bring the tensors of a full checkpoint, into staging."""
    wrong = {
        "target": update.target.kind != "base",
        "encoding": update.encoding != "full",
        "policy.staging": update.policy.staging != "host",
    }
    for field, is_wrong in wrong.items():
        if is_wrong:
            raise InvalidRequest(
                "an update whose tensors are announced part by part is a full one, of the base, and staged",
                field=field,
                fix="leave it out, or send a manifest",
            )


def _check_digests(update: _Update | Prepare) -> None:
    """A delta has both, anything else no `base`."""
    if update.encoding == "full":
        if update.base is not None:
            raise InvalidRequest("base is of a delta", field="base", fix="leave it out, or send encoding delta")
        return
    for field in ("base", "digest"):
        if getattr(update, field) is None:
            whose = "the version that it changes" if field == "base" else "the full version that it makes"
            raise InvalidRequest(f"a delta needs the digest of {whose}", field=field, fix="add it: blake3:…")


def check_source(target: BaseTarget | LoraTarget, transport: Transport | None, instead: str = "") -> None:
    """Weights come by a transport; an adapter goes without one."""
    unload = isinstance(target, LoraTarget) and target.op == "unload"
    if transport is None and not unload:
        raise InvalidRequest(
            "transport: Field required", field="transport", fix=f"say where the weights are (transport){instead}"
        )
    if transport is not None and unload:
        raise InvalidRequest("nothing is fetched to unload an adapter", field="transport", fix="leave it out")


class UpdateWeights(_Update):
    """One body for every update (seed of the shape: Dynamo PR 9131)."""

    transport: Transport | None = None
    """None only to unload an adapter."""
    owner: str | None = Field(None, min_length=1, max_length=64, pattern=PRINTABLE)
    """Of a prepared update: by whose calls it goes on. A dialect's calls take only its own; feed, complete and abort
    take any."""

    @model_validator(mode="after")
    def _source(self) -> Self:
        check_source(self.target, self.transport)
        if self.in_parts:
            _check_in_parts(self)
        return self

    @property
    def pushed(self) -> bool:
        return self.transport is not None and self.transport.backend in PUSHED

    @property
    def in_parts(self) -> bool:
        """Its tensors are announced part by part."""
        extra = self.transport.model_extra if self.transport is not None else None
        return self.pushed and bool((extra or {}).get("in_parts"))


class Rollback(Body):
    """A committed version of the history: exactly one of the two."""

    label: str | None = Field(None, min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)
    """The newest version that is called so."""
    sequence: int | None = Field(None, ge=0)


class UpdateCall(_Update):
    """An update of the fleet: by a transport, or back to an earlier version."""

    transport: Transport | None = None
    """Where the weights are; this or `rollback`."""
    rollback: Rollback | None = None
    """Back to a committed version of the history (GET /v1/rl/updates), by its transport, digest and label; beside
    it only `version` and `policy`."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.rollback is None:
            check_source(self.target, self.transport, ", or which earlier version is meant (rollback)")
            return self
        given = {"transport", "target", "encoding", "base", "digest", "cast"} & self.model_fields_set
        if given:
            name = sorted(given)[0]
            raise InvalidRequest(
                f"{name} and rollback are both given: the history says {name} of the version",
                field=name,
                fix="leave one of the two out",
            )
        if (self.rollback.label is None) == (self.rollback.sequence is None):
            raise InvalidRequest(
                "rollback names one version", field="rollback", fix='{"label": "step_3"} or {"sequence": 3}'
            )
        return self


class ListUpdates(Body):
    limit: int = Field(50, ge=1, le=256)
    """The newest so many."""
