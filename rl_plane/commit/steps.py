"""The instructions, events and results of `UpdateMachine`: the whole interface between the machine and its shell.

Each instruction names the event that answers it after an arrow. Any instruction may be answered by Failed instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_plane.errors import PlaneError
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.canary import CanaryHistory
from rl_plane.protocol.record import (
    DecisionRecord,
    DesiredPause,
    KvPolicy,
    PauseMode,
    UpdateSession,
    VersionSource,
)
from rl_plane.protocol.stored import Stored
from rl_plane.protocol.update_requests import Part, UpdateWeights
from rl_plane.protocol.versions import WeightVersion

NO_HISTORY = CanaryHistory()
Members = Mapping[str, str]
"""instance_id → incarnation."""

Phase = Literal[
    "survey",  # read the fleet, the committed record, and what another coordinator has left
    "clear",  # drop what a silent trainer has left staged
    "begin",  # begin the entry in the history
    "prepare",  # stage and verify on every worker
    "receive",  # receive tensors that the trainer sends now
    "recheck",  # compare the fleet with the fleet that the caller pinned
    "abort",  # drop what is staged
    "session",  # save the session, or end it
    "decide",  # write the record: from here on the version is committed
    "resolve",  # read the outcome of a decision whose answer was lost
    "pause",  # save that the fleet stays paused
    "gate",  # every member and frontend learns the decision, and closes
    "commit",  # swap, on all gated workers
    "roll",  # swap, worker by worker
    "leases",  # wait for processes that did not acknowledge the decision, until they can't serve any more
    "open",  # the record says that the version may be served; members and frontends learn it
    "watch",  # read what the workers serve
    "end",
]

# ---- instructions ----


@dataclass(frozen=True, slots=True)
class Survey:
    """Asks every member for its record, reads session and desired pause from the leader, and seals the newest record
    that any of them has. → Surveyed"""

    phase: Phase = "survey"


@dataclass(frozen=True, slots=True)
class ResolveWrite:
    """Takes a new fence, then does what Survey does. A write under the old fence counts only if it is found now.
    → Surveyed"""

    phase: Phase = "resolve"


@dataclass(frozen=True, slots=True)
class Needs:
    """The workers without which an update can't be committed."""

    update_id: str
    each: frozenset[str]
    """The failure of one of these ends the update."""
    at_least: int = 1
    """The update also ends if fewer workers than this are left that have not failed."""

    def are_lost(self, failed: Collection[str], asked: int) -> bool:
        """Reports whether the failures so far decide that the update can't be committed, whatever the others reply."""
        return not self.each.isdisjoint(failed) or asked - len(failed) < self.at_least


@dataclass(frozen=True, slots=True)
class SendOp:
    """Sends one op to each of these workers at once. Workers that have left meanwhile get no reply. → Answered"""

    phase: Phase
    op: str
    body: Mapping[str, Any]
    workers: Sequence[str]
    timeout_s: float | None = None
    each: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Worker → more fields of its body."""
    needs: Needs | None = None
    """The workers that an update needs. Once they are lost, the shell tells all workers to stop, and returns."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Sends `follow_record` to every member of this moment, and to every listed frontend. → RecordAcks"""

    phase: Phase
    record: DecisionRecord
    sequence: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Write:
    """Writes the record over this coordinator's own last write. With phase `decide` it is a new decision. → Written.
    StaleFence: another writer has replaced that write."""

    phase: Phase
    record: DecisionRecord


@dataclass(frozen=True, slots=True)
class BeginJournal:
    """Begins the update's entry in the history. → Done"""

    base: DecisionRecord
    """The committed record before this update."""
    phase: Phase = "begin"


@dataclass(frozen=True, slots=True)
class Put:
    """Writes a key of the state bucket. NATS takes it only while this coordinator holds the lock. → Done"""

    phase: Phase
    key: str
    value: Stored | None
    """None: an empty value, which ends the session."""
    ttl_s: int | None = None
    """The seconds after which the key expires. None: it stays."""


@dataclass(frozen=True, slots=True)
class WaitSilent:
    """Waits until these have left, or have lost their serving leases since the last Announce. → Done"""

    workers: Members
    frontends: Sequence[str]
    phase: Phase = "leases"


@dataclass(frozen=True, slots=True)
class Watch:
    """Waits until every member serves the record, or the time is over. → Answered with each worker's `state`"""

    record: DecisionRecord
    timeout_s: float
    phase: Phase = "watch"


