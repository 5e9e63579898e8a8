"""Starts the process of the host agent, and ends it, from the worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker.receive.rank_agents.agent_messages import host_socket
from worker.receive.rank_agents.agent_server import listen_at

MODULE = "worker.receive.host_agent"


def start_agent(arguments: Sequence[str], descriptor: int) -> subprocess.Popen[Any]:
    """Runs the host agent in an interpreter of its own. It inherits `descriptor`."""
    # -P: a worker.py in the working directory is not ours.
    command = [sys.executable, "-P", "-m", MODULE, *arguments]
    return subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL)


class HostAgentProcess:
    """The process ends with the thread that makes this object, if it is not ended before."""

    def __init__(self, directory: Path) -> None:
        """Starts the process. Calls to its socket wait until it is up, and fail when it has ended."""
        with listen_at(host_socket(directory)) as listener:
            given = listener.fileno()
            self._process = start_agent([str(directory), str(os.getpid()), str(given)], given)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
