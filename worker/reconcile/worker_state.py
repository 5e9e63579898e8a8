"""The state of one worker: fence, admission, pause, version, memory. Pure: the caller passes the time in.

The worker is open if there is no reason against it. So nothing can open a worker while one reason is left.
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
    "behind",  # its weights are not the committed ones: it fetches them, or `detail` says why it can't
    "updating",  # a decision is made that some processes may not know yet
    "disabled",  # an operator closed it
    "draining",  # an operator lets its requests end
    "leaving",  # its process ends
    "memory",  # memory was released
    "numerics",  # its weights failed the canary, or were not scored yet
    "checking",  # an op reads all of its weights, and requests would wait for that
    "engine",  # the engine does not answer
]

OPENED_BY_ENABLE = frozenset[Reason]({"disabled", "draining"})
"""An operator has closed the worker for these reasons, and opens it again."""


@dataclass(slots=True)
class TokenLoad:
    """Counts the tokens of this worker's requests. Frontends choose a worker by them."""

    running: int = 0
    """Tokens of the running requests: their prompts, and what the engine has made."""
    waiting: int = 0
    """Prompt tokens that the engine has still to compute."""
    made: int = 0
    """Tokens that the engine has made since the start."""
    prompts: int = 0
    """Prompt tokens of the requests that have begun since the start."""
    ended: int = 0
    """Requests that the engine has ended since the start, by a stop or at their length."""


class TokenShare:
    """Counts one request into a TokenLoad, from its arrival to `gone`."""

    __slots__ = ("_begun", "_load", "_tokens")

    def __init__(self, load: TokenLoad, prompt: int) -> None:
        """`prompt`: the number of its tokens, or an estimate."""
        self._load = load
        self._tokens = prompt
        self._begun = False
        load.waiting += prompt

    def made(self, tokens: int, prompt: int | None) -> None:
        """Counts tokens that the engine has made. `prompt`: the number of prompt tokens, if the engine reports it."""
        if not self._begun:
            self._begun = True
            self._load.waiting -= self._tokens
            self._tokens = prompt if prompt is not None else self._tokens
            self._load.running += self._tokens
            self._load.prompts += self._tokens
        self._tokens += tokens
        self._load.running += tokens
        self._load.made += tokens

    def gone(self) -> None:
        """Ends the count. A second call does nothing."""
        if self._begun:
            self._load.running -= self._tokens
        else:
            self._load.waiting -= self._tokens
        self._tokens = 0


@dataclass(frozen=True, slots=True)
class Scores:
    """The canary's scores by the base weights that the engine holds."""

    sequences: Sequences
    vectors: list[list[float]]
    """One vector per sequence. Empty: the engine gave none, and `error` says why."""
    error: str = ""


@dataclass(slots=True)
class WorkerState:
    """The facts that admission, pause and version follow from."""

    instance_id: str
    incarnation: str
    fence: int = 0
    digest: str | None = None
    """The digest of the base weights that the engine holds. None: unknown."""
    version: WeightVersion | None = None
    """The committed version with this digest. None: no committed version is known to have it."""
    scores: Scores | None = None
    """The canary's scores. None: these weights were not scored yet."""
    adapters: dict[str, WeightVersion] = field(default_factory=dict)
    """The LoRA adapters that the engine holds."""
    sequence: int | None = None
    """The sequence of the committed state that the engine holds whole, adapters included. None: there is none."""
    since: float = 0.0
    """Monotonic seconds at which admission, pause or version last changed."""
    closed: dict[Reason, str] = field(default_factory=lambda: {"starting": ""})
    """The reasons why the worker is closed. Reason → detail."""
    pause_mode: str | None = None
    """The mode in which generation is paused. None: it runs."""
    pause_until: float = 0.0
    """Monotonic seconds at which the pause's lease ends."""
    pause_fence: int = 0
    """The fence of the last call that paused or resumed this worker. 0: there was none."""
    admission_fence: int = 0
    """The fence of the last call that opened or closed this worker for an operator. 0: there was none."""
    lease: ServingLease = field(default_factory=ServingLease)
    """The worker admits requests while this lease holds. In monotonic seconds."""
    released: set[str] = field(default_factory=set)
    """The released memory tags. Without `weights` no update can be received. Without any tag nothing generates."""
    tokens: TokenLoad = field(default_factory=TokenLoad)

    # ---- fence and incarnation ----

    def check_changing(self, request: Request) -> None:
        """Refuses a changing op that has no fence or incarnation, or names another process."""
        if request.fence is None or request.incarnation is None:
            raise FenceRequired(
                f"{request.op} changes a worker, so it needs a fence and an incarnation",
                field="fence" if request.fence is None else "incarnation",
                fix="call it by RlClient, over HTTP, or by a message to the fleet subject `<ns>.<comp>.fleet`",
            )
        if request.incarnation != self.incarnation:
            raise WrongIncarnation(
                f"{self.instance_id} is a new process since the caller read its incarnation",
                incarnation=self.incarnation,
            )

    def check_fence(self, fence: int) -> None:
        """Refuses a coordinator that was replaced while its op waited: the new one has a higher fence. Called just
        before the engine changes."""
        if fence != self.fence:
            raise StaleFence(
                f"the fence {fence} is not {self.fence}: another coordinator has taken over",
                fence=self.fence,
            )

    # ---- admission ----

    def close(self, reason: Reason, detail: str = "") -> bool:
        """Adds a reason against admission. Returns whether that changed anything."""
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
        """Extends the lease: the leader was asked at `asked_at`, and has the newest record that this worker knows."""
        self.lease.confirm(asked_at, connection)

    def check_lease(self, now: float, connection: tuple[str, int]) -> None:
        if not self.lease.holds(now, connection):
            raise NotAdmitted(
                f"worker {self.instance_id} has not confirmed the committed version in time", retry_after_s=1.0
            )

    def check_admitted(self, sequence: int | None, incarnation: str | None) -> None:
        """Raises NotAdmitted unless a generation request may enter. `sequence`: the committed sequence that its
        frontend knows."""
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
        """Pauses for at least so long. A pause that is there keeps its mode. 0: nothing changes."""
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
        """Whether the weights of a version and all memory are here. If not, the engine stays frozen."""
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
        """Conflict if the weights' memory is released. The KV cache's may be: trainers that share the GPU need it."""
        if "weights" in self.released:
            raise Conflict(
                f"memory is released ({', '.join(sorted(self.released))})",
                field="memory",
                fix="resume_memory of the weights first; resume_memory of the KV cache may follow the update",
            )

    # ---- version ----

    def hold(self, version: WeightVersion) -> None:
        """Notes the base weights that were swapped in, or a new label for the present weights."""
        if version.digest != self.digest:
            self.scores = None
        self.digest, self.version = version.digest, version

    def lose_weights(self, why: str) -> None:
        """Closes the worker until verified weights are here again."""
        self.digest = self.version = self.sequence = self.scores = None
        self.close("behind", why)

    def wire_version(self) -> VersionReply | None:
        return self.version.to_wire() if self.version else None


def _released(tags: Iterable[str]) -> str:
    return f"released: {', '.join(sorted(tags))}"
