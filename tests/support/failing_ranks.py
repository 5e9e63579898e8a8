"""A rank of a trainer whose rank 0 fails at the second version, after its first bucket is sent.

As tests/support/publishing_ranks.py; a way is a transport, or TRANSPORT:ENCODING.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from rl_plane import WeightPublisher
from rl_plane.transports.base import Sender, SenderContext
from tests.support.publishing_ranks import Rank, main

BROKEN = "the network is down"


class Failing(Rank):
    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def publisher(self, way: str, url: str, **how: Any) -> WeightPublisher:
        rank = self

        class Publisher(WeightPublisher):
            def make_sender(self, backend: str, context: SenderContext) -> Sender:
                """A sender that fails when the rank fails."""
                sender: Any = super().make_sender(backend, context)
                send = sender.send

                def broken(number: int) -> None:
                    if rank.fails and number == 1:
                        raise OSError(BROKEN)
                    send(number)

                sender.send = broken
                made: Sender = sender
                return made

        transport, _, encoding = way.partition(":")
        return Publisher(self.model, url, transport=transport, encoding=encoding or "auto", **how)  # type: ignore[arg-type]

    def begins(self, number: int) -> None:
        self.fails = number == 2 and dist.get_rank() == 0

    def ended(self) -> dict[str, Any]:
        dist.barrier()
        return {}


if __name__ == "__main__":
    main(Failing)
