"""A process that a test starts and commands line by line.

Each line is JSON, `[what, argument]`; each answer is one line, `{"ok": …}` or `{"error": …}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from rl_plane.errors import EngineFailed, error_from_wire
from tests.support.zygote import fork_module

if TYPE_CHECKING:
    from tests.conftest import Plane

ANSWER_S = 150.0
"""The bound in seconds for answers of processes that import torch side by side on two cores."""


class CommandedProcess:
    """The handle of `python -m MODULE [ARGUMENT]`, which has what a worker of that engine `imports`."""

    def __init__(self, plane: Plane, module: str, argument: Any = None, imports: str = "hf") -> None:
        self.log = plane.tmp / f"{module}.log"
        self.process = fork_module(imports, module, [json.dumps(argument)], self.log, stdin=True)

    async def do(self, what: str, argument: Any = None) -> Any:
        """Sends a command and returns its answer, or raises its error."""
        return await asyncio.to_thread(self._do, what, argument)

    def _do(self, what: str, argument: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([what, argument]).encode() + b"\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], ANSWER_S)[0], f"{what}: no answer"
        line = self.process.stdout.readline()
        assert line, f"{what}: it died:\n{self.log.read_text()}"
        answer = json.loads(line)
        if "error" in answer:
            raise error_from_wire(answer["error"])
        return answer["ok"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def forked() -> int:
    """A child that lives until it is killed, as a data loader's may."""
    pid = os.fork()
    while pid == 0:
        signal.pause()
    return pid


def serve(do: Callable[[str, Any], Any]) -> None:
    """Runs in the process until the lines end. Reports each exception that `do` raises."""
    while line := sys.stdin.readline():
        try:
            answer: dict[str, Any] = {"ok": do(*json.loads(line))}
        except Exception as error:
            text = getattr(getattr(error, "response", None), "text", "")  # of an HTTP client's
            answer = {"error": EngineFailed(f"{type(error).__name__}: {error} {text}".rstrip()).to_wire()}
        print(json.dumps(answer), flush=True)
