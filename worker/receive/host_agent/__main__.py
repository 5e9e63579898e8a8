"""Runs the host agent of one engine: `python -m worker.receive.host_agent DIRECTORY WORKER_PID LISTENER`.

The worker starts it, and gives it the listening socket by number."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from pathlib import Path

from rl_plane._util.log_format import inherited_format, set_up_logging
from worker.receive.host_agent.agent import HostAgent
from worker.receive.rank_agents.agent_server import AgentServer, belong_to_worker

NAME = "rl-plane::host"
"""The name of the process, as tools such as `ps` and `top` show it."""


def main() -> None:
    directory, worker, listener = sys.argv[1:]
    belong_to_worker(int(worker))
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/comm").write_text(NAME)
    set_up_logging("info", inherited_format())
    AgentServer(socket.socket(fileno=int(listener)), HostAgent(Path(directory)).methods()).start()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
