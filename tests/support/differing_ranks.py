"""A rank of a trainer whose rank 1 has a buffer of another shape. As tests/support/publishing_ranks.py."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from rl_plane.publish import WeightPublisher
from tests.support.publishing_ranks import Rank, main


class Differing(Rank):
    versions = 1

    def publisher(self, way: str, url: str, **how: Any) -> WeightPublisher:
        self.model.scale = torch.ones(2 + dist.get_rank())
        return WeightPublisher(self.model, url, transport=way, root=os.environ["PUBLISH_ROOT"], **how)


if __name__ == "__main__":
    main(Differing)
