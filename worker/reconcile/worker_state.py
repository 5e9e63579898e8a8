"""What one worker knows of itself: fence, admission, pause, version. Pure; time is passed in.

Admission is not stored but follows from the reasons against it, so nothing can open a worker while one stands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from rl_plane.errors import Conflict, FenceRequired, NotAdmitted, StaleFence, WrongIncarnation
from rl_plane.protocol.canary import Sequences
from rl_plane.protocol.envelope import Request
from rl_plane.protocol.serving_lease import ServingLease
from rl_plane.protocol.versions import VersionReply, WeightVersion
from rl_plane.protocol.worker_ops import AdmissionState, PauseState

Reason = Literal[
    "starting",  # the record has not been read yet
    "behind",  # its weights are not the committed ones: it is fetching them, or `detail` says why it can't
    "updating",  # a decision is made that not everybody may know yet
    "disabled",  # an operator took it out
    "draining",  # an operator lets its requests end
    "leaving",  # its process ends
    "memory",  # memory was released
    "numerics",  # its weights compute something else than they should, or nobody has looked yet
    "checking",  # all of its weights are read, and requests would wait for that
    "engine",  # the engine does not answer
]


@dataclass(slots=True)
class TokenLoad:
    """Of the requests that this worker has: what frontends weigh it by."""

    running: int = 0
    """Prompts, and what was made after them."""
    waiting: int = 0
    """Prompts that are still to be computed."""


class TokenShare:
    """One request's part of it, from its arrival to `gone`."""

    __slots__ = ("_begun", "_load", "_tokens")

    def __init__(self, load: TokenLoad, prompt: int) -> None:
        """`prompt`: its tokens, or a guess at them."""
        self._load = load
        self._tokens = prompt
        self._begun = False
        load.waiting += prompt

    def made(self, tokens: int, prompt: int | None) -> None:
        """`prompt`: its tokens, where they are told."""
        if not self._begun:
            self._begun = True
            self._load.waiting -= self._tokens
            self._tokens = prompt if prompt is not None else self._tokens
            self._load.running += self._tokens
        self._tokens += tokens
        self._load.running += tokens

    def gone(self) -> None:
        """May come twice."""
        if self._begun:
            self._load.running -= self._tokens
        else:
            self._load.waiting -= self._tokens
        self._tokens = 0


@dataclass(frozen=True, slots=True)
class Scores:
    """What the engine computes with the base weights that it holds."""

    sequences: Sequences
    vectors: list[list[float]]
    """The vectors that the engine gave. Empty: it gave none, and `error` says why."""
    error: str = ""


