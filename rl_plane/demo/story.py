"""The record of a run, step by step. The trainer writes it; the table and the report read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The numbers of one step."""

    step: int
    version: str
    """The label under which the step's completions were asked for."""
    reward: float
    """The mean over them."""
    completions: int
    mixed_version_completions: int
    """Completions with a token that is not labelled with the committed version."""
    by_worker: Mapping[str, int]
    """instance_id → completions."""
    max_logprob_diff: float
    canary_difference: float | None
    """The largest difference between the trainer's and the engines' log probabilities of the numeric canary, with the
    step's new weights; nats. None: no engine scored it."""
    mismatch_kl: float | None
    """The mismatch of the same canary: see `rl_plane.commit.canary_rules.mismatch_kl`."""
    workers: int
    """The number of workers that took the step's new weights."""
    rollout_s: float
    learn_s: float
    update_s: float
    """Seconds of the whole update."""
    repeats: int
    """HTTP calls that had to be made again, since the start of the run."""
    committed: str
    """The label of the step's new weights."""
    digest: str


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """A worker that is in the fleet at the end of the run."""

    instance_id: str
    version: str | None
    digest: str | None


@dataclass(slots=True)
class Story:
    """The events of one run so far."""

    planned: int
    """Steps."""
    steps: list[StepRecord] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    """Instance ids."""
    killed_at: int | None = None
    """The step during whose rollout the worker was killed."""
    killed_in_flight: int = 0
    """Requests that ran on the killed worker when it died."""
    started: list[str] = field(default_factory=list)
    """The instance ids of the workers started after the kill."""
    workers: list[WorkerEnd] = field(default_factory=list)
    elapsed_s: float = 0.0

    @property
    def by_worker(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for step in self.steps:
            total.update(step.by_worker)
        return total

    def first_step_of(self, instance_id: str) -> int | None:
        return next((step.step for step in self.steps if step.by_worker.get(instance_id)), None)

    @property
    def joined(self) -> list[str]:
        """The late workers that made completions."""
        return [key for key in self.started if self.first_step_of(key) is not None]
