"""Ranks of a trainer with sharded weights, each a process of its own, of which one dies or hangs in a version."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tests.support.commanded_process import CommandedProcess, serve

if TYPE_CHECKING:
    from tests.conftest import Plane

MODULE = "tests.support.faulty_ranks"
SILENT_S = 5.0
"""Seconds after which a rank hangs."""


class FaultyRank(CommandedProcess):
    """The handle of one rank."""

    def __init__(self, plane: Plane, trainer: str, rank: int, ranks: int, transport: str) -> None:
        """`trainer`: a name that all ranks of one trainer have, and no other."""
        argument = {
            "file": str(plane.tmp / trainer),
            "rank": rank,
            "ranks": ranks,
            "transport": transport,
            "root": str(plane.tmp / "weights" / "published"),
            "fleet": [plane.url, plane.namespace, plane.component],
        }
        super().__init__(plane, MODULE, argument)
        self.rank = rank

    async def publish(self, version: str, fault: str = "", phase: str = "", model: int = 0) -> dict[str, Any]:
        """Publishes the model plus `model`, which only grows. At the phase the rank dies (`die`) or stops (`hang`)."""
        answer: dict[str, Any] = await self.do("publish", [version, fault, phase, model])
        return answer

    def go_on(self) -> None:
        """Lets a rank that has stopped continue."""
        os.kill(self.process.pid, signal.SIGCONT)


class _Fault:
    """The death or the stop of this rank at one phase of the present version."""

    def __init__(self) -> None:
        self.kind = self.phase = ""
        self.gathers = 0

    def at(self, phase: str) -> None:
        """Dies or stops, if this is the phase."""
        if phase == self.phase:
            self.phase = ""
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "die" else signal.SIGSTOP)


def main(file: str, rank: int, ranks: int, transport: str, root: str, fleet: list[str]) -> None:
    import torch
    import torch.distributed as dist

    from rl_plane.publish import WeightPublisher
    from rl_plane.publish.publish_options import PUBLISH_LIMITS
    from rl_plane.publish.ranks.gather_group import GatherGroup
    from rl_plane.transports.base import Sender, SenderContext
    from tests.support.sharded_sources import fresh, fsdp2

    fault = _Fault()

    def faulty(phase: str, act: Any) -> Any:
        def work(*args: Any, **how: Any) -> Any:
            fault.at(phase)
            return act(*args, **how)

        return work

    class Publisher(WeightPublisher):
        limits = replace(PUBLISH_LIMITS, silent_s=SILENT_S)

        def make_sender(self, backend: str, context: SenderContext) -> Sender:
            sender: Any = super().make_sender(backend, context)
            for phase in ("send", "finish", "keep"):
                if hasattr(sender, phase):
                    setattr(sender, phase, faulty(phase, getattr(sender, phase)))
            made: Sender = sender
            return made

    gather_parts = GatherGroup.gather

    def gather(self: GatherGroup, *args: Any) -> Any:
        fault.gathers += 1
        if fault.gathers == 3:
            fault.at("gather")
        return gather_parts(self, *args)

    setattr(GatherGroup, "gather", gather)  # noqa: B010 - mypy allows no assignment to a method
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    model = fsdp2(fresh())
    added = 0
    url, namespace, component = fleet
    publisher = Publisher(
        model,
        url,
        transport=transport,
        encoding="full",
        root=root,
        namespace=namespace,
        component=component,
        bucket_bytes=100,
    )

    def do(what: str, argument: Any) -> Any:
        nonlocal added
        version, fault.kind, fault.phase, number = argument
        fault.gathers = 0
        with torch.no_grad():
            for weight in model.parameters():
                for _ in range(number - added):
                    weight.add_(1)
        added = number
        fault.at("begin")
        publisher.publish(version)
        return {"rank": rank}

    serve(do)
    os._exit(0)  # torch's threads may abort a process that ends in an orderly way


if __name__ == "__main__":
    import json
    import sys

    main(**json.loads(sys.argv[1]))
