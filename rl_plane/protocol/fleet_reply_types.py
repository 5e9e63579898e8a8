"""The types of the fleet's merged replies. The op table names the type of each op's reply.

RlClient and SyncRlClient return these types, and the OpenAPI document describes the replies by them. A reply is a plain
dict. Each type names its keys. The rows in `workers` have the op's own keys only where `status` is `ok`. A call for
several components gives another shape (`components`): use `run` for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypeVar

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic describes no other TypedDict before Python 3.12

from rl_plane.protocol.canary import CanarySummary
from rl_plane.protocol.record import Encoding
from rl_plane.protocol.relay import SourceUse
from rl_plane.protocol.versions import VersionReply
from rl_plane.protocol.worker_ops import (
    AbortedReply,
    AdmissionState,
    CheckWeightsReply,
    DescribeReply,
    FlushReply,
    LivenessReply,
    MemoryReply,
    PauseReply,
    StateReply,
)

UpdateOutcome = Literal["running", "prepared", "committed", "aborted"]
"""The state of an update in the history."""


class Selection(TypedDict, total=False):
    """The workers that a call means. All keys are optional."""

    component: str | list[str]
    """The component or components. Default: the client's."""
    workers: list[str]
    """Instance ids. Default: all workers. Updates refuse it."""
    epoch: int
    """The epoch of an earlier reply. MembershipChanged if the fleet has another one."""
    fingerprint: str
    """The fingerprint of an earlier reply. MembershipChanged if the fleet has another one."""
    min_workers: int
    """The number of workers that must be in the fleet. Default: 1; 0 allows an empty fleet."""
    wait_s: float
    """Seconds to wait for `min_workers`. Default: 5."""


class WorkerEntry(TypedDict):
    """One worker's part of a reply."""

    instance_id: str
    incarnation: str
    """Changes each time the worker's process starts."""
    status: Literal["ok", "error", "skipped"]
    error: NotRequired[dict[str, Any]]
    """The worker's error: `code`, `message`, `field`, `fix`."""
    reason: NotRequired[str]
    """Why a stage skipped the op."""
    rank_results: NotRequired[list[dict[str, Any]]]
    """The answers of its engine's ranks, in their order: `{rank, …}`."""


class EntryWithoutReply(TypedDict):
    """A worker's part of a reply without the op's own keys: the op failed on the worker, or the worker skipped it."""

    instance_id: str
    incarnation: str
    status: Literal["error", "skipped"]
    error: NotRequired[dict[str, Any]]
    """The worker's error: `code`, `message`, `field`, `fix`."""
    reason: NotRequired[str]
    """Why a stage skipped the op."""


T = TypeVar("T")

if TYPE_CHECKING:
    Rows = list[T]
else:
    # The OpenAPI document says that a row may lack the op's keys. The types of the SDK do not: code that has made a
    # change would check each row in vain, because the change raises an error unless it succeeded on every worker.
    Rows = list[T | EntryWithoutReply]


@with_config(ConfigDict(use_attribute_docstrings=True))
class Merged(TypedDict):
    """The keys of every reply but `workers`."""

    status: Literal["ok"]
    epoch: int
    """Changes with each join, leave and death."""
    fingerprint: str
    """Identifies the set of workers."""
    elapsed_s: float


class DoneOnAll(Merged):
    """The reply of an op that has nothing more to report."""

    workers: list[WorkerEntry]


class LivenessEntry(WorkerEntry, LivenessReply):
    """The round trip through one engine."""


class FleetLiveness(Merged):
    alive: Literal[True]
    workers: Rows[LivenessEntry]


class ReportedState(WorkerEntry, StateReply):
    """One worker's admission, pause, version and load."""


class FleetReadiness(Merged):
    alive: Literal[True]
    ready: Literal[True]
    workers: Rows[ReportedState]


