"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`): little, and only for our engines."""

from __future__ import annotations

import os

MARK = "RL_PLANE_VLLM"
"""In the environment of the processes that the adapter starts: the worker's process id."""


def register() -> None:
    worker = os.environ.get(MARK)
    if worker is None or worker == str(os.getpid()):
        return
    from worker.agent.server import die_with_parent

    die_with_parent()
    os.kill(int(worker), 0)  # raises where the worker was gone before
    os.setpgid(0, 0)  # Ctrl-C is for the worker, which lets requests end first
    os.dup2(2, 1)  # what the worker says on its standard output is for who started it
