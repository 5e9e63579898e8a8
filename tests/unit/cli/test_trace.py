"""Traces of past updates: the events of a viewer, and the command that writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_plane.cli import main
from rl_plane.cli.trace_events import trace_of
from rl_plane.commit.history import UpdateEntry
from tests.support.small_facade import HEAD, Facade, facade

__all__ = ["facade"]


def entry(label: str, **facts: Any) -> dict[str, Any]:
    """An update as `updates` lists it."""
    times = {"began_at": 1000.0, "ended_at": 1004.0}
    return UpdateEntry(f"id-of-{label}", label, "committed", **{**times, **facts}).to_wire()


def bars(trace: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    """The name, the row, the begin and the length of each bar."""
    return [(one["name"], one["tid"], one["ts"], one["dur"]) for one in trace["traceEvents"] if one["ph"] == "X"]


def rows(trace: dict[str, Any]) -> list[str]:
    return [one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "thread_name"]


def test_the_phases_of_an_update_follow_each_other() -> None:
    trace = trace_of({"engine": [entry("a", phases={"wait_s": 1.0, "prepare_s": 2.0, "open_s": 1.0})]})
    assert bars(trace) == [
        ("a (committed)", 1, 1_000_000_000, 4_000_000),
        ("wait", 1, 1_000_000_000, 1_000_000),
        ("prepare", 1, 1_001_000_000, 2_000_000),
        ("open", 1, 1_003_000_000, 1_000_000),
    ]


def test_each_worker_that_took_bytes_from_several_sources_has_a_row() -> None:
    sources = {
        "w1": [{"source": "trainer", "bytes": 8, "seconds": 1.5}],
        "w2": [{"source": "w1", "bytes": 4, "seconds": 0.5}, {"source": "trainer", "bytes": 4, "seconds": 1.0}],
    }
    trace = trace_of({"engine": [entry("a", phases={"wait_s": 1.0, "prepare_s": 2.0}, sources=sources)]})
    assert rows(trace) == ["updates", "worker w1", "worker w2"]
    assert bars(trace)[-3:] == [
        ("from trainer", 2, 1_001_000_000, 1_500_000),
        ("from w1", 3, 1_001_000_000, 500_000),
        ("from trainer", 3, 1_001_000_000, 1_000_000),
    ]


def test_an_update_that_runs_is_cut_off_and_one_without_a_begin_is_left_out() -> None:
    running = {**entry("a", phases={"wait_s": 1.0}), "ended_at": None, "outcome": "running"}
    trace = trace_of({"engine": [entry("initial", began_at=None), running]}, now=1002.0)
    assert bars(trace)[0] == ("a (running)", 1, 1_000_000_000, 2_000_000)
    assert "initial" not in json.dumps(trace)


def test_components_are_processes_and_a_failed_update_says_why() -> None:
    failed = {**entry("a"), "outcome": "aborted", "error": {"code": "busy", "message": "it was"}}
    trace = trace_of({"one": [failed], "two": [entry("b")]})
    assert {one["pid"] for one in trace["traceEvents"]} == {1, 2}
    assert trace["traceEvents"][2]["args"]["error"] == "busy: it was"


@pytest.mark.parametrize(
    ("named", "labels"), [([], ["b", "a"]), (["a"], ["a"]), (["id-of-b"], ["b"]), (["id-of"], ["b", "a"])]
)
def test_the_command_writes_the_updates_that_are_named(
    facade: Facade, tmp_path: Path, capsys: pytest.CaptureFixture[str], named: list[str], labels: list[str]
) -> None:
    facade.answers({**HEAD, "workers": [], "updates": [entry("a"), entry("b")]})
    path = tmp_path / "trace.json"
    assert main.run(["trace", *named, "--url", facade.url, "--output", str(path)]) == 0
    written = json.loads(path.read_text())
    assert sorted(name for name, *_ in bars(written)) == sorted(f"{label} (committed)" for label in labels)
    assert (
        capsys.readouterr().out
        == f"{path} has the updates {', '.join(labels)}: open it at https://ui.perfetto.dev\n"
    )


def test_trace_refuses_an_unknown_update_and_an_unwritable_file(
    facade: Facade, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facade.answers({**HEAD, "workers": [], "updates": [entry("a")]})
    assert main.run(["trace", "step_9", "--url", facade.url, "--output", str(tmp_path / "t.json")]) == 1
    assert "none of the newest 20 updates is 'step_9'" in capsys.readouterr().err
    assert main.run(["trace", "--url", facade.url, "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--output" in error
    assert "fix: give another file" in error
    assert not list(tmp_path.iterdir())
