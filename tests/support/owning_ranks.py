"""The ranks of a trainer, each of which owns some of the tensors and sends them.

As tests/support/publishing_ranks.py; a way is KIND:TRANSPORT:ENCODING. The environment's PUBLISH_ROOT is the directory
for files. Each rank reports the names of the tensors that it has packed, and their bytes.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from rl_plane.publish import WeightPublisher
from rl_plane.transports.base import Sender, SenderContext
from tests.support.publishing_ranks import Rank, add_one, main
from tests.support.sharded_sources import fresh, fsdp2, zero3

KINDS = {"fsdp2": fsdp2, "zero3": zero3}


def step(model: Any, way: str) -> None:
    """Changes all tensors, or one small one for a delta."""
    if way.endswith(":delta"):
        with torch.no_grad():
            (narrow,) = (one for name, one in model.named_parameters() if name.endswith("narrow"))
            (narrow.ds_tensor if hasattr(narrow, "ds_tensor") else narrow).add_(1)
    else:
        add_one(model)


class Owning(Rank):
    def __init__(self) -> None:
        super().__init__()
        self.packed: dict[int, int] = {}
        """The bytes of each bucket that this rank has packed for the last version."""

    def publisher(self, way: str, url: str, **how: Any) -> WeightPublisher:
        kind, transport, encoding = way.split(":")
        self.model = KINDS[kind](fresh())
        packed = self.packed

        class Publisher(WeightPublisher):
            def make_sender(self, backend: str, context: SenderContext) -> Sender:
                sender: Any = super().make_sender(backend, context)
                buffer = sender.buffer

                def counted(number: int) -> Any:
                    data = buffer(number)
                    packed[number] = data.nbytes
                    return data

                sender.buffer = counted
                made: Sender = sender
                return made

        return Publisher(
            self.model,
            url,
            transport=transport,
            encoding=encoding,  # type: ignore[arg-type]
            root=os.environ["PUBLISH_ROOT"],
            **how,
        )

    def step(self, way: str) -> None:
        step(self.model, way)

    def begins(self, number: int) -> None:
        self.packed.clear()

    def ended(self) -> dict[str, Any]:
        return {"packed": sum(self.packed.values())}


if __name__ == "__main__":
    main(Owning)