@dataclass(slots=True)
class WorkerState:
    instance_id: str
    incarnation: str
    fence: int = 0
    digest: str | None = None
    """Of the weights that the engine holds; None: of no known ones."""
    version: WeightVersion | None = None
    """The committed version that they are; None: not known to be one."""
    scores: Scores | None = None
    """None: these weights were not scored yet."""
    adapters: dict[str, WeightVersion] = field(default_factory=dict)
    """The LoRA adapters that the engine holds."""
    sequence: int | None = None
    """Of the committed state that is held whole, adapters included; None: of none."""
    since: float = 0.0
    """Monotonic seconds when admission, pause or version last changed."""
    closed: dict[Reason, str] = field(default_factory=lambda: {"starting": ""})
    """Reason → detail."""
    pause_mode: str | None = None
    """None: running."""
    pause_until: float = 0.0
    """Monotonic seconds at which the lease ends."""
    lease: ServingLease = field(default_factory=ServingLease)
    """Requests are admitted while it holds; by monotonic seconds."""
    released: set[str] = field(default_factory=set)
    """Memory tags that are released: without the weights' nothing is received, without all nothing generates."""
    tokens: TokenLoad = field(default_factory=TokenLoad)

    # ---- who may change it ----

    def check_changing(self, request: Request) -> None:
        """A changing op carries a fence and names this very process."""
        if request.fence is None or request.incarnation is None:
            raise FenceRequired(
                f"{request.op} changes a worker, so it needs a fence and an incarnation",
                field="fence" if request.fence is None else "incarnation",
                fix="call it by RlClient, over HTTP, or by a message to the fleet subject `<ns>.<comp>.fleet`",
            )
        if request.incarnation != self.incarnation:
            raise WrongIncarnation(
                f"{self.instance_id} is another process than the one that was meant", incarnation=self.incarnation
            )

    def check_fence(self, fence: int) -> None:
        """Again at the moment of the change: another coordinator may have taken over while it waited. Its fence is
        higher."""
        if fence != self.fence:
            raise StaleFence(
                f"the fence {fence} is not {self.fence}: another coordinator has taken over",
                fence=self.fence,
            )

    # ---- admission ----

    def close(self, reason: Reason, detail: str = "") -> bool:
        """Whether that changed anything."""
        if self.closed.get(reason) == detail:
            return False
        self.closed[reason] = detail
        return True

    def open(self, reason: Reason) -> bool:
        return self.closed.pop(reason, None) is not None

    def admission(self) -> AdmissionState:
        reasons = [f"{reason}: {detail}" if detail else reason for reason, detail in self.closed.items()]
        return AdmissionState(open=not reasons, reasons=reasons)

    def confirm_lease(self, asked_at: float, connection: tuple[str, int]) -> None:
        """The leader was asked at `asked_at`, and its record is the newest that is known here."""
        self.lease.confirm(asked_at, connection)

    def check_lease(self, now: float, connection: tuple[str, int]) -> None:
        if not self.lease.holds(now, connection):
            raise NotAdmitted(
                f"worker {self.instance_id} has not confirmed the committed version lately", retry_after_s=1.0
            )

    def check_admitted(self, sequence: int | None, incarnation: str | None) -> None:
        """May a generation request enter? `sequence`: the committed one that its frontend knows."""
        if self.closed:
            raise NotAdmitted(
                f"worker {self.instance_id} is closed: {', '.join(self.admission()['reasons'])}", retry_after_s=1.0
            )
        if incarnation is not None and incarnation != self.incarnation:
            raise NotAdmitted(f"worker {self.instance_id} is a new process")
        if self.sequence is None or (sequence is not None and sequence != self.sequence):
            raise NotAdmitted(
                f"{self.instance_id} serves sequence {self.sequence}, the request is for {sequence}",
                sequence=self.sequence,
            )

    # ---- pause ----

    def pause(self, mode: str, now: float, lease_s: float) -> None:
        self.pause_mode, self.pause_until = mode, now + lease_s

    def keep_paused(self, mode: str, now: float, lease_s: float) -> None:
        """Paused for so long at least, and if it was paused before, in that mode; 0: it stays as it is."""
        if lease_s:
            self.pause_mode = self.pause_mode or mode
            self.pause_until = max(self.pause_until, now + lease_s)

    def resume(self) -> None:
        self.pause_mode, self.pause_until = None, 0.0

    def pause_ran_out(self, now: float) -> bool:
        return self.pause_mode is not None and now >= self.pause_until

    def pause_state(self, now: float) -> PauseState:
        if self.pause_mode is None:
            return PauseState(paused=False, mode=None, lease_left_s=None)
        return PauseState(paused=True, mode=self.pause_mode, lease_left_s=max(0.0, self.pause_until - now))

    # ---- memory ----

    @property
    def may_run(self) -> bool:
        """Weights of a version and all memory are here. Else the engine stays frozen, whether it is paused or not."""
        return self.digest is not None and not self.released

    def release(self, tags: Iterable[str]) -> None:
        self.released |= set(tags)
        self.close("memory", _released(self.released))

    def take_back(self, tags: Iterable[str]) -> None:
        self.released -= set(tags)
        if self.released:
            self.close("memory", _released(self.released))
        else:
            self.open("memory")

    def check_weights_here(self) -> None:
        """Weights can be written. The KV cache may be released still, as it is for trainers that share the GPU."""
        if "weights" in self.released:
            raise Conflict(
                f"memory is released ({', '.join(sorted(self.released))})",
                field="memory",
                fix="resume_memory of the weights first; the KV cache may come back after the update",
            )

    # ---- version ----

    def hold(self, version: WeightVersion) -> None:
        """Weights that were just swapped in, or those that are here under a new label."""
        if version.digest != self.digest:
            self.scores = None
        self.digest, self.version = version.digest, version

    def lose_weights(self, why: str) -> None:
        """Nobody serves before weights are there again, verified."""
        self.digest = self.version = self.sequence = self.scores = None
        self.close("behind", why)

    def wire_version(self) -> VersionReply | None:
        return self.version.to_wire() if self.version else None


def _released(tags: Iterable[str]) -> str:
    return f"released: {', '.join(sorted(tags))}"
