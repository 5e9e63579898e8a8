"""`rl-plane top` at a pseudo-terminal, beside a real fleet."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.started_command import READY_S, Started

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

BOUND_S = 30.0
ROWS, CELLS = 40, 150
LEFT_ALTERNATE_SCREEN = "\x1b[?1049l"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")


class Terminal:
    """A command at a terminal of its own, which is also its controlling terminal."""

    def __init__(self, *argv: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, CELLS, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rl_plane.cli.main", *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**env, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.written = ""

    def _read(self, seconds: float) -> None:
        if select.select([self._ours], [], [], seconds)[0]:
            self.written += os.read(self._ours, 1 << 16).decode(errors="replace")

    def until(self, pattern: str, since: int = 0) -> int:
        """Reads until the screen has shown the pattern after the character number `since`. Returns the number of
        characters that were written."""
        give_up = time.monotonic() + BOUND_S
        while not re.search(pattern, ESCAPES.sub("", self.written[since:])):
            assert time.monotonic() < give_up, f"no {pattern!r} on {ESCAPES.sub('', self.written[-6000:])!r}"
            self._read(0.1)
        return len(self.written)

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def end(self) -> int:
        """Reads until the command has ended, and returns its exit code."""
        give_up = time.monotonic() + BOUND_S
        while self.process.poll() is None:
            assert time.monotonic() < give_up, "it did not end"
            self._read(0.1)
        self._read(0.1)
        return self.process.returncode

    @property
    def now(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


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
        os.kill(ready["frontend_pid"], signal.SIGKILL)
        at = terminal.until(r"no answer since \d\d:\d\d:\d\d \(\d+ s\), trying again", at)
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
