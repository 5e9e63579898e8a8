"""A command of `rl-plane` at a pseudo-terminal, for tests that read what its screen shows."""

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
from typing import Any

from rl_plane.cli.settings import SETTINGS

BOUND_S = 30.0
ROWS, CELLS = 40, 150
LEFT_ALTERNATE_SCREEN = "\x1b[?1049l"
CURSOR_SHOWN = "\x1b[?25h"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")


def _at_a_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the tests themselves may run in the background of a shell


class Terminal:
    """A command at a terminal of its own, which is also its controlling terminal."""

    def __init__(self, *argv: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, CELLS, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        unset = {"COLUMNS", "LINES", "NO_COLOR", *(setting.variable for setting in SETTINGS.values())}
        env = {key: value for key, value in os.environ.items() if key not in unset}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rl_plane.cli.main", *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**env, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=_at_a_terminal,
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
