"""The requests and replies of a weight update: the fleet's, and each worker's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator
from typing_extensions import TypedDict

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.canary import Canary, OnCanaryFailure, PolicyCanary
from rl_plane.protocol.record import (
    COMMIT_TIMEOUT_S,
    DecisionRecord,
    Encoding,
    KvPolicy,
    PauseMode,
    VersionSource,
)
from rl_plane.protocol.relay import MAX_WORKERS, RelayPlan, SourceUse
from rl_plane.protocol.shared_tensors import GpuCopies, GpuMemory, NamedMemory, TensorPlace
from rl_plane.protocol.transport_traits import TransportTraits, traits_of
from rl_plane.protocol.validation import (
    DIGEST,
    LABEL_CHARS,
    MAX_TIMEOUT_S,
    PAUSE_WORDS,
    PRINTABLE,
    Body,
    Label,
    parse_body,
    without_sglangs_names,
)
from rl_plane.protocol.versions import (
    DTYPE_BYTES,
    MAX_RANK,
    DigestAlgorithm,
    TensorSpec,
    VersionReply,
    WeightVersion,
    algorithm_of,
    checked_name,
)

PART_TIMEOUT_S = 300.0
"""The default time-out of one part: much longer than a trainer takes to send a part that it has announced."""
MAX_PART_TIMEOUT_S = 3600.0
"""The longest time that a known trainer (AReaL) waits for the answer. Meanwhile the call holds the fleet's lock."""
MAX_PART_TENSORS = 1 << 18
"""Twice the tensors of the largest public checkpoints."""
DEFAULT_PACKED_BYTES = 1 << 30
"""The bucket size of vLLM."""
MAX_PART_BYTES = 1 << 40
MAX_PART_MEMORIES = 8192
"""Twice what fits into a message to a worker."""
MAX_STEP = 1 << 53
"""The largest integer that every JSON reader keeps exactly."""

