"""The demo's child processes: started with their output in a log, ended without a rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rl_plane._util.processes import die_with_parent
from rl_plane.errors import PlaneError

STOP_TIMEOUT_S = 5.0
"""For all of them together; then SIGKILL."""
POLL_S = 0.02
TAIL_CHARS = 300


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    output: Path
    """Its stdout, unless that is a pipe."""
    log: Path
    """Its stderr."""

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def last_words(self) -> str:
        """How it ended, in one line."""
        code = self.process.poll()
        how = "has not ended" if code is None else f"ended with {code}" if code >= 0 else f"was killed by {-code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"{self.name} {how}" + (f": {lines[-1][-TAIL_CHARS:]}" if lines else "")

    def kill(self) -> None:
        """SIGKILL, to it alone, as a crash would be."""
        self.process.kill()
        self.process.wait()


def child_environment(scratch: Path) -> dict[str, str]:
    """Ours, less settings that would steer the demo's own fleet elsewhere, with one thread per process; what torch
    and others keep in temporary folders goes to `scratch`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RL_PLANE_")}
    own = {"TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {"OMP_NUM_THREADS": "1", **kept, **own}


class Processes:
    def __init__(self, logs: Path, scratch: Path) -> None:
        """`scratch`: the children's temporary folder, which the caller removes."""
        self._logs = logs
        self._environment = child_environment(scratch)
        self._children: list[Child] = []

    def python(self, name: str, *arguments: str, pipe: bool = False) -> Child:
        """`python -P …`, in its own session. `pipe`: its stdout is `process.stdout`."""
        output, log = self._logs / f"{name}.out", self._logs / f"{name}.log"
        with output.open("wb") as out, log.open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-P", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else out,
                stderr=err,
                env=self._environment,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        child = Child(name, process, output, log)
        self._children.append(child)
        return child

    def rl_plane(self, name: str, *arguments: str) -> Child:
        return self.python(name, "-m", "rl_plane.cli.main", *arguments)

    def stop(self) -> None:
        """Ends all, and whatever they have started."""
        for child in self._children:
            if child.running:
                child.process.terminate()
        give_up = time.monotonic() + STOP_TIMEOUT_S
        while any(child.running for child in self._children) and time.monotonic() < give_up:
            time.sleep(POLL_S)
        for child in self._children:
            try:
                os.killpg(child.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the usual case: nobody is left in its session
            child.process.wait()
            if child.process.stdout is not None:
                child.process.stdout.close()


def wait_for_line(child: Child, give_up: float, check: Callable[[], None]) -> str:
    """The first line that it prints. `give_up`: a time of the monotonic clock; `check` may raise to end the wait."""
    while True:
        ended = not child.running  # before the look, or its last line may be missed
        text = child.output.read_text(errors="replace")
        if "\n" in text:
            return text.split("\n", 1)[0]
        if ended:
            raise PlaneError(child.last_words())
        _wait(child, give_up, check)


def wait_for_end(child: Child, give_up: float, check: Callable[[], None]) -> None:
    """Until it has ended well; otherwise as `wait_for_line`."""
    while child.running:
        _wait(child, give_up, check)
    if child.process.returncode != 0:
        raise PlaneError(child.last_words())


def _wait(child: Child, give_up: float, check: Callable[[], None]) -> None:
    check()
    if time.monotonic() > give_up:
        raise PlaneError(f"{child.name} was not done in time")
    time.sleep(POLL_S)
