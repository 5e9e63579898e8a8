"""Replayed records: which are sent again, and how they are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_plane.errors import InvalidRequest, Unavailable
from rl_plane.rollouts.replay import Replayed, read_records, replay, replay_one

SPAN = {"version": "one", "digest": "xxh3:1", "start": 0, "end": 4}
RECORD: dict[str, Any] = {
    "format": 1,
    "id": "r",
    "outcome": "ok",
    "finish_reason": "length",
    "prompt_token_ids": [5, 6],
    "token_ids": [1, 2, 3, 4],
    "logprobs": [-1.0, -2.0, -3.0, -4.0],
    "weight_versions": [SPAN],
    "body": {"temperature": 0.0, "max_tokens": 4, "logprobs": 1, "truncate_prompt_tokens": 2},
}


def reply(tokens: list[int], logprobs: list[float] | None = None, digest: str = "xxh3:1") -> dict[str, Any]:
    choice: dict[str, Any] = {"token_ids": tokens, "weight_versions": [{**SPAN, "digest": digest}]}
    if logprobs is not None:
        choice["logprobs"] = {"token_logprobs": logprobs}
    return {"choices": [choice]}


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (reply([1, 2, 3, 4], [-1.0, -2.5, -3.0, -4.0]), Replayed("r", "equal", "", 4, 4, 0.5)),
        (reply([1, 2, 9, 4], [-1.0, -2.0, -9.0, -9.0]), Replayed("r", "differs", "", 2, 4, 0.0)),
        (reply([1, 2]), Replayed("r", "differs", "", 2, 4, None)),
        (reply([9, 2, 3, 4], [-9.0, -2.0, -3.0, -4.0]), Replayed("r", "differs", "", 0, 4, None)),
        (reply([1, 9, 9, 9], digest="xxh3:2"), Replayed("r", "other_weights", "", 1, 4, None)),
    ],
)
def test_tokens_and_logprobs_are_compared(answer: dict[str, Any], wanted: Replayed) -> None:
    sent: list[Mapping[str, Any]] = []

    def call(body: Mapping[str, Any]) -> Mapping[str, Any]:
        sent.append(body)
        return answer

    assert replay_one(RECORD, call) == wanted
    assert sent == [
        {"temperature": 0.0, "max_tokens": 4, "logprobs": 1, "prompt_token_ids": [5, 6], "return_token_ids": True}
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"outcome": "worker_lost"}, "did not end by itself"),
        ({"finish_reason": "abort"}, "did not end by itself"),
        ({"prompt_token_ids": None}, "tokens are not known"),
        ({"body": {"max_tokens": 4}}, "without a seed"),
        ({"body": {"seed": 3, "max_tokens": 4}, "instances": [{"end": 1}, {"start": 1}]}, "with another seed"),
        ({"token_ids": []}, "has no tokens"),
    ],
)
def test_a_record_that_can_not_be_compared_is_not_sent(change: dict[str, Any], why: str) -> None:
    found = replay_one({**RECORD, **change}, lambda body: pytest.fail("it was sent"))
    assert found.verdict == "skipped"
    assert why in found.why


def test_a_seed_makes_a_sample_comparable() -> None:
    record = {**RECORD, "body": {"seed": 3, "max_tokens": 4}}
    assert replay_one(record, lambda body: reply([1, 2, 3, 4])).verdict == "equal"


def test_a_greedy_choice_that_another_worker_has_continued_is_comparable() -> None:
    record = {**RECORD, "instances": [{"start": 0, "end": 1}, {"start": 1, "end": 4}]}
    assert replay_one(record, lambda body: reply([1, 2, 3, 4])).verdict == "equal"


@pytest.mark.parametrize(("reason", "most"), [("length", 4), ("stop", 128)])
def test_a_choice_that_filled_the_context_is_asked_for_as_many_tokens(reason: str, most: int) -> None:
    sent: list[Mapping[str, Any]] = []

    def call(body: Mapping[str, Any]) -> Mapping[str, Any]:
        sent.append(body)
        return reply([1, 2, 3, 4])

    record = {**RECORD, "finish_reason": reason, "body": {"temperature": 0.0, "max_tokens": 128}}
    assert replay_one(record, call).verdict == "equal"
    assert sent[0]["max_tokens"] == most


def test_an_error_is_a_verdict_of_its_record() -> None:
    def call(body: Mapping[str, Any]) -> Mapping[str, Any]:
        raise Unavailable("no worker")

    assert replay_one(RECORD, call) == Replayed("r", "failed", "no worker", of_tokens=4)
    assert replay_one(RECORD, lambda body: {}).verdict == "failed"


def test_records_are_sent_in_their_order_up_to_a_limit() -> None:
    records = [{**RECORD, "id": str(number)} for number in range(40)]
    found = list(replay(records, lambda body: reply([1, 2, 3, 4]), 30))
    assert [one.id for one in found] == [str(number) for number in range(30)]


def test_a_folders_files_are_read_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    for name in ("2", "1"):
        line = json.dumps({**RECORD, "id": name}) + "\n"
        (tmp_path / f"rollouts-{name}.jsonl").write_text(line + ('{"format": 1, "i' if name == "1" else ""))
    assert [one["id"] for one in read_records(tmp_path)] == ["1", "2"]
    assert [one["id"] for one in read_records(tmp_path / "rollouts-2.jsonl")] == ["2"]


def test_a_file_that_a_frontend_deletes_meanwhile_is_left_out(tmp_path: Path) -> None:
    for name in ("1", "2", "3"):
        (tmp_path / f"rollouts-{name}.jsonl").write_text(json.dumps({**RECORD, "id": name}) + "\n")
    records = read_records(tmp_path)
    assert next(records)["id"] == "1"
    (tmp_path / "rollouts-2.jsonl").unlink()
    assert [one["id"] for one in records] == ["3"]


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is no "):
        read_records(tmp_path / "absent")


@pytest.mark.parametrize("text", ["nonsense\n", "[]\n", "{}\n", '{"format": 2}\n', '{"format": 1}\n'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rollouts-1.jsonl").write_text(text)
    with pytest.raises(InvalidRequest, match=r"rollouts-1.jsonl:1 is no record of format 1"):
        list(read_records(tmp_path))


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="has no records"):
        list(read_records(tmp_path))
