"""The demo's verdict: each thing that may go wrong makes it fail, and says why."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_plane.demo.report import make_report, write_picture, write_report
from rl_plane.demo.story import StepRecord, Story, WorkerEnd
from rl_plane.demo.table import LiveTable

STEPS = 20


def a_step(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        version=f"step_{step - 1}" if step > 1 else "initial",
        reward=0.5 + 0.02 * step,
        completions=64,
        mixed_version_completions=0,
        by_worker={"a": 64} if 8 < step < 12 else {"a": 32, "b" if step <= 8 else "c": 32},
        max_logprob_diff=2e-6,
        canary_difference=4e-6 if step == 7 else 1e-6,
        mismatch_kl=1e-12,
        workers=2,
        rollout_s=0.5,
        learn_s=0.1,
        update_s=0.25 if step == 3 else 0.1,
        repeats=1,
        committed=f"step_{step}",
        digest=f"blake3:{step:064x}",
    )


def a_story() -> Story:
    story = Story(STEPS, [a_step(step) for step in range(1, STEPS + 1)])
    story.killed, story.killed_at, story.started = ["b"], 8, ["c"]
    last = story.steps[-1]
    story.workers = [WorkerEnd(key, last.committed, last.digest) for key in "ac"]
    return story


def test_the_report_of_a_good_run_is_ok_and_has_its_numbers() -> None:
    report = make_report(a_story())
    assert report["ok"] is True
    assert report["failures"] == []
    assert report["reward_first"] == pytest.approx(0.56)
    assert report["reward_last"] == pytest.approx(0.86)
    assert (report["canary_updates"], report["max_canary_difference"], report["max_mismatch_kl"]) == (
        20,
        4e-6,
        1e-12,
    )
    assert report["per_step"][6]["canary_difference"] == 4e-6
    assert report["completions"] == STEPS * 64
    assert report["update_seconds"] == {"median": 0.1, "max": 0.25}
    assert report["joined"] == ["c"]
    assert report["joined_at_step"] == 12
    assert report["workers"][0] == {"instance_id": "a", "version": "step_20", "digest": a_step(20).digest}
    assert report["completions_by_worker"]["b"] == 8 * 32


def spoil_steps(story: Story, **change: Any) -> None:
    story.steps = [replace(step, **change) for step in story.steps]


def one_mixed(story: Story) -> None:
    story.steps[4] = replace(story.steps[4], mixed_version_completions=1)


def one_off(story: Story) -> None:
    story.steps[4] = replace(story.steps[4], max_logprob_diff=1.1e-3)


def canary_off(story: Story) -> None:
    story.steps[4] = replace(story.steps[4], canary_difference=1.1e-3)


def not_scored(story: Story) -> None:
    spoil_steps(story, canary_difference=None, mismatch_kl=None)


def test_one_update_may_have_no_canary() -> None:
    story = a_story()
    story.steps[4] = replace(story.steps[4], canary_difference=None, mismatch_kl=None)
    report = make_report(story)
    assert (report["ok"], report["canary_updates"]) == (True, STEPS - 1)


def falls(story: Story) -> None:
    story.steps = [replace(step, reward=1 - step.reward) for step in story.steps]


def never_served(story: Story) -> None:
    spoil_steps(story, by_worker={"a": 64})


def never_killed(story: Story) -> None:
    story.killed = []


def cut_short(story: Story) -> None:
    story.steps.pop()


def behind(story: Story) -> None:
    story.workers[1] = WorkerEnd("c", "step_19", a_step(19).digest)


def other_bytes(story: Story) -> None:
    story.workers[1] = WorkerEnd("c", "step_20", a_step(19).digest)


def unknown_version(story: Story) -> None:
    story.workers[0] = WorkerEnd("a", None, None)


def one_left(story: Story) -> None:
    story.workers.pop()


def ghost(story: Story) -> None:
    story.workers[0] = replace(story.workers[0], instance_id="b")


def newcomer_gone(story: Story) -> None:
    story.workers[1] = replace(story.workers[1], instance_id="d")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda story: spoil_steps(story, reward=0.9), "the reward rose by 0.000"),
        (falls, "the reward rose by -0.3"),
        (one_mixed, "1 of 1280 completions are not labelled"),
        (lambda story: spoil_steps(story, completions=0, by_worker={}), "no completion was made"),
        (one_off, "differ from the engines' by 1.10e-03"),
        (lambda story: spoil_steps(story, max_logprob_diff=float("nan")), "differ from the engines'"),
        (canary_off, "the engines' canary differs from the trainer's by 1.10e-03"),
        (not_scored, "no update's canary was scored"),
        (never_killed, "no worker was killed"),
        (never_served, "no new worker joined"),
        (cut_short, "only 19 of 20 steps"),
        (lambda story: story.steps.clear(), "only 0 of 20 steps"),
        (behind, "worker c ended at step_19"),
        (other_bytes, "worker c ended at step_20 blake3:"),
        (unknown_version, "worker a ended at None"),
        (one_left, "1 workers are in the fleet at the end"),
        (ghost, "the killed worker is still listed"),
        (newcomer_gone, "the worker that joined is gone"),
    ],
)
def test_each_fault_is_named_as_a_failure(spoil: Any, why: str) -> None:
    story = a_story()
    spoil(story)
    report = make_report(story)
    assert report["ok"] is False
    assert any(failure.startswith(why) or why in failure for failure in report["failures"]), report["failures"]


def test_the_error_that_ended_the_run_early_is_the_reason() -> None:
    report = make_report(a_story(), "worker b ended with -9")
    assert (report["ok"], report["failures"]) == (False, ["worker b ended with -9"])


def test_the_report_and_its_picture_are_written(tmp_path: Path) -> None:
    report = make_report(a_story())
    write_report(report, tmp_path / "report.json")
    write_picture(report, tmp_path / "reward.png")
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == STEPS
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_table_is_a_line_per_step_and_lives_on_a_terminal() -> None:
    plain, terminal = io.StringIO(), Terminal()
    for out in (plain, terminal):
        table = LiveTable(out, STEPS)
        for step in (1, 2):
            table.phase(step, "rolling out")
            table.step(a_step(step))
        table.step(replace(a_step(3), canary_difference=None, mismatch_kl=None))
        table.note("a word")
        table.end()
    lines = plain.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[1].split()[-1] == "1.0e-06"
    assert lines[3].split()[-1] == "-"
    assert lines[0].startswith("step  version")
    assert "initial   0.520" in lines[1]
    assert "\x1b" not in plain.getvalue()
    assert f"   1  rolling out … (1 of {STEPS})" in terminal.getvalue()
