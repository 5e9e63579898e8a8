"""Worker processes by fork: the packages that a worker imports take longer than most tests.

A zygote is started once for each test process. It imports them, makes no thread and no loop, and then forks: once, and
that child again, and ends. So each worker is an orphan, which the kernel gives to the test process: it is its child, as
one that it has started itself, to signal, to wait for and to outlive.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ADOPTED_S = 10.0
"""From the end of its first parent on it is ours at once."""

ROOT = Path(__file__).parent.parent
MAX_REQUEST_BYTES = 1 << 18
"""The environment is the largest part."""
_ZYGOTE = "import sys; from tests.zygote import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"


class Forked(subprocess.Popen[str]):
    """As Popen, of a child that the zygote has made."""

    def __init__(self, pid: int, stdout: int) -> None:
        self.args = ["worker"]
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = None
        self.stdout = os.fdopen(stdout, "r")
        self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self._communication_started = False
        self._input = None
        self.text_mode = True
        self.encoding = self.errors = None
        self.pipesize = -1
        self.process_group = None


def fork_worker(main: str, arguments: list[str], log: Path) -> Forked:
    """A process that runs `main`, with `sys.argv` of these arguments, its standard error in `log`."""
    reader, writer = os.pipe()
    try:
        with log.open("w") as stderr:
            what = {"main": main, "argv": ["-c", *arguments], "cwd": os.getcwd(), "env": dict(os.environ)}
            pid = _zygote().fork(what, writer, stderr.fileno())
    finally:
        os.close(writer)
    return Forked(pid, reader)


@functools.cache
def _zygote() -> _Zygote:
    return _Zygote()


class _Zygote:
    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ZYGOTE, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )
        atexit.register(self._end)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait(ADOPTED_S)

    def fork(self, what: dict[str, Any], stdout: int, stderr: int) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(what).encode()], [stdout, stderr])
            answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError(f"the zygote ended with {self._process.wait(ADOPTED_S)}")
        return int(answer)


# ---- the zygote ----


def serve(descriptor: int, tester: int) -> None:
    """Until the test process ends."""
    import worker.engines.fake
    import worker.process  # noqa: F401

    # Not with its parent: that is a thread, which may end long before its process, by whose end this one's socket ends.
    with socket.socket(fileno=descriptor) as asked:
        while True:
            data, (stdout, stderr) = _received(asked)
            if (middle := os.fork()) == 0:
                _fork_again(asked, tester, json.loads(data), stdout, stderr)
            os.close(stdout)
            os.close(stderr)
            os.waitpid(middle, 0)


def _received(asked: socket.socket) -> tuple[bytes, list[int]]:
    descriptors = array.array("i")
    data, ancillary, _, _ = asked.recvmsg(MAX_REQUEST_BYTES, socket.CMSG_SPACE(2 * descriptors.itemsize))
    if not data:
        os._exit(0)
    for _, _, one in ancillary:
        descriptors.frombytes(one)
    return data, list(descriptors)


def _fork_again(asked: socket.socket, tester: int, what: dict[str, Any], stdout: int, stderr: int) -> None:
    if (pid := os.fork()) != 0:
        asked.send(str(pid).encode())
        os._exit(0)
    asked.close()
    os.setsid()
    _wait_for_adoption(tester)
    _die_with_parent()  # only now: before, it would be with the one that has just made it
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.chdir(what["cwd"])
    os.environ.clear()
    os.environ.update(what["env"])
    sys.argv = what["argv"]
    code = 1
    try:
        exec(compile(what["main"], "<worker>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for_adoption(tester: int) -> None:
    give_up = time.monotonic() + ADOPTED_S
    while os.getppid() != tester:
        if time.monotonic() > give_up:
            os._exit(1)
        time.sleep(0.0005)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
