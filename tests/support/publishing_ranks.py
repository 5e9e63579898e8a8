"""The ranks of a trainer that tests start by `told_by_ranks`, as `MODULE URL NAMESPACE COMPONENT WAY…`.

By each way they publish some versions, each the one before plus one. Each rank prints a JSON line for each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl_plane.publish import WeightPublisher
from tests.support.sharded_sources import fresh, fsdp2

VERSIONS = 3
"""The number of versions that each transport publishes."""
GATHER_S = 60.0
"""The seconds after which a rank ends that waits for another one, even if the test waits no longer."""


class Rank:
    """One rank. A script overrides the parts that differ."""

    versions = VERSIONS

    def __init__(self) -> None:
        self.model = fsdp2(fresh())

    def publisher(self, way: str, url: str, **how: Any) -> WeightPublisher:
        return WeightPublisher(self.model, url, transport=way, **how)

    def step(self, way: str) -> None:
        """Changes the weights before each version."""
        add_one(self.model)

    def begins(self, number: int) -> None:
        """Called before each version."""

    def ended(self) -> dict[str, Any]:
        """Called after each version; returns more facts for the test's report."""
        return {}

    def publish(self, url: str, namespace: str, component: str, *ways: str) -> None:
        for way in ways:
            how: dict[str, Any] = {"namespace": namespace, "component": component, "bucket_bytes": 100}
            with self.publisher(way, url, **how) as publisher:
                for number in range(1, self.versions + 1):
                    self.step(way)
                    self.begins(number)
                    version, error = f"{way} {number}", ""
                    try:
                        publisher.publish(version)
                    except Exception as failed:
                        error = f"{type(failed).__name__}: {failed}"
                    report = {"rank": dist.get_rank(), "version": version, "error": error, **self.ended()}
                    print(json.dumps(report) + "\n", end="", flush=True)  # one write: both ranks have one pipe


def add_one(model: Any) -> None:
    """Adds one to each parameter that is trained."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:  # ZeRO-3 keeps the weight in parts
                (weight.ds_tensor if hasattr(weight, "ds_tensor") else weight).add_(1)


def main(make: Callable[[], Rank]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=GATHER_S))
    make().publish(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # as tests/support/sharded_sources.py
