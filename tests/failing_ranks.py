"""A rank of a trainer whose rank 0 fails at the second version, after its first bucket is sent.

Run by torchrun: `tests/failing_ranks.py URL NAMESPACE COMPONENT TRANSPORT…`. Each rank prints a JSON line for each
version; each version is the one before plus one.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import rl_plane.publish.way as ways
from rl_plane.publish import WeightPublisher
from rl_plane.publish.sender import Sender, Surroundings
from rl_plane.publish.senders import make_sender
from tests.sharded_sources import fresh, fsdp2

BROKEN = "the network is down"
VERSIONS = 3
GATHER_S = 60.0
"""A rank that waits for another one longer than this ends, also when nobody waits for it any more."""


class Failing:
    """Makes senders that fail while it says so."""

    now = False

    def __call__(self, backend: str, around: Surroundings) -> Sender:
        sender: Any = make_sender(backend, around)
        send = sender.send

        def broken(number: int) -> None:
            if self.now and number == 1:
                raise OSError(BROKEN)
            send(number)

        sender.send = broken
        made: Sender = sender
        return made


def main(url: str, namespace: str, component: str, *transports: str) -> None:
    failing = Failing()
    ways.make_sender = failing  # type: ignore[attr-defined]
    model = fsdp2(fresh())
    for transport in transports:
        where: dict[str, Any] = {"namespace": namespace, "component": component, "transport": transport}
        with WeightPublisher(model, url, bucket_bytes=100, **where) as publisher:
            for number in range(1, VERSIONS + 1):
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.add_(1)
                failing.now, error = number == 2, ""
                try:
                    publisher.publish(f"{transport} {number}")
                except Exception as failed:
                    error = f"{type(failed).__name__}: {failed}"
                told = {"rank": dist.get_rank(), "version": f"{transport} {number}", "error": error}
                print(json.dumps(told) + "\n", end="", flush=True)  # one write: both ranks have one pipe
                dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=GATHER_S))
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # as tests/sharded_sources.py
