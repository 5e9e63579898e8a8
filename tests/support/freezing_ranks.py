"""A rank of a trainer of which only one layer is trained, sharded by FSDP2: it publishes only that layer.

As tests/support/publishing_ranks.py; a way is a transport.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from rl_plane import WeightPublisher
from tests.support.publishing_ranks import GATHER_S, Rank, main

TRAINED = "layers.1."


def freeze(model: Any) -> None:
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.startswith(TRAINED))


class Freezing(Rank):
    def __init__(self) -> None:
        super().__init__()
        freeze(self.model)
        self.made: WeightPublisher | None = None

    def publisher(self, way: str, url: str, **how: Any) -> WeightPublisher:
        self.made = WeightPublisher(self.model, url, transport=way, trainable_only=True, **how)
        return self.made

    def begins(self, number: int) -> None:
        """Waits until the workers say that they keep the version before."""
        assert self.made is not None
        plan, digest = self.made._plan, self.made._baseline.digest
        until = time.monotonic() + GATHER_S / 2
        while plan is not None and number > 1 and {row.get("kept") for row in plan.workers()} != {digest}:
            assert time.monotonic() < until, "the workers keep another version"
            time.sleep(0.1)
        dist.barrier()


if __name__ == "__main__":
    main(Freezing)
