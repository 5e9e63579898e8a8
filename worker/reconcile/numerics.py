"""Decides by the numeric canary whether a worker may serve the weights that it has swapped in. Pure.

Tokens of running requests wait from a swap until its verdict (`flow`). A worker that fails closes with the reason
`numerics`, its running requests continue on other workers, and it fetches the weights again a few times.
"""

from __future__ import annotations

from typing import Literal

from rl_plane.commit.canary_rules import Verdict, evaluate_worker
from rl_plane.errors import WrongNumerics
from rl_plane.protocol.canary import CanaryRecord
from rl_plane.protocol.record import DecisionRecord
from worker.reconcile.worker_state import Scores, WorkerState

HEAL_TRIES = 3
"""After so many swaps in a row that fail, the engine would fail each time. The worker waits for the next decision."""
NOT_SCORED = "the weights were not scored yet"

Flow = Literal["open", "held", "cut"]


class Numerics:
    """The verdict on the weights of one worker, and whether tokens made with them may go out.

    `kind`: the engine's kind (`rl_plane.protocol.canary.engine_kind`). None: it can't score, and every version
    passes."""

    def __init__(self, state: WorkerState, kind: str | None) -> None:
        self.kind = kind
        self.flow: Flow = "open"
        """`held`: tokens of running requests wait for the verdict. `cut`: these requests continue on other workers."""
        self.verdict: Verdict | None = None
        """The verdict on the weights that the engine holds now. None: they have no verdict yet."""
        self.cuts = 0
        """Counts how often all running requests were ended. A request that began before the last time delivers no more:
        its reader may be slow, so tokens that must not go out may still wait for it."""
        self.failed: Scores | None = None
        """The scores of this decision's weights when they last failed. The weights may be dropped and fetched again
        while a coordinator still asks for the scores."""
        self._state = state
        self._tries = 0
        self._last: tuple[CanaryRecord, Scores, Verdict] | None = None
        """The canary and the scores that were evaluated last, and their verdict."""

    def wanted(self, record: DecisionRecord | None) -> CanaryRecord | None:
        """Returns the canary that the engine has to score now. None: there is nothing to score."""
        state = self._state
        if record is None or self.kind is None or record.canary is None or state.released:
            return None
        if state.digest != record.version.digest or self._is_scored(record.canary):
            return None
        return record.canary

    def new_decision(self, record: DecisionRecord) -> None:
        """Takes a new decision. Weights without a verdict get none any more, so tokens made with them do not go out."""
        self._tries = 0
        self.failed = None
        if self.have_run and record.version.digest != self._state.digest:
            self.flow = "cut"

    @property
    def have_run(self) -> bool:
        """Whether running requests may have computed with weights that did not pass. No request computes while
        memory is released."""
        return self.flow == "cut" or (self.flow == "held" and not self._state.released)

    def swapped(self, record: DecisionRecord | None) -> None:
        """Notes that other base weights are here."""
        if self.have_run:
            self.cuts += 1
        awaited = record is not None and record.canary is not None and self.kind is not None
        self.flow = "held" if awaited else "open"
        self.verdict = None

    def needs_others(self, record: DecisionRecord) -> bool:
        """Returns whether the record has nothing to compare this worker's scores with."""
        if record.canary is None or self.kind is None or self._state.released:
            return False
        return self.verdict is None or (self.verdict.passed and self.verdict.against == "nothing")

    def update_admission(self, record: DecisionRecord, final: bool) -> None:
        """Sets verdict, admission and flow. `final`: the worker waits for no other worker's scores."""
        state, canary = self._state, record.canary
        if canary is None or self.kind is None:
            state.open("numerics")
            self.flow = "cut" if self.flow == "cut" else "open"
            return
        if state.digest != record.version.digest:
            return  # a worker that failed stays closed until other weights are here
        if not self._is_scored(canary):
            if state.released:
                state.open("numerics")
            else:
                state.close("numerics", NOT_SCORED)
            return
        assert state.scores is not None
        verdict = self.verdict = self._evaluated(canary, state.scores)
        if not verdict.passed:
            state.close("numerics", state.scores.error or verdict.message)
            self.flow = "cut"
            self.failed = state.scores
            return
        self.failed = None
        state.open("numerics")
        if self.flow == "cut":  # the record overrules the values that these weights missed
            self.cuts += 1
            self.flow = "held"
        if self.flow == "held" and (final or verdict.against != "nothing"):
            self.flow = "open"

    def _evaluated(self, canary: CanaryRecord, scores: Scores) -> Verdict:
        """Returns the verdict on these scores. The worker asks at each tick, so it evaluates only what is new."""
        assert self.kind is not None
        if self._last is None or self._last[0] is not canary or self._last[1] is not scores:
            self._last = canary, scores, evaluate_worker(canary, self.kind, scores.vectors)
        return self._last[2]

    def scores_for(self, record: DecisionRecord) -> Scores | None:
        """Returns the scores that a coordinator of this decision needs: of the present weights, or of weights that
        failed and are being fetched again. None: the engine has not scored this decision's canary."""
        if record.canary is None or self.kind is None:
            return None
        state = self._state
        here = state.scores if state.digest == record.version.digest else None
        for scores in (here, self.failed):
            if scores is not None and scores.sequences == record.canary.sequences:
                return scores
        return None

    @property
    def gave_up(self) -> bool:
        """Whether the weights have failed, and the worker does not fetch them again: another try would fail, too."""
        verdict = self.verdict
        if verdict is None or verdict.passed or self._state.digest is None:
            return False
        return verdict.reason == "tie" or self._tries >= HEAL_TRIES

    def take_heal(self) -> bool:
        """Returns whether to fetch these weights again. Each True counts as one try."""
        if self.verdict is None or self.verdict.passed or self.gave_up:
            return False
        self._tries += 1
        return True

    def try_again(self) -> None:
        self._tries = 0

    def delivers(self, began: int) -> bool:
        """Returns whether a token may go out now. WrongNumerics: never: its request continues on another worker.
        `began`: the value of `cuts` when the request began."""
        lost = self.flow == "held" and self._state.digest is None
        if self.flow == "cut" or lost or began != self.cuts:
            raise WrongNumerics(
                f"worker {self._state.instance_id} has failed the canary with its new weights",
                retry_after_s=1.0,
                fix="send it again; if error.partial has tokens, after those (migrate: true does so)",
            )
        return self.flow == "open"

    def _is_scored(self, canary: CanaryRecord) -> bool:
        scores = self._state.scores
        return scores is not None and scores.sequences == canary.sequences
