"""Starts commands of `rl-plane` as processes, for tests, and ends all of their processes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_plane.cli.settings import SETTINGS

READY_S = 60.0
"""On a loaded machine: four interpreters start."""
BACK_S = 30.0
MARK = "TEST_CLI_UP_MARK"


def eventually(check: Callable[[], bool], within_s: float, what: str) -> None:
    give_up = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < give_up, what
        time.sleep(0.05)


def without_settings() -> dict[str, str]:
    """The environment of this process, without settings of `rl-plane`."""
    known = {setting.variable for setting in SETTINGS.values()}
    return {key: value for key, value in os.environ.items() if key not in known}


class Started:
    """A command with --json: its lines of JSON as they come, and every process that carries its mark."""

    def __init__(self, tmp_path: Path, *argv: str, **environ: str) -> None:
        self.mark = uuid.uuid4().hex
        env = without_settings() | {
            MARK: self.mark,
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "TMPDIR": str(tmp_path),
            **environ,
        }
        self.errors = tmp_path / f"stderr-{self.mark}"
        with self.errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rl_plane.cli.main", *argv, "--json"],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env,
                cwd=tmp_path,
            )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def line(self, within_s: float = BACK_S, **facts: Any) -> dict[str, Any]:
        """Returns the next line that has these facts, and skips other lines."""
        give_up = time.monotonic() + within_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, give_up - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no line with {facts}; stderr:\n{self.errors.read_text()}")
            if facts.items() <= line.items():
                return line

    def marked(self) -> set[int]:
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        found.add(int(entry.name))
                except OSError:
                    continue  # it ended, or is not ours
        return found

    def end(self) -> None:
        for pid in self.marked():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        sys.stderr.write(self.errors.read_text(errors="replace"))  # shown if the test fails


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts commands, and ends them after the test."""
    made: list[Started] = []

    def make(*argv: str, **environ: str) -> Started:
        made.append(Started(tmp_path, *argv, **environ))
        return made[-1]

    yield make
    for started in made:
        started.end()
