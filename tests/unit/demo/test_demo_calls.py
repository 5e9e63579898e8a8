"""The calls of the demo's trainer: what it repeats, refuses, and counts as well labelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_plane.demo import rollout as rollout_module
from rl_plane.demo import trainer_calls as steering_module
from rl_plane.demo.rollout import Completion, GroupSampler
from rl_plane.demo.trainer_calls import Published, Steering
from rl_plane.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    NoWorkers,
    PlaneError,
    Unavailable,
    WorkerLost,
)

VERSION = {"run": "r", "sequence": 2, "label": "step_2", "digest": "blake3:22"}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_module, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(steering_module, "PAUSE_S", 0.0)
    monkeypatch.setattr(steering_module, "READY_POLL_S", 0.0)


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
    """Gives the answers in order, and raises those that are exceptions. The last answer repeats."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, Any, str]] = []

    def post(self, url: str, body: Any, key: str | None, timeout_s: float) -> dict[str, Any]:
        return self.answer(url, body, "")

    def call(
        self, url: str, key: str | None, op: str, body: Any, timeout_s: float, request_id: str
    ) -> dict[str, Any]:
        return self.answer(f"{url}/v1/rl/{op}", body, request_id)

    def answer(self, url: str, body: Any, request_id: str) -> dict[str, Any]:
        self.calls.append((url, body, request_id))
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
    rollout = GroupSampler("http://h", "m", group=2, max_tokens=3, post=server.post)
    return rollout, rollout.groups([[1, 2]] * prompts, seed=7)


def test_a_rollout_asks_for_groups_of_tokens_with_logprobs() -> None:
    server = Server(reply())
    _, groups = roll(server, prompts=3)
    assert [len(group) for group in groups] == [2, 2, 2]
    assert groups[0][0] == Completion([1, 2], [2, 2, 2], [-1.0] * 3, [span(0, 3)], "w")
    url, body, _ = server.calls[0]
    assert url == "http://h/v1/completions"
    assert body["prompt_token_ids"] == [1, 2]
    assert (body["n"], body["max_tokens"], body["temperature"]) == (2, 3, 1.0)
    assert body["return_token_ids"] is True
    assert sorted(body["seed"] for _, body, _ in server.calls) == [42, 44, 46]  # two samples each


@pytest.mark.parametrize(
    "trouble",
    [WorkerLost("died", token_ids=[1]), NoWorkers("none"), DeadlineExceeded("slow"), reply(tokens=1, logprobs=1)],
)
def test_a_request_that_a_death_has_cut_is_repeated(trouble: Any) -> None:
    rollout, groups = roll(Server(trouble, trouble, reply()))
    assert len(groups[0]) == 2
    assert rollout.repeats == 2


def test_repeats_have_an_end_and_errors_of_ours_are_not_repeated() -> None:
    lost, wrong = Server(WorkerLost("died")), Server(InvalidRequest("no"))
    with pytest.raises(WorkerLost):
        roll(lost)
    assert len(lost.calls) == rollout_module.ATTEMPTS
    with pytest.raises(InvalidRequest):
        roll(wrong)
    assert len(wrong.calls) == 1
    for bad in (reply(choices=1), reply(logprobs=2)):
        with pytest.raises(PlaneError):
            roll(Server(bad))


COMMITTED = {
    "version": VERSION,
    "workers": [{"status": "ok"}, {"status": "error"}],
    "canary": {"scored": 1, "failed": 0, "against": "trainer", "difference": 2e-6, "mismatch_kl": 1e-12},
}
CANARY = {"sequences": [[1, 2]], "expected": [[-0.5]]}


def test_publishing_is_one_update() -> None:
    server = Server(COMMITTED)
    published = Steering("http://h", server.call).publish(Path("/w/step_2"), "step_2", "blake3:22", CANARY)
    assert published == Published(VERSION, 1, 2e-6, 1e-12)
    [(url, body, _)] = server.calls
    assert url == "http://h/v1/rl/update_weights"
    assert body == {
        "transport": {"backend": "filesystem", "path": "/w/step_2"},
        "version": "step_2",
        "digest": "blake3:22",
        "policy": {"canary": CANARY},
    }


def test_an_update_that_was_undone_is_tried_anew_and_a_lost_answer_is_asked_for() -> None:
    server = Server(Unavailable("reset"), Conflict("aborted"), COMMITTED)
    steering = Steering("http://h", server.call)
    steering.publish(Path("/w/step_2"), "step_2", "blake3:22", CANARY)
    keys = [key for _, _, key in server.calls]
    assert keys[0] == keys[1] != keys[2]
    assert steering.repeats == 2


def test_a_failed_update_raises() -> None:
    with pytest.raises(InvalidRequest):
        Steering("http://h", Server(InvalidRequest("shape")).call).publish(
            Path("/w"), "step_2", "blake3:22", CANARY
        )
    stuck = Server(Conflict("aborted"))
    with pytest.raises(Conflict):
        Steering("http://h", stuck.call).publish(Path("/w"), "step_2", "blake3:22", CANARY)
    assert len(stuck.calls) == steering_module.ATTEMPTS
    with pytest.raises(PlaneError, match="is committed"):
        Steering("http://h", Server(COMMITTED).call).publish(Path("/w"), "step_3", "blake3:33", CANARY)


def test_waiting_for_workers_is_bounded() -> None:
    Steering("http://h", Server(NoWorkers("none"), {}).call).wait_ready(2, 5.0)
    with pytest.raises(DeadlineExceeded, match="2 workers were not ready"):
        Steering("http://h", Server(NoWorkers("none")).call).wait_ready(2, 0.0)