class LeftWorker(TypedDict):
    """A worker that has left the fleet, as the frontend that answers has seen it."""

    instance_id: str
    incarnation: str
    engine: str | None
    host: str | None
    pid: int | None
    left_at: float
    """Unix seconds."""
    ago_s: float
    reason: str
    """`ended`, `engine`, `connection`, `silent` or `replaced`: see docs/metrics.md. `start`: `rl-plane up` has started
    the process, and it has ended before it joined. Then the incarnation is empty."""
    why: str
    """The reason in words."""
    back: bool
    """A worker of this instance id is in the fleet again."""
    exit_code: int | None
    """The exit code of its process, or the negative number of the signal that killed it. None: no supervisor (`rl-plane
    up`) has told it."""


class StartingWorker(TypedDict):
    """A worker that loads its engine, as the frontend that answers has heard. It is no member: it takes no requests,
    and no update waits for it."""

    instance_id: str
    engine: str
    host: str
    pid: int
    phase: str
    """The thing that it does, in words."""
    since: float
    """Unix seconds at which it began, by the frontend's clock."""
    elapsed_s: float
    """Seconds since then."""
    in_phase_s: float


class RunningUpdate(TypedDict):
    """An update that has begun and not ended."""

    update_id: str
    label: str
    phase: str
    """A phase of `rl_plane.commit.steps.Phase`. Between two calls of a trainer: `receive` while the workers listen for
    what the trainer pushes, else `prepared`."""
    caller: str
    """The process that asked for it, with its address if it asked over HTTP."""
    asked_by: str
    """The id of the caller's key. Empty: it has none."""
    who: str
    """The process that coordinates it, or did so last."""
    transport: str | None
    """The name of the transport. None: nothing is received."""
    began_at: float | None
    """Unix seconds. None: it has not begun to ask the workers yet."""
    elapsed_s: float
    in_phase_s: float | None
    """Seconds since the phase began. None: not known."""
    deadline_in_s: float | None
    """Seconds until the phase must have ended. Negative: it is late. None: it has no bound of its own, or none that is
    known."""
    idle_limit_s: float | None
    """The update is dropped if its trainer is silent for so long. None: it does not wait for a call of its trainer."""
    waits_for: str
    """The thing that it waits for, in words."""
    workers: int
    """The number of workers that receive it or hold it staged."""
    bytes: int
    """The bytes that have come to these workers."""
    total_bytes: int
    """The bytes that these workers expect."""
    bytes_per_s: float
    """The sum of their rates."""
    since_progress_s: float | None
    """Seconds since the last bytes came to the slowest worker. None: no worker reports it."""


class FleetState(Merged):
    ready: bool
    """Every worker is admitted and holds the committed version, and there are as many as are expected."""
    expected: int | None
    """The number of workers that the frontend expects (`--expect`). None: it expects none."""
    left: list[LeftWorker]
    """The workers that left in the last hour, newest first, at most 100, as this frontend has seen it since its start.
    A client over NATS has none."""
    starting: list[StartingWorker]
    """The workers that load their engines, the longest first. A client over NATS has none."""
    engine_alive: bool
    pause_state: Literal["running", "paused", "mixed"]
    applied_weight_version: str | None
    """The label that every worker serves. None: they differ."""
    loras: list[str]
    version: VersionReply | None
    """The committed version. None: no version is committed yet."""
    adapters: dict[str, VersionReply]
    """Adapter → its committed version."""
    sources: list[dict[str, Any]]
    """The transports from which a worker can fetch the committed version, in order. While an update may return to the
    version before, that version's follow."""
    encoding: str | None
    """The form in which the committed version was sent: `full`, `delta` or `partial`. None: there is no version."""
    sent_bytes: int | None
    """The bytes of the tensors that each worker took of it. None: the workers' own model, or not known."""
    model_bytes: int | None
    """The bytes of all tensors of the committed version."""
    sequence: int | None
    """The committed state, adapters included."""
    update: RunningUpdate | None
    """The update that runs: its phase, who asked for it, how far it is, and what it waits for. None: no update runs."""
    workers: Rows[ReportedState]


