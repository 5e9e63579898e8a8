"""The words of `rl-plane events`, and a reader that connects again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rl_plane.cli import follow_events, main
from rl_plane.errors import Unavailable

ONE = {"update_id": "u", "label": "one", "who": "frontend@a:1", "caller": "train.py@b:2"}


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("member", {"instance_id": "a", "change": "left"}, "worker a left"),
        ("op", {"op": "pause", "who": "w", "asked_by": "key-1", "outcome": "ok"}, "pause by key-1: ok"),
        ("update", {**ONE, "change": "began"}, "update u (one) began, asked by train.py@b:2"),
        (
            "update",
            {**ONE, "change": "aborted", "error": {"code": "update_aborted", "message": "why"}},
            "update u (one) aborted: update_aborted: why",
        ),
        (
            "update",
            {**ONE, "change": "finished", "phases": {"gate_s": 0.25}},
            "update u (one) finished (gate 0.2 s)",
        ),
        (
            "update",
            {
                **ONE,
                "change": "progress",
                "phase": "prepare",
                "bytes": 1,
                "total_bytes": 4,
                "elapsed_s": 3.0,
                "waits_for": "the trainer's bytes",
            },
            "update u (one) prepare, 25%, 3 s: waits for the trainer's bytes",
        ),
        (
            "admission",
            {"instance_id": "a", "open": False, "reasons": ["behind"], "paused": True, "version": None},
            "worker a closed: behind; paused, no version",
        ),
        ("missed", {"fix": "read the state"}, "missed: read the state"),
        ("end", {"reason": "slow"}, "end: slow"),
    ],
)
def test_each_event_has_words(kind: str, data: dict[str, Any], words: str) -> None:
    assert follow_events.event_line(kind, data) == f"--:--:-- {words}"
    assert follow_events.event_line(kind, {**data, "at": 1.0}).endswith(f":01 {words}")


def test_a_follower_connects_again_after_the_last_event_that_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int | None] = []

    def read(url: str, key: str | None, since_s: int, after: int | None, *more: Any) -> Iterator[Any]:
        assert more == (True, "reference")
        asked.append(after)
        if len(asked) == 3:
            raise KeyboardInterrupt
        yield len(asked), "end", {"reason": "stopping"}
        raise Unavailable("the connection was lost")

    monkeypatch.setattr(follow_events, "read_events", read)
    monkeypatch.setattr(follow_events, "AGAIN_S", 0.0)
    assert main.run(["events", "--follow", "--component", "reference"]) == 130
    assert asked == [None, 1, 2]
    assert capsys.readouterr().out.count("end: stopping") == 2


def test_a_frontend_that_never_answered_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(*asked: Any) -> Iterator[Any]:
        raise Unavailable("no frontend answers")
        yield

    monkeypatch.setattr(follow_events, "read_events", read)
    assert main.run(["events", "--follow"]) == 1
    assert "no frontend answers" in capsys.readouterr().err
