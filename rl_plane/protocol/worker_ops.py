"""The table of the workers' ops: the typed request and reply of each, its time-out and its traits.

The dispatcher, the CLI and docs/reference.md derive from this table. Names and meanings follow Dynamo's RL integration
(PR 9131) if it has them, else SGLang's and vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator
from typing_extensions import TypedDict

from rl_plane.errors import InvalidRequest, NotFound
from rl_plane.protocol.generation import MAX_PROMPT_TOKENS, LogprobsMode, Rendering, TokenId
from rl_plane.protocol.pooling import Task
from rl_plane.protocol.record import PauseMode
from rl_plane.protocol.relay import OpenRelay, OpenRelayReply, SourceUse
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
    PreparedReply,
    ReceivePart,
    ReceiveRequest,
    RecordReport,
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
"""Longer than an update of a large model takes. A trainer that dies stops the fleet for at most this long."""

# ---- what every worker reports ----


class AdmissionState(TypedDict):
    """The admission of a worker: whether it may get generation requests."""

    open: bool
    reasons: list[str]
    """The reasons why it is closed. Empty: it is open."""


class PauseState(TypedDict):
    paused: bool
    mode: str | None
    lease_left_s: float | None
    """Seconds until the worker resumes by itself."""


class CanaryState(TypedDict):
    """The result of the numeric canary for the base weights in the engine."""

    passed: bool
    gave_up: bool
    """The weights failed, and the worker waits for an update or for `enable`: it does not fetch them again by
    itself."""
    against: str
    """The other side of the comparison: `trainer`, `reference` (the values that this version had before), `fleet` (the
    other workers' values), or `nothing`."""
    reason: str | None
    """The reason of a failure: `trainer`, `reference`, `fleet`, `tie` or `unusable`. None: the worker passed. Its
    admission has the details."""
    warning: str
    """Why the worker serves weights that every worker has failed with (`on_canary_failure: warn`). Empty: none has."""
    difference: float | None
    """The largest difference of a log probability. None: there was nothing to compare with."""
    tolerance: float | None
    mismatch_kl: float | None


class EngineLoadReply(TypedDict):
    """The load of an engine, in its own counts."""

    running: int
    """The requests in the engine's batch."""
    waiting: int
    """The requests that wait for a place in the batch."""
    kv_usage: float
    """The part of the KV cache that is in use, from 0 to 1."""
    preemptions: int | None
    """The requests that have lost their KV to others since the engine started. None: the engine does not count them."""
    tokens_per_s: float | None
    """The rate at which the engine makes tokens. None: the engine does not report it."""


class UpdateOnWorker(TypedDict):
    """The update that a worker receives, or holds staged. It may be the committed version, which the worker fetches to
    heal."""

    update_id: str
    label: str
    transport: str
    """The name of the transport."""
    bytes: int
    """The bytes of tensors that have come so far."""
    total_bytes: int | None
    """The bytes of all tensors that are announced. None: not known yet."""
    bytes_per_s: float | None
    """The rate between the first and the newest bytes. None: too few have come."""
    since_progress_s: float
    """Seconds since the last bytes came, or since the worker began."""
    elapsed_s: float
    """Seconds since the worker began."""
    waits_for: str
    """The thing that the update waits for here, in words, such as `the trainer's bytes`."""


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
    """The sequence of the committed state that the worker has, adapters included. None: it does not have all of it."""
    adapters: dict[str, VersionReply]
    """Adapter → its version in the engine."""
    staged: VersionReply | None
    """The version that is prepared and verified, and waits for its decision. Its sequence is 0 until then."""
    update: UpdateOnWorker | None
    """The update that is being received, or is staged. None: there is none."""
    canary: CanaryState | None
    """It is None if these weights were not scored: the update had no canary, or the engine can't score."""
    received_from: list[SourceUse]
    """The bytes that came from each source when the worker last received a version from several. Empty: it has not."""
    kept: str | None
    """The digest of the copy in host memory, to which a delta may be applied (`policy.keep_staged`)."""
    loras: list[str]
    running: int
    waiting: int
    """The number of requests without a token yet."""
    running_tokens: int
    """The tokens of the running requests: their prompts, and the generated tokens."""
    waiting_tokens: int
    """The prompt tokens of the waiting requests."""
    tokens_made: int
    """The tokens that the engine has made since the worker's process started."""
    prompt_tokens: int
    """The prompt tokens of the requests that have begun since then."""
    engine_load: EngineLoadReply | None
    """The engine's own counts, about a second old. None: the engine does not tell them, or did not answer."""
    requests_ended: int
    """The requests that the engine has ended since then, by a stop or at their length. Each choice counts."""
    fence: int
    """The highest fence that the worker has seen."""
    draining: bool


class LivenessReply(TypedDict):
    alive: Literal[True]
    round_trip_s: float


MANIFEST_PAGE = 1000
"""The number of tensors in one answer. With their names they take some 100 KB."""


class Describe(Body):
    manifest_from: int | None = Field(None, ge=0)
    """Reply with a page of 1000 of the model's tensors in `manifest`, from this number on. Name one worker
    (`workers`)."""
    host: bool = False
    """Reply with what the worker sees of its machine in `host`."""
    weight_roots: list[str] | None = Field(None, max_length=16)
    """With `host`: directories to look at, beside the configured weight roots. The worker looks only beneath these."""

    @model_validator(mode="after")
    def _check_roots(self) -> Self:
        if self.weight_roots is not None and not self.host:
            raise InvalidRequest(
                "weight_roots without host", field="weight_roots", fix="set host, or leave it out"
            )
        return self


class TensorReply(TypedDict):
    name: str
    dtype: str
    """The dtype's name in safetensors."""
    shape: list[int]


class RootReply(TypedDict):
    """One directory as a worker sees it. Equal listings and inodes are those of one directory."""

    path: str
    error: str | None
    """Why it can't be read. None: it can."""
    device: int | None
    inode: int | None
    entries: int | None
    """The number of names in it; 10,001 stands for more."""
    digest: str | None
    """A hash of the names in it. None: there are more than 10,000, or it can't be read."""
    free_bytes: int | None
    """The bytes that may still be written there."""


class HostReply(TypedDict):
    """A worker's machine, as the worker sees it."""

    version: str
    """The worker's version of rl_plane."""
    host: str
    clock: float
    """Unix seconds."""
    nats: dict[str, Any]
    """The NATS server as the worker knows it: `url`, `connected`, `lost_s`, `version`, `max_payload`, `jetstream`."""
    free_memory_bytes: int | None
    """The host memory that staging may use. None: not known."""
    memory_limit: str
    """The limit that leaves the least memory, such as that of a control group."""
    shm_free_bytes: int | None
    """The free bytes of /dev/shm. None: the machine has no /dev/shm."""
    lacking: dict[str, str]
    """Transport → why this worker does not have it, although its code is installed."""
    roots: list[RootReply]
    """The configured weight roots, at most 16, and the directories that were asked for."""


class DescribeReply(TypedDict):
    engine: str
    engine_version: str
    model: str
    model_path: str
    dtype: str
    device: str
    world_size: int
    tp_size: int
    """The number of ranks of tensor parallelism."""
    pp_size: int
    """The number of stages of pipeline parallelism."""
    dp_size: int
    """The number of replicas of data parallelism inside the engine."""
    task: Task
    """The task of the model: it makes tokens, scores of labels, or embeddings."""
    dimension: int | None
    """The numbers of one vector of a pooling model. None: the model makes tokens."""
    labels: list[str]
    """The names of a classifier's labels."""
    vocab_size: int
    max_model_len: int
    transports: list[str]
    lacks: dict[str, str]
    """Op → the reason why this engine does not support it."""
    deterministic: bool
    """Whether the tokens of a request do not depend on the rest of the batch."""
    memory_saver: bool
    """Whether memory can be released and resumed."""
    witnesses: bool
    """Whether each token is labelled with its weight version. False: the label is `unknown`."""
    max_adapters: int | None
    """The number of adapters that may be loaded at once. None: the memory is the limit."""
    max_lora_rank: int | None
    """The highest rank of an adapter. None allows any."""
    kv_tokens: int | None
    """The tokens that the KV cache has room for. None: the engine does not report it."""
    logprobs_mode: LogprobsMode
    """Whether the logprobs of a completion are of the raw logits, or of the logits that the token was drawn from."""
    max_prompt_top_logprobs: int
    """The largest number of likeliest tokens beside each token of a prompt."""
    tensors: int
    tied: list[str]
    """Names that a full checkpoint may have too, because the model ties them to other tensors. `tensors`,
    `weight_bytes` and `manifest` do not count them."""
    weight_bytes: int
    version: VersionReply | None
    manifest: list[TensorReply] | None
    """The tensors that a full checkpoint must have, always in the same order. None: not requested."""
    host: HostReply | None
    """The worker's machine. None: not requested."""


class PingReply(TypedDict):
    revision: int
    """The sequence of the worker's registration, as the worker knows it."""


# ---- pause, cache, requests ----


class Pause(Body):
    mode: PauseMode = Field("keep", json_schema_extra={"enum": [*PAUSE_WORDS]})
    """`keep` stops requests between two tokens, `wait` lets them end first, `abort` ends them now. SGLang's names:
    `retract` is `keep` with `clear_cache`, `in_place` is `keep` without."""
    clear_cache: bool = False
    """Drop the prefix cache as well."""
    lease_s: float = Field(DEFAULT_PAUSE_LEASE_S, gt=0, le=MAX_LEASE_S)
    """The worker resumes by itself after this many seconds."""

    @model_validator(mode="wrap")
    @classmethod
    def _sglang_names(cls, body: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        return without_sglangs_names(body, "mode", "clear_cache", check)


class DoneReply(TypedDict):
    """A reply without fields."""


class PauseReply(TypedDict):
    pause_state: Literal["running", "paused"]
    cache_flushed: bool


class FlushCache(Body):
    reset_running_requests: bool = False
    """Freeze running requests meanwhile, because an engine with a prefix cache refuses to drop it while they run. These
    requests compute their KV again. False: such an engine refuses."""


class FlushReply(TypedDict):
    flushed: Literal[True]


class AbortRequests(Body):
    request_ids: list[str] | None = Field(None, max_length=10_000)
    """The id of a reply, or the caller's own name of the request, for all of its choices; with `-<index>` for one
    choice. None: all requests."""


class AbortInFrontend(AbortRequests):
    waiting: bool = True
    """Ends the choices that wait there for a worker. False: the call means some workers only."""


class AbortedReply(TypedDict):
    aborted: int


class AbortedInFrontend(AbortedReply):
    """A frontend's reply. `aborted` counts the choices that waited there for a worker."""

    made: dict[str, list[str]]
    """Each of the names that a caller has chosen for requests under way there → the ids by which workers know them."""


# ---- weights: update_requests.py has the rest ----


MAX_SKIPPED = 256
"""Each tensor's name is compared with each text. A trainer names a few kinds of tensors."""


class CheckWeights(Body):
    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"
    closed: bool = False
    """Close the worker meanwhile, because reading all weights delays its engine."""
    per_tensor: bool = False
    """A checksum has the hash of each tensor too."""
    skip_tensor_list: list[str] = Field([], max_length=MAX_SKIPPED)
    """Checksum and compare leave out the tensors whose names contain one of these texts."""


class CheckWeightsReply(TypedDict):
    ranks: list[dict[str, Any]]


class MemoryTags(Body):
    tags: list[Literal["weights", "kv_cache"]] = Field(["weights", "kv_cache"], min_length=1)


class MemoryReply(TypedDict):
    tags: list[str]


# ---- tokens and text ----


class Tokenize(Body):
    """Text (`prompt`) or `messages` to tokenize."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    """Chat messages. The model's chat template renders them, as it does for generation."""
    add_special_tokens: bool | None = None
    """For a prompt: whether the tokenizer adds its special tokens. None: yes, as in generation."""
    add_generation_prompt: bool | None = None
    """Whether the template begins the next reply after the messages. None: yes, unless `continue_final_message`."""
    continue_final_message: bool = False
    """Whether the last message stays open."""
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Other arguments of the chat template."""

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
                "the body must have either prompt or messages", field="prompt", fix="send one of the two"
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
                raise InvalidRequest(f"{field} has no meaning for {what}", field=field, fix="leave it out")
        return self


class TokenizeReply(TypedDict):
    tokens: list[int]
    max_model_len: int


class Detokenize(Body):
    tokens: list[TokenId] = Field(max_length=MAX_PROMPT_TOKENS)


class DetokenizeReply(TypedDict):
    prompt: str
    """The text, special tokens included."""


class ParseToolCalls(Body):
    """A finished text, and the tools that its prompt offered."""

    tokens: list[TokenId] = Field(max_length=MAX_PROMPT_TOKENS)
    """The tokens of the text. Without any, the op only checks the tools and that the worker has a parser."""
    tools: list[dict[str, Any]] = Field(min_length=1)


class ParsedCall(TypedDict):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ParsedToolCalls(TypedDict):
    content: str
    """The text without the calls."""
    calls: list[ParsedCall]


# ---- admission ----


class SetAdmission(Body):
    open: bool


class Drain(Body):
    timeout_s: float = Field(30.0, gt=0, le=MAX_TIMEOUT_S)
    """Seconds that running requests may take to end."""


class DrainReply(TypedDict):
    drained: bool
    aborted: int


Pool = Literal["control", "tokenizer"]


@dataclass(frozen=True, slots=True)
class Op:
    name: str
    request: type[Body] | type[Transport]
    reply: type[Any]
    """A TypedDict: a worker makes thousands of them, and its own replies need no check."""
    changes: bool
    """Whether the op changes something. Then it needs a live fence and the target's incarnation."""
    timeout_s: float
    """The default time for which a caller waits for a worker."""
    doc: str = ""
    of_pipeline_stage: bool = False
    """A pipeline stage, which has no engine of its own, answers it too."""
    pool: Pool = "control"
    """The places that the op takes in a worker. Ops that any client may send leave those of the control plane free."""
    reply_follows: str | None = None
    """The field of the request that makes the reply long."""
    shorter: str = "send it in parts"
    """The fix for a reply that is too long."""


QUICK_S = 1.0
"""The time-out of an op that the worker's NATS loop answers, which never blocks."""
TOKENIZER_S = 10.0
"""The time-out for the longest text that fits in a message."""
OPEN_RELAY_S = 5.0
"""The time-out of a worker that loads nixl for its first update. A later one is left out of the relay, not of the
update."""
ENGINE_S = 30.0
"""The time-out of an op that the engine carries out between two steps."""

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            "ping",
            Empty,
            PingReply,
            False,
            QUICK_S,
            doc="The bus round trip; the engine is not asked.",
            of_pipeline_stage=True,
        ),
        Op(
            "liveness",
            Empty,
            LivenessReply,
            False,
            5.0,
            doc="A real round trip through the engine.",
            of_pipeline_stage=True,
        ),
        Op("describe", Describe, DescribeReply, False, QUICK_S, doc="What the engine is and can do."),
        Op("state", Empty, StateReply, False, QUICK_S, doc="Admission, pause, version, load."),
        Op(
            "report_record",
            Empty,
            RecordReport,
            False,
            QUICK_S,
            doc="The newest decision record that the worker knows.",
        ),
        Op(
            "tokenize",
            Tokenize,
            TokenizeReply,
            False,
            TOKENIZER_S,
            doc="Text or messages to tokens.",
            pool="tokenizer",
            reply_follows="prompt",
        ),
        Op(
            "detokenize",
            Detokenize,
            DetokenizeReply,
            False,
            TOKENIZER_S,
            doc="Tokens to text.",
            pool="tokenizer",
            reply_follows="tokens",
        ),
        Op(
            "parse_tool_calls",
            ParseToolCalls,
            ParsedToolCalls,
            False,
            TOKENIZER_S,
            doc="The tool calls in a finished text, by the engine's own parser.",
            pool="tokenizer",
            reply_follows="tokens",
        ),
        Op("pause", Pause, PauseReply, True, ENGINE_S, doc="Stop generation, with a lease."),
        Op("resume", Empty, PauseReply, True, ENGINE_S, doc="Continue generation."),
        Op("flush_cache", FlushCache, FlushReply, True, ENGINE_S, doc="Drop the prefix cache."),
        Op("abort_requests", AbortRequests, AbortedReply, True, ENGINE_S, doc="End requests now."),
        Op("init_transport", InitTransport, DoneReply, True, 300.0, doc="Set up a weight transport."),
        Op("destroy_transport", DestroyTransport, DoneReply, True, ENGINE_S, doc="Take a weight transport down."),
        Op(
            "receive_part",
            ReceivePart,
            PartReply,
            True,
            PART_TIMEOUT_S + ENGINE_S,
            doc="Receive tensors that the trainer sends now.",
        ),
        Op(
            "open_relay",
            OpenRelay,
            OpenRelayReply,
            True,
            OPEN_RELAY_S,
            doc="Listen for peers that fetch an update from this worker, and say where.",
        ),
        Op("listen_update", ReceiveRequest, ListeningReply, True, 60.0, doc="Listen for weights that are pushed."),
        Op("prepare_update", ReceiveRequest, PreparedReply, True, 300.0, doc="Stage and verify weights."),
        Op("follow_record", FollowRecord, FollowedReply, True, QUICK_S, doc="Learn a decision."),
        Op("commit_update", Commit, CommittedReply, True, 60.0, doc="Swap staged weights in."),
        Op("abort_update", AbortUpdate, AbortUpdateReply, True, ENGINE_S, doc="Drop staged weights."),
        Op("update_weights", UpdateWeights, CommittedReply, True, 360.0, doc="Prepare, commit."),
        Op("release_memory", MemoryTags, MemoryReply, True, 60.0, doc="Give memory back (sleep)."),
        Op("resume_memory", MemoryTags, MemoryReply, True, 60.0, doc="Take it again (wake)."),
        Op(
            "check_weights",
            CheckWeights,
            CheckWeightsReply,
            True,
            60.0,
            doc="Checksum or compare.",
            reply_follows="per_tensor",
            shorter="leave it out, or leave out tensors with skip_tensor_list",
        ),
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
