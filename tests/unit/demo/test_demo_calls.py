"""The demo's trainer repeats calls that a death has cut, and checks the labels of each completion."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rl_plane.demo import rollout, trainer
from rl_plane.demo.rollout import Completion, GroupSampler
from rl_plane.demo.trainer import published, wait_ready
from rl_plane.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    NoWorkers,
    PlaneError,
    Unavailable,
    WorkerLost,
)
from rl_plane.publish import WeightPublisher
from tests.support.small_facade import HEAD, Facade, facade

__all__ = ["facade"]

VERSION = {"run": "r", "sequence": 2, "label": "step_2", "digest": "blake3:22"}


def span(start: int, end: int, **other: Any) -> dict[str, Any]:
    return {
        "version": "step_2",
        "run": "r",
        "sequence": 2,
        "digest": "blake3:22",
        "start": start,
        "end": end,
    } | other


def completion(*spans: dict[str, Any], tokens: int = 3) -> Completion:
    return Completion([1], [2] * tokens, [-1.0] * tokens, list(spans), "w")


def test_a_completion_is_of_a_version_only_if_each_token_says_so() -> None:
    assert completion(span(0, 3)).made_by(VERSION)
    assert completion(span(0, 1), span(1, 3)).made_by(VERSION)
    for spans in (
        (),
        (span(0, 2),),
        (span(1, 3),),
        (span(0, 1), span(2, 3)),
        (span(0, 4),),
        (span(0, 1), span(1, 3, version="step_3")),
        (span(0, 3, digest="blake3:33"),),
        (span(0, 3, sequence=3),),
        (span(0, 3, run="q"),),
    ):
        assert not completion(*spans).made_by(VERSION), spans
    assert not completion(tokens=0).made_by(VERSION)


class Server:
    """Gives the answers in order, and raises an answer that is an exception. The last answer repeats."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, Any]] = []

    def post(self, url: str, body: Any, key: str | None, timeout_s: float) -> dict[str, Any]:
        self.calls.append((url, body))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)


def reply(choices: int = 2, tokens: int = 3, logprobs: int = 3) -> dict[str, Any]:
    choice = {
        "token_ids": [2] * tokens,
        "logprobs": {"token_logprobs": [-1.0] * logprobs},
        "weight_versions": [span(0, tokens)],
        "instance_id": "w",
    }
    return {"choices": [choice] * choices}


def roll(server: Server, prompts: int = 1) -> tuple[GroupSampler, list[list[Completion]]]:
    sampler = GroupSampler("http://h", "m", group=2, max_tokens=3, post=server.post, first_pause_s=0.0)
    return sampler, sampler.groups([[1, 2]] * prompts, seed=7)


def test_a_rollout_asks_for_groups_of_tokens_with_logprobs() -> None:
    server = Server(reply())
    _, groups = roll(server, prompts=3)
    assert [len(group) for group in groups] == [2, 2, 2]
    assert groups[0][0] == Completion([1, 2], [2, 2, 2], [-1.0] * 3, [span(0, 3)], "w")
    url, body = server.calls[0]
    assert url == "http://h/v1/completions"
    assert body["prompt_token_ids"] == [1, 2]
    assert (body["n"], body["max_tokens"], body["temperature"]) == (2, 3, 1.0)
    assert body["return_token_ids"] is True
    assert sorted(body["seed"] for _, body in server.calls) == [42, 44, 46]  # two samples each


@pytest.mark.parametrize(
    "trouble",
    [WorkerLost("died", token_ids=[1]), NoWorkers("none"), DeadlineExceeded("slow"), reply(tokens=1, logprobs=1)],
)
def test_a_request_that_a_death_has_cut_is_repeated(trouble: Any) -> None:
    sampler, groups = roll(Server(trouble, trouble, reply()))
    assert len(groups[0]) == 2
    assert sampler.repeats == 2


def test_repeats_have_an_end_and_errors_of_ours_are_not_repeated() -> None:
    lost, wrong = Server(WorkerLost("died")), Server(InvalidRequest("no"))
    with pytest.raises(WorkerLost):
        roll(lost)
    assert len(lost.calls) == rollout.ATTEMPTS
    with pytest.raises(InvalidRequest):
        roll(wrong)
    assert len(wrong.calls) == 1
    for bad in (reply(choices=1), reply(logprobs=2)):
        with pytest.raises(PlaneError):
            roll(Server(bad))


class Publisher:
    """Gives the outcomes of publications in order, and repeats the last one."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.labels: list[str] = []

    def publish(self, label: str) -> Publisher:
        self.labels.append(label)
        return self

    def result(self) -> dict[str, Any]:
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return dict(outcome)


def publish(publisher: Publisher) -> tuple[dict[str, Any], int]:
    return published(cast("WeightPublisher", publisher), "step_2", pause_s=0.0)


def test_an_update_that_was_undone_is_repeated() -> None:
    assert publish(Publisher({"version": VERSION})) == ({"version": VERSION}, 0)
    publisher = Publisher(Unavailable("reset"), Conflict("aborted"), {"version": VERSION})
    assert publish(publisher) == ({"version": VERSION}, 2)
    assert publisher.labels == ["step_2"] * 3


def test_repeats_of_an_update_have_an_end_and_a_wrong_update_is_not_repeated() -> None:
    stuck, wrong = Publisher(Conflict("aborted")), Publisher(InvalidRequest("shape"))
    with pytest.raises(Conflict):
        publish(stuck)
    assert len(stuck.labels) == trainer.ATTEMPTS
    with pytest.raises(InvalidRequest):
        publish(wrong)
    assert len(wrong.labels) == 1


def test_the_frontend_waits_for_the_workers_until_the_bound(facade: Facade) -> None:
    facade.answers({"error": NoWorkers("none").to_wire()}, status=503)
    with pytest.raises(NoWorkers):
        wait_ready(facade.url, 2)
    facade.answers({**HEAD, "workers": []})
    wait_ready(facade.url, 2)
    assert facade.asked[-1]["query"] == {"min_workers": ["2"], "wait_s": [str(trainer.READY_TIMEOUT_S)]}