class ListedWorker(ReportedState):
    """A worker's state with its registration. Each engine adds keys of its own. A frontend with dialects adds those by
    which Dynamo's clients discover the worker."""

    namespace: str
    component: str
    engine: str
    model: str
    host: str
    pid: int
    world_size: int


class FleetWorkers(Merged):
    namespace: NotRequired[str]
    """The fleet's namespace, for Dynamo's clients, if the frontend has a dialect."""
    protocol_version: NotRequired[int]
    """The version of Dynamo's protocol, if the frontend has a dialect."""
    left: list[LeftWorker]
    """The field of `FleetState` explains it."""
    starting: list[StartingWorker]
    """The field of `FleetState` explains it."""
    workers: Rows[ListedWorker]


class ServedVersion(Merged):
    version: VersionReply | None
    """The version that every admitted worker serves. None: nothing is committed yet."""
    adapters: dict[str, VersionReply]
    workers: Rows[ReportedState]


class WorkerDescription(WorkerEntry, DescribeReply):
    """One engine's description."""


class FleetDescription(Merged):
    workers: Rows[WorkerDescription]


class PausedWorker(WorkerEntry, PauseReply):
    """One worker's pause state."""


class PausedFleet(Merged):
    workers: Rows[PausedWorker]


class FlushedWorker(WorkerEntry, FlushReply):
    """A worker that has dropped its prefix cache."""


class FlushedFleet(Merged):
    workers: Rows[FlushedWorker]


class AbortedOnWorker(WorkerEntry, AbortedReply):
    """The number of requests that one worker has ended."""


class AbortedRequests(Merged):
    waiting: int
    """Choices that waited in the frontends for a worker, and were ended there."""
    workers: Rows[AbortedOnWorker]


class AdmissionOnWorker(WorkerEntry, AdmissionState):
    """One worker's admission."""


class FleetAdmission(Merged):
    workers: Rows[AdmissionOnWorker]


class UpdateReply(Merged):
    version: VersionReply
    """The committed version: `run`, `sequence`, `label`, `digest`."""
    excluded: list[str]
    """Members that do not serve the new version yet. They heal by themselves."""
    phases: dict[str, float]
    """Phase → seconds: `wait_s` (for the fleet, the lock and the workers' reports), `prepare_s`, `gate_s`, `commit_s`,
    `open_s`, `other_s`. They add up to the seconds of the update. If a trainer pushes between two calls, `receive_s` is
    the time between them."""
    encoding: NotRequired[Encoding]
    """`full`, `delta` or `partial`: the form in which the weights were sent."""
    sent_bytes: NotRequired[int]
    """The bytes of the tensors that each worker took."""
    model_bytes: NotRequired[int]
    """The bytes of all tensors of the version."""
    sources: NotRequired[dict[str, list[SourceUse]]]
    """Worker → the bytes that it took from each source, if workers fetched from one another: the largest sources of 64
    workers."""
    canary: NotRequired[CanarySummary]
    """The result of the numeric canary, if an engine scored it."""
    num_buckets_received: NotRequired[int]
    """The number of buckets that a trainer has pushed."""
    workers: list[WorkerEntry]


class PreparedUpdate(Merged):
    update_id: str
    ready: Literal[True]
    digest: str | None
    """The digest of the staged weights. None: their bytes are still to come."""
    excluded: list[str]
    workers: list[WorkerEntry]


class ReceivedPart(Merged):
    update_id: str
    missing: int
    """Tensors of the model that are still to come."""
    tensors: int
    bytes: int
    workers: list[WorkerEntry]


class LabelledUpdate(Merged):
    update_id: str
    label: str
    workers: list[WorkerEntry]


class AbortedUpdate(Merged):
    update_id: str
    workers: list[WorkerEntry]