PART_DTYPES = {
    **{name: name for name in DTYPE_BYTES},
    "float64": "F64", "double": "F64", "float32": "F32", "float": "F32", "float16": "F16", "half": "F16",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "long": "I64", "int32": "I32", "int": "I32", "int16": "I16", "short": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""A trainer's name of a dtype → the name in safetensors."""


class BaseTarget(Body):
    """The model's own weights."""

    kind: Literal["base"] = "base"
    adapters: Literal["keep", "drop"] = "keep"
    """Whether the loaded adapters stay."""


class LoraTarget(Body):
    """A LoRA adapter."""

    kind: Literal["lora"]
    op: Literal["load", "swap", "unload"]
    """`load`: adds an adapter. `swap`: replaces the adapter with this name. `unload`: removes it (without a
    transport)."""
    name: Label


class Transport(BaseModel):
    """The transport of the weights. `backend` names it. It checks its own fields, which are beside `backend`."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    backend: str = Field(min_length=1, max_length=64)

    @property
    def traits(self) -> TransportTraits:
        return traits_of(self.backend)


SECRET_FIELD = "secret"
"""The field of a transport by which a receiver proves that the weights are meant for it. Workers get it; replies and
events never have it."""


_SECRET_FIELDS = frozenset({SECRET_FIELD, "headers"})
_URL = re.compile(r"(https?://)(?:[^/?#]*@)?([^?#]*)([?#].*)?", re.IGNORECASE | re.DOTALL)


def without_secret(transport: Mapping[str, Any]) -> dict[str, Any]:
    """The transport as replies show it: without its secret and its headers, and with URLs that show no query, where
    signatures are."""
    shown = {key: _without_queries(value) for key, value in transport.items() if key not in _SECRET_FIELDS}
    if isinstance(shares := shown.get("shares"), list):  # of the ranks of a trainer
        shown["shares"] = [without_secret(one) if isinstance(one, Mapping) else one for one in shares]
    return shown


def _without_queries(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_queries(one) for key, one in value.items()}
    if isinstance(value, str) and (url := _URL.fullmatch(value)):
        return f"{url[1]}{url[2]}{'?…' if url[3] else ''}"
    return value


class InitTransport(Transport):
    """Sets up a transport for several updates. Idempotent."""


class DestroyTransport(Body):
    backend: str = Field(min_length=1, max_length=64)
    group: str | None = Field(None, min_length=1, max_length=256, pattern=PRINTABLE)
    """One group of several that a trainer has formed. None: all."""


class DeltaChainEntry(Body):
    """One version that a worker can fetch to rebuild the base of a delta or of a partial version."""

    digest: str = Field(pattern=DIGEST)
    transport: Transport | None
    """The transport that brings the bytes. None: they are the model that the worker was started with."""
    refetchable: bool = True
    """Whether the bytes can still be fetched."""
    encoding: Encoding = "full"
    """The form of the bytes. The first entry is a full version, each further one changes the one before."""


class ReceiveRequest(Body):
    """The weights that a worker receives for one update.

    The coordinator builds the request from the update, the worker checks it, and the same object goes to each rank's
    process. A worker that heals itself builds one from the committed record."""

    update_id: str = Field(min_length=1, max_length=128)
    target: BaseTarget | LoraTarget = Field(default_factory=BaseTarget, discriminator="kind")
    transport: Transport | None = None
    """None for an adapter: it is unloaded. None for base weights: the worker stages the copy that it keeps, to heal."""
    encoding: Encoding = "full"
    base: str | None = Field(None, pattern=DIGEST)
    """For a delta or a partial version: the digest of the version that it changes."""
    base_chain: tuple[DeltaChainEntry, ...] = ()
    """The versions from a full one up to `base`, for a worker that has no copy of `base`."""
    label: str = Field(min_length=1, max_length=LABEL_CHARS)
    digest: str | None = Field(None, pattern=DIGEST)
    """The version's digest, as the trainer published it. None: the coordinator compares the workers' digests."""
    digest_algorithm: DigestAlgorithm | None = None
    """The hash of the version's digest, where neither `digest` nor the weights' own digests tell it. None: the
    default."""
    cast: bool = False
    staging: Literal["host", "none"] = "host"
    keep_staged: bool = False
    pause_mode: PauseMode = "keep"
    """With staging `none`: what happens to running requests before the first byte is written."""
    relay: tuple[RelayPlan, ...] = Field((), max_length=MAX_WORKERS)
    """The sources of each host of this worker's engine, by node rank, if workers also fetch from one another. Empty:
    the trainer is the only source."""
    canary_file: bool = False
    """Reads the `canary.json` beside the checkpoint, because the update gives no canary. Else it may be broken."""

    @classmethod
    def of_update(
        cls, update: UpdateWeights, update_id: str, label: str, base_source: VersionSource | None
    ) -> Self:
        """Builds the request for every worker of an update. `base_source`: where `update.base` comes from."""
        return cls(
            update_id=update_id,
            target=update.target,
            transport=update.transport,
            encoding=update.encoding,
            base=update.base,
            base_chain=delta_chain(base_source, update.base),
            label=label,
            digest=update.digest,
            digest_algorithm=update.digest_algorithm,
            cast=update.cast,
            staging=update.policy.staging,
            keep_staged=update.keeps_copy,
            pause_mode=update.policy.pause_mode,
            canary_file=update.policy.canary is None,
        )

    @classmethod
    def of_source(
        cls,
        update_id: str,
        adapter: str | None,
        version: WeightVersion,
        source: VersionSource,
        model: Transport,
        in_place: bool,
    ) -> Self:
        """Builds the request of a worker that heals itself. `model`: the model that the worker was started with."""
        return cls(
            update_id=update_id,
            target=BaseTarget() if adapter is None else LoraTarget(kind="lora", op="load", name=adapter),
            transport=Transport.model_validate(source.transport) if source.transport is not None else model,
            encoding=source.encoding,
            base=source.base,
            base_chain=delta_chain(source.before, source.base),
            label=version.label,
            digest=version.digest,
            cast=source.cast,
            staging="none" if in_place else "host",
            keep_staged=source.keep_staged,
        ).with_own_model(model)

    @property
    def adapter(self) -> str | None:
        """The name of the adapter. None: the request is for base weights."""
        return self.target.name if self.target.kind == "lora" else None

    @property
    def in_place(self) -> bool:
        """Whether the tensors go over the served weights, because the model does not fit in memory twice."""
        return self.staging == "none" and self.adapter is None

    @property
    def keeps_copy(self) -> bool:
        """Whether the staged tensors stay in host memory after the swap."""
        return self.keep_staged and self.adapter is None

    def with_own_model(self, model: Transport) -> Self:
        """Fills in `model`, the worker's own, where an entry of the chain has no transport."""
        if all(entry.transport is not None for entry in self.base_chain):
            return self
        chain = (
            entry if entry.transport is not None else entry.model_copy(update={"transport": model})
            for entry in self.base_chain
        )
        return self.model_copy(update={"base_chain": tuple(chain)})

    def full_from(self, transport: Transport | None) -> Self:
        """A request for this version as a whole, from `transport`. None: from the worker's kept copy."""
        return self.model_copy(
            update={"transport": transport, "encoding": "full", "base": None, "base_chain": (), "relay": ()}
        )

    @model_validator(mode="after")
    def _whole_delta(self) -> Self:
        _check_digests(self)
        return self


def delta_chain(source: VersionSource | None, base: str | None) -> tuple[DeltaChainEntry, ...]:
    """The versions from a full one up to `base`, with the transports in `source`."""
    if source is None or base is None:
        return ()
    return tuple(
        DeltaChainEntry(
            digest=digest,
            transport=Transport.model_validate(one.transport) if one.transport is not None else None,
            refetchable=one.refetchable,
            encoding=one.encoding,
        )
        for digest, one in source.chain(base)
    )


class ListeningReply(TypedDict):
    """The receivers of every rank listen. `prepare_update` under the same id waits until they have received
    everything."""

    listening: Literal[True]


class PreparedReply(TypedDict):
    digest: str
    tensors: int
    bytes: int
    """The bytes of the tensors that came."""
    refetchable: bool
    model_bytes: NotRequired[int]
    """The bytes of all tensors of the version. Absent: `bytes`, because all of them came."""
    canary: NotRequired[dict[str, Any]]
    """The `canary.json` beside the checkpoint, if there is one: see `rl_plane.protocol.canary.Canary`."""
    sources: NotRequired[list[SourceUse]]
    """The bytes that came from each source. Absent: the transport has one source."""


class Part(Body):
    """A part of an update: tensors that the trainer broadcasts now, from rank 0 of its group, in this order. Or, with
    `places`, tensors that lie in memory of a trainer on the workers' machine, and that each rank copies now."""

    names: list[str] = Field(max_length=MAX_PART_TENSORS)
    dtypes: list[str]
    """Names of torch (`bfloat16`) or of safetensors (`BF16`)."""
    shapes: list[list[int]]
    layout: Literal["each", "flat", "packed"] = "each"
    """`each`: one broadcast for each tensor. `flat`: one broadcast of all bytes. `packed`: several broadcasts; a new
    one begins when one has more than `bucket_bytes`."""
    bucket_bytes: int = Field(DEFAULT_PACKED_BYTES, gt=0, le=MAX_PART_BYTES)
    """For layout `packed`."""
    group: str | None = Field(None, min_length=1, max_length=256, pattern=PRINTABLE)
    """The group of the broadcasts. None: the group that the update was prepared with."""
    timeout_s: float = Field(PART_TIMEOUT_S, gt=0, le=MAX_PART_TIMEOUT_S)
    """Seconds until every rank must have the tensors."""
    check_only: bool = False
    """Receive nothing: only check that these tensors are all that the model needs. A trainer can so check before it
    sends."""
    memories: list[NamedMemory | GpuMemory | GpuCopies] = Field([], max_length=MAX_PART_MEMORIES)
    """The memory in which the tensors lie, for the transport `ipc`."""
    places: list[TensorPlace | None] | None = None
    """For the transport `ipc`: where each tensor lies. None for a tensor that is empty."""
    unused: list[GpuMemory] = Field([], max_length=MAX_PART_MEMORIES)
    """Further shares of the trainer's GPU memory, for other ranks. They are released unread."""

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
        if self.places is not None and len(self.places) != len(self.names):
            raise InvalidRequest(
                f"there are {len(self.names)} names and {len(self.places)} places",
                field="places",
                fix="give one for each name",
            )
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            if not checked_name(name):
                raise InvalidRequest(
                    f"{name[:100]!r} is not a name for a tensor", field="names", fix="use the names of the model"
                )
            if dtype.removeprefix("torch.") not in PART_DTYPES:
                raise InvalidRequest(
                    f"{name} has the unknown dtype {dtype[:50]!r}",
                    field="dtypes",
                    fix=f"one of {', '.join(sorted(PART_DTYPES))}",
                )
            if len(shape) > MAX_RANK or not all(0 <= side < 1 << 40 for side in shape):
                raise InvalidRequest(
                    f"{name} can't have the shape {shape}",
                    field="shapes",
                    fix="give its sides, none of them negative",
                )
        if len(set(self.names)) != len(self.names):
            raise InvalidRequest("a name is given twice", field="names", fix="name each tensor once")
        if sum(spec.nbytes for spec in self.specs) > MAX_PART_BYTES:
            raise InvalidRequest(
                f"the part has more than {MAX_PART_BYTES} bytes",
                field="shapes",
                fix="check the shapes, or send several parts",
            )
        return self


class ReceivePart(Part):
    update_id: str = Field(min_length=1, max_length=128)
    last: bool = False
    """This is the last part, so a missing tensor is an error. With `check_only`: the last tensors to check."""


class PartReply(TypedDict):
    """Every rank has staged the part."""

    tensors: int
    bytes: int
    missing: int
    """The number of tensors that the model needs and that have not arrived yet."""


class FollowRecord(Body):
    """The decision of the fleet. A record that is not open closes admission until it is. The answer shows that the
    worker has learnt it."""

    record: DecisionRecord
    sequence: int = Field(ge=0)
    """The sequence of the record's write in the state bucket."""


class FollowedReply(TypedDict):
    sequence: int | None
    """The sequence of the newest record that the worker knows. It may be newer than the record in the call."""


class RecordReport(TypedDict):
    """The newest record that this worker knows. A coordinator compares it with the store, which may have lost a
    write."""

    record: dict[str, Any] | None
    """The newest known DecisionRecord."""
    admitted: bool
    model_digest: str
    """The digest of the model that the worker was started with."""
    failed: str | None
    """The update for which the worker listened, and which it can't receive any more."""
    canary: NotRequired[CanaryLimits | None]
    """The limits of the sequences that the engine can score. None: it can't score."""


class CanaryLimits(TypedDict):
    vocab_size: int
    max_model_len: int


class Commit(FollowRecord):
    """The decision: swap the staged weights in. NotPrepared: nothing is staged for it."""

    update_id: str = Field(min_length=1, max_length=128)
    pause_s: float = Field(0.0, ge=0)
    """Seconds for which the fleet stays paused from now on. 0: it runs."""


class CommittedReply(TypedDict):
    version: VersionReply
    cache_flushed: bool
    swap_s: float
    """Seconds for which generation was stopped."""
    canary: NotRequired[ScoresReply]
    """Absent: the record has no canary, the engine can't score, or its memory is released."""


class ScoresReply(TypedDict):
    """The scores of the engine's present weights for the sequences of the record's canary."""

    kind: str
    """The engine kind: engines of one kind must agree closely."""
    vectors: list[list[float]]
    """For each sequence the log probability of each token but the first, in nats. Empty: the engine failed to score."""


class AbortUpdate(Body):
    update_id: str | None = Field(None, max_length=128)
    """The update to drop. None: any."""


class AbortUpdateReply(TypedDict):
    discarded: bool


ROLLED_WORKERS = 256
"""The workers of a rolling update for which its caller waits. Workers swap one after another, and the caller does not
know their number. A caller that gave up sooner could end the roll, and all the other workers would swap at once."""


class UpdatePolicy(Body):
    """The way in which an update is carried out."""

    barrier: Literal["strict", "rolling"] = "strict"
    """`strict`: two versions are never served at once. `rolling`: workers swap one after another, and tokens are
    labelled."""
    staging: Literal["host", "none"] = "host"
    """`none` is for a model that does not fit in memory twice: the tensors are written over the served weights. Each
    worker is closed from the first byte to the commit, and after a failure it heals to the committed version."""
    keep_staged: bool = False
    """Each rank keeps a copy of the base weights in host memory until the next swap. The next delta or partial version
    is applied to this copy, and other workers may heal from it."""
    relay: bool = True
    """With `nixl`, two or more workers fetch the weights from one another too. False: each worker fetches everything
    from the trainer."""
    pause_mode: PauseMode = Field("keep", json_schema_extra={"enum": [*PAUSE_WORDS]})
    """The mode of the pause during the swap, see `pause`. `retract` is `keep` with `kv` `recompute`, `in_place` is
    `keep` with `kv` `keep`."""
    kv: KvPolicy = "recompute"
    """The KV of requests that run through the swap. `recompute`: the new weights compute it again. `keep`: requests
    that have made a token keep their KV, and the spans of their later tokens name its version (`kv_version`). No new
    request uses KV of older weights, in either case. Where KV can't be kept, it is computed again: in an engine without
    this, and for an adapter that is swapped."""
    on_prepare_failure: Literal["abort", "exclude"] = "abort"
    """`abort`: one open worker that can't prepare ends the update on all workers. `exclude`: the update commits on the
    others."""
    min_ready: int = Field(1, ge=1)
    """With `exclude`: the number of workers that must have prepared."""
    keep_pause: bool = False
    """Leave the fleet paused after the commit."""
    prepare_timeout_s: float = Field(300.0, gt=0, le=MAX_TIMEOUT_S)
    """Seconds within which every worker must have staged the weights."""
    gate_timeout_s: float = Field(2.0, gt=0, le=MAX_TIMEOUT_S)
    """Seconds to close and to open admission. A worker's NATS loop answers at once."""
    commit_timeout_s: float = Field(COMMIT_TIMEOUT_S, gt=0, le=MAX_TIMEOUT_S)
    """Seconds for the swap and the canary on every worker."""
    canary: PolicyCanary = None
    """The token sequences that every worker scores after the swap, before it serves the version. None: sequences that
    follow from the size of the vocabulary. `off`: no worker scores anything."""
    on_canary_failure: OnCanaryFailure = "rollback"
    """The reaction if every worker fails the canary. `rollback`: the fleet returns to the version before. `exclude`: no
    worker serves the version. `warn`: the workers serve it, and the answer says so. A worker that fails while
    another one passes is excluded in every case."""

    @property
    def commit_bound_s(self) -> float:
        """The longest time in seconds from the decision to the answer: the swaps, and a wait for late workers."""
        swaps = ROLLED_WORKERS if self.barrier == "rolling" else 1
        return (swaps + 1) * self.commit_timeout_s

    @model_validator(mode="wrap")
    @classmethod
    def _sglang_names(cls, body: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        return without_sglangs_names(
            body, "pause_mode", "kv", check, drops="recompute", keeps="keep", within="policy."
        )


SHOWN_AS_ASKED = ("step",)
"""The fields of an update that the history (`GET /v1/rl/updates`) shows as the caller gave them. The history names each
other field that it shows, because the committed record may have another value."""


class _Update(Body):
    target: BaseTarget | LoraTarget = Field(default_factory=BaseTarget, discriminator="kind")
    encoding: Encoding = "full"
    """`partial`: only some tensors, whole; the others are those of `base`. `delta`: only the tensors that have changed
    since `base`, each encoded as a U8 tensor (`rl_plane.weights.delta_codec`). Both need `base` and `digest`: the
    digests of the full versions before and after."""
    base: str | None = Field(None, pattern=DIGEST)
    """For a delta: the digest of the committed version, to which it is applied. For a partial version: that digest, or
    the digest of an earlier version on which the committed one was built."""
    version: Label | None = None
    """The trainer's label for the version, such as `step_17`. None: the sequence number."""
    step: int | None = Field(None, ge=0, le=MAX_STEP)
    """The trainer's step, for the history (`GET /v1/rl/updates`)."""
    digest: str | None = Field(None, pattern=DIGEST)
    """The version's digest, `xxh3:…` or `blake3:…`, as the trainer computed it. The update fails if the workers' bytes
    have another digest. None: the coordinator compares the workers' digests only with one another, and with the digests
    beside the weights."""
    digest_algorithm: DigestAlgorithm | None = None
    """The hash, where neither `digest` nor digests beside the weights tell it: for a digest that comes with
    `complete_weights_update`, or after the last byte. None: `xxh3`."""
    cast: bool = False
    """Allow float tensors of another float dtype than the engine's. They are converted."""
    policy: UpdatePolicy = UpdatePolicy()

    @model_validator(mode="after")
    def _one_at_a_time(self) -> Self:
        if self.target.kind == "lora" and self.policy.staging == "none":
            raise InvalidRequest(
                "an adapter is always staged, because it is small",
                field="policy.staging",
                fix="use staging host",
            )
        if self.target.kind == "lora" and isinstance(self.policy.canary, Canary):
            raise InvalidRequest(
                "a canary scores the base weights, which an adapter does not change",
                field="policy.canary",
                fix="leave it out",
            )
        _check_delta(self)
        if self.digest and self.digest_algorithm not in (None, algorithm_of(self.digest)):
            raise InvalidRequest(
                f"the digest is {algorithm_of(self.digest)}, and digest_algorithm is {self.digest_algorithm}",
                field="digest_algorithm",
                fix="leave it out",
            )
        if self.policy.staging == "none" and self.policy.keep_staged:
            raise InvalidRequest(
                "keep_staged needs staging",
                field="policy.keep_staged",
                fix="use staging host, or leave it out",
            )
        if self.policy.kv == "keep" and self.policy.staging == "none":
            raise InvalidRequest(
                "weights that are written over the served ones are of no version meanwhile, so no KV can be kept",
                field="policy.kv",
                fix="use staging host, or kv recompute",
            )
        if self.policy.barrier == "rolling" and self.policy.staging == "none":
            raise InvalidRequest(
                "a rolling update serves the version before while the next one arrives, so it needs staging",
                field="policy.staging",
                fix="use staging host, or barrier strict",
            )
        return self


def _check_delta(update: _Update) -> None:
    """Checks the fields that a delta or a partial version needs, and the fields that exclude it."""
    _check_digests(update)
    if update.encoding == "full":
        return
    if update.target.kind == "lora":
        raise InvalidRequest(
            f"an adapter can't be sent as {update.encoding}, because it is small",
            field="encoding",
            fix="leave encoding out, or send full",
        )
    if update.cast:
        raise InvalidRequest(
            f"{update.encoding} weights change a copy of the published bytes, which a cast would lose",
            field="cast",
            fix="leave it out, or send full weights",
        )
    if update.policy.staging == "none":
        raise InvalidRequest(
            f"{update.encoding} weights are applied to the copy that a worker keeps in host memory",
            field="policy.staging",
            fix="use staging host, or send full weights",
        )


def _check_in_parts(update: _Update) -> None:
    """Checks that an update whose tensors are announced as they come is a full checkpoint of base weights, with
    staging."""
    wrong = {
        "target": update.target.kind != "base",
        "encoding": update.encoding != "full",
        "policy.staging": update.policy.staging != "host",
    }
    for field, is_wrong in wrong.items():
        if is_wrong:
            raise InvalidRequest(
                "an update in parts must bring all base weights into staging",
                field=field,
                fix="leave it out, or send a manifest",
            )


def _check_digests(update: _Update | ReceiveRequest) -> None:
    """Checks that a delta or a partial version has `base` and `digest`, and that a full version has no `base`."""
    if update.encoding == "full":
        if update.base is not None:
            raise InvalidRequest(
                "a full version has no base", field="base", fix="leave it out, or send encoding delta or partial"
            )
        return
    for field in ("base", "digest"):
        if getattr(update, field) is None:
            whose = "the version that it changes" if field == "base" else "the full version that it makes"
            raise InvalidRequest(
                f"encoding {update.encoding} needs the digest of {whose}",
                field=field,
                fix=f"add {field}, or send full weights",
            )


def check_source(target: BaseTarget | LoraTarget, transport: Transport | None, instead: str = "") -> None:
    """Checks that there is a transport, except to unload an adapter."""
    unload = isinstance(target, LoraTarget) and target.op == "unload"
    if transport is None and not unload:
        raise InvalidRequest(
            "transport: Field required", field="transport", fix=f"say where the weights are (transport){instead}"
        )
    if transport is not None and unload:
        raise InvalidRequest("an adapter is unloaded without a transport", field="transport", fix="leave it out")


class UpdateWeights(_Update):
    """The body of every update. Its shape follows Dynamo PR 9131."""

    transport: Transport | None = None
    """None only to unload an adapter."""
    owner: str | None = Field(None, min_length=1, max_length=64, pattern=PRINTABLE)
    """For a prepared update: the dialect whose calls continue it. The calls of one dialect don't continue the update of
    another. receive_weights_part, complete and abort continue any update."""

    @model_validator(mode="after")
    def _source(self) -> Self:
        check_source(self.target, self.transport)
        if self.described_as_it_comes:
            _check_in_parts(self)
        return self

    def shown_as_asked(self) -> dict[str, Any]:
        """The fields of SHOWN_AS_ASKED that the caller has given, as JSON values."""
        return self.model_dump(mode="json", include=set(SHOWN_AS_ASKED), exclude_none=True)

    @property
    def keeps_copy(self) -> bool:
        return self.policy.keep_staged or self.encoding != "full"

    def source(self, refetchable: bool, before: VersionSource | None) -> VersionSource:
        """Returns the source of this update for the record. `before`: the source of the version that a delta or a
        partial version changes."""
        transport = self.transport.model_dump() if self.transport is not None else None
        if transport is not None and not refetchable:
            transport = {"backend": transport["backend"]}  # the rest may be long, and no worker can fetch by it
        return VersionSource(
            transport=transport,
            cast=self.cast,
            refetchable=refetchable,
            staging=self.policy.staging,
            keep_staged=self.keeps_copy,
            encoding=self.encoding,
            base=self.base,
            before=before,
        )

    @property
    def pushed(self) -> bool:
        return self.transport is not None and (self.transport.traits.pushed or self.in_parts)

    @property
    def relayed(self) -> bool:
        """Reports whether workers fetch the update from one another: the policy asks for it, and it is staged, whole,
        and of one source. Tensors that are applied to the kept copy have no place from which a worker could serve
        them. A trainer whose ranks each send a share has as many links as ranks."""
        of_base = self.target.kind == "base" and self.encoding == "full" and self.policy.staging == "host"
        if not self.policy.relay or not of_base or self.transport is None:
            return False
        return self.transport.traits.relayed and "shares" not in (self.transport.model_extra or {})

    @property
    def in_parts(self) -> bool:
        """Reports whether the trainer announces the tensors part by part."""
        transport = self.transport
        if transport is None or not transport.traits.in_parts:
            return False
        return bool((transport.model_extra or {}).get("in_parts"))

    @property
    def described_as_it_comes(self) -> bool:
        """Reports whether the tensors are described as they come: part by part, in a group that the trainer has formed
        itself (`format`), or by checkpoint-engine (`zmq_handles`)."""
        transport = self.transport
        if transport is None or not transport.traits.in_parts:
            return False
        return self.in_parts or transport.traits.described_by in (transport.model_extra or {})


class Rollback(Body):
    """Names a committed version of the history, by exactly one of the two fields."""

    label: Label | None = None
    """The newest version with this label."""
    sequence: int | None = Field(None, ge=0)


class UpdateCall(_Update):
    """An update of the fleet: to the weights of a transport, or back to an earlier version."""

    transport: Transport | None = None
    """The transport of the weights. Give this or `rollback`."""
    rollback: Rollback | None = None
    """Go back to a committed version of the history (GET /v1/rl/updates), with its transport, digest and label. Beside
    it, `version`, `policy` and `step` may be given."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.rollback is None:
            check_source(self.target, self.transport, ", or which earlier version is meant (rollback)")
            return self
        given = {
            "transport",
            "target",
            "encoding",
            "base",
            "digest",
            "digest_algorithm",
            "cast",
        } & self.model_fields_set
        if given:
            name = sorted(given)[0]
            raise InvalidRequest(
                f"{name} and rollback are both given, but the history has the version's {name}",
                field=name,
                fix="leave one of the two out",
            )
        if (self.rollback.label is None) == (self.rollback.sequence is None):
            raise InvalidRequest(
                "rollback names one version", field="rollback", fix='{"label": "step_3"} or {"sequence": 3}'
            )
        return self


class _UpdateArguments(Body):
    """The fields of an update that code may give as a model of this module, or as a mapping of its fields."""

    transport: Transport | None = None
    target: BaseTarget | LoraTarget = Field(default_factory=BaseTarget, discriminator="kind")
    policy: UpdatePolicy = UpdatePolicy()


def update_arguments(
    *,
    transport: Transport | Mapping[str, Any] | None = None,
    target: BaseTarget | LoraTarget | Mapping[str, Any] | None = None,
    policy: UpdatePolicy | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Checks these arguments, and returns them as fields of an update's body. An argument that is None is left out, and
    a policy has only the fields that the caller has set. InvalidRequest names the wrong field."""
    arguments = {"transport": transport, "target": target, "policy": policy}
    given = {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in arguments.items()
        if value is not None
    }
    checked = parse_body(_UpdateArguments, given)
    return {name: getattr(checked, name).model_dump(exclude_unset=name == "policy") for name in given}


class ListUpdates(Body):
    limit: int = Field(50, ge=1, le=256)
    """The number of updates, the newest first."""