@dataclass(frozen=True, slots=True)
class End:
    """The command has ended."""

    result: Result | PlaneError
    phase: Phase = "end"


Instruction = Survey | ResolveWrite | SendOp | Announce | Write | BeginJournal | Put | WaitSilent | Watch | End

# ---- events ----


@dataclass(frozen=True, slots=True)
class Surveyed:
    """The fleet and the state bucket at one moment."""

    members: Members
    fingerprint: str
    epoch: int
    reports: Sequence[WorkerReply]
    """Each member's reply to `report_record`."""
    record: DecisionRecord | None
    """The newest record, sealed by this command. None: no worker has fixed sequence 0 yet."""
    written: int
    """The record's sequence in the bucket."""
    session: UpdateSession | None
    pause: DesiredPause
    pause_written: int
    """The pause's sequence in the bucket."""
    history: CanaryHistory = NO_HISTORY
    """The scores of earlier versions for the numeric canary."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The workers' replies to one op."""

    replies: Sequence[WorkerReply]


@dataclass(frozen=True, slots=True)
class RecordAcks:
    """The acknowledgements of one announced record."""

    members: Members
    replies: Sequence[WorkerReply]
    silent_frontends: Sequence[str]
    """Frontends that have not acknowledged it."""


@dataclass(frozen=True, slots=True)
class Written:
    """A write that the server has accepted."""

    record: DecisionRecord
    """The record as the server has it, with the fence of this coordinator."""
    sequence: int
    """The record's sequence in the bucket."""


@dataclass(frozen=True, slots=True)
class Done:
    """The instruction was carried out, and there is nothing to report."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The instruction could not be carried out."""

    error: PlaneError


Event = Surveyed | Answered | RecordAcks | Written | Done | Failed

# ---- results ----


@dataclass(frozen=True, slots=True)
class Prepared:
    """Enough workers hold the same verified bytes, or all workers listen for them."""

    digest: str
    """Empty: the workers listen."""
    ready: Members
    excluded: list[str]
    refetchable: bool
    failed: Sequence[WorkerReply] = ()
    """The error replies of workers that could not prepare."""
    session: UpdateSession | None = None
    """The session of an update that waits for complete or abort."""
    replies: Sequence[WorkerReply] = ()
    """The replies of the workers that prepared."""
    sent_bytes: int | None = None
    """The bytes of the tensors that a worker took. None: not known."""
    model_bytes: int | None = None
    """The bytes of all tensors of the version."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The facts of an update's reply."""

    version: WeightVersion
    replies: Sequence[WorkerReply] = ()
    excluded: Sequence[str] = ()
    canary: Mapping[str, Any] | None = None
    """The result of the numeric canary over all workers. None: no worker scored anything."""
    source: VersionSource | None = None
    """The source of the version that the update made. None: it made none."""


@dataclass(frozen=True, slots=True)
class PartReceived:
    """Every rank of every worker has staged a part."""

    session: UpdateSession
    missing: int
    """The number of tensors that are still to come."""


Result = Outcome | Prepared | PartReceived | UpdateSession


SESSION_IDLE_S = 120
"""A prepared update is aborted when its trainer has been silent for this long, because its staging takes as much memory
as a model. A call that waits for the lock is not silence (`session_keepalive.py`)."""


@dataclass(frozen=True, slots=True)
class UpdateCommand:
    """A command to a coordinator."""

    kind: Literal["update", "prepare", "receive_part", "label", "complete", "abort", "finish", "new_run"]
    """`finish` only finishes what a coordinator that died had decided."""
    update_id: str
    body: UpdateWeights | None = None
    fingerprint: str | None = None
    """The fleet that the caller pinned. The update is aborted if the fleet is another one after preparing."""
    digest: str | None = None
    """For `complete`: the digest that the trainer has sent."""
    version: str | None = None
    """For `receive_part`, `label` and `complete`: the label, if the trainer gives it only now."""
    part: Part | None = None
    """For `receive_part`."""
    pause_mode: PauseMode | None = None
    """For `receive_part`: replaces the pause mode of the policy."""
    kv: KvPolicy | None = None
    """For `receive_part` and `complete`: replaces the `kv` of the policy."""
    min_ready: int = 1
    """For `complete` of an update that was decided: the policy's value, which the ended session does not have."""
    before: VersionSource | None = None
    """For a roll-back to a delta or a partial version: the source of the version that it changed."""
    session_idle_s: int = SESSION_IDLE_S
    """For `prepare`: the seconds after which the update ends if its trainer is silent."""
