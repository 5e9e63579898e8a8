"""What a coordinator is told to do, and what comes back: the instructions and events of `update.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_plane.errors import PlaneError
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.canary import CanaryHistory
from rl_plane.protocol.record import DecisionRecord, DesiredPause, PauseMode, Source, UpdateSession
from rl_plane.protocol.update_requests import Part, UpdateWeights
from rl_plane.protocol.versions import WeightVersion

NO_HISTORY = CanaryHistory()
Members = Mapping[str, str]
"""instance_id → incarnation."""

Phase = Literal[
    "survey",  # who is there, what is committed, what did another coordinator leave?
    "clear",  # drop what a trainer that fell silent has left staged
    "begin",  # tell the history
    "prepare",  # stage and verify, everywhere
    "receive",  # receive tensors that the trainer sends now
    "recheck",  # is the fleet still the one that the caller pinned?
    "abort",  # drop it again
    "session",  # note that it waits for another call, or that this wait is over
    "decide",  # the record: from here on the version is committed
    "settle",  # was it, when the answer was lost? A survey under a new fence
    "pause",  # note that the fleet is to stay paused
    "gate",  # every member and frontend learns the decision, and closes
    "commit",  # swap, on all that are gated
    "roll",  # swap, worker by worker
    "leases",  # wait until whoever could not be told can't serve any more
    "open",  # the record says that it may be served; members and frontends learn it
    "watch",  # NATS was lost on the way: look how the workers get on by themselves
    "end",
]

# ---- instructions ----


@dataclass(frozen=True, slots=True)
class Survey:
    """Asks every member to `report_record`, reads session and desired pause from the leader, and seals the newest
    record that anybody has. With phase `settle` it takes a new fence first, so that whatever was written before under
    the old one counts only if it is found now. → Surveyed, or Failed"""

    phase: Phase = "survey"


@dataclass(frozen=True, slots=True)
class SendOp:
    """One op on each of these workers, at once; those that have left meanwhile are left out. → Answered"""

    phase: Phase
    op: str
    body: Mapping[str, Any]
    workers: Sequence[str]
    timeout_s: float | None = None
    together: str | None = None
    """An update: the first that fails ends it on all the others, which wait for what will not come any more."""


@dataclass(frozen=True, slots=True)
class Announce:
    """`follow_record` to every member of this moment, and to every frontend that is listed. → Told"""

    phase: Phase
    record: DecisionRecord
    sequence: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Write:
    """The record, in the place of what this call has sealed or written last. Phase `decide`: a new decision.
    → Written, or Failed: StaleFence when another writer has been there"""

    phase: Phase
    record: DecisionRecord


@dataclass(frozen=True, slots=True)
class Note:
    """The desired pause, the history's entry, what the canary gave, or the session (None: it is over). → Done"""

    phase: Phase
    session: UpdateSession | None = None
    pause: DesiredPause | None = None
    base: DecisionRecord | None = None
    canary: CanaryHistory | None = None


@dataclass(frozen=True, slots=True)
class WaitSilent:
    """Until these have left, or have lost their serving leases since the last Tell. → Done"""

    workers: Members
    frontends: Sequence[str]
    phase: Phase = "leases"


@dataclass(frozen=True, slots=True)
class Watch:
    """Until every member serves the record, or so long. → Answered with their `state`"""

    record: DecisionRecord
    timeout_s: float
    phase: Phase = "watch"


@dataclass(frozen=True, slots=True)
class End:
    """It is over."""

    result: Result | PlaneError
    phase: Phase = "end"


Instruction = Survey | SendOp | Announce | Write | Note | WaitSilent | Watch | End

# ---- events ----


@dataclass(frozen=True, slots=True)
class Surveyed:
    members: Members
    fingerprint: str
    epoch: int
    reports: Sequence[WorkerReply]
    record: DecisionRecord | None
    """The newest, sealed by this call. None: no worker has fixed sequence 0 yet."""
    written: int
    """Its sequence in the bucket."""
    session: UpdateSession | None
    pause: DesiredPause
    pause_written: int
    """Its sequence in the bucket."""
    history: CanaryHistory = NO_HISTORY
    """What earlier versions gave for the numeric canary."""


@dataclass(frozen=True, slots=True)
class Answered:
    replies: Sequence[WorkerReply]


@dataclass(frozen=True, slots=True)
class RecordAcks:
    members: Members
    replies: Sequence[WorkerReply]
    silent_frontends: Sequence[str]


@dataclass(frozen=True, slots=True)
class Written:
    record: DecisionRecord
    """The record that the server has, with the fence of this call."""
    sequence: int
    """Its sequence in the bucket."""


@dataclass(frozen=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, slots=True)
class Failed:
    """The instruction could not be carried out."""

    error: PlaneError


Event = Surveyed | Answered | RecordAcks | Written | Done | Failed

# ---- results ----


@dataclass(frozen=True, slots=True)
class Prepared:
    """Enough workers hold the same verified bytes, or all listen for them."""

    digest: str
    """Empty: they listen."""
    ready: Members
    excluded: list[str]
    refetchable: bool
    failed: Sequence[WorkerReply] = ()
    """What those that could not prepare have said."""
    session: UpdateSession | None = None
    """Of an update that waits for complete or abort."""
    replies: Sequence[WorkerReply] = ()
    """The answers of the workers that prepared."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an update's reply is made of."""

    version: WeightVersion
    replies: Sequence[WorkerReply] = ()
    excluded: Sequence[str] = ()
    canary: Mapping[str, Any] | None = None
    """What the numeric canary has shown, over all workers. None: nothing was scored."""


@dataclass(frozen=True, slots=True)
class PartReceived:
    """A part that every rank has staged."""

    session: UpdateSession
    missing: int
    """Tensors that are still to come."""


Result = Outcome | Prepared | PartReceived | UpdateSession


@dataclass(frozen=True, slots=True)
class UpdateCommand:
    """What is asked of a coordinator."""

    kind: Literal["update", "prepare", "receive_part", "label", "complete", "abort", "finish", "new_run"]
    """`finish`: only what a dead coordinator has left."""
    update_id: str
    body: UpdateWeights | None = None
    fingerprint: str | None = None
    """The fleet that the caller pinned: abort if it is another one after preparing."""
    digest: str | None = None
    """To complete an update: what the caller says was sent."""
    version: str | None = None
    """To feed, name or complete an update: the label, where it is given only now."""
    part: Part | None = None
    """To feed an update."""
    pause_mode: PauseMode | None = None
    """To feed an update: in place of its policy's."""
    min_ready: int = 1
    """To complete an update that was decided: its policy's, which its session does not tell any more."""
    before: Source | None = None
    """To go back to a version that was sent as a delta: the source of the one that it changed."""
