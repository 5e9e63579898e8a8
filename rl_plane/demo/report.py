"""The demo's report: the numbers of a Story, the failures that they show, and the picture."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_plane.demo.reward import REWARD_RANGE, REWARD_TEXT
from rl_plane.demo.story import Story

MEAN_OVER = 5
"""The first and the last so many steps are compared by their mean reward: one step's noise is about 0.02."""
MIN_RISE = 0.1
"""The least rise of the reward, as a share of its range. It is far more than that noise."""
LOGPROB_TOLERANCE = 1e-3
"""Nats. In float32 the engine and the trainer differ by rounding, about 1e-6. Other weights, masks or positions differ
by far more than this."""
FLEET = 2
"""The number of workers at the end."""


def make_report(story: Story, trouble: str = "") -> dict[str, Any]:
    """The content of report.json, with `ok` and `failures`. `trouble`: the error that ended the run early."""
    rewards = [step.reward for step in story.steps]
    updates = [step.update_s for step in story.steps]
    last = story.steps[-1] if story.steps else None
    differences = [step.canary_difference for step in story.steps if step.canary_difference is not None]
    mismatches = [step.mismatch_kl for step in story.steps if step.mismatch_kl is not None]
    report: dict[str, Any] = {
        "steps": len(story.steps),
        "planned_steps": story.planned,
        "reward": REWARD_TEXT,
        "reward_first": statistics.fmean(rewards[:MEAN_OVER]) if rewards else None,
        "reward_last": statistics.fmean(rewards[-MEAN_OVER:]) if rewards else None,
        "reward_range": REWARD_RANGE,
        "max_logprob_diff": max((step.max_logprob_diff for step in story.steps), default=None),
        "logprob_tolerance": LOGPROB_TOLERANCE,
        "canary_updates": len(differences),
        "max_canary_difference": max(differences, default=None),
        "max_mismatch_kl": max(mismatches, default=None),
        "completions": sum(step.completions for step in story.steps),
        "mixed_version_completions": sum(step.mixed_version_completions for step in story.steps),
        "completions_by_worker": dict(story.by_worker),
        "killed": story.killed,
        "killed_at_step": story.killed_at,
        "killed_in_flight": story.killed_in_flight,
        "joined": story.joined,
        "joined_at_step": story.first_step_of(story.joined[0]) if story.joined else None,
        "http_repeats": last.repeats if last else 0,
        "version": last.committed if last else None,
        "digest": last.digest if last else None,
        "workers": [asdict(worker) for worker in story.workers],
        "update_seconds": _spread(updates),
        "rollout_seconds": _spread([step.rollout_s for step in story.steps]),
        "learn_seconds": _spread([step.learn_s for step in story.steps]),
        "elapsed_seconds": story.elapsed_s,
    }
    failures = [trouble] if trouble else failures_of(report)
    return {"ok": not failures, "failures": failures, **report, "per_step": [asdict(step) for step in story.steps]}


def failures_of(report: dict[str, Any]) -> list[str]:
    """The failures that the numbers show. A successful run has none."""
    failures = []
    if report["steps"] != report["planned_steps"] or report["steps"] < 2 * MEAN_OVER:
        failures.append(f"only {report['steps']} of {report['planned_steps']} steps were taken")
    if not report["steps"]:
        return failures
    rise = report["reward_last"] - report["reward_first"]
    if not rise >= MIN_RISE * report["reward_range"]:
        failures.append(f"the reward rose by {rise:.3f}, less than {MIN_RISE * report['reward_range']:g}")
    if report["mixed_version_completions"] != 0:
        failures.append(
            f"{report['mixed_version_completions']} of {report['completions']} completions are not labelled with "
            "the committed version"
        )
    if not report["completions"]:
        failures.append("no completion was made")
    if not report["max_logprob_diff"] <= report["logprob_tolerance"]:
        failures.append(
            f"the trainer's logprobs differ from the engines' by {report['max_logprob_diff']:.2e}, "
            f"more than {report['logprob_tolerance']:g}"
        )
    if not report[
        "canary_updates"
    ]:  # of a few it may be missing: a worker that is late at the gate swaps by itself
        failures.append("no update's canary was scored")
    elif not report["max_canary_difference"] <= report["logprob_tolerance"]:
        failures.append(
            f"after an update the engines' canary differs from the trainer's by {report['max_canary_difference']:.2e}, "
            f"more than {report['logprob_tolerance']:g}"
        )
    if not report["killed"]:
        failures.append("no worker was killed")
    if not report["joined"]:
        failures.append("no new worker joined and served")
    return failures + _failures_of_workers(report)


def _failures_of_workers(report: dict[str, Any]) -> list[str]:
    workers, failures = report["workers"], []
    if len(workers) != FLEET:
        failures.append(f"{len(workers)} workers are in the fleet at the end, not {FLEET}")
    alive = {worker["instance_id"] for worker in workers}
    if not set(report["joined"]) <= alive:
        failures.append("the worker that joined is gone at the end")
    if alive & set(report["killed"]):
        failures.append("the killed worker is still listed")
    for worker in workers:
        if (worker["version"], worker["digest"]) != (report["version"], report["digest"]):
            failures.append(
                f"worker {worker['instance_id']} ended at {worker['version']} {worker['digest']}, "
                f"not at {report['version']} {report['digest']}"
            )
    return failures


def write_report(report: dict[str, Any], path: Path) -> None:
    """Writes report.json."""
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


def write_picture(report: dict[str, Any], path: Path) -> None:
    """Writes the picture of the reward over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [step["step"] for step in report["per_step"]]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, [step["reward"] for step in report["per_step"]], marker=".", color="tab:blue")
    axes.set(xlabel="step", ylabel=REWARD_TEXT, ylim=(0, REWARD_RANGE), title="rl-plane demo")
    marks = [
        ("a worker is killed", report["killed_at_step"], "tab:red", "--"),
        ("a new one serves", report["joined_at_step"], "tab:green", ":"),
    ]
    for text, step, colour, line in marks:
        if step is not None:
            axes.axvline(step, color=colour, linestyle=line, label=f"{text} (step {step})")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _spread(values: list[float]) -> dict[str, float | None]:
    return {"median": statistics.median(values) if values else None, "max": max(values, default=None)}
