"""Child processes: each leads its own session, sends its lines to the parent, and dies with the parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_plane._util.processes import die_with_parent
from rl_plane.cli.output import READY

PRINT_QUEUE = 10_000
"""The number of lines that a slow terminal may be behind. Further lines are lost, so that the fleet never waits."""
FLUSH_S = 1.0
MAX_LINE_BYTES = 65_536
"""A longer line is shown in several parts."""
LAST_LINES_S = 1.0
"""Seconds for the last lines of a dead child to arrive."""

OUT, ERR = 1, 2


def python(*args: str) -> list[str]:
    """Our own interpreter, without the working directory on its path, so that a user's worker.py can't shadow ours."""
    return [sys.executable, "-P", "-m", *args]


class Printer:
    """Writes whole lines from a thread, so that a reader who stops does not stop the fleet."""

    def __init__(self) -> None:
        self.at_terminal: Callable[[str], None] | None = None
        """Writes the lines for a terminal above a drawing that is there. None: nothing is drawn."""
        self._lines: queue.Queue[tuple[int, bytes] | None] = queue.Queue(PRINT_QUEUE)
        self._thread = threading.Thread(target=self._write, name="printer", daemon=True)
        self._thread.start()

    def line(self, text: str | bytes, fd: int = OUT) -> None:
        """Queues a line. It is lost if the queue is full."""
        data = text if isinstance(text, bytes) else text.encode(errors="replace")
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait((fd, data + b"\n"))

    def flush(self) -> None:
        """Waits until the lines are written, for FLUSH_S at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=FLUSH_S)
            self._thread.join(FLUSH_S)

    def _write(self) -> None:
        while (item := self._lines.get()) is not None:
            fd, data = item
            with contextlib.suppress(OSError):  # the reader has gone
                if (write := self.at_terminal) is not None and os.isatty(fd):
                    write(data[:-1].decode(errors="replace"))
                    continue
                while data:
                    data = data[os.write(fd, data) :]


def exit_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """The return code of a process once it has ended. A negative one is a signal."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def tell(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def wait() -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(tell, code)

    threading.Thread(target=wait, name=f"wait-{process.pid}", daemon=True).start()
    return ended


def start_process(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a process. Call this on the main thread: the kernel kills the process when that thread ends."""
    return subprocess.Popen(
        argv,
        env={**env, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )


class Child:
    """A running process, which leads a session.

    `on_ready` gets the facts of its ready line. `on_line(line, fd)` gets every other line."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        on_line: Callable[[bytes, int], None],
        on_ready: Callable[[dict[str, Any]], None],
    ) -> None:
        self._on_line, self._on_ready = on_line, on_ready
        self.process = process
        self._exit = exit_of(self.process)
        self._gone = False
        self._pumps = [
            asyncio.ensure_future(self._pump(self.process.stdout, OUT)),
            asyncio.ensure_future(self._pump(self.process.stderr, ERR)),
        ]

    @property
    def pid(self) -> int:
        return self.process.pid

    async def wait(self) -> int:
        """Waits for the end, kills the rest of the session, and returns the return code."""
        code = await asyncio.shield(self._exit)
        self.signal_group(signal.SIGKILL)
        self._gone = True
        _, late = await asyncio.wait(self._pumps, timeout=LAST_LINES_S)
        for pump in late:
            pump.cancel()
        return code

    def terminate(self) -> None:
        """Sends SIGTERM to the process alone, which ends the processes that it has started."""
        if not self._exit.done():
            self.process.terminate()

    def signal_group(self, number: int) -> None:
        """Sends a signal to the process and to all that it has started."""
        if not self._gone:  # later the number may belong to another process
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def _pump(self, pipe: Any, fd: int) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            rest = b""
            while data := await reader.read(MAX_LINE_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._line(line, fd)
                if len(rest) >= MAX_LINE_BYTES:
                    self._line(rest, fd)
                    rest = b""
            if rest:
                self._line(rest, fd)
        finally:
            transport.close()

    def _line(self, line: bytes, fd: int) -> None:
        if fd == OUT and (facts := ready_facts(line)) is not None:
            self._on_ready(facts)
        else:
            self._on_line(line.rstrip(b"\r"), fd)


async def run_child(argv: Sequence[str], env: Mapping[str, str], on_line: Callable[[bytes, int], None]) -> int:
    """Runs a process to its end, and returns its return code. Cancelling the caller kills the process."""
    child = Child(start_process(argv, env), on_line, lambda _: None)
    try:
        return await child.wait()
    finally:
        child.signal_group(signal.SIGKILL)


def ready_facts(line: bytes) -> dict[str, Any] | None:
    """The facts of a ready line in JSON. None: another line."""
    if not line.startswith(b'{"' + READY.encode() + b'"'):
        return None
    try:
        facts = json.loads(line)
    except ValueError:
        return None
    return facts if isinstance(facts, dict) else None
