"""`rl-plane top` and `up` at a pseudo-terminal, with a real fleet."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.started_command import READY_S, Started
from tests.support.terminal import CURSOR_SHOWN, LEFT_ALTERNATE_SCREEN, Terminal

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[tuple[Started, dict[str, Any]]]:
    up = Started(tmp_path, "up", "--engine", "fake", "--workers", "2", "--rl-port", "0", "--http-port", "0")
    yield up, up.line(READY_S, ready="up")
    up.end()


@pytest.mark.parametrize("leave", ["q", "\x03"])
def test_top_follows_a_fleet_survives_its_frontend_and_leaves_the_terminal_as_it_was(
    up: tuple[Started, dict[str, Any]], leave: str
) -> None:
    started, ready = up
    terminal = Terminal("top", "--url", ready["rl_url"])
    try:
        first, second = (row["instance_id"] for row in ready["workers"])
        at = terminal.until(rf"{first} +fake")
        at = terminal.until(rf"{second} +fake", 0)
        at = terminal.until(r"tokens/s: 0\.0", 0)
        assert terminal.now != terminal.before, "keys come at once"
        os.kill(ready["workers"][1]["pid"], signal.SIGKILL)
        started.line(event="died", name="worker-2")
        at = terminal.until(rf"{second} left \d+ s ago: SIGKILL", at)
        at = terminal.until(rf"worker {second} left", 0)
        os.kill(ready["frontend_pid"], signal.SIGSTOP)  # it would be back before `top` asks again
        at = terminal.until(r"no answer since \d\d:\d\d:\d\d \(\d+ s\), trying again", at)
        os.kill(ready["frontend_pid"], signal.SIGKILL)
        started.line(event="back", name="frontend")
        terminal.until(r"1 workers, epoch", at)
        assert "Traceback" not in terminal.written
        terminal.press(leave)
        assert terminal.end() == 0
        assert (
            terminal.written.rstrip().endswith(LEFT_ALTERNATE_SCREEN) or LEFT_ALTERNATE_SCREEN in terminal.written
        )
        assert terminal.now == terminal.before
    finally:
        terminal.close()


def test_up_shows_at_a_terminal_what_it_waits_for(tmp_path: Path) -> None:
    terminal = Terminal("up", "--engine", "fake", "--workers", "2", "--rl-port", "0", "--http-port", "off")
    try:
        terminal.until(r"rl-plane up: \d of 3 processes are ready, \d+ s")
        terminal.until(r"\n +worker-2: starting")
        terminal.until(r"rl-plane is up: demo\.engine, 2 workers")
        assert CURSOR_SHOWN in terminal.written
        drawn = terminal.until("Ctrl-C ends everything")
        terminal.press("\x03")
        assert terminal.end() == 0
        assert "processes are ready" not in terminal.written[drawn:]
        assert terminal.now == terminal.before
    finally:
        terminal.close()
