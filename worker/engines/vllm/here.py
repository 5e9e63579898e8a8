"""The facts of one host that its vLLM processes must know. Ranks of one engine may run on several hosts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

MARK = "RL_PLANE_VLLM"
"""An environment variable of the processes that the adapter starts: `Here`, as JSON."""


@dataclass(frozen=True, slots=True)
class Here:
    worker: int
    """The worker's process id."""
    model: str
    """The model's directory on this host."""
    directory: str
    """The directory of the agents' sockets and other files."""
    first_rank: int
    """The first rank of this host. It writes the files of adapters."""

    @classmethod
    def read(cls) -> Here:
        return cls(**json.loads(os.environ[MARK]))