class UpdatedWorker(TypedDict):
    """One worker's outcome of an update, in the history."""

    incarnation: NotRequired[str]
    status: NotRequired[Literal["ok", "error", "skipped"]]
    error: NotRequired[dict[str, Any]]
    """The worker's error: `code`, `message`."""


class PastUpdate(TypedDict):
    """One update of the history."""

    update_id: str
    """The request id; empty for sequence 0, the workers' own model."""
    label: str
    outcome: UpdateOutcome
    """`prepared`: the update was prepared by a call of its own, and waits for complete or abort."""
    who: str
    """The client that coordinated it. Empty: the entry was made from the record alone."""
    asked_by: str
    """The id of the HTTP key with which the caller asked; over NATS the public key that it says is its own, with
    ` (said)`. Empty: it has no key."""
    caller: str
    """The process that asked, such as `train.py@gpu3:4711`. If it asked over HTTP, its address follows."""
    began_at: NotRequired[float]
    """Unix seconds."""
    ended_at: float | None
    """Unix seconds. None: the update has not ended, or its coordinator died."""
    version: VersionReply | None
    """The committed version. None: nothing was committed."""
    error: NotRequired[dict[str, Any]]
    """The error: `code`, `message`, and its facts without `workers`. A committed update has one if too few workers
    served it, or if the number was never reported."""
    phases: dict[str, float]
    """Phase → seconds. Once the update has ended, they add up to the time from `began_at` to `ended_at`."""
    workers: dict[str, UpdatedWorker]
    """Worker → its outcome."""
    workers_left_out: int
    """The number of successful workers that are not listed, to save space."""
    excluded: list[str]
    canary: NotRequired[CanarySummary]
    """The result of the numeric canary, if an engine scored it."""
    target: NotRequired[dict[str, Any]]
    """The target of the request: the fields of `BaseTarget` or of `LoraTarget`."""
    transport: dict[str, Any] | None
    """The transport of the request, without its secret. None for sequence 0."""
    digest: NotRequired[str]
    """The committed digest, or the digest that the caller stated."""
    cast: bool
    refetchable: bool
    """A worker can fetch the weights again."""
    encoding: Encoding
    base: NotRequired[str]
    """For a delta or a partial version: the digest of the version that it changed."""
    sent_bytes: NotRequired[int]
    """The bytes of the tensors that each worker took. Absent: not known."""
    model_bytes: NotRequired[int]
    """The bytes of all tensors of the version."""
    rollback: NotRequired[dict[str, Any]]
    """The version that the update went back to, as the caller named it."""
    sources: dict[str, list[SourceUse]]
    """Worker → the bytes that it took from each source, if workers fetched from one another."""
    num_buckets: NotRequired[int]
    """The number of buckets that were pushed. Absent: the workers fetched the weights."""
    step: NotRequired[int]
    """The trainer's step, as the caller gave it."""


class PastUpdates(Merged):
    updates: list[PastUpdate]
    """Newest first."""
    workers: list[WorkerEntry]


class FormedTransport(Merged):
    world_size: NotRequired[int]
    """The ranks of a group: those of the trainer and those of the workers."""
    rank_offsets: NotRequired[dict[str, int]]
    """Worker → its first rank in a group."""
    rank_offset: NotRequired[int]
    """The number of the trainer's ranks in a group that the trainer forms by itself."""
    fleet_ranks: NotRequired[int]
    """The number of the workers' ranks in such a group."""
    workers: list[WorkerEntry]


class MemoryOnWorker(WorkerEntry, MemoryReply):
    """The memory that one worker has released or resumed."""


class FleetMemory(Merged):
    workers: Rows[MemoryOnWorker]


class WeightChecksOnWorker(WorkerEntry, CheckWeightsReply):
    """One worker's checks, rank by rank."""


class FleetWeightChecks(Merged):
    workers: Rows[WeightChecksOnWorker]
