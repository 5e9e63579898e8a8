"""A rank of a trainer whose rank 0 fails at the second version, after its first bucket is sent.

As tests/support/publishing_ranks.py; a way is a transport.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import rl_plane.publish.send_plan as send_plan
from rl_plane.transports.base import Sender, SenderContext
from rl_plane.transports.registry import make_sender
from tests.support.publishing_ranks import Rank, main

BROKEN = "the network is down"


class Failing(Rank):
    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        send_plan.make_sender = self.sender  # type: ignore[attr-defined]

    def sender(self, backend: str, context: SenderContext) -> Sender:
        """One that fails while the rank does."""
        sender: Any = make_sender(backend, context)
        send = sender.send

        def broken(number: int) -> None:
            if self.fails and number == 1:
                raise OSError(BROKEN)
            send(number)

        sender.send = broken
        made: Sender = sender
        return made

    def begins(self, number: int) -> None:
        self.fails = number == 2

    def ended(self) -> dict[str, Any]:
        dist.barrier()
        return {}


if __name__ == "__main__":
    main(Failing)
