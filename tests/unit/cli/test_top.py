"""The screen of `rl-plane top`: what it says of each fleet, and how the command starts."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import threading
from typing import Any

import pytest
from rich.console import Console

from rl_plane.cli import main
from rl_plane.cli.start_display import StartProgress
from rl_plane.cli.top_facts import (
    Rates,
    TopFacts,
    WorkCounts,
    in_order,
    rates_by_version,
    seconds_left,
    version_lag,
)
from rl_plane.cli.top_screen import screen
from rl_plane.cli.wait_display import DISPLAY, seconds_shown
from tests.support.small_facade import HEAD, ID_A, ID_B, VERSION, Facade, facade, starting_row
from tests.support.terminal import CURSOR_SHOWN, Terminal

__all__ = ["facade"]


@pytest.mark.parametrize("as_json", [False, True])
def test_an_update_shows_how_far_it_is_at_a_terminal_but_not_with_json(facade: Facade, as_json: bool) -> None:
    facade.at_once["/v1/rl/state"] = state(row(ID_A), update=UPDATE)
    facade.answers({**HEAD, "version": VERSION, "phases": {}, "excluded": [], "workers": [row(ID_A)]})
    facade.delay.clear()
    terminal = Terminal("update", "/w", "--url", facade.url, *(["--json"] if as_json else []))
    try:
        if not as_json:
            terminal.until(r"update weights: waiting, \d+ s")
            terminal.until(
                r"update 7057251d \(step_4\) .*1,024\.0 of 2,048\.0 MB on 2 workers, 310\.2 MB/s, 3 s left"
            )
            terminal.until("prepare, 21 s so far, waits for the trainer's bytes")
        facade.delay.set()
        assert terminal.end() == 0
        assert ("MB/s" in terminal.written) is not as_json
        assert as_json or CURSOR_SHOWN in terminal.written
        assert '"label": "step_3"' in terminal.written if as_json else "committed version 3" in terminal.written
        assert terminal.now == terminal.before
    finally:
        terminal.close()


def test_an_interrupt_leaves_the_terminal_as_it_was(facade: Facade) -> None:
    facade.at_once["/v1/rl/state"] = state(row(ID_A), update=UPDATE)
    facade.delay.clear()
    terminal = Terminal("update", "/w", "--url", facade.url)
    try:
        terminal.until(r"310\.2 MB/s")
        terminal.press("\x03")
        assert terminal.end() == 130
        assert CURSOR_SHOWN in terminal.written
        assert terminal.now == terminal.before
    finally:
        facade.delay.set()
        terminal.close()


def test_with_json_nothing_is_drawn() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours), os.fdopen(theirs, "w") as terminal, contextlib.redirect_stderr(terminal):
        with seconds_shown("publish", quiet=True):
            assert DISPLAY not in {thread.name for thread in threading.enumerate()}
        with seconds_shown("publish"):
            assert DISPLAY in {thread.name for thread in threading.enumerate()}


def row(instance_id: str, **more: Any) -> dict[str, Any]:
    return {
        "instance_id": instance_id,
        "incarnation": "i",
        "status": "ok",
        "engine": "fake",
        "pause_state": "running",
        "admission": {"open": True, "reasons": []},
        "version": VERSION,
        "sequence": 3,
        "running": 2,
        "waiting": 1,
        "tokens_made": 100,
        "requests_ended": 0,
        "update": None,
        **more,
    }


def state(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    facts = {"ready": True, "expected": None, "pause_state": "running", "version": VERSION, "sequence": 3}
    return {**HEAD, **facts, "left": [], "starting": [], "update": None, "workers": list(rows), **more}


UPDATE = {
    "update_id": "7057251dffff",
    "label": "step_4",
    "phase": "prepare",
    "elapsed_s": 21.4,
    "waits_for": "the trainer's bytes, since 19 s",
    "workers": 2,
    "bytes": 1_024_000_000,
    "total_bytes": 2_048_000_000,
    "bytes_per_s": 310_200_000.0,
}
ON_WORKER = {"update_id": "7057251dffff", "label": "step_4", "total_bytes": 1_024_000_000}


def shown(facts: TopFacts, height: int | None = None, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(screen(facts, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def facts(found: dict[str, Any] | None, **more: Any) -> TopFacts:
    return TopFacts(url="http://f:8002", clock="09:41:07", state=found, **more)


def test_the_screen_of_a_healthy_fleet_shows_its_rates_and_workers() -> None:
    text = shown(
        facts(
            state(row(ID_A), expected=2),
            rates={"step_3": Rates(1234.5, 2.0), "step_2": Rates(10.0, 0.5)},
            events=("one", "two"),
        )
    )
    assert "ready, running, 1 of 2 workers, epoch 7, version 3 (step_3)" in text
    assert (
        "tokens/s: 1,244.5 (10.0 by step_2, 1,234.5 by step_3); rollouts/s: 2.5 (0.5 by step_2, 2.0 by step_3)"
        in text
    )
    assert f"{ID_A}  fake    3 (step_3)    0        2        1  open" in text
    assert text.rstrip().endswith("one\ntwo")
    assert "update" not in text
    assert "no answer" not in text


def test_the_screen_shows_an_update_and_first_the_closed_workers() -> None:
    behind = row(
        ID_B,
        admission={"open": False, "reasons": ["behind: no route to the trainer"]},
        sequence=1,
        pause_state="paused",
        update={**ON_WORKER, "bytes": 512_000_000, "bytes_per_s": 51_200_000.0},
    )
    starting = starting_row("c" * 16)
    left = {"instance_id": "d" * 16, "ago_s": 12.0, "why": "it was killed", "back": False, "exit_code": -9}
    found = state(row(ID_A), behind, ready=False, update=UPDATE, starting=[starting], left=[left])
    text = shown(facts(found), width=140)
    assert "update 7057251d (step_4)" in text
    assert "1,024.0 of 2,048.0 MB on 2 workers, 310.2 MB/s, 10 s left" in text
    assert "prepare, 21 s so far, waits for the trainer's bytes, since 19 s" in text
    assert text.index(ID_B) < text.index(ID_A), "the worker that needs a look comes first"
    assert "closed: behind: no route to the trainer, paused, has 50% of step_4" in text
    assert f"{'c' * 16} starts since " in text
    assert f"{'d' * 16} left 12 s ago: SIGKILL: it was killed" in text


def test_top_shows_a_lost_frontend_beside_the_last_state() -> None:
    text = shown(facts(state(row(ID_A)), lost_since="09:40:00", lost_s=67.0, why="no frontend answers"))
    assert "no answer since 09:40:00 (67 s), trying again: no frontend answers" in text
    assert ID_A in text
    assert "no state is known yet" in shown(facts(None, lost_since="09:40:00", why="refused"))


def test_a_screen_fits_its_terminal_and_can_not_be_written_over() -> None:
    many = [row(f"{number:016x}") for number in range(200)]
    text = shown(facts(state(*many), events=("x",) * 100), height=30)
    assert len(text.splitlines()) <= 30
    assert "more workers" in text
    assert len(shown(facts(state(*many))).splitlines()) > 200
    nasty = row(ID_A, engine="\x1b[2J", admission={"open": False, "reasons": ["[red]\x1b]0;x\x07"]})
    text = shown(facts(state(nasty, {"instance_id": ID_B, "status": "error", "error": {"message": "\x1b[H"}})))
    assert "\x1b" not in text
    assert "[red]" in text, "it is no markup"


def test_top_shows_the_tokens_per_second_of_each_version() -> None:
    before = WorkCounts.of(state(row(ID_A, tokens_made=100), row(ID_B, tokens_made=50, requests_ended=2)), 1.0)
    other = {**VERSION, "label": "step_4"}
    after = WorkCounts.of(
        state(
            row(ID_A, tokens_made=140), row(ID_B, tokens_made=60, requests_ended=5, version=other), row("c" * 16)
        ),
        3.0,
    )
    assert rates_by_version(before, after) == {"step_3": Rates(20.0, 0.0), "step_4": Rates(5.0, 1.5)}
    assert rates_by_version(after, after) == {}
    again = WorkCounts.of(state(row(ID_A, tokens_made=1, incarnation="new")), 4.0)
    assert rates_by_version(after, again) == {}, "a process that has started again counts from 0"
    assert rates_by_version(before, WorkCounts.of(state({"instance_id": ID_A, "status": "error"}), 2.0)) == {}


def test_the_seconds_that_an_update_needs_are_those_of_the_slowest_worker() -> None:
    fast = row(ID_A, update={**ON_WORKER, "bytes": 1_024_000_000, "bytes_per_s": 1e9})
    slow = row(ID_B, update={**ON_WORKER, "bytes": 24_000_000, "bytes_per_s": 1e8})
    assert seconds_left(state(fast, slow, update=UPDATE)) == 10.0
    silent = row(ID_B, update={**ON_WORKER, "bytes": 0, "bytes_per_s": None})
    assert seconds_left(state(fast, silent, update=UPDATE)) is None
    assert seconds_left(state(row(ID_A))) is None
    assert seconds_left(state(row(ID_A), update={**UPDATE, "bytes_per_s": 0.0})) is None


def test_a_workers_lag_is_counted_and_puts_it_first() -> None:
    found = state(row("b" * 16), row("a" * 16, sequence=None), row("c" * 16, sequence=1))
    assert [version_lag(found, one) for one in found["workers"]] == [0, None, 2]
    assert [one["instance_id"][0] for one in in_order(found)] == ["c", "a", "b"]
    assert version_lag({**found, "sequence": None}, found["workers"][0]) is None


def test_once_prints_one_screen_and_a_live_one_needs_a_terminal(
    facade: Facade, capsys: pytest.CaptureFixture[str]
) -> None:
    facade.answers(state(row(ID_A)))
    assert main.run(["top", "--once"]) == 0
    out = capsys.readouterr().out
    assert ID_A in out
    assert "tokens/s: 0.0 (0.0 by step_3); rollouts/s: 0.0" in out
    assert facade.asked[0]["query"] == {"min_workers": ["0"], "wait_s": ["0"]}
    assert main.run(["top"]) == 2
    assert "stdout is no terminal; fix: use a terminal, or --once" in capsys.readouterr().err
    facade.answers({"status": "error", "error": {"code": "unauthorized", "message": "no key"}}, 401)
    assert main.run(["top", "--once"]) == 1
    assert "no key" in capsys.readouterr().err


def test_up_says_what_each_process_does() -> None:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    progress = StartProgress(3)
    console.print(progress.drawing([]))
    progress.learn({"starting": [{"instance_id": ID_B, "phase": "importing the engine", "elapsed_s": 1.0}]})
    progress.learn({"starting": [{"instance_id": ID_A, "phase": "loading the model", "elapsed_s": 95.2}]})
    processes = [("worker-1", ID_A, False), ("worker-2", ID_B, False), ("frontend", "", True)]
    console.print(progress.drawing(processes))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "0 of 3 processes are ready, 0 s" in text
    assert "  model: being made from a seed\n" in text
    assert "1 of 3 processes are ready, 0 s" in text
    assert "  worker-1: loading the model, 95 s\n  worker-2: joining the fleet\n" in text
