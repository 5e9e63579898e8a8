"""Every op: one typed request and one typed reply. The dispatcher, the HTTP facade, the CLI and the reference
docs derive from this table.

The names and meanings follow Dynamo's RL integration (PR 9131) where it has them, then SGLang's and vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self, TypedDict

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, model_validator

from rl_plane.errors import InvalidRequest, NotFound
from rl_plane.protocol.generation import MAX_PROMPT_TOKENS, Rendering, TokenId
from rl_plane.protocol.record import PauseMode
from rl_plane.protocol.update_requests import (
    PART_TIMEOUT_S,
    AbortUpdate,
    AbortUpdateReply,
    Commit,
    CommittedReply,
    DestroyTransport,
    FollowedReply,
    FollowRecord,
    InitTransport,
    ListeningReply,
    PartReply,
    Prepare,
    PreparedReply,
    ReceivePart,
    RecordReport,
    ReportRecord,
    Transport,
    UpdateWeights,
)
from rl_plane.protocol.validation import (
    MAX_LEASE_S,
    MAX_TIMEOUT_S,
    PAUSE_WORDS,
    Body,
    Empty,
    without_sglangs_names,
)
from rl_plane.protocol.versions import VersionReply

DEFAULT_PAUSE_LEASE_S = 600.0
"""Longer than an update of a large model takes, short enough that a dead trainer costs one coffee break."""

# ---- what every worker tells ----


class Version(BaseModel):
    run: str
    sequence: int
    label: str
    digest: str


class AdmissionState(TypedDict):
    """May the worker get generation requests?"""

    open: bool
    reasons: list[str]
    """Why not; empty when open."""


class PauseState(TypedDict):
    paused: bool
    mode: str | None
    lease_left_s: float | None
    """Seconds until the worker resumes by itself."""


class CanaryState(TypedDict):
    """What the numeric canary has shown of the base weights that the engine holds."""

    passed: bool
    against: str
    """What the values were compared with: `trainer`, `reference` (the values that this version had before), `fleet`
    (the other workers' values), or `nothing`."""
    reason: str | None
    """Why the worker failed: `trainer`, `reference`, `fleet`, `tie` or `unusable`. None: it passed. The worker's
    admission has the sentence."""
    warning: str
    """Why the worker serves weights that every worker has failed with (`on_canary_failure: warn`). Empty: none has."""
    difference: float | None
    """The largest difference of a log probability. None: there was nothing to compare with."""
    tolerance: float | None
    mismatch_kl: float | None


class StateReply(TypedDict):
    ready: bool
    """The engine is alive and the worker is admitted."""
    in_state_s: float
    """Seconds since its admission, its pause or its version last changed."""
    engine: str
    engine_alive: bool
    pause_state: Literal["running", "paused"]
    pause: PauseState
    admission: AdmissionState
    version: VersionReply | None
    applied_weight_version: str | None
    """The label of `version`."""
    sequence: int | None
    """Of the committed state that the worker holds whole, adapters included; None: it holds none."""
    adapters: dict[str, VersionReply]
    """Adapter → the version that the engine holds of it."""
    staged: VersionReply | None
    """Prepared and verified, waiting for its decision (its sequence is 0 until then)."""
    canary: CanaryState | None
    """None: these weights were not judged. The update had no canary, or the engine can't score."""
    kept: str | None
    """The digest of the version that its ranks keep in host memory, which a delta may change (`policy.keep_staged`)."""
    loras: list[str]
    running: int
    waiting: int
    """Without a token yet."""
    running_tokens: int
    """Prompts of the running requests, and what was made after them."""
    waiting_tokens: int
    """Prompts that are still to be computed."""
    fence: int
    """The highest seen."""
    draining: bool


class LivenessReply(TypedDict):
    alive: Literal[True]
    round_trip_s: float


MANIFEST_PAGE = 1000
"""Tensors in one answer: with their names some 100 KB."""


class Describe(Body):
    manifest_from: int | None = Field(None, ge=0)
    """Tell the model's tensors too, from this one on: `manifest`, a page of 1000. Of one worker (`workers`)."""


class TensorReply(TypedDict):
    name: str
    dtype: str
    """As safetensors has it."""
    shape: list[int]


class DescribeReply(TypedDict):
    engine: str
    engine_version: str
    model: str
    model_path: str
    dtype: str
    device: str
    world_size: int
    tp_size: int
    """Of its ranks, those of tensor parallelism."""
    pp_size: int
    """And the stages of its pipeline."""
    vocab_size: int
    max_model_len: int
    transports: list[str]
    capabilities: dict[str, str]
    """Op → why this engine can't do it."""
    deterministic: bool
    """The same tokens whatever else is in the batch."""
    memory_saver: bool
    """Memory can be released and resumed."""
    witnesses: bool
    """Each token is labelled with the weights that made it; false: with `unknown`."""
    max_adapters: int | None
    """That may be loaded at once; None: as many as there is memory for."""
    max_lora_rank: int | None
    """None: any."""
    tensors: int
    tied: list[str]
    """Names that a full checkpoint may also hold, because the model ties them to another; `tensors`, `weight_bytes` and
    `manifest` are without them."""
    weight_bytes: int
    version: VersionReply | None
    manifest: list[TensorReply] | None
    """What a full checkpoint must hold, always in the same order; None: it was not asked for."""


class PingReply(TypedDict):
    revision: int
    """The sequence at which the worker believes it is registered."""


# ---- pause, cache, requests ----


class Pause(Body):
    mode: PauseMode = Field("keep", json_schema_extra={"enum": [*PAUSE_WORDS]})
    """`keep` freezes requests between two tokens, `wait` lets them end first, `abort` ends them now. SGLang's names:
    `retract` is `keep` with `clear_cache`, `in_place` is `keep` without."""
    clear_cache: bool = False
    """Drop the prefix cache too."""
    lease_s: float = Field(DEFAULT_PAUSE_LEASE_S, gt=0, le=MAX_LEASE_S)
    """The worker resumes by itself after so many seconds."""

    @model_validator(mode="wrap")
    @classmethod
    def _sglang_names(cls, body: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        return without_sglangs_names(body, "mode", "clear_cache", check)


class DoneReply(TypedDict):
    """Nothing to tell."""


class PauseReply(TypedDict):
    pause_state: Literal["running", "paused"]
    cache_flushed: bool


class FlushReply(TypedDict):
    flushed: Literal[True]


class AbortRequests(Body):
    request_ids: list[str] | None = Field(None, max_length=10_000)
    """The replies' ids, each with all its choices, or a choice's own (`<id>-<index>`). None: all."""


class AbortedReply(TypedDict):
    aborted: int


# ---- weights: the rest is in update_bodies ----


class CheckWeights(Body):
    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"
    closed: bool = False
    """Out of routing meanwhile: reading all weights holds an engine up."""


class CheckWeightsReply(TypedDict):
    ranks: list[dict[str, Any]]


class MemoryTags(Body):
    tags: list[Literal["weights", "kv_cache"]] = Field(["weights", "kv_cache"], min_length=1)


class MemoryReply(TypedDict):
    tags: list[str]


# ---- tokens and text ----


class Tokenize(Body):
    """`prompt` or `messages`."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    """Rendered by the model's chat template, as for generation."""
    add_special_tokens: bool | None = None
    """Of the prompt: those that the tokenizer puts around a text. None: yes, as in generation."""
    add_generation_prompt: bool | None = None
    """The head of the next reply after the messages. None: yes, unless `continue_final_message`."""
    continue_final_message: bool = False
    """Leave the last message open."""
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """What else the chat template reads."""

    @property
    def rendering(self) -> Rendering:
        return Rendering.of(
            self.tools,
            self.documents,
            self.chat_template_kwargs,
            self.add_generation_prompt,
            self.continue_final_message,
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest(
                "one of prompt and messages is tokenized", field="prompt", fix="send one of the two"
            )
        assert self.rendering, "this checks it"
        of_messages = {
            "add_generation_prompt": self.add_generation_prompt is not None,
            "continue_final_message": self.continue_final_message,
            "tools": self.tools is not None,
            "documents": self.documents is not None,
            "chat_template_kwargs": self.chat_template_kwargs is not None,
        }
        misplaced = {"add_special_tokens": bool(self.add_special_tokens)} if self.prompt is None else of_messages
        for field, given in misplaced.items():
            if given:
                what = "messages" if self.prompt is None else "a prompt"
                raise InvalidRequest(f"{field} says nothing of {what}", field=field, fix="leave it out")
        return self


class TokenizeReply(TypedDict):
    tokens: list[int]
    max_model_len: int


class Detokenize(Body):
    tokens: list[TokenId] = Field(max_length=MAX_PROMPT_TOKENS)


class DetokenizeReply(TypedDict):
    prompt: str
    """The text, special tokens included."""


# ---- admission ----


class SetAdmission(Body):
    open: bool


class Drain(Body):
    timeout_s: float = Field(30.0, gt=0, le=MAX_TIMEOUT_S)
    """How long running requests may take to end."""


class DrainReply(TypedDict):
    drained: bool
    aborted: int


@dataclass(frozen=True, slots=True)
class Op:
    name: str
    request: type[Body] | type[Transport]
    reply: type[Any]
    """A TypedDict: a worker makes these by the thousand, and nobody has to check what we made ourselves."""
    changes: bool
    """Needs a live fence and the target's incarnation."""
    timeout_s: float
    """How long a caller waits for a worker unless it says otherwise."""
    doc: str = ""


QUICK_S = 1.0
"""An answer from the worker's NATS loop, which never blocks."""
TOKENIZER_S = 10.0
"""Of the longest text that a message carries."""
ENGINE_S = 30.0
"""An op that the engine carries out between two steps."""

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("ping", Empty, PingReply, False, QUICK_S, doc="The bus round trip; the engine is not asked."),
        Op("liveness", Empty, LivenessReply, False, 5.0, doc="A real round trip through the engine."),
        Op("describe", Describe, DescribeReply, False, QUICK_S, doc="What the engine is and can do."),
        Op("state", Empty, StateReply, False, QUICK_S, doc="Admission, pause, version, load."),
        Op("report_record", ReportRecord, RecordReport, False, QUICK_S, doc="What it knows to be committed."),
        Op("tokenize", Tokenize, TokenizeReply, False, TOKENIZER_S, doc="Text or messages to tokens."),
        Op("detokenize", Detokenize, DetokenizeReply, False, TOKENIZER_S, doc="Tokens to text."),
        Op("pause", Pause, PauseReply, True, ENGINE_S, doc="Stop generation, with a lease."),
        Op("resume", Empty, PauseReply, True, ENGINE_S, doc="Go on."),
        Op("flush_cache", Empty, FlushReply, True, ENGINE_S, doc="Drop the prefix cache."),
        Op("abort_requests", AbortRequests, AbortedReply, True, ENGINE_S, doc="End requests now."),
        Op("init_transport", InitTransport, DoneReply, True, 300.0, doc="Set up a weight transport."),
        Op("destroy_transport", DestroyTransport, DoneReply, True, ENGINE_S, doc="Take it down."),
        Op(
            "receive_part",
            ReceivePart,
            PartReply,
            True,
            PART_TIMEOUT_S + ENGINE_S,
            doc="Receive tensors that come now.",
        ),
        Op("listen_update", Prepare, ListeningReply, True, 60.0, doc="Listen for weights that are pushed."),
        Op("prepare_update", Prepare, PreparedReply, True, 300.0, doc="Stage and verify weights."),
        Op("follow_record", FollowRecord, FollowedReply, True, QUICK_S, doc="Learn a decision."),
        Op("commit_update", Commit, CommittedReply, True, 60.0, doc="Swap staged weights in."),
        Op("abort_update", AbortUpdate, AbortUpdateReply, True, ENGINE_S, doc="Drop staged weights."),
        Op("update_weights", UpdateWeights, CommittedReply, True, 360.0, doc="Prepare, commit."),
        Op("release_memory", MemoryTags, MemoryReply, True, 60.0, doc="Give memory back (sleep)."),
        Op("resume_memory", MemoryTags, MemoryReply, True, 60.0, doc="Take it again (wake)."),
        Op("check_weights", CheckWeights, CheckWeightsReply, True, 60.0, doc="Checksum or compare."),
        Op("set_admission", SetAdmission, AdmissionState, True, QUICK_S, doc="Open or close."),
        Op("drain", Drain, DrainReply, True, 60.0, doc="Close admission, let requests end."),
    )
}


def op_named(name: str) -> Op:
    op = OPS.get(name)
    if op is None:
        raise InvalidRequest(f"unknown op {name!r}", field="op", fix=f"the ops are {', '.join(OPS)}")
    return op


def not_a_member(instance_id: str) -> NotFound:
    return NotFound(
        f"no worker {instance_id} is in the fleet", field="workers", fix="list them: GET /v1/rl/workers"
    )
