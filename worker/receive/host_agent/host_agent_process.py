"""Starts the process of the host agent, and ends it, from the worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from worker.receive.rank_agents.agent_messages import host_socket
from worker.receive.rank_agents.agent_server import listen_at


class HostAgentProcess:
    """The process ends with the thread that makes this object, if it is not ended before."""

    def __init__(self, directory: Path) -> None:
        """Starts the process. Calls to its socket wait until it is up, and fail when it has ended."""
        with listen_at(host_socket(directory)) as listener:
            given = listener.fileno()
            arguments = [str(directory), str(os.getpid()), str(given)]
            command = [sys.executable, "-m", "worker.receive.host_agent", *arguments]
            self._process = subprocess.Popen(command, pass_fds=[given], stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
