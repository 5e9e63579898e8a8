"""A rank of a trainer whose export gathers once more, and meets the other ranks, after the last tensor that is sent.

As tests/support/publishing_ranks.py; a way is TRANSPORT:ENCODING. At the second version the export has a tensor more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from rl_plane.publish import ExportSource, WeightPublisher
from tests.support.publishing_ranks import Rank, main

LEFT_OUT = "reference.weight"
GROWN = "grown.weight"


class Exporting(Rank):
    def __init__(self) -> None:
        super().__init__()
        self.grows = False
        self.exports = 0
        """The number of exports that have come to their end."""

    def publisher(self, way: str, url: str, **how: Any) -> WeightPublisher:
        transport, encoding = way.split(":")
        source = ExportSource(self.export, names=lambda name: None if name == LEFT_OUT else name, collective=True)
        return WeightPublisher(source, url, transport=transport, encoding=encoding, **how)  # type: ignore[arg-type]

    def export(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if self.grows:
            yield GROWN, torch.zeros(2)
        yield LEFT_OUT, self.model.narrow.full_tensor()
        dist.barrier()
        self.exports += 1

    def begins(self, number: int) -> None:
        self.grows = number == 2

    def ended(self) -> dict[str, Any]:
        return {"exports": self.exports}


if __name__ == "__main__":
    main(Exporting)
