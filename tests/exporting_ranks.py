"""A rank of a trainer whose export gathers once more, and meets the other ranks, after the last tensor that is sent.

Run by torchrun: `tests/exporting_ranks.py URL NAMESPACE COMPONENT WAY…`, each TRANSPORT:ENCODING. Each rank prints a
JSON line for each version; each version is the one before plus one. At the second the export has a tensor more.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl_plane.publish import ExportSource, WeightPublisher
from tests.failing_ranks import GATHER_S
from tests.sharded_sources import fresh, fsdp2

LEFT_OUT = "reference.weight"
GROWN = "grown.weight"
VERSIONS = 3


class Export:
    def __init__(self) -> None:
        self.model = fsdp2(fresh())
        self.grows = False
        self.ended = 0

    def __call__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if self.grows:
            yield GROWN, torch.zeros(2)
        yield LEFT_OUT, self.model.narrow.full_tensor()
        dist.barrier()
        self.ended += 1


def main(url: str, namespace: str, component: str, *ways: str) -> None:
    export = Export()
    for way in ways:
        transport, encoding = way.split(":")
        source = ExportSource(export, names=lambda name: None if name == LEFT_OUT else name, collective=True)
        where: dict[str, Any] = {"namespace": namespace, "component": component, "transport": transport}
        with WeightPublisher(source, url, bucket_bytes=100, encoding=encoding, **where) as publisher:  # type: ignore[arg-type]
            for number in range(1, VERSIONS + 1):
                with torch.no_grad():
                    for weight in export.model.parameters():
                        weight.add_(1)
                export.grows, error = number == 2, ""
                try:
                    publisher.publish(f"{way} {number}")
                except Exception as failed:
                    error = f"{type(failed).__name__}: {failed}"
                told = {
                    "rank": dist.get_rank(),
                    "version": f"{way} {number}",
                    "error": error,
                    "ended": export.ended,
                }
                print(json.dumps(told) + "\n", end="", flush=True)  # one write: both ranks have one pipe


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=GATHER_S))
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # as tests/sharded_sources.py
